"""Replicas of a fleet as processes behind sockets of this machine, for measurements; without Ray, and each on its core.

    python -m scripts.fleet_processes PORT ROLE TARGET DRAFTER K SLOTS CONTEXT

A replica connects to the port, and answers requests that come as frames: 8 bytes of the JSON's size, 8 of the
payload's, the JSON, the payload. A payload is a hand-off.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peagle.cluster.fleet import ReplicaLost
from peagle.config import SamplingParams
from peagle.engine.handoff import parse
from peagle.engine.request import Request, StepRecord, TokenChunk
from peagle.engine.resolved import Role
from peagle.loading import load
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.serve.errors import ApiError
from peagle.serve.loop import EngineLoop

ROOT = Path(__file__).parents[1]
STARTING_S = 600.0
MOST_QUEUED = 1_000_000
Frame = tuple[dict[str, Any], bytearray]


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Read a frame; None at the end of the connection."""
    try:
        sizes = await reader.readexactly(16)
        text = await reader.readexactly(int.from_bytes(sizes[:8], "little"))
        left, payload = int.from_bytes(sizes[8:], "little"), bytearray()
        while left:
            part = await reader.read(min(left, 1 << 20))
            if not part:
                return None
            payload += part
            left -= len(part)
    except (asyncio.IncompleteReadError, OSError):
        return None
    return json.loads(text), payload


def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any], payload: Any = b"") -> None:
    text, whole = dumps(message).encode(), memoryview(payload)
    writer.write(len(text).to_bytes(8, "little") + whole.nbytes.to_bytes(8, "little") + text)
    if whole.nbytes:
        writer.write(whole)


# --- the replica's process --------------------------------------------------------------------------------------------


async def serve(port: int, role: Role, target: str, drafter: str, k: int, slots: int, context: int) -> None:
    """Answer the requests of one connection until it ends."""
    pair = load(target, drafter if k else None)
    engine = pair.engine(pair.engine_config(k, slots=slots, context=context, role=role))
    engine.warm_up()
    loop = EngineLoop(engine, MOST_QUEUED)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    write_frame(writer, {"ready": role})
    tasks: dict[int, asyncio.Task[None]] = {}
    while (frame := await read_frame(reader)) is not None:
        message, payload = frame
        if "abort" in message:
            if task := tasks.get(message["abort"]):
                task.cancel()
            continue
        task = asyncio.create_task(answer(loop, writer, message, payload))
        tasks[message["id"]] = task
        task.add_done_callback(lambda _, number=message["id"]: tasks.pop(number, None))
        del message, payload, frame
    loop.close()


async def answer(loop: EngineLoop, writer: asyncio.StreamWriter, asked: dict[str, Any], payload: bytearray) -> None:
    """Send the chunks of a request, or an error."""
    try:
        sampling = SamplingParams(**asked["sampling"])
        request = Request(tuple(asked["prompt_ids"]), asked["max_new_tokens"], sampling, tuple(asked["stops"]))
        call = loop.submit([request], [parse(payload) if payload else None])
        del payload
        with contextlib.closing(call):
            async for _, chunk in call.chunks():
                handle = call.jobs[0].handle
                hand_off = None if handle is None else handle.hand_off
                steps = [dataclasses.astuple(step) for step in chunk.steps]
                message = {"id": asked["id"], "tokens": chunk.token_ids, "steps": steps, "finish": chunk.finish_reason}
                if chunk.finish_reason == "handed_off" and hand_off is not None:
                    write_frame(writer, message, hand_off.data)
                else:
                    write_frame(writer, message)
                await writer.drain()
    except (ApiError, InputError) as error:
        write_frame(writer, {"id": asked["id"], "error": str(error)})


