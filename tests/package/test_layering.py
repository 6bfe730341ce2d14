"""The house: which module may know of which, and what a file may be called and weigh."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sorted((ROOT / "cydist").rglob("*.py"))
CYTHON = sorted([*(ROOT / "src").rglob("*.pyx"), *(ROOT / "cydist").rglob("*.pxd")])
KERNELS = sorted((ROOT / "src/kernels").glob("*.[ch]"))
CODE = sorted(
    path
    for room in ("cydist", "src", "tests", "docs", "scripts")
    for path in (ROOT / room).rglob("*")
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ""} and path.is_file()
)

# docs/architecture.md draws these.
LAYERS = {
    0: "_native",
    1: "waiting work types errors config",
    2: "agreement codec devices driver folding group running executor registry routing tuning "
    "crossings nonmember "
    "rendezvous meeting names interfaces launchers multicast stores door auth secret",
    3: "backends",
    4: "making world",
    5: "arguments calling collectives coalesced deprecated entries monitored scans p2p objects "
    "shared shrinking",
    6: "launch testing bench interop",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
API = 5  # `import cydist` inside the package; what __init__ itself imports is free

# Compiled code: the rooms, and what each may cimport of the others. The rooms "algorithms"
# and "transports" are the folders in src/; files that are not in one are named here.
CIMPORTS: dict[str, set[str]] = {
    "abi": set(),
    "kernels": {"abi"},
    "array": {"abi", "kernels"},
    "engine": {"abi", "kernels", "array"},
    "rehearsal": {"abi"},
    "algorithms": {"abi"},
    "transports": {"abi"},
}
ROOM_OF = {
    "waiting": "abi",
    "failpoints": "abi",
    "notices": "abi",
    "failures": "engine",
    "messages": "engine",
    "turn": "engine",
    "choices": "engine",
    "short": "engine",
    "short_messages": "engine",
    "short_streams": "engine",
    "shortcuts": "engine",
    "torch_options": "engine",
    "dlpack": "array",
    "overlaps": "array",
    "parts": "array",
    "exporters": "array",
    "plain": "array",
    "linux": "transports",
    "stream": "transports",
}
ABOVE_THE_ENGINE = re.compile(r"^\s*(?:from|import)\s+cydist\.(?!_native)(\w+)", re.M)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """The name that LAYERS knows a module by: "stores" for cydist/stores/tcp.py."""
    return path.relative_to(ROOT / "cydist").with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """Every module of cydist that this one imports anywhere in its text, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            if node.module == "cydist":
                found |= {
                    f"cydist.{alias.name}" if is_module(alias.name) else "cydist"
                    for alias in node.names
                }
            else:
                found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "cydist"}


def is_module(name: str) -> bool:
    return (ROOT / "cydist" / name).is_dir() or (ROOT / "cydist" / f"{name}.py").is_file()


def native_room(name: str) -> str:
    """Which row of CIMPORTS the compiled module `name` belongs to."""
    for room in ("algorithms", "transports"):
        if (ROOT / "src" / room / f"{name}.pyx").exists():
            return room
    return ROOM_OF.get(name, name)


def check_each(paths: list[Path], found_in: Callable[[Path], object]) -> None:
    """Assert that what is looked for is found in none of the files; say in which it is."""
    assert paths
    assert {relative(path): found for path in paths if (found := found_in(path))} == {}


def test_imports_point_down() -> None:
    """A module imports from its own layer and from those below."""

    def upward(path: Path) -> set[str]:
        layer = LAYER_OF[module_of(path)]
        # Compiled code raises the classes of errors.py, nothing else of Python's.
        free = {"cydist.errors"} if module_of(path) == "_native" else set()
        return {
            name
            for name in imports_of(path) - free
            if (LAYER_OF[name.split(".")[1]] if "." in name else API) > layer
        }

    check_each([path for path in PYTHON if path != ROOT / "cydist/__init__.py"], upward)


def test_one_door_to_compiled_code() -> None:
    """Outside cydist/_native, Python imports cydist._native and nothing inside it."""

    def inside(path: Path) -> set[str]:
        return {name for name in imports_of(path) if name.startswith("cydist._native.")}

    check_each([path for path in PYTHON if module_of(path) != "_native"], inside)


