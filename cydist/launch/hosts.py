"""The launchers of a job over several hosts: they meet, start together, and end together.

Host 0's launcher listens on MASTER_PORT until the others have come, and then leaves the port to
rank 0. The connections stay. On each the launchers have proved that they know the job's secret
(cydist/net/auth.py), and every message carries a tag (cydist/net/records.py). Host 0 decides:

    hello   ->          a launcher's node rank, its number of ranks, and what must be equal
            <- refuse   why it cannot take part
            <- start    the number of the generation, how many ranks each host has, and after how
                        many seconds in a call a rank hangs
    failed  ->          a rank failed here, with its last words
    done    ->          all ranks here have ended well
    stopped ->          a signal told this launcher to end
            <- end      what failed first, on any host: end the ranks
    ended   ->          the ranks here have ended, and a restart may follow
            <- finish   all ranks of all hosts have ended well
    ask     ->          a command on this host wants to see all ranks (all_hosts.py)
            <- look     what do your ranks do?
    seen    ->          they do this
            <- seen     the ranks of another host do this
    hung    ->          a rank here is in a call for too long (launch/reports.py)
            <- told     host 0 reports the hang, so this host's calls need no other report

Everything happens on the launcher's one thread, but for the attempts to connect: those have a
thread of their own, which is gone before a worker starts.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cydist import config
from cydist.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    RendezvousError,
    listed,
)
from cydist.launch.options import LaunchOptions
from cydist.net import auth
from cydist.net.acceptor import MOST_REFUSALS, Acceptor
from cydist.net.auth import ClientHandshake, OtherJobError, ServerHandshake
from cydist.net.encryption import check_encryption
from cydist.net.interfaces import why_unreachable
from cydist.net.records import HEAD_BYTES, Records
from cydist.net.silence import peer_timeout, watch_idle
from cydist.stores.listen import bind
from cydist.waiting import DEFAULT_TIMEOUT, WaitNotices

_CHANNEL = b"launch"
MOST_BYTES = 1 << 20  # of a message
_READ_BYTES = 1 << 16
# Without a failure that blames no other rank, host 0 waits this long for one.
VERDICT_SECONDS = 1.0
# A launcher that was refused has ended. Its user may correct it for so long.
REFUSED_SECONDS = 30.0
_TRY_SECONDS, _PAUSE = 3.0, 0.2  # of an attempt to connect, and between two
# Ranks that wait for a host that has vanished raise within CYDIST_PEER_TIMEOUT. The launchers give
# the host up so much later: then the ranks' errors are printed before the launchers end them.
_LATER_SECONDS = 5.0
_MOST_MS = (1 << 31) - 1  # of a socket's option
_SEND_SECONDS = 5.0  # for a message that a full socket does not take
_CLOSE_SECONDS = 1.0  # that host 0's launcher waits for the others to close

Message = dict[str, Any]


class Verdict(NamedTuple):
    """The end of the ranks on all hosts, and what caused it.

    Attributes:
        node: The host where it began.
        rank: The one that failed first; None: it was no rank.
        code: Exit code of every launcher.
        text: What the launchers of other hosts print, in whole lines.
        restart: Whether all hosts start their ranks again.
        ended_by: The signal that the ranks get: SIGTERM, or what a launcher was told to end by.
    """

    node: int
    rank: int | None
    code: int
    text: str
    restart: bool = False
    ended_by: int = signal.SIGTERM


def patience_with_hosts() -> float:
    """Return the seconds after which a silent host is lost for the launchers; inf: never.

    Raises RendezvousError if CYDIST_PEER_TIMEOUT is not a time.
    """
    try:
        return peer_timeout() + _LATER_SECONDS
    except ValueError as error:
        raise RendezvousError(str(error)) from None


class _Connection:
    """An authenticated connection to another launcher."""

    def __init__(self, sock: socket.socket, handshake: ClientHandshake | ServerHandshake) -> None:
        self.sock = sock
        self.node: int | None = None  # of the other launcher, once it has said so
        self.address = handshake.there.rpartition(":")[0]
        self._records = Records(handshake, MOST_BYTES)
        self._received = bytearray()
        self._missing = 0  # bytes after the head of the record that arrives; 0: no whole head yet
        sock.settimeout(_SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = patience_with_hosts()
        watch_idle(sock, seconds)
        # While bytes are under way the kernel does not probe. Messages are few and short, so a
        # living host always has room for them.
        if not math.isinf(seconds):
            limit_ms = int(min(1000 * seconds, _MOST_MS))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError."""
        self.sock.sendall(self._records.seal(json.dumps(message).encode()))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises OSError at the end of the stream, and for what the other launcher did not send.
        """
        try:
            data = self.sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._received += self._records.decrypt(data)
        messages: list[Message] = []
        while True:
            if not self._missing and len(self._received) >= HEAD_BYTES:
                self._missing = self._records.open_head(self._received)
            whole = HEAD_BYTES + self._missing
            if not self._missing or len(self._received) < whole:
                return messages
            body = self._records.open_body(self._received[HEAD_BYTES:whole])
            self._received, self._missing = self._received[whole:], 0
            messages.append(json.loads(body))

    def close(self) -> None:
        self.sock.close()


class Launchers:
    """This launcher's view of all launchers of the job.

    Set `look`, which gets a question and returns what the ranks here do; `take`, which gets another
    host's answer: its key, the host, and the answer; `hung`, which host 0's launcher calls when
    ranks of a host hang: with the limit in seconds; and `told`, called when host 0 reports a hang.

    Register `fileno()` for reading and call `serve` when it is ready, and at `deadline`.

    Attributes:
        started: Number of the latest generation that host 0 has started; -1: none.
        sizes: How many ranks each host has, once a generation has started.
        verdict: Why that generation ends; None: it runs, or ended well.
        finished: All ranks of all hosts have ended well.
        report_hangs: Seconds, as host 0's launcher was told; 0: never.
    """

    def __init__(self, options: LaunchOptions, say: Callable[[str], object]) -> None:
        self._options = options
        self._say = say
        self._selector = selectors.EpollSelector()
        self._name = socket.gethostname()
        self._until = time.monotonic() + DEFAULT_TIMEOUT.total_seconds()
        self._notices: WaitNotices | None = WaitNotices(say)
        self.started = -1
        self.sizes: tuple[int, ...] = ()
        self.verdict: Verdict | None = None
        self.finished = False
        self.report_hangs = 0.0
        self.look: Callable[[Message], Message] = lambda question: {}
        self.take: Callable[[str, int, Message], object] = lambda key, node, answer: None
        self.hung: Callable[[float], object] = lambda seconds: None
        self.told: Callable[[], object] = lambda: None

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def deadline(self) -> float | None:
        """Return when `serve` must be called at the latest, on time.monotonic(); None: never."""
        if self._notices is None:
            return None
        return min(self._until, time.monotonic() + self._notices.left)

    def serve(self) -> None:
        """Handle what has arrived, and what is due.

        Raises RendezvousError if the launchers do not meet.
        """
        raise NotImplementedError

    def tell(self, kind: str, **content: object) -> None:
        """Tell host 0's launcher."""
        raise NotImplementedError

    def ask(self, key: str, question: Message) -> None:
        """Ask the other launchers what their ranks do. Their answers go to `take`.

        Args:
            key: Comes back with each answer.
            question: For their `look`.
        """
        raise NotImplementedError

    def report_hang(self, seconds: float) -> None:
        """Let host 0's launcher report that a rank here is in a call for more than `seconds`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
        self._selector.close()

    def _obey(self, message: Message) -> None:
        """Take an order of host 0's launcher."""
        content = {name: value for name, value in message.items() if name != "kind"}
        match message["kind"]:
            case "start":
                self.started, self.sizes = content["number"], tuple(content["sizes"])
                self.report_hangs = float(content["report_hangs"])
                self.verdict, self._notices = None, None
            case "end":
                self.verdict = Verdict(**content)
            case "finish":
                self.finished = True
            case "notice":
                self._say(content["text"])
            case "refuse":
                raise RendezvousError(content["text"])
            case "look":
                self._answer(content["asker"], content["key"], content["question"])
            case "seen":
                self.take(content["key"], content["node"], content["answer"])
            case "told":
                self.told()

    def _answer(self, asker: int, key: str, question: Message) -> None:
        """Let the launcher of a host know what the ranks here do."""
        raise NotImplementedError