# --- the router's process ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Process:
    """A connected replica, and its calls. lost: its connection has ended."""

    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, "asyncio.Queue[Frame | None]"] = field(default_factory=dict)
    lost: bool = False

    async def listen(self) -> None:
        """Deliver frames to their calls; at the end of the connection tell all of them."""
        while (frame := await read_frame(self.reader)) is not None:
            if queue := self.calls.get(frame[0]["id"]):
                queue.put_nowait(frame)
        self.lost = True
        for queue in self.calls.values():
            queue.put_nowait(None)

    async def frames(self, number: int, request: Request, payload: Any) -> AsyncGenerator[Frame, None]:
        """Send a request, and yield the frames of its answer. Raises ReplicaLost, and ApiError for its error."""
        queue: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.calls[number] = queue
        asked = {
            "id": number,
            "prompt_ids": request.prompt_ids,
            "max_new_tokens": request.max_new_tokens,
            "stops": request.stop_token_ids or (),
            "sampling": dataclasses.asdict(request.sampling),
        }
        ended = False
        try:
            write_frame(self.writer, asked, payload)
            del payload
            while not ended:
                frame = None if self.lost and queue.empty() else await queue.get()
                if frame is None:
                    raise ReplicaLost
                if "error" in frame[0]:
                    raise ApiError(400, frame[0]["error"])
                ended = frame[0]["finish"] is not None
                yield frame
        finally:
            del self.calls[number]
            if not ended and not self.lost:
                write_frame(self.writer, {"abort": number})


class SocketReplicas:
    """Replicas in processes of this machine (peagle.cluster.fleet.Replicas): calls go where the fewest are open."""

    def __init__(self, prefills: Sequence[Process], decodes: Sequence[Process]) -> None:
        self.disaggregated = bool(prefills)
        self._prefills, self._decodes, self._numbers = prefills, decodes, itertools.count()

    @staticmethod
    def _choose(pool: Sequence[Process]) -> Process:
        alive = [process for process in pool if not process.lost]
        if not alive:
            raise ReplicaLost
        return min(alive, key=lambda process: len(process.calls))

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        frames = self._choose(self._prefills).frames(next(self._numbers), request, b"")
        async with contextlib.aclosing(frames):
            async for message, payload in frames:
                return chunk_of(request, message), np.frombuffer(payload, np.uint8) if payload else None
        raise ReplicaLost

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        payload = b"" if hand_off is None else hand_off
        frames = self._choose(self._decodes).frames(next(self._numbers), request, payload)
        del payload, hand_off
        async with contextlib.aclosing(frames):
            async for message, _ in frames:
                yield chunk_of(request, message)


def chunk_of(request: Request, message: dict[str, Any]) -> TokenChunk:
    steps = tuple(StepRecord(length, tuple(drafts), *rest) for length, drafts, *rest in message["steps"])
    return TokenChunk(request, tuple(message["tokens"]), 0.0, steps, message["finish"])


@contextlib.asynccontextmanager
async def started(
    roles: Sequence[tuple[Role, int]], target: str, drafter: str, k: int, slots: int, context: int
) -> AsyncIterator[SocketReplicas]:
    """Start a replica for each (role, core), and end them."""
    connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.put_nowait((reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=1 << 22)
    port = server.sockets[0].getsockname()[1]
    processes: list[tuple[Role, Process]] = []
    listening = []
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        for role, core in roles:  # one by one: each connects after it has compiled
            words = [str(port), role, target, drafter, str(k), str(slots), str(context)]
            command = ["taskset", "-c", str(core), sys.executable, "-m", "scripts.fleet_processes", *words]
            process = subprocess.Popen(command, cwd=ROOT, env=env)
            reader, writer = await asyncio.wait_for(connected.get(), STARTING_S)
            await read_frame(reader)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = Process(process, reader, writer)
            listening.append(asyncio.create_task(found.listen()))
            processes.append((role, found))
        pools = [[found for role, found in processes if (role == "prefill") == first] for first in (True, False)]
        yield SocketReplicas(*pools)
    finally:
        server.close()
        for _, found in processes:
            found.writer.close()
        for _, found in processes:
            try:
                await asyncio.to_thread(found.process.wait, 30)
            except subprocess.TimeoutExpired:
                found.process.kill()


def main(port: str, role: str, target: str, drafter: str, k: str, slots: str, context: str) -> None:
    """Run a replica."""
    asyncio.run(serve(int(port), role, target, drafter, int(k), int(slots), int(context)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
