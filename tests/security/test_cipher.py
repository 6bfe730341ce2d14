"""Sealed records: their bytes, their nonces and keys, and that no other record opens."""

from __future__ import annotations

import _ssl
import ctypes
import hmac
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cydist import _native
from cydist.net.encryption import check_encryption

ONE, OTHER = bytes(range(32)), bytes(range(100, 132))
RECORD = 65536  # bytes that the longest record carries
HEAD, TAG = 4, 16


@pytest.fixture(autouse=True)
def encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYDIST_ENCRYPT", "1")
    check_encryption()


def ciphers() -> tuple[_native.CipherHandle, _native.CipherHandle]:
    """Both sides' of one connection."""
    return _native.CipherHandle(ONE, OTHER), _native.CipherHandle(OTHER, ONE)


def records_in(sealed: bytes) -> Iterator[bytes]:
    """The records of a stream, each with its head and tag."""
    while sealed:
        size = HEAD + int.from_bytes(sealed[:HEAD], "big") + TAG
        yield sealed[:size]
        sealed = sealed[size:]


# What RFC 8446 says, without cydist's code


def expand_label(secret: bytes, label: bytes, nbytes: int) -> bytes:
    """HKDF-Expand-Label (7.1) with an empty context."""
    info = nbytes.to_bytes(2, "big") + bytes([6 + len(label)]) + b"tls13 " + label + b"\0"
    return hmac.digest(secret, info + b"\1", "sha256")[:nbytes]


class Opener:
    """Opens records by their description: AES-128-GCM, a nonce of number and IV, the head as
    additional data."""

    def __init__(self, secret: bytes) -> None:
        self._lib = ctypes.CDLL(_ssl.__file__)  # finds what that is linked to
        for name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.EVP_CIPHER_CTX_new())
        self._secret = secret
        self.number = 0

    def close(self) -> None:
        self._lib.EVP_CIPHER_CTX_free(self._context)

    def change_key(self) -> None:
        """Go on to the next secret (7.2)."""
        self._secret = expand_label(self._secret, b"traffic upd", 32)
        self.number = 0

    def open(self, record: bytes) -> bytes:
        """Return what the record carries. Raises ValueError if the tag is another's."""
        lib, context, length = self._lib, self._context, ctypes.c_int()
        key, iv = expand_label(self._secret, b"key", 16), expand_label(self._secret, b"iv", 12)
        nonce = (int.from_bytes(iv, "big") ^ self.number).to_bytes(12, "big")  # 5.3
        self.number += 1
        cipher = ctypes.c_void_p(lib.EVP_aes_128_gcm())
        assert lib.EVP_DecryptInit_ex(context, cipher, None, key, nonce)
        assert lib.EVP_DecryptUpdate(context, None, ctypes.byref(length), record, HEAD)
        plain = ctypes.create_string_buffer(len(record))
        inner, tag = record[HEAD:-TAG], record[-TAG:]
        assert lib.EVP_DecryptUpdate(context, plain, ctypes.byref(length), inner, len(inner))
        assert lib.EVP_CIPHER_CTX_ctrl(context, 0x11, TAG, tag)
        end = ctypes.create_string_buffer(16)
        if lib.EVP_DecryptFinal_ex(context, end, ctypes.byref(length)) != 1:
            raise ValueError("another tag")
        return plain.raw[: len(inner)]


@pytest.fixture
def opener() -> Iterator[Opener]:
    made = Opener(ONE)
    yield made
    made.close()


def test_labels_are_those_of_the_standard() -> None:
    """The test's own derivation gives the keys of RFC 8448, section 3."""
    secret = bytes.fromhex("b3eddb126e067f35a780b3abf45e2d8f3b1a950738f52e9600746a0e27a55a21")
    assert expand_label(secret, b"key", 16).hex() == "dbfaa693d1762c5b666af5d950258d01"
    assert expand_label(secret, b"iv", 12).hex() == "5bd3c71b836e0b76bb73265f"


def test_records_are_as_described(opener: Opener) -> None:
    """Another program opens them by the description in cipher.pxd."""
    here, _ = ciphers()
    for nbytes in (1, 15, 16, 17, 1000, RECORD, RECORD + 1, 3 * RECORD):
        data = random.Random(nbytes).randbytes(nbytes)
        records = list(records_in(here.seal(data)))
        assert [len(r) - HEAD - TAG for r in records[:-1]] == [RECORD] * (len(records) - 1)
        assert b"".join(map(opener.open, records)) == data


def test_keys_change_as_described(opener: Opener) -> None:
    """A key seals no more once the blocks of its records, and two for each, are the limit. Then the
    next one comes from it."""
    before = _native.change_keys_after(100)
    try:
        here, there = ciphers()
    finally:
        _native.change_keys_after(before)
    blocks, changes = 0, 0
    for number in range(200):
        if blocks >= 100:
            opener.change_key()
            blocks, changes = 0, changes + 1
        data = os.urandom(1 + 7 * number % 120)
        blocks += len(data) // 16 + 3
        sealed = here.seal(data)
        assert opener.open(sealed) == data, number
        assert there.open(sealed) == data
    assert changes > 8


def test_a_key_serves_for_as_long_as_the_standard_allows() -> None:
    """2^24.5 records of 2^14 bytes (RFC 8446, 5.5), in blocks of 16 bytes."""
    limit = _native.change_keys_after(1)
    _native.change_keys_after(limit)
    assert limit < 2**24.5 * 2**14 / 16


