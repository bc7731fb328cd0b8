"""One process prefills, another decodes; with no more between them than a socket."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import peagle
from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.engine.host.handoff import parse
from peagle.engine.request import Request, TokenChunk
from peagle.ops import native
from tests.peagle.parallel.prefill_process import receive, send
from tests.support.pairs import Directories
from tests.support.toys import follow

pytestmark = [pytest.mark.compile, pytest.mark.slow]  # in one process test_handoff.py holds it

K, CAPACITY, NEW = 3, 200, 40
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def prefilling(directories: Directories) -> Iterator[socket.socket]:
    """A connection to a process that prefills."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        command = [sys.executable, "-m", "tests.peagle.parallel.prefill_process", str(server.getsockname()[1])]
        command += [str(directories.target), str(directories.drafter), str(K)]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            try:
                connection, _ = server.accept()
                connection.settimeout(120)
                with connection:
                    yield connection
                    send(connection, b"")
                assert process.wait(60) == 0
            finally:
                process.kill()


def hand_off(connection: socket.socket, request: Request) -> tuple[list, bytes]:
    sampling = {"temperature": request.sampling.temperature, "seed": request.sampling.seed}
    fields = {"prompt_ids": request.prompt_ids, "max_new_tokens": request.max_new_tokens, "sampling": sampling}
    send(connection, json.dumps(fields).encode())
    return json.loads(receive(connection)), receive(connection)


def facts(chunks: list[TokenChunk]) -> tuple[list, list, list]:
    steps = [step for chunk in chunks for step in chunk.steps]
    logprobs = [token.logprob for chunk in chunks for token in chunk.logprobs]
    return [token for chunk in chunks for token in chunk.token_ids], steps, logprobs


def test_two_processes_answer_as_one_engine_does(prefilling: socket.socket, directories: Directories) -> None:
    """Greedy and sampled; another checkpoint's hand-off is refused."""
    pair = peagle.load(directories.target, directories.drafter)
    local = pair.engine(pair.engine_config(K, context=CAPACITY))
    decoder = pair.engine(pair.engine_config(K, context=CAPACITY, slots=2))
    rng = np.random.default_rng(3)
    for number, length in enumerate((5, 130, 33)):
        prompt = tuple(rng.integers(3, pair.target.vocab_size, length).tolist())
        sampling = SamplingParams(0.7, seed=number) if number == 1 else SamplingParams()
        request = Request(prompt, min(NEW, 160 - length), sampling, (), logprobs=1)
        (tokens, logprobs), message = hand_off(prefilling, request)
        emitted = facts(list(follow(decoder, decoder.add(request, hand_off=parse(message)))))
        expected = facts(list(follow(local, local.add(request))))
        assert (tokens + emitted[0], emitted[1]) == expected[:2]
        if native.available():
            assert logprobs + emitted[2] == expected[2]
    plain = peagle.load(directories.target, "ngram").engine(pair.engine_config(K, context=CAPACITY))
    with pytest.raises(InputError, match="of another drafter"):
        plain.add(request, hand_off=parse(message))