def test_cimports_stay_in_their_room() -> None:
    """An algorithm never sees a transport or a dtype, a transport never an algorithm."""

    def elsewhere(path: Path) -> set[str]:
        room, text = native_room(path.stem), path.read_text()
        cimported = set(re.findall(r"^\s*from\s+cydist\._native\.(\w+)\s+cimport", text, re.M))
        cimported |= set(re.findall(r"^\s*cimport\s+cydist\._native\.(\w+)", text, re.M))
        return {name for name in cimported if native_room(name) not in CIMPORTS[room] | {room}}

    check_each(CYTHON, elsewhere)


def test_compiled_code_imports_nothing_above_it() -> None:
    """Compiled code knows errors.py; algorithms do not even know that."""

    def above(path: Path) -> set[str]:
        allowed = set() if native_room(path.stem) == "algorithms" else {"errors"}
        return set(ABOVE_THE_ENGINE.findall(path.read_text())) - allowed

    check_each(CYTHON, above)


def test_no_gil_below_the_engine() -> None:
    """Algorithms and transports never take the GIL in the middle of a call."""
    below = [path for path in CYTHON if native_room(path.stem) in ("algorithms", "transports")]
    check_each(below, lambda path: "with gil" in path.read_text())


def test_kernels_are_plain_c() -> None:
    """The loops over elements include libc and the compiler's headers, never Python's."""

    def python_s(path: Path) -> list[str]:
        included = re.findall(r"#\s*include\s*[<\"]([^>\"]+)", path.read_text())
        return [name for name in included if "Python" in name or "numpy" in name]

    check_each(KERNELS, python_s)


def test_names_say_the_subject() -> None:
    """No file or folder is named for its role."""
    roles = {"utils", "util", "common", "helpers", "helper", "base", "misc"}

    def role(path: Path) -> set[str]:
        return roles & {Path(part).stem.removeprefix("_") for part in path.relative_to(ROOT).parts}

    check_each(CODE, role)


def test_settings_are_declared_once() -> None:
    """Every CYDIST_* variable that the package's Python mentions is declared in config.py."""
    quoted = re.compile(r"[\"'](CYDIST_[A-Z0-9_]+)[\"']")
    declared = set(quoted.findall((ROOT / "cydist/config.py").read_text()))
    mentioned = {name for path in PYTHON for name in quoted.findall(path.read_text())}
    assert mentioned == declared


def test_settings_are_used() -> None:
    """Every setting that config.py declares changes something somewhere."""
    from cydist import config

    text = "".join(path.read_text() for path in PYTHON if path.name != "config.py")
    declared = [name for name, value in vars(config).items() if isinstance(value, config.Variable)]
    assert [name for name in declared if not re.search(rf"\bconfig\.{name}\b", text)] == []


def test_settings_are_read_in_one_place() -> None:
    """Outside config.py nobody looks a CYDIST_* variable up in the environment."""
    look_up = re.compile(r"(?:environ(?:\.get|\.pop)?|getenv)[(\[]\s*[\"']CYDIST_")
    elsewhere = [path for path in PYTHON if path.name != "config.py"]
    check_each(elsewhere, lambda path: look_up.findall(path.read_text()))


def fresh(program: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=50, cwd=ROOT
    ).stdout.strip()


@pytest.mark.parametrize(
    "library",
    [
        *("numpy", "torch", "mpi4py", "cupy", "ml_dtypes", "sklearn"),
        # Of the standard library what is slow to import.
        *("dataclasses", "inspect", "logging", "multiprocessing", "socket", "subprocess", "pickle"),
        *("hashlib", "importlib.metadata", "concurrent.futures", "json", "pathlib"),
    ],
)
def test_import_loads_only_what_it_needs(library: str) -> None:
    """`import cydist` loads other libraries, and slow modules, when they are used."""
    # Some ways of installing load modules of their own when Python starts.
    loaded = f"{library!r} in sys.modules and {library!r} not in old"
    assert fresh(f"import sys; old = set(sys.modules); import cydist; print({loaded})") == "False"


@pytest.mark.parametrize("library", ["numpy", "dataclasses", "inspect", "logging"])
def test_launcher_loads_only_what_it_needs(library: str) -> None:
    """cydistrun starts without numpy, and without what is slow to import."""
    program = f"import sys, cydist.launch.__main__; print({library!r} in sys.modules)"
    assert fresh(program) == "False"


