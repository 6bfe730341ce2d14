"""The house: the folder is the layer. Which may know of which, and what a file may be called."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sorted((ROOT / "cydist").rglob("*.py"))
CYTHON = sorted([*(ROOT / "src").rglob("*.pyx"), *(ROOT / "cydist").rglob("*.pxd")])
KERNELS = sorted((ROOT / "src/kernels").glob("*.[ch]"))
CODE = sorted(
    path
    for room in ("cydist", "src", "tests", "docs", "scripts")
    for path in (ROOT / room).rglob("*")
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ""} and path.is_file()
)

# The folders of cydist/, from the ground up: each imports from those above it in this list. Folders
# of one line know nothing of each other. Two are none: LEAVES are the modules at the top that
# import no folder, FACE is `cydist` itself and the other modules there, which users import.
LEAVES, FACE = "leaves", "cydist"
ORDER = f"""
    _native
    {LEAVES}
    recorder
    devices
    net
    stores
    launch tuning
    rendezvous
    groups
    backends
    backends/host
    backends/mpi backends/nccl backends/torch
    api
    deprecated
    {FACE}
    interop
    interop/torch
    testing
    bench
"""
LEVEL = {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}
MOST_AT_THE_TOP = 29
# Folders of cydist/ whose files import each other in circles; the other folders have none.
CIRCLES = {"groups", "backends/host", "backends/mpi", "backends/torch"}

# The folders of src/: each cimports from those before it in a line, and from what these may.
CHAINS = """
    abi kernels arrays engine fastpath
    abi algorithms algorithms/windows
    abi algorithms/hierarchical
    abi transports transports/shm transports/stream transports/mpi algorithms/mpi
    abi net transports/stream
    transports transports/inproc
    abi transports transports/stream testing
"""
ABOVE_THE_ENGINE = re.compile(r"^\s*(?:from|import)\s+cydist\.(?!_native)(\w+)", re.M)
CIMPORTED = re.compile(
    r"^\s*(?:from\s+cydist\._native\.(\w+)\s+c?import|c?import\s+cydist\._native\.(\w+))", re.M
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> set[str]:
    """Every module of cydist that this one imports anywhere in its text, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            whole = node.module or ""
            for alias in node.names:
                found.add(name if file_of(name := f"{whole}.{alias.name}") else whole)
    return {name for name in found if name.split(".")[0] == "cydist"}


def file_of(module: str) -> Path | None:
    """Where a module of cydist is, or the package; None for what is no module."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def room_of(path: Path) -> str:
    """The name that ORDER knows a module's place by: "backends/host", say."""
    folder = path.parent.relative_to(ROOT / "cydist")
    if folder.parts:
        return str(folder)
    below = {room_at_the_top(name) for name in imports_of(path)} - {"_native", ""}
    return FACE if below or path.stem == "__init__" else LEAVES


def room_at_the_top(module: str) -> str:
    """The folder in cydist/ that a module is in, "" for none."""
    file = file_of(module) or file_of("cydist._native")
    assert file is not None
    folder = file.relative_to(ROOT / "cydist").parts[:-1]
    return folder[0] if folder else "" if file.stem != "__init__" else FACE


def native_rooms() -> dict[str, str]:
    """Each compiled module, and the folder of src/ that it is in. What is only declared, in a .pxd
    without a .pyx, belongs to the lowest folder that uses it."""
    rooms = {
        path.stem: str(path.parent.relative_to(ROOT / "src"))
        for path in CYTHON
        if path.suffix == ".pyx"
    }
    declared = [path.stem for path in CYTHON if path.suffix == ".pxd" and path.stem not in rooms]
    users: dict[str, set[str]] = {name: set() for name in declared}
    for path in CYTHON:
        for name in cimports_of(path) & set(declared):
            if path.stem in rooms:
                users[name].add(rooms[path.stem])
    for name in declared:
        common = [
            room for room in users[name] if all(room in below(other) for other in users[name])
        ]
        shared = set.intersection(*(below(room) for room in users[name]))
        rooms[name] = common[0] if common else max(shared, key=lambda room: len(below(room)))
    return rooms


def cimports_of(path: Path) -> set[str]:
    return {name for names in CIMPORTED.findall(path.read_text()) for name in names if name}


