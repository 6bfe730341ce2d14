"""The job's secret: 32 bytes that only the job's ranks know.

It comes from the first of these that exists:

1. the inherited descriptor named by CYDIST_SECRET_FD (read once, closed, variable unset),
2. the file named by CYDIST_SECRET_FILE (regular, closed to other users),
3. `set_secret`, which the MPI side calls with the secret that rank 0 sends,
4. a file of the user, created 0600 at first use, which all jobs of the user share.

Use it through `cydist.net.auth`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import threading
from typing import TYPE_CHECKING

from cydist import config
from cydist.errors import AuthenticationError, warn_user
from cydist.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path  # slow to import, and ranks under a launcher need no file

SECRET_BYTES = 32


class Secret(bytes):
    """A secret that shows itself in no traceback, log or debugger."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


_PUBLIC_SECRET = b"cydist without authentication..."

_log = Log("secret")
_lock = threading.Lock()
_secret: Secret | None = None
_source = ""  # where it came from, for logs
_warned = False


def insecure() -> bool:
    """Return whether CYDIST_INSECURE=1 switches authentication off."""
    return config.INSECURE.is_on()


def secret(warn: Callable[[str], object] = warn_user) -> bytes:
    """Return the secret of this process's job, found once. The module's docstring lists the places.

    Args:
        warn: Told once if authentication is switched off.

    Raises AuthenticationError when the place that should hold it cannot be trusted or read.
    """
    global _secret, _source, _warned
    with _lock:
        if insecure():
            if not _warned:
                _warned = True
                warn(
                    "CYDIST_INSECURE=1: anyone who reaches this job's ports can join it and "
                    "read or change its data"
                )
            return _PUBLIC_SECRET
        if _secret is None:
            given = _configured_secret()
            _secret = Secret(given or _user_secret())
            if given is None:
                _source = f"the user's own file {user_secret_path()}"
            _log.debug("the job's secret is from %s", _source)
        return _secret


def source() -> str:
    """Return where this process's secret came from, for logs; never the secret."""
    if insecure():
        return f"none: {config.INSECURE.names[0]}=1"
    return _source or "not needed so far"


def is_configured() -> bool:
    """Return whether there is already a secret that `set_secret` would not replace."""
    return (
        _secret is not None
        or insecure()
        or bool(config.SECRET_FD.get() or config.SECRET_FILE.get())
    )


def is_public(value: bytes) -> bool:
    """Return whether this is the public value used while authentication is switched off."""
    return value == _PUBLIC_SECRET


def set_secret(value: bytes) -> None:
    """Set the job's secret (32 bytes), unless a descriptor or a file gave one.

    For launchers that distribute it in their own way, such as a broadcast over MPI.
    """
    global _secret, _source
    if len(value) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(value)}")
    with _lock:
        given = _configured_secret()
        _secret = Secret(given or value)
        if given is None:
            _source = "rank 0, over MPI"
        _log.debug("the job's secret is from %s", _source)


def new_secret() -> bytes:
    """Return a fresh random secret for a launcher to distribute."""
    return Secret(os.urandom(SECRET_BYTES))


def user_secret_tag(nonce: bytes, *, create: bool = False) -> bytes | None:
    """Return a keyed hash of `nonce` by which ranks see whether they have the same user's secret.

    Args:
        create: Make the user's secret if there is none.

    Returns None without a user's secret that can be read.
    """
    try:
        if not create and not user_secret_path().exists():
            return None
        return hmac.digest(_user_secret(), b"cydist same secret" + nonce, "sha256")
    except (AuthenticationError, OSError, RuntimeError):  # RuntimeError: no home directory
        return None


def renew_user_secret() -> Path:
    """Replace the user's own secret by a new one, and return its path. Running jobs keep theirs.

    Raises AuthenticationError if the file cannot be written.
    """
    path = user_secret_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path, new_secret(), replace=True)
    except OSError as error:
        raise AuthenticationError(f"{path} cannot be written: {error}") from None
    return path


def descriptor_text(fd: int) -> str:
    """Return "FD:INODE", by which a child sees whether the descriptor is still the same file."""
    return f"{fd}:{os.fstat(fd).st_ino}"


def forget_secret() -> None:
    """Forget the secret; the next use looks for it again."""
    global _secret, _source, _warned
    with _lock:
        _secret, _source = None, ""
        _warned = False


def _configured_secret() -> bytes | None:
    """Return the secret that a launcher or the user gave explicitly; None: neither did."""
    global _source
    fd = config.SECRET_FD.pop()
    if fd:
        _source = f"the launcher, through descriptor {fd.partition(':')[0]}"
        return _read_descriptor(fd)
    path = config.SECRET_FILE.get()
    if path:
        _source = f"the file {path} ({config.SECRET_FILE.names[0]})"
        return _read_file(path, given=True)
    return None


