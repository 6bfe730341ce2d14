"""Backends by name: installed packages are found without an import."""

import sys

import pytest

import cydist as dist
from cydist.groups import registry
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
    [(2, "version 2 .*install a later release of cydist"), (0, "later release of the backend")],
)
def test_a_backend_of_another_interface_is_refused_before_traffic(version, words, monkeypatch):
    """Whoever names it learns both versions and what to do; the store is not even asked."""
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))

    class Other(dist.ProcessGroup):
        interface_version = version

    with pytest.raises(dist.UnsupportedError, match=rf"'other' \(.*Other\) .*{words}"):
        dist.register_backend("other", Other)
    assert not dist.is_backend_available("other")


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