class HostZero(Launchers):
    """Host 0's launcher, which decides."""

    def __init__(self, options: LaunchOptions, say: Callable[[str], object], secret: bytes) -> None:
        super().__init__(options, say)
        assert options.master_port is not None
        self._all = set(range(options.nodes))
        self._connections: dict[_Connection, None] = {}
        self._names = {0: self._name}
        self._sizes = {0: options.local_size}
        self._failures: list[tuple[bool, float, Verdict]] = []  # first comes the least
        self._well: set[int] = set()  # hosts whose ranks have all ended well
        self._over: set[int] = set()  # hosts whose ranks have all ended
        self._refused: list[str] = []  # launchers that cannot take part
        # How long to wait for another one in place of one that knew the secret, by its address.
        self._refused_until: dict[str, float] = {}
        self._unauthenticated = 0  # refused without the secret
        self._act_at: float | None = None  # of a verdict, or of a restart
        try:
            listeners = bind(options.master_addr, options.master_port)
        except DistNetworkError as error:
            raise RendezvousError(
                f"{error}. This launcher is host 0, which listens at --master-addr and "
                "--master-port: on other hosts, give --node-rank"
            ) from None
        self._acceptor = Acceptor(
            self._selector, secret, _CHANNEL, _job_name(options), on_refusal=self._on_refusal
        )
        for listener in listeners:
            self._acceptor.listen(listener)

    @property
    def deadline(self) -> float | None:
        refused = self._refused_until.values() if self.started < 0 else ()
        times = (super().deadline, self._act_at, *refused, self._acceptor.next_deadline)
        return min((each for each in times if each is not None), default=None)

    def serve(self) -> None:
        for key, _ in self._selector.select(0):
            if key.data is self._acceptor:
                peer = self._acceptor.react(key.fileobj)
                if peer is not None:
                    self._admit(peer.sock, peer.handshake, peer.unsent)
            elif key.data in self._connections:
                self._read(key.data)
        self._acceptor.expire(time.monotonic())
        self._advance()

    def tell(self, kind: str, **content: object) -> None:
        self._hear(0, {"kind": kind, **content})
        self._advance()

    def close(self) -> None:
        """Close the connections when the others have, or soon.

        A connection that is closed with unread bytes may lose the last order.
        """
        self._acceptor.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        end = time.monotonic() + _CLOSE_SECONDS
        while self._connections and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                with contextlib.suppress(OSError, ValueError):
                    key.data.receive()
                    continue
                self._drop(key.data)
        for connection in list(self._connections):
            self._drop(connection)
        super().close()

    def _admit(self, sock: socket.socket, handshake: ServerHandshake, proof: bytes) -> None:
        connection = _Connection(sock, handshake)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        try:
            sock.sendall(proof)
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            for message in connection.receive():
                if connection.node is None:
                    self._welcome(connection, message)
                else:
                    self._hear(connection.node, message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._drop(connection)
            if connection.node is not None:
                self._lost(connection.node, error)

    def _on_refusal(self, address: str, why: str, knows: bool) -> None:
        """Print why the handshake refused a launcher. Only one that knows the secret can end the
        start, since any client can connect."""
        if knows:
            self._refused_until[address] = time.monotonic() + REFUSED_SECONDS
        else:
            self._unauthenticated += 1
        if knows or self._unauthenticated <= MOST_REFUSALS:
            self._say(f"cydistrun: {why}\n")

    def _welcome(self, connection: _Connection, hello: Message) -> None:
        node, name = int(hello["node"]), str(hello["name"])
        if wrong := self._unfit(node, name, hello):
            self._refused.append(wrong)
            self._refused_until[connection.address] = time.monotonic() + REFUSED_SECONDS
            self._say(f"cydistrun: {wrong}\n")
            connection.send({"kind": "refuse", "text": wrong})
            return
        self._refused_until.pop(connection.address, None)
        connection.node = node
        self._names[node], self._sizes[node] = name, int(hello["size"])

    def _unfit(self, node: int, name: str, hello: Message) -> str:
        """Return why a launcher cannot take part; "" if it can."""
        if node in self._names:
            return (
                f"--node-rank {node} was given twice: on {self._names[node]}, and on {name}, which "
                "was refused"
            )
        if node not in self._all:
            return f"--node-rank {node} on {name} is not in 0..{self._options.nodes - 1} (--nnodes)"
        for option, own in _shared(self._options).items():
            if hello["shared"].get(option) != own:
                return (
                    f"{option} is {hello['shared'].get(option)} on {name} and {own} on "
                    f"{self._name} (host 0): give the same"
                )
        return ""

    def _hear(self, node: int, message: Message) -> None:
        """Take what the launcher of a host says."""
        match message["kind"]:
            case "failed":
                found = Verdict(node, message["rank"], message["code"], message["text"])
                at = time.monotonic() - message["ago"]
                self._failures.append((message["secondary"], at, found))
                if self._act_at is None and self.verdict is None and not self._options.keep_going:
                    self._act_at = time.monotonic() + VERDICT_SECONDS
            case "done":
                self._well.add(node)
            case "ended":
                self._over.add(node)
            case "stopped":
                where = f"host {node} ({self._names[node]})"
                text = f"cydistrun: {where} was told to end by {message['signal']}\n"
                number = signal.Signals[message["signal"]]
                self._end(Verdict(node, None, message["code"], text, ended_by=number))
            case "ask":
                self._pass_on(node, message["key"], message["question"])
            case "seen":
                self._give(message["asker"], message["key"], node, message["answer"])
            case "hung":
                self.report_hang(float(message["seconds"]))

    def ask(self, key: str, question: Message) -> None:
        self._pass_on(0, key, question)

    def report_hang(self, seconds: float) -> None:
        self.hung(seconds)
        self._broadcast({"kind": "told"})

    def _pass_on(self, asker: int, key: str, question: Message) -> None:
        """Ask all launchers but the one that asks."""
        passed = {"kind": "look", "asker": asker, "key": key, "question": question}
        for node in self._all - {asker, 0}:
            self._send_to(node, passed)
        if asker != 0:  # last, since looking takes time
            self._answer(asker, key, question)

    def _answer(self, asker: int, key: str, question: Message) -> None:
        self._give(asker, key, 0, self.look(question))

    def _give(self, asker: int, key: str, node: int, answer: Message) -> None:
        """Give one launcher's answer to the one that asked."""
        if asker == 0:
            self.take(key, node, answer)
        else:
            self._send_to(asker, {"kind": "seen", "key": key, "node": node, "answer": answer})

    def _send_to(self, node: int, message: Message) -> None:
        for connection in list(self._connections):
            if connection.node == node:
                try:
                    connection.send(message)
                except OSError:
                    self._drop(connection)

    def _advance(self) -> None:
        now = time.monotonic()
        if self.verdict is None and self.started < 0:
            self._meet(now)
        elif self.verdict is None and not self.finished:
            self._judge(now)
        elif self.verdict is not None and self.verdict.restart and self._over == self._all:
            if self._act_at is None:
                self._act_at = now + self._options.restart_delay
            elif now >= self._act_at:
                self._start()

    def _meet(self, now: float) -> None:
        if self._names.keys() == self._all:
            self._acceptor.close()  # the port is rank 0's
            self._start()
        elif now >= self._until:
            self._give_up(f"timeout: {self._missing()}")
        elif any(now >= until for until in self._refused_until.values()):
            self._give_up(
                f"{self._missing()}. A launcher that was refused has ended, and none has come in "
                f"its place for {REFUSED_SECONDS:g} s: start all again"
            )
        elif self._notices is not None:
            self._notices.say_if_due(self._notice)

    def _give_up(self, why: str) -> None:
        self._send_to_all({"kind": "refuse", "text": why})
        raise RendezvousError(why)

    def _notice(self, seconds: float) -> str:
        text = f"cydistrun: host 0 ({self._name}) has waited {seconds:.0f} s: {self._missing()}"
        self._send_to_all({"kind": "notice", "text": f"{text}\n"})
        return text

    def _missing(self) -> str:
        late = sorted(self._all - self._names.keys())
        here = len(self._names)
        text = (
            f"{listed('host', late)} {'has' if len(late) == 1 else 'have'} not come, {here} of "
            f"{self._options.nodes} hosts {'is' if here == 1 else 'are'} here"
        )
        refused = [*self._refused[-4:], *self._acceptor.refusals.values()]
        return f"{text}. Refused: {'; '.join(refused)}" if refused else text

    def _start(self) -> None:
        self._failures, self._act_at = [], None
        self._well, self._over = set(), set()
        sizes = [self._sizes[node] for node in sorted(self._all)]
        self._broadcast(
            {"kind": "start", "number": self.started + 1, "sizes": sizes,
             "report_hangs": self._options.report_hangs}
        )  # fmt: skip

    def _judge(self, now: float) -> None:
        """Decide whether the job is over, and why."""
        if self._options.keep_going:
            reported = self._well | {failure.node for _, _, failure in self._failures}
            certain = reported == self._all
        else:
            certain = any(not secondary for secondary, _, _ in self._failures)
            certain = certain or (self._act_at is not None and now >= self._act_at)
        if self._failures and certain:
            _, _, first = min(self._failures, key=lambda failure: failure[:2])
            again = self.started < self._options.max_restarts
            self._end(first._replace(restart=again))
        elif self._well == self._all:
            self._broadcast({"kind": "finish"})

    def _end(self, verdict: Verdict) -> None:
        self._act_at = None
        self._broadcast({"kind": "end", **verdict._asdict()})

    def _lost(self, node: int, error: Exception) -> None:
        """Take the loss of a launcher for the end of its host."""
        name = self._names[node]
        if self.started < 0:  # it may come again
            del self._names[node], self._sizes[node]
            self._say(f"cydistrun: host {node} ({name}) has gone again\n")
            return
        if self.finished or (self.verdict is not None and not self.verdict.restart):
            return
        text = f"cydistrun: host {node} ({name}) was lost, or its launcher killed: {error}\n"
        lost = Verdict(node, None, 1, text)
        if self._options.keep_going:
            self._failures.append((False, time.monotonic(), lost))
            self._say(text)
        else:
            self._end(lost)

    def _broadcast(self, message: Message) -> None:
        self._obey(message)
        self._send_to_all(message)

    def _send_to_all(self, message: Message) -> None:
        for connection in list(self._connections):
            if connection.node is not None:
                try:
                    connection.send(message)
                except OSError:
                    self._drop(connection)  # its ranks are missed by the others

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.close()


class OtherHost(Launchers):
    """Another host's launcher, which is connected to host 0's."""

    def __init__(self, options: LaunchOptions, say: Callable[[str], object], secret: bytes) -> None:
        super().__init__(options, say)
        self._secret = secret
        self._connection: _Connection | None = None
        self._failure: Exception | None = None  # of the latest attempt
        self._told_all = False  # how this host's ranks ended
        self._alone: Verdict | None = None  # without host 0, once this host's ranks have ended
        self._answer_by = math.inf  # when host 0's answer to the report of a failure is overdue
        self._reached: tuple[socket.socket, ClientHandshake] | None = None
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._thread.start()

    @property
    def deadline(self) -> float | None:
        return super().deadline if math.isinf(self._answer_by) else self._answer_by

    def serve(self) -> None:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._wake:
                self._take_connection()
            else:
                self._read()
        if self._connection is not None and time.monotonic() >= self._answer_by:
            self._lost(
                TimeoutError(
                    "its launcher does not answer the report of a failure for "
                    f"{patience_with_hosts():g} s, and may be stopped"
                )
            )
        if self._notices is not None and self._connection is None:
            if time.monotonic() >= self._until:
                raise RendezvousError(f"timeout: {self._where()}: {self._why()}")
            self._notices.say_if_due(self._notice)

    def tell(self, kind: str, **content: object) -> None:
        self._told_all = kind in ("done", "failed")
        if self._connection is None:
            self.verdict = self.verdict or self._alone
            return
        try:
            self._connection.send({"kind": kind, **content})
        except OSError as error:
            self._lost(error)
        else:
            # Host 0 ends the job then, at the latest after VERDICT_SECONDS.
            if kind == "failed" and not self._options.keep_going:
                self._answer_by = time.monotonic() + patience_with_hosts()

    def ask(self, key: str, question: Message) -> None:
        self._send({"kind": "ask", "key": key, "question": question})

    def report_hang(self, seconds: float) -> None:
        self._send({"kind": "hung", "seconds": seconds})

    def _answer(self, asker: int, key: str, question: Message) -> None:
        self._send({"kind": "seen", "asker": asker, "key": key, "answer": self.look(question)})

    def _send(self, message: Message) -> None:
        """Tell host 0's launcher something that does not decide how the job goes on."""
        if self._connection is not None:
            try:
                self._connection.send(message)
            except OSError as error:
                self._lost(error)

    def _obey(self, message: Message) -> None:
        super()._obey(message)
        if message["kind"] == "end":
            self._answer_by = math.inf

    def close(self) -> None:
        self._giving_up.set()
        if self._connection is not None:
            self._connection.close()
        self._wake.close()
        self._waker.close()
        super().close()

    def _connect(self) -> None:
        """Run the thread: try to connect until host 0's launcher answers or refuses."""
        while not self._giving_up.is_set():
            try:
                self._reached = self._try()
                break
            except AuthenticationError as error:
                self._failure = error
                break
            except (OSError, DistError) as error:
                self._failure = error
            self._giving_up.wait(_PAUSE)
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _try(self) -> tuple[socket.socket, ClientHandshake]:
        address = (self._options.master_addr, self._options.master_port)
        sock = socket.create_connection(address, _TRY_SECONDS)
        try:
            if sock.getsockname() == sock.getpeername():  # no process listens there
                raise ConnectionRefusedError("connected to itself")
            return sock, auth.authenticate_client(
                sock, channel=_CHANNEL, job=_job_name(self._options), secret=self._secret
            )
        except BaseException:
            sock.close()
            raise

    def _take_connection(self) -> None:
        self._selector.unregister(self._wake)
        self._thread.join()
        if self._reached is None:
            hint = (
                f". If the job is running already, --node-rank {self._options.node_rank} was given "
                "twice"
                if isinstance(self._failure, OtherJobError)
                else ""
            )
            raise RendezvousError(f"{self._where()}: {self._failure}{hint}")
        self._connection, self._notices = _Connection(*self._reached), None
        self._selector.register(self._connection.sock, selectors.EVENT_READ)
        self.tell(
            "hello",
            node=self._options.node_rank,
            name=self._name,
            size=self._options.local_size,
            shared=_shared(self._options),
        )

    def _read(self) -> None:
        assert self._connection is not None
        try:
            for message in self._connection.receive():
                self._obey(message)
        except RendezvousError:  # a refusal
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """Take the loss of host 0's launcher for the end of the job."""
        assert self._connection is not None
        self._answer_by = math.inf
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._connection.sock)
        self._connection.close()
        self._connection = None
        if self.started < 0:
            raise RendezvousError(f"{self._where()} has ended: {error}")
        if self.finished or (self.verdict is not None and not self.verdict.restart):
            return
        text = f"cydistrun: host 0 was lost, or its launcher killed: {error}\n"
        lost = Verdict(0, None, 1, text)
        if self._options.keep_going and not self._told_all:
            self._say(text)
            self._alone = lost
        else:
            self.verdict = lost

    def _where(self) -> str:
        host = self._options.master_addr
        shown = f"[{host}]" if ":" in host else host
        return f"host 0's launcher at {shown}:{self._options.master_port}"

    def _why(self) -> str:
        failure = self._failure
        return (
            "no answer yet"
            if failure is None
            else why_unreachable(self._options.master_addr, failure)
        )

    def _notice(self, seconds: float) -> str:
        return (
            f"cydistrun: host {self._options.node_rank} ({self._name}) has waited {seconds:.0f} s "
            f"for {self._where()}: {self._why()}"
        )