def _read_descriptor(text: str) -> bytes:
    try:
        number, _, inode = text.partition(":")
        fd = int(number)
        if inode and os.fstat(fd).st_ino != int(inode):
            raise ValueError("it is another file, which is left alone")
        try:
            # Workers that inherited one memfd share its offset: read at 0, where that is possible.
            data = Secret(os.pread(fd, 128, 0))
        except OSError:
            data = Secret(os.read(fd, 128))
        os.close(fd)
    except (ValueError, OverflowError, OSError) as error:
        raise AuthenticationError(
            f"{config.SECRET_FD.names[0]}={text} is not a descriptor to read: {error}. Was this "
            "program started through a wrapper? If a program between the launcher and this one "
            "closed it, let it replace itself by this one (exec), or hand its descriptors on "
            "(in Python: subprocess.run(..., close_fds=False))"
        ) from None
    if not data:
        raise AuthenticationError(
            f"{config.SECRET_FD.names[0]}={text} is empty: a launcher's secret can be read "
            "once, and an earlier program of this rank has read it. Let one program of each rank "
            "use cydist, or start later ones without this variable (env -u "
            f"{config.SECRET_FD.names[0]}): they take {config.SECRET_FILE.names[0]}, or the user's "
            "own secret"
        )
    return _parse(data, f"descriptor {text}")


def _read_file(path: str | Path, *, given: bool = False) -> bytes:
    """Return the secret in `path`, if it is a regular file that only this user may read.

    Args:
        given: The user named it: it may be root's, closed to all but a group, and a link of root's
            or of this user's may lead to it, as in a container.
    """
    try:
        target = _target(path) if given else path
        fd = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"the secret file {path} cannot be read: {error}{_IN_KUBERNETES if given else ''}"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"the secret file {path} is not a regular file")
        roots = given and status.st_uid == 0 != os.geteuid()
        if status.st_uid != os.geteuid() and not roots:
            raise AuthenticationError(
                f"the secret file {path} belongs to user {status.st_uid}, not to {os.geteuid()}"
            )
        if status.st_mode & (0o037 if roots else 0o077):
            raise AuthenticationError(
                f"the secret file {path} is open to others (mode {status.st_mode & 0o777:04o}): "
                f"chmod 600 {path}{_IN_KUBERNETES if given else ''}"
            )
        return _parse(Secret(os.read(fd, 128)), str(path))
    finally:
        os.close(fd)


_IN_KUBERNETES = (
    ". In Kubernetes, mount it with defaultMode 0400 for root, or 0440 with fsGroup for another "
    "user; or copy it in an init container"
)
_MOST_LINKS = 16


def _target(path: str | Path) -> str:
    """Return the file to which links of root's or of this user's lead. Raises OSError."""
    target = os.fspath(path)
    for _ in range(_MOST_LINKS):
        status = os.lstat(target)
        if not stat.S_ISLNK(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            break
        target = os.path.join(os.path.dirname(target), os.readlink(target))
    return target


def _parse(data: bytes, source: str) -> bytes:
    """Return the secret in 32 raw bytes, or in 64 hex digits with white space around them."""
    if len(data) == SECRET_BYTES:
        return data
    text = Secret(data.strip())
    if len(text) == 2 * SECRET_BYTES:
        with contextlib.suppress(ValueError):
            return Secret(bytes.fromhex(text.decode("ascii", "replace")))
    raise AuthenticationError(
        f"{source} holds {len(data)} bytes: a secret is {SECRET_BYTES} bytes, or "
        f"{2 * SECRET_BYTES} hex digits (openssl rand -hex {SECRET_BYTES})"
    )


def user_secret_path() -> Path:
    """Return the path of the user's own secret, below XDG_STATE_HOME or ~/.local/state."""
    from pathlib import Path

    state = config.STATE_HOME.get()
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "cydist" / "secret"


def _user_secret() -> bytes:
    """Return the user's own secret, created at first use; racing processes agree on one."""
    path = user_secret_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path, new_secret())
    except OSError as error:
        raise AuthenticationError(
            f"no secret: {path} cannot be created ({error}); set {config.SECRET_FILE.names[0]} "
            "to a file of mode 0600 that all ranks share"
        ) from None
    return _read_file(path)


def _create(path: Path, value: bytes, *, replace: bool = False) -> None:
    """Write `value` to `path` completely or not at all; the first process wins, unless it is to
    replace what is there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(value.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.rename(draft, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
