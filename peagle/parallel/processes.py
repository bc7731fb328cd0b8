"""Several processes that run one target together: process 0 coordinates, the others do what its messages say.

    process 0    listens at the coordinator's address, compares the others' options with its own, and starts
    process i    connects, and runs each message that arrives, until the last one

Their devices become one mesh (jax.distributed; gloo on CPU). Messages go one way, heartbeats both ways. If a process
ends, or is silent for DEADLINE_S, all end. The main thread may wait in a collective for ever, so a second thread of
each process notices the loss, prints one line that names the lost process, and ends its own.

A message is JSON and arrays: no code, no pickle. As in jax.distributed, nobody is authenticated: the network between
the processes must be trusted.
"""

import contextlib
import dataclasses
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np

from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.records import describe_difference, flat
from peagle.base.strict_json import dumps

LOOPBACK = "127.0.0.1"
JOIN_S = 120.0  # until all processes are connected
BEAT_S = 1.0
DEADLINE_S = 30.0  # without a heartbeat: loading and compiling let other threads run
MOST_BYTES = 1 << 30  # of a message
MOST_HELLO_BYTES = 1 << 20
GREETING = b"peagle processes 1\n"
LOST = 1  # the exit code after another process was lost
BAD_INPUT = 2
Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Rendezvous:
    """The address of process 0, this process's rank (`process`), and the number of processes."""

    host: str
    port: int
    process: int
    count: int

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_rendezvous(typed: str | None) -> Rendezvous | None:
    """Read process I of N at HOST:PORT, as I/N@HOST:PORT; without a host it is this machine. Raises InputError."""
    if typed is None:
        return None
    parts = re.fullmatch(r"(\d{1,5})/(\d{1,5})@(?:(.*):)?(\d{1,5})", typed, re.ASCII)
    if parts is None:
        raise InputError(f"--process is {typed!r}; expected I/N@HOST:PORT, as 0/2@127.0.0.1:7000")
    process, count, port = int(parts[1]), int(parts[2]), int(parts[4])
    if not 0 < port < 1 << 16:
        raise InputError(f"--process is {typed!r}; expected a port of 1 to 65535")
    if count < 2:
        raise InputError(f"--process is {typed!r}; expected 2 processes or more, or leave it out")
    if process >= count:
        raise InputError(f"--process is {typed!r}; expected I from 0 to {count - 1}, another one in each process")
    return Rendezvous((parts[3] or "").removeprefix("[").removesuffix("]") or LOOPBACK, port, process, count)


# --- messages ---------------------------------------------------------------------------------------------------------


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message: JSON with arrays at any depth. Tuples become lists."""
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            arrays.append(np.asarray(value, order="C"))
            return {"array": [arrays[-1].dtype.str, list(arrays[-1].shape)]}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    head = dumps(plain(message)).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays)])


def decode(data: bytes) -> Message:
    """Undo `encode`. Raises ValueError for malformed bytes."""
    size = int.from_bytes(data[:4], "little")
    at = 4 + size

    def whole(value: Any) -> Any:
        nonlocal at
        if isinstance(value, dict) and value.keys() == {"array"}:
            kind, shape = value["array"]
            dtype = np.dtype(str(kind))
            if dtype.hasobject:
                raise ValueError("an array of objects")
            array = np.frombuffer(data, dtype, int(np.prod(shape, dtype=np.int64)), at).reshape(shape)
            at += array.nbytes
            return array
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return [whole(item) for item in value] if isinstance(value, list) else value

    message = whole(json.loads(data[4 : 4 + size]))
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


class Link:
    """One connection. A frame is its length in 8 bytes, then its bytes; an empty frame is a heartbeat."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()

    def send(self, frame: bytes = b"") -> None:
        """Send a frame; any thread may. Raises OSError if the other side is gone."""
        with self._sending:
            self._connection.sendall(len(frame).to_bytes(8, "little") + frame)

    def receive(self, timeout_s: float, most_bytes: int = MOST_BYTES) -> bytes:
        """Wait for a frame.

        Raises TimeoutError if nothing arrives for timeout_s, OSError if the other side is gone, ValueError for a frame
        that is too long.
        """
        self._connection.settimeout(timeout_s)
        size = int.from_bytes(self._exactly(8), "little")
        if size > most_bytes:
            raise ValueError(f"a frame of {size} bytes")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._connection.close()