def _job_name(options: LaunchOptions) -> str:
    return f"cydistrun {options.run_id} hosts"


def _shared(options: LaunchOptions) -> Message:
    """Return the options that must be equal on all hosts."""
    return {
        "--nnodes": options.nodes,
        "--max-restarts": options.max_restarts,
        "--keep-going": options.keep_going,
    }


def other_launchers(
    options: LaunchOptions, say: Callable[[str], object], secret: bytes | None = None
) -> Launchers:
    """Begin to meet the other launchers of the job.

    Args:
        say: Prints a message, in whole lines.
        secret: That all of them were given; None: that of CYDIST_SECRET_FILE, or the user's own.

    Raises RendezvousError if host 0's port cannot be listened on, if this host cannot encrypt as it
    should, or if CYDIST_PEER_TIMEOUT is not a time; AuthenticationError if it has no usable secret.
    """
    config.SECRET_FD.pop()  # of an outer job
    patience_with_hosts()  # so that a wrong value is told of before any host is waited for
    try:
        check_encryption()
    except ValueError as error:
        raise RendezvousError(str(error)) from None
    kind = OtherHost if options.node_rank else HostZero
    if secret is None:
        secret = auth.secret(lambda text: say(f"cydistrun: {text}\n"))
    return kind(options, say, secret)
