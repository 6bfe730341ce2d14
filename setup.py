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

MODULES = [
    Extension(
        f"cydist._native.{os.path.basename(path)[:-4]}",
        [path, *(sorted(glob("src/kernels/*.c")) if path == "src/kernels/kernels.pyx" else ())],
    )
    for path in sorted(glob("src/**/*.pyx", recursive=True))
]

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
    """Compiles each module for itself, and links all of them into one file.

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
            objects = [path for some in pool.map(self.objects, MODULES) for path in some]
        whole = self.get_ext_fullpath(ext.name)
        if self.force or newer_group(objects, whole):
            self.compiler.link_shared_object(
                objects, whole, extra_postargs=["-pthread"], build_temp=self.build_temp
            )

    def objects(self, module):
        """Return a module's objects, rebuilt if a source or an interface has changed."""
        # The C that Cython makes never lands in the tree.
        generated = os.path.join(self.build_temp, module.sources[0][:-4] + ".c")
        sources = [generated, *module.sources[1:]]
        objects = self.compiler.object_filenames(sources, output_dir=self.build_temp)
        # Cython takes no module's own .pxd for something that it depends on.
        depends = [*module.sources, *INTERFACES]
        if self.force or newer_group(depends, generated):
            cythonize(
                module,
                force=True,
                quiet=not self.verbose,
                build_dir=self.build_temp,
                include_path=[".", "src"],  # else a module misses its own .pxd
                compiler_directives=DIRECTIVES,
            )
        if self.force or any(newer_group([generated, *depends], path) for path in objects):
            self.compiler.compile(
                sources,
                output_dir=self.build_temp,
                include_dirs=["src"],
                debug=self.debug,
                extra_postargs=COMPILE,
            )
        return objects


setup(
    ext_modules=[
        Extension(
            "cydist._native.compiled",
            [source for module in MODULES for source in module.sources],
            depends=INTERFACES,
        )
    ],
    cmdclass={"build_ext": BuildTogether},
)
