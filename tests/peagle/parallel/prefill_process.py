"""A process that prefills: python -m tests.peagle.parallel.prefill_process PORT TARGET DRAFTER K.

It connects to a port of this machine, reads a request a line, and answers each with its first tokens and a hand-off.
"""

import json
import socket
import sys
from typing import Any

import peagle
from peagle.config import SamplingParams
from peagle.engine.request import Request


def receive(connection: socket.socket) -> bytes:
    """Read a part: 8 bytes of its size, then it."""
    size = int.from_bytes(_exactly(connection, 8), "little")
    return _exactly(connection, size)


def send(connection: socket.socket, part: Any) -> None:
    connection.sendall(memoryview(part).nbytes.to_bytes(8, "little"))
    connection.sendall(part)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError(f"{len(data)} of {size} bytes")
        data += part
    return bytes(data)


def main(port: str, target: str, drafter: str, k: str) -> None:
    pair = peagle.load(target, drafter)
    engine = pair.engine(pair.engine_config(int(k), context=160, prefill_chunk=32, prefill_only=True))
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        while line := receive(connection):
            fields = json.loads(line)
            sampling = SamplingParams(**fields["sampling"])
            request = Request(tuple(fields["prompt_ids"]), fields["max_new_tokens"], sampling, (), logprobs=1)
            handle = engine.add(request)
            ((_, chunk),) = engine.run([handle])
            assert handle.hand_off is not None
            send(connection, json.dumps([chunk.token_ids, [token.logprob for token in chunk.logprobs]]).encode())
            send(connection, handle.hand_off.data)


if __name__ == "__main__":
    main(*sys.argv[1:])