def test_both_sides_count_alike() -> None:
    """One that changes its key earlier than the other is not understood from there on."""
    before = _native.change_keys_after(30)
    try:
        here = _native.CipherHandle(ONE, OTHER)
    finally:
        _native.change_keys_after(before)
    there = _native.CipherHandle(OTHER, ONE)
    for _ in range(10):
        assert there.open(here.seal(b"x")) == b"x"
    with pytest.raises(ValueError, match="not the next one"):
        there.open(here.seal(b"x"))


def test_a_forked_child_seals_nothing() -> None:
    """It has its parent's keys, and would use a nonce again for other bytes. The parent goes on."""
    here, there = ciphers()
    assert there.open(here.seal(b"before")) == b"before"
    child = os.fork()
    if child == 0:
        try:
            here.seal(b"in the child")
            os._exit(1)
        except OSError as error:
            os._exit(42 if "forked" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert there.open(here.seal(b"after")) == b"after"


def test_two_threads_take_no_nonce_twice() -> None:
    """Of one cipher: equal bytes are other records each time."""
    here, _ = ciphers()
    with ThreadPoolExecutor(2) as threads:
        sealed = list(threads.map(here.seal, 20_000 * [b"equal"]))
    assert len(set(sealed)) == len(sealed)


# What does not open


@pytest.mark.parametrize(
    ("opened", "then"), [([], 1), ([0], 0), ([0], 2)], ids=["first lost", "twice", "one lost"]
)
def test_records_open_in_their_order(opened: list[int], then: int) -> None:
    """Each once: what an attacker drops, repeats or reorders does not open."""
    here, there = ciphers()
    sealed = [here.seal(bytes([number]) * 50) for number in range(3)]
    for number in opened:
        there.open(sealed[number])
    with pytest.raises(ValueError, match="not the next one"):
        there.open(sealed[then])


@pytest.mark.parametrize("wrong", ["changed", "no record"])
def test_nothing_opens_after_a_wrong_record(wrong: str) -> None:
    """Not the one that the peer sent next either: an attacker would have added or taken one."""
    here, there = ciphers()
    first, second = here.seal(b"first"), here.seal(b"second")
    with pytest.raises(ValueError, match="not the next one"):
        there.open(bytes(HEAD) if wrong == "no record" else first[:-1] + bytes([first[-1] ^ 1]))
    with pytest.raises(ValueError, match="not the next one"):
        there.open(first if wrong == "no record" else second)


# HMAC that fails when it is called for the given time, in a library that OpenSSL is looked up in.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
long left = -1;
unsigned char *HMAC(const void *hash, const void *key, int key_bytes, const unsigned char *data,
                    size_t bytes, unsigned char *into, unsigned int *count) {
    static unsigned char *(*next)(const void *, const void *, int, const unsigned char *, size_t,
                                  unsigned char *, unsigned int *);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "HMAC");
    return left >= 0 && left-- == 0 ? NULL : next(hash, key, key_bytes, data, bytes, into, count);
}
"""
PROGRAM = """
import ctypes, sys
from cydist import _native

_native.load_openssl(sys.argv[1])
left = ctypes.c_long.in_dll(ctypes.CDLL(sys.argv[1]), "left")
_native.change_keys_after(3)
for fails in range(3):      # the next secret, its key, its IV
    here = _native.CipherHandle(bytes(32), bytes(range(32)))
    first = here.seal(b"first")
    left.value = fails
    later = []
    for _ in range(2):
        try:
            later.append(here.seal(b"first"))
        except OSError as error:
            later.append("cannot encrypt" in str(error))
    print(left.value, later)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nothing_is_sealed_after_half_a_change_of_keys(tmp_path: Path) -> None:
    """OpenSSL may have no memory for the next key. With the old one the numbers, which begin again,
    would give nonces that it has had."""
    (tmp_path / "shim.c").write_text(SHIM)
    library = str(tmp_path / "shim.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, f"{library[:-2]}c",
         _ssl.__file__], check=True, timeout=60,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, library], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (3 * "-1 [True, True]\n", "")


def test_a_reflected_record_does_not_open() -> None:
    """Each direction has its own key."""
    here, _ = ciphers()
    with pytest.raises(ValueError, match="not the next one"):
        here.open(here.seal(b"hello"))


def test_no_bit_can_be_turned() -> None:
    """Whichever bit of a record is another, it does not open, or waits for bytes."""
    for place in range(8 * (HEAD + 40 + TAG)):
        here, there = ciphers()
        sealed = bytearray(here.seal(bytes(40)))
        sealed[place // 8] ^= 1 << place % 8
        try:
            assert there.open(bytes(sealed)) == b"", place
        except ValueError:
            continue
        assert int.from_bytes(sealed[:HEAD], "big") > 40


@pytest.mark.parametrize("said", [0, RECORD + 1, 1 << 24, (1 << 32) - 1])
def test_no_record_has_such_a_length(said: int) -> None:
    """It is refused by its head alone, before anything is kept for it."""
    _, there = ciphers()
    with pytest.raises(ValueError, match="not the next one"):
        there.open(said.to_bytes(HEAD, "big"))


def test_a_cut_record_opens_when_it_is_whole() -> None:
    """Byte by byte: nothing comes of it before its tag has."""
    here, there = ciphers()
    sealed = here.seal(b"every byte counts")
    for byte in sealed[:-1]:
        assert there.open(bytes([byte])) == b""
    assert there.open(sealed[-1:]) == b"every byte counts"


def test_secrets_have_a_length() -> None:
    """A shorter secret is refused."""
    with pytest.raises(ValueError, match="32 bytes"):
        _native.CipherHandle(ONE, b"short")