def below(room: str) -> set[str]:
    """The folders of src/ that one of them may know, itself too."""
    found = {room}
    for line in CHAINS.split("\n"):
        rooms = line.split()
        if room in rooms[1:]:
            for lower in rooms[: rooms.index(room)]:
                found |= below(lower)
    return found


def check_each(paths: list[Path], found_in: Callable[[Path], object]) -> None:
    """Assert that what is looked for is found in none of the files; say in which it is."""
    assert paths
    assert {relative(path): found for path in paths if (found := found_in(path))} == {}


def test_every_folder_has_its_place() -> None:
    """ORDER and CHAINS name the folders that there are, and no others."""
    assert {room_of(path) for path in PYTHON} == set(LEVEL)
    assert set(native_rooms().values()) == set(CHAINS.split())


def test_imports_point_down() -> None:
    """A module imports from its own folder and from those below, inside functions and for type
    checkers, too: so there is no circle of folders."""

    def upward(path: Path) -> set[str]:
        own = room_of(path)
        # Compiled code raises the classes of errors.py, nothing else of Python's.
        free = {"cydist.errors"} if own == "_native" else set()
        rooms = {name: room_of(file) for name in imports_of(path) - free if (file := file_of(name))}
        return {name for name, room in rooms.items() if room != own and LEVEL[room] >= LEVEL[own]}

    check_each(PYTHON, upward)


def has_circle(imports: dict[Path, set[Path]]) -> bool:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError:
        return True
    return False


def test_circles_are_found() -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    assert not has_circle({a: {b, c}, b: {c}, c: set()})
    assert has_circle({a: {b}, b: {c}, c: {a}})


def test_files_of_a_folder_have_no_circle() -> None:
    """Nor inside functions and for type checkers, so a file can be read after those that it
    imports. A folder that has lost its circles leaves CIRCLES."""
    found = set()
    for room in LEVEL:
        own = {path for path in PYTHON if room_of(path) == room}
        imports = {path: {file_of(name) for name in imports_of(path)} & own for path in own}
        if has_circle({path: files - {path} for path, files in imports.items()}):
            found.add(room)
    assert found == CIRCLES


def test_few_at_the_top() -> None:
    """At the top of cydist/ lie folders, leaves, and modules that users import; not many."""
    top = [path.name for path in (ROOT / "cydist").iterdir() if path.name != "__pycache__"]
    assert len(top) <= MOST_AT_THE_TOP, sorted(top)


def test_one_module_imports_compiled_code() -> None:
    """Outside cydist/_native, Python imports cydist._native and nothing inside it."""

    def inside(path: Path) -> set[str]:
        return {name for name in imports_of(path) if name.startswith("cydist._native.")}

    check_each([path for path in PYTHON if room_of(path) != "_native"], inside)


def test_cimports_point_down() -> None:
    """An algorithm sees neither a transport nor a dtype, except MPI's own collectives, which see
    MPI's link; a transport sees no algorithm."""
    rooms = native_rooms()

    def elsewhere(path: Path) -> set[str]:
        known = below(rooms[path.stem])
        return {name for name in cimports_of(path) if rooms[name] not in known}

    check_each(CYTHON, elsewhere)


def test_compiled_code_imports_nothing_above_it() -> None:
    """Compiled code knows errors.py; algorithms do not even know that."""
    rooms = native_rooms()

    def above(path: Path) -> set[str]:
        allowed = set() if rooms[path.stem].startswith("algorithms") else {"errors"}
        return set(ABOVE_THE_ENGINE.findall(path.read_text())) - allowed

    check_each(CYTHON, above)


def test_no_gil_below_the_engine() -> None:
    """Algorithms and transports never take the GIL in the middle of a call."""
    rooms = native_rooms()
    under = [path for path in CYTHON if rooms[path.stem].startswith(("algorithms", "transports"))]
    check_each(under, lambda path: "with gil" in path.read_text())


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
    launcher = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", "--no-python"]
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
        *("cydist.stores.server_refcount", "cydist.stores.listen", "cydist.stores.tcp_server"),
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
    found = (name.partition(":")[2] for name in imported)
    assert sorted(name for name in found if name[0] != "_") == sorted(public_names())


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
