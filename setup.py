"""The extension modules; everything else is declared in pyproject.toml."""

import os
from glob import glob
from sysconfig import get_config_var

from setuptools import Extension, setup

# What a body may depend on: a change rebuilds everything, and listing it here
# puts it into the sdist.
INTERFACES = sorted(
    glob("cydist/_native/*.pxd") + glob("src/**/*.pxd", recursive=True) + glob("src/kernels/*.h")
)


def native(name, *sources):
    return Extension(
        f"cydist._native.{name}",
        list(sources),
        depends=INTERFACES,
        include_dirs=["src"],
        # No -march: instruction sets are chosen at import, and -ffp-contract=off
        # keeps every variant's bits the same.
        extra_compile_args=[
            "-std=gnu11",
            "-O3",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-pthread",
        ],
        extra_link_args=["-pthread"],
    )


def older_than_interfaces(module):
    """Was the module, as it lies in the tree, built before an interface changed?"""
    built = module.name.replace(".", "/") + get_config_var("EXT_SUFFIX")
    changed = max(map(os.path.getmtime, INTERFACES))
    return os.path.exists(built) and os.path.getmtime(built) < changed


MODULES = [
    native("abi", "src/abi.pyx"),
    native("failpoints", "src/failpoints.pyx"),
    native("array", "src/array.pyx"),
    native("overlaps", "src/overlaps.pyx"),
    native("exporters", "src/exporters.pyx"),
    native("parts", "src/parts.pyx"),
    native("plain", "src/plain.pyx"),
    native("kernels", "src/kernels.pyx", *sorted(glob("src/kernels/*.c"))),
    native("notices", "src/notices.pyx"),
    native("failures", "src/failures.pyx"),
    native("engine", "src/engine.pyx"),
    native("messages", "src/messages.pyx"),
    native("choices", "src/choices.pyx"),
    native("turn", "src/turn.pyx"),
    native("short", "src/short.pyx"),
    native("short_messages", "src/short_messages.pyx"),
    native("short_streams", "src/short_streams.pyx"),
    native("shortcuts", "src/shortcuts.pyx"),
    native("torch_options", "src/torch_options.pyx"),
    native("rehearsal", "src/rehearsal.pyx"),
    *(
        native(name, f"src/{room}/{name}.pyx")
        for room in ("algorithms", "transports")
        for name in sorted(path[len(f"src/{room}/") : -4] for path in glob(f"src/{room}/*.pyx"))
    ),
]

setup(
    ext_modules=MODULES,
    options={
        "build_ext": {
            # Cython takes no module's own .pxd for something that it depends on.
            "force": any(map(older_than_interfaces, MODULES)),
            "parallel": True,  # as many compilers as there are cores
            "cython_c_in_temp": True,  # generated C never lands in the tree
            "cython_include_dirs": ["."],  # else a module misses its own .pxd
            "cython_directives": {
                "language_level": "3",
                "boundscheck": False,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": False,
                "embedsignature": True,
                "freethreading_compatible": True,
            },
        }
    },
)