@pytest.fixture(scope="module")
def loaded_by_rank() -> set[str]:
    """The modules of a rank that serves no store, after a barrier and its end."""
    rank = (
        "import os, sys; old = set(sys.modules); import cydist as d; d.init_process_group('tcp');"
        "d.barrier(); d.destroy_process_group();"
        "print(*set(sys.modules) - old if os.environ['RANK'] == '1' else ())"
    )
    launcher = [sys.executable, "-m", "cydist.launch", "--nproc-per-node", "2", "--no-python"]
    command = [*launcher, sys.executable, "-c", rank]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        *("numpy", "dataclasses", "inspect", "logging", "json", "pathlib", "queue", "heapq"),
        *(
            "random",
            "ipaddress",
            "tempfile",
            "importlib.metadata",
            "concurrent.futures",
            "urllib.parse",
        ),
        *("cydist.stores.leases", "cydist.stores.listening", "cydist.stores.tcp_server"),
    ],
)
def test_rank_loads_only_what_it_needs(module: str, loaded_by_rank: set[str]) -> None:
    """A rank that joins a job and leaves it again loads nothing slow that it does not use."""
    assert "cydist.stores.tcp" in loaded_by_rank
    assert module not in loaded_by_rank


def test_compiled_modules_come_from_one_file() -> None:
    """All compiled modules come out of one file, whatever older builds left beside it."""
    files = "{m.__file__ for n, m in sys.modules.items() if n.startswith('cydist._native.')}"
    (file,) = fresh(f"import sys, cydist; print(*{files})").split()
    assert Path(file).name.startswith("compiled.")


def test_import_starts_nothing() -> None:
    """`import cydist` starts no thread."""
    program = "import cydist, os; print(len(os.listdir('/proc/self/task')))"
    before = fresh("import numpy, os; print(len(os.listdir('/proc/self/task')))")
    assert fresh(program) == before


def public_names() -> list[str]:
    import cydist

    return list(cydist.__all__)


def test_public_names_exist() -> None:
    """Every name in __all__ is there, once."""
    import cydist

    names = public_names()
    assert [name for name in names if not hasattr(cydist, name)] == []
    assert len(set(names)) == len(names)


def imported_by_init(later: bool) -> set[str]:
    """The names that cydist/__init__.py imports from cydist: at once, or for type checkers."""
    tree = ast.parse((ROOT / "cydist/__init__.py").read_text())
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)] if later else [tree.body]
    return {
        f"{node.module}:{alias.name}"
        for block in blocks
        for node in block
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cydist.")
        for alias in node.names
    }


def test_public_names_are_what_is_imported() -> None:
    """__all__ is what cydist/__init__.py imports from its modules, at once or later."""
    imported = imported_by_init(later=False) | imported_by_init(later=True)
    assert sorted(name.partition(":")[2] for name in imported) == sorted(public_names())


def test_later_names_are_the_ones_that_type_checkers_see() -> None:
    """What is imported when asked for comes from where type checkers take it."""
    import cydist

    served = {f"{module}:{name}" for module, names in cydist._LATER.items() for name in names}
    assert served == imported_by_init(later=True)


def test_public_names_are_listed_before_they_are_imported() -> None:
    """dir(cydist) has every public name from the start, and asking for one gives it for good."""
    program = (
        "import cydist; late = [n for n in cydist.__all__ if n not in vars(cydist)]\n"
        "print(set(cydist.__all__) <= set(dir(cydist)), len(late) > 0)\n"
        "same = [getattr(cydist, n) is getattr(cydist, n) is vars(cydist)[n] for n in late]\n"
        "print(all(same), hasattr(cydist, 'no_such_name'))"
    )
    assert fresh(program).split() == ["True", "True", "True", "False"]


def test_public_names_are_documented() -> None:
    """Every public function and class says in its own words what it does."""
    import cydist

    things = {name: getattr(cydist, name) for name in public_names()}
    documented = (inspect.isfunction, inspect.isclass)
    silent = [
        name
        for name, thing in things.items()
        if any(kind(thing) for kind in documented) and not (thing.__doc__ or "").strip()
    ]
    assert silent == []
