"""NCCL's settings in its configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cydist import config
from cydist.backends.nccl import nccl_conf
from cydist.backends.nccl.cuda import gpu_identity

NOW, BEFORE_CONF_FILE = 22809, 22203


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's home, and the system's file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (config.NCCL_HOSTID, config.NCCL_CONF_FILE):
        monkeypatch.delenv(*variable.names, raising=False)
    monkeypatch.setattr(nccl_conf, "SYSTEM_FILE", str(tmp_path / "nccl.conf"))
    return tmp_path


def host_id(version: int = NOW) -> str:
    return nccl_conf.setting(config.NCCL_HOSTID, version)


def test_no_file(files: Path) -> None:
    """The kernel's id tells hosts apart."""
    assert host_id() == ""
    assert not gpu_identity(NOW, "bus", None, 0).startswith("/")


def test_the_systems_file_counts_least(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the user's, the one that a variable names, and the environment."""
    (files / "nccl.conf").write_text("NCCL_HOSTID=system\n")
    assert host_id() == "system"
    (files / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_HOSTID=user\nNCCL_HOSTID=again\n")
    assert host_id() == "user"
    named = files / "named"
    named.write_text("NCCL_HOSTID=named")
    monkeypatch.setenv("NCCL_CONF_FILE", str(named))
    assert host_id() == "named"
    assert host_id(BEFORE_CONF_FILE) == "user"
    monkeypatch.setenv("NCCL_HOSTID", "environment")
    assert host_id() == "environment"
    assert gpu_identity(NOW, "bus", None, 0) == "environment/bus"


def test_a_named_file_replaces_the_users(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it says nothing, or is not there; the system's is read after it."""
    (files / ".nccl.conf").write_text("NCCL_HOSTID=user\n")
    (files / "nccl.conf").write_text("NCCL_HOSTID=system\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(files / "missing"))
    assert host_id() == "system"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#NCCL_HOSTID=a\nNCCL_HOSTID=b\n", "b"),
        ("NCCL_HOSTID=a=b\r\n", "a=b"),
        ("NCCL_HOSTID = a\n NCCL_HOSTID=a\nNCCL_HOSTID\n", ""),
        ("NCCL_HOSTID= a ", " a "),
    ],
)
def test_lines(files: Path, text: str, found: str) -> None:
    """They are as NCCL reads them, with their spaces."""
    (files / "nccl.conf").write_text(text)
    assert host_id() == found
