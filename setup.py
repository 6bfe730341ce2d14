"""The compiled modules, in one file; everything else is declared in pyproject.toml."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from sysconfig import get_platform

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# Files that a body may depend on. A change rebuilds everything, and listing them here puts them
# into the sdist.
INTERFACES = sorted(
    glob("cydist/_native/*.pxd")
    + glob("src/**/*.pxd", recursive=True)
    + glob("src/kernels/*.h")
    + glob("src/vendor/**/*.[ch]", recursive=True)
)

# Plain C first: it is compiled while Cython makes the C of the others.
SOURCES = sorted(glob("src/kernels/*.c")) + sorted(glob("src/**/*.pyx", recursive=True))

# No -march: instruction sets are chosen at import, and -ffp-contract=off
# keeps every variant's bits the same.
COMPILE = ["-std=gnu11", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]

DIRECTIVES = {
    "language_level": "3",
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
}


class BuildTogether(build_ext):
    """Compiles each source for itself, and links all of them into one file.

    To open a file for each took half of `import cydist`.
    """

    def finalize_options(self):
        if self.editable_mode:  # where the next `build_ext --inplace` looks, not a folder that goes
            self.build_temp = f"build/temp.{get_platform()}-{sys.implementation.cache_tag}"
        super().finalize_options()

    def build_extension(self, ext):
        # One more than cores: Cython holds Python's lock, so that a second thread in it waits.
        workers = self.parallel if self.parallel is not True else None
        with ThreadPoolExecutor(workers or (os.cpu_count() or 1) + 1) as pool:
            objects = list(pool.map(self.object, SOURCES))
        whole = self.get_ext_fullpath(ext.name)
        if self.force or newer_group(objects, whole):
            self.compiler.link_shared_object(
                objects, whole, extra_postargs=["-pthread"], build_temp=self.build_temp
            )

    def object(self, source):
        """Return a source's object, rebuilt if the source or an interface has changed."""
        # Cython takes no module's own .pxd for something that it depends on.
        depends = [source, *INTERFACES]
        if source.endswith(".pyx"):
            source = self.generated(source, depends)
        (path,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
        if self.force or newer_group([source, *depends], path):
            self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=["src"],
                debug=self.debug,
                extra_postargs=COMPILE,
            )
        return path

    def generated(self, source, depends):
        """Return the C of a module, which never lands in the tree."""
        path = os.path.join(self.build_temp, source[:-4] + ".c")
        if self.force or newer_group(depends, path):
            cythonize(
                Extension(f"cydist._native.{os.path.basename(source)[:-4]}", [source]),
                force=True,
                quiet=not self.verbose,
                build_dir=self.build_temp,
                include_path=[".", "src"],  # else a module misses its own .pxd
                compiler_directives=DIRECTIVES,
            )
        return path


setup(
    ext_modules=[
        Extension(
            "cydist._native.compiled",
            SOURCES,
            depends=INTERFACES,
        )
    ],
    cmdclass={"build_ext": BuildTogether},
)
