"""Backends by name: installed packages are found without an import."""

import importlib
import subprocess
import sys

import pytest

import cydist as dist
from cydist.groups import process_group, registry
from cydist.testing import run_threads

MODULE = """
from cydist import ProcessGroup
from cydist.backends.host import create as host


def create(options, pg_options):
    return host.create_inproc(options)


create.extended_api = True
create.devices = "cpu"
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point in the group cydist.backends."""
    (tmp_path / "somebodys_backend.py").write_text(MODULE)
    info = tmp_path / "somebodys_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[cydist.backends]\nsomebodys = somebodys_backend:create\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "somebodys"
    registry._plugins.pop("somebodys", None)
    sys.modules.pop("somebodys_backend", None)


def test_an_installed_backend_is_listed_but_not_imported(installed):
    """Listing names reads metadata only."""
    assert installed in registry.names()
    assert dist.is_backend_available(installed)
    assert "somebodys_backend" not in sys.modules


def test_an_installed_backend_works_by_name(installed):
    """init_process_group finds it; it serves the devices that its creator names."""

    def body(rank):
        gathered = [None, None]
        dist.all_gather_object(gathered, rank)
        return dist.get_backend(), gathered

    assert [(installed, [0, 1])] * 2 == run_threads(body, 2, installed)
    assert {"cpu": installed} == registry.parse(installed)
    with pytest.raises(ValueError, match="not cuda"):
        registry.parse(f"cuda:{installed}")


@pytest.mark.parametrize(
    ("version", "words"),
    [(3, "version 3 .*install a later release of cydist"), (1, "later release of the backend")],
)
def test_a_backend_of_another_interface_is_refused_before_traffic(version, words, monkeypatch):
    """A rank that names it learns both versions and what to do; the store is not even asked."""
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))

    class Other(dist.ProcessGroup):
        interface_version = version

    with pytest.raises(dist.UnsupportedError, match=rf"'other' \(.*Other\) .*{words}"):
        dist.register_backend("other", Other)
    assert not dist.is_backend_available("other")


@pytest.mark.parametrize("name", process_group.FORMER_NAMES)
def test_a_class_with_the_former_names_is_refused(name):
    """It would never be called: the error gives the present name."""
    source = f"class Old(dist.ProcessGroup):\n    def {name}(self, call, *rest): pass"
    with pytest.raises(TypeError, match=rf"Old\.{name} .* version 1 .* call it run_{name}"):
        exec(source, {"dist": dist})
    assert hasattr(dist.ProcessGroup, f"run_{name}")


@pytest.mark.parametrize("spec", ["cpu:", ":tcp", "cpu:tcp:x", "cpu:tcp,", ""])
def test_malformed_backend_strings_are_refused(spec):
    """Every pair is device:backend, and the backend takes the device."""
    with pytest.raises(ValueError, match=r"device:backend|no backend is called|takes arrays on"):
        registry.parse(spec)


def test_a_string_of_pairs_routes_by_device():
    """Each device gets its backend; calls without arrays go to every one of them."""

    def body(rank):
        group = dist.new_group(backend="cpu:inproc")
        gathered = [None, None]
        dist.all_gather_object(gathered, rank, group=group)
        dist.barrier(group=group)
        return gathered

    assert [[0, 1]] * 2 == run_threads(body, 2)


def test_a_backend_that_fails_leaves_no_group_open(monkeypatch):
    """The groups of other devices, made before the one that failed, are closed; the error is the
    backend's own, and the rank may join again."""
    closed = []

    class Recorded(dist.ProcessGroup):
        def close(self):
            closed.append(self.group_name)

    def fails(options, pg_options):
        raise dist.DistBackendError("no such device")

    for name, creator, devices in (
        ("recorded", lambda options, _: Recorded(options.group_rank, options.group_size), "cpu"),
        ("fails", fails, "cuda"),
    ):
        monkeypatch.setitem(registry._plugins, name, registry.Plugin(creator, True, (devices,)))

    def body(rank):
        with pytest.raises(dist.DistBackendError, match="no such device"):
            dist.new_group(backend="cpu:recorded,cuda:fails")
        return len(closed), dist.new_group(backend="recorded").size()

    assert [(1, 1)] == run_threads(body, 1)