# --- a process among others -------------------------------------------------------------------------------------------


class Team:
    """This process's connections: from process 0 to all others, from another process to process 0.

    lost: prints the line that says why all end. `gather` and `join` make teams.
    """

    def __init__(self, rendezvous: Rendezvous, links: Mapping[int, Link], lost: Callable[[str], None]) -> None:
        self.rendezvous, self._links, self._lost = rendezvous, dict(links), lost
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ending = threading.Lock()  # the first cause of the end acquires it and never releases it
        for process in links:
            threading.Thread(target=self._listen, args=(process,), name=f"process {process}", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeats", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to all others. If one is gone, all end."""
        frame = encode(message)
        for process, link in self._links.items():
            try:
                link.send(frame)
            except OSError as error:
                self._end_for(process, error)

    def receive(self) -> Message:
        return self._inbox.get()

    def end(self, line: str | None = None) -> None:
        """Tell the others to end. line: the error of this process; None: it ends well."""
        if not self._ending.acquire(blocking=False):
            return
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(encode({"end": line}))

    def leave(self, code: int) -> NoReturn:
        """End this process at once. An orderly exit would wait in jax.distributed for the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            for process, link in self._links.items():
                try:
                    link.send()
                except OSError as error:
                    self._end_for(process, error)

    def _listen(self, process: int) -> None:
        link = self._links[process]
        while True:
            try:
                frame = link.receive(DEADLINE_S)
                message = decode(frame) if frame else None
            except (OSError, ValueError) as error:
                return self._end_for(process, error)
            if message is None:
                continue
            if message.get("end") is not None:
                return self._exit(f"process {process} of {self.rendezvous.count}: {message['end']}", BAD_INPUT)
            if "end" in message:
                self._ending.acquire(blocking=False)  # ignore any loss from now on
            self._inbox.put(message)
            if "end" in message:
                return None

    def _end_for(self, process: int, error: Exception) -> None:
        silent = isinstance(error, TimeoutError)
        why = f"was silent for {DEADLINE_S:.0f} s" if silent else f"has ended ({error})"
        self._exit(f"process {process} of {self.rendezvous.count} {why}, so all end; start them again", LOST)

    def _exit(self, line: str, code: int) -> None:
        """Print the line, send it to the others if this is process 0, and end this process at once."""
        if not self._ending.acquire(blocking=False):
            return
        self._lost(line)
        if self.rendezvous.process == 0:
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send(encode({"end": line}))
        self.leave(code)


def gather(rendezvous: Rendezvous, hello: Mapping[str, Any], lost: Callable[[str], None]) -> Team:
    """As process 0, wait for all others and start jax.distributed, which then has all devices.

    hello: options and version, which must be equal in all processes. Raises InputError if the address is not available,
    or if a process does not connect or differs; the connected ones end with the same line.
    """
    try:
        server = socket.create_server((rendezvous.host, rendezvous.port), family=rendezvous.family)
    except OSError as error:
        raise InputError(
            f"--process names {rendezvous.address}, which cannot be listened on: {reason_of(error)}; expected an "
            "address of this machine, which runs process 0, and a free port"
        ) from None
    links: dict[int, Link] = {}
    try:
        with server:
            deadline = time.monotonic() + JOIN_S
            while len(links) < rendezvous.count - 1:
                _welcome(rendezvous, hello, links, server, deadline)
        with socket.socket(rendezvous.family) as free:
            free.bind((rendezvous.host, 0))
            port = free.getsockname()[1]
        team = Team(rendezvous, links, lost)
        team.send({"begin": port})
        _start_jax(dataclasses.replace(rendezvous, port=port))
        return team
    except InputError as error:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send(encode({"end": str(error)}))
        raise


def _welcome(
    rendezvous: Rendezvous, hello: Mapping[str, Any], links: dict[int, Link], server: socket.socket, deadline: float
) -> None:
    """Accept one connection; close it if it is not a process of ours."""
    server.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        connection, _ = server.accept()
    except TimeoutError:
        absent = [str(rank) for rank in range(1, rendezvous.count) if rank not in links]
        which = f"process {absent[0]}" if len(absent) == 1 else f"processes {', '.join(absent)}"
        raise InputError(
            f"{which} of {rendezvous.count} did not connect to {rendezvous.address} within {JOIN_S:.0f} s; start them "
            "with the same options but for --process"
        ) from None
    link = Link(connection)
    try:
        if link.receive(5, len(GREETING)) != GREETING:
            raise ValueError("no greeting")
        greeting = decode(link.receive(5, MOST_HELLO_BYTES))
        process = int(greeting["process"])
        theirs = flat(greeting["hello"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return link.close()
    if not 0 < process < rendezvous.count or process in links:
        links[-process - 1] = link  # `gather` sends the error to all links
        raise InputError(
            f"--process names process {process} of {rendezvous.count}, which is there already or cannot be; expected "
            "another number in each process"
        )
    links[process] = link
    # encoded and decoded like theirs: tuples become lists
    ours = flat(decode(encode({"hello": hello}))["hello"])
    if theirs != ours:
        differs = describe_difference(theirs, ours, _option)
        raise InputError(
            f"process {process} of {rendezvous.count} differs from process 0: "
            f"{differs.replace('(now ', '(process 0: ')}; expected the same version and options everywhere, but for "
            "--process"
        )
    return None


def _option(key: str) -> str:
    kind, _, name = key.rpartition(".")
    return f"--{name.replace('_', '-')}" if "options" in kind else name


def join(rendezvous: Rendezvous, hello: Mapping[str, Any], lost: Callable[[str], None]) -> Team:
    """As another process, connect to process 0, and start jax.distributed after all have connected.

    Raises InputError if process 0 is not there or refuses.
    """
    link, deadline = None, time.monotonic() + JOIN_S
    while link is None:
        try:
            link = Link(socket.create_connection((rendezvous.host, rendezvous.port), timeout=5))
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"process 0 at {rendezvous.address} cannot be reached: {reason_of(error)}; start it there"
                ) from None
            time.sleep(0.1)
    try:
        link.send(GREETING)
        link.send(encode({"process": rendezvous.process, "hello": hello}))
        answer = decode(link.receive(JOIN_S + 5))
    except (OSError, ValueError) as error:
        raise InputError(f"process 0 at {rendezvous.address} is gone: {error}; start all processes again") from None
    if "begin" not in answer:
        raise InputError(str(answer.get("end")))
    team = Team(rendezvous, {0: link}, lost)
    _start_jax(dataclasses.replace(rendezvous, port=int(answer["begin"])))
    return team


def _redirect_gloo() -> None:
    """Redirect file descriptor 1, where gloo writes a line when it connects; sys.stdout writes as before."""
    own, old = os.dup(1), sys.stdout
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    lines = old.isatty()
    sys.stdout = os.fdopen(own, "w", encoding=old.encoding, errors=old.errors, buffering=1 if lines else -1)


def _start_jax(rendezvous: Rendezvous) -> None:
    """Start jax.distributed. Its service listens at process 0's address only, at the rendezvous's port."""
    address = rendezvous.address
    try:
        jax.distributed.initialize(
            address,
            rendezvous.count,
            rendezvous.process,
            initialization_timeout=int(JOIN_S),
            coordinator_bind_address=address if rendezvous.process == 0 else None,
            cluster_detection_method="deactivate",
        )
        jax.devices()  # all of them: the processes wait here for each other
        if jax.default_backend() == "cpu":
            _redirect_gloo()
    except RuntimeError as error:
        raise InputError(
            f"jax.distributed does not start at {address}: {' '.join(str(error).split())}; expected a network that "
            "lets all processes reach process 0"
        ) from None