@pytest.fixture
def table(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.setattr(dist.Backend, "THEIRS", "", raising=False)


def test_built_in_backends_are_registered_as_others_are(table):
    """By register_backend, as the package of them is imported: there is no other table."""
    registry._plugins.clear()
    registry._families.clear()
    with pytest.raises(ValueError, match="no backend is called 'tcp'"):
        registry.find("tcp")
    importlib.reload(sys.modules["cydist.backends"])
    assert set(registry.names()) >= {"tcp", "gloo", "inproc", "mpi", "nccl"}
    assert registry.find("mpi").of_all
    assert registry.parse("nccl") == {"cuda": "nccl"}
    with pytest.raises(ValueError, match="'tcp' is registered already"):
        dist.register_backend("TCP", dist.ProcessGroup)


def test_a_built_in_backend_is_imported_when_a_group_is_made():
    """Listing, finding and looking whether they are there imports none of them."""
    program = (
        "import sys, cydist\n"
        "from cydist.groups import process_group, registry\n"
        "for name in registry.names(): registry.find(name); cydist.is_backend_available(name)\n"
        "def late(): return [n for n in sys.modules if n.startswith('cydist.backends.')]\n"
        "print(len(late()))\n"
        "cydist.init_process_group('inproc', store=cydist.HashStore(), rank=0, world_size=1)\n"
        "print(len(late()) > 0, 'cydist.backends.host.group' in late())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["0", "True", "True"]


def test_a_backend_says_which_packages_it_needs(table):
    """Without them it is not available, as backend "mpi" is not without mpi4py."""

    class Theirs(dist.ProcessGroup):
        requires = ("numpy", "a_package_that_nobody_has")

    dist.register_backend("theirs", Theirs)
    assert "theirs" in registry.names()
    assert not dist.is_backend_available("theirs")
    Theirs.requires = ("numpy",)
    del registry._plugins["theirs"]
    dist.register_backend("theirs", Theirs)
    assert dist.is_backend_available("theirs")


def test_a_backend_says_that_its_groups_share_one_of_all_ranks(table):
    """Then the first new_group of it beside another default group takes all ranks."""

    class Theirs(dist.ProcessGroup):
        of_all = True

    dist.register_backend("theirs", Theirs)
    assert registry.find("theirs").of_all
    assert not registry.find("tcp").of_all


def test_anybody_may_register_a_family(table):
    """As "torch:NAME" is one: its members are found, routed by device, and make groups."""

    class Member:
        extended_api = True
        devices = "cpu"

        def __init__(self, name):
            self.name = name

        def __call__(self, options, pg_options):
            return registry.find(self.name).create(options, pg_options)

    class Family:
        def member(self, name):
            if name != "inproc":
                raise ValueError(f"theirs has no {name}")
            return Member(name)

    dist.register_backend("theirs", Family())
    assert registry.parse("theirs:inproc") == {"cpu": "theirs:inproc"}
    assert registry.parse("cpu:theirs:inproc") == {"cpu": "theirs:inproc"}
    assert dist.is_backend_available("theirs:inproc")
    assert not dist.is_backend_available("theirs:other")
    with pytest.raises(ValueError, match=r"no backend is called 'theirs'.*theirs:NAME"):
        registry.find("theirs")
    with pytest.raises(ValueError, match="'theirs' is registered already"):
        dist.register_backend("theirs", dist.ProcessGroup)

    def body(rank):
        gathered = [None, None]
        dist.all_gather_object(gathered, rank)
        return dist.get_backend(), gathered

    assert run_threads(body, 2, "theirs:inproc") == [("theirs:inproc", [0, 1])] * 2


def test_only_own_backends_are_authenticated_by_default() -> None:
    """A backend of others has nothing unpickled unless it says that nobody else can send there."""
    from cydist.backends.host.group import HostGroup
    from cydist.groups.process_group import ProcessGroup

    assert not ProcessGroup.authenticated
    assert HostGroup.authenticated
