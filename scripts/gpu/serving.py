"""Serve a pair that is in this process's memory, compared with its engine alone; the clients are another process.

As a program this is the clients: it reads {"url", "clients", "bodies"} from standard input, and prints their figures.
"""

import contextlib
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from peagle.base.strict_json import dumps
from peagle.engine.devices.replicas import AnyEngine
from peagle.pair import Pair
from peagle.text.tokenizer import byte_alphabet, load_tokenizer
from scripts.runs import ROOT, Json, ratios
from scripts.scenarios.serve import body_of, by_engine, engine_of
from scripts.serving.client import figures, together
from scripts.serving.models import PLAIN, Load

LOADS = tuple(Load(clients, 2 * clients, 512, 128, rounds=3) for clients in (1, 8, 32))
START_S, ROUND_S = 30.0, 120.0  # time limits
WARM_UP_TOKENS = 8
FIGURES = ("tok_per_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s")


def over_engine(pair: Pair, loads: Sequence[Load] = LOADS) -> Iterator[Json]:
    """Measure plain decoding by the engine alone, then by a server of the same engine; yield a row of each load."""
    vocab_size = pair.plain_target.vocab_size
    with tempfile.TemporaryDirectory() as directory:  # answers are texts: its texts are bytes
        write_tokenizer(vocab_size, Path(directory))
        served_pair = replace(pair, tokenizer=load_tokenizer(Path(directory)))
    for load in loads:
        rng = np.random.default_rng(load.clients)
        prompts = rng.integers(0, vocab_size, (load.requests, load.tokens_in)).tolist()
        engine = engine_of(pair, 0, load)
        alone = [figures(by_engine(engine, prompts, load)) for _ in range(1 + load.rounds)][1:]
        with serving(engine, served_pair, load.context) as url:
            of_clients(url, replace(load, tokens_out=WARM_UP_TOKENS), prompts[: load.clients])
            served = [of_clients(url, load, prompts) for _ in range(load.rounds)]
        yield {
            "clients": load.clients,
            "tokens_in": load.tokens_in,
            "tokens_out": load.tokens_out,
            "engine_tok_per_s": statistics.median(line["tok_per_s"] for line in alone),
            **{name: statistics.median(line[name] for line in served) for name in FIGURES},
            "over_engine": statistics.median(
                ratios([line["tok_per_s"] for line in served], [line["tok_per_s"] for line in alone])
            ),
        }


def write_tokenizer(size: int, directory: Path) -> None:
    """Write a byte-level tokenizer: the 256 bytes, then other texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*byte_alphabet(), *(f"t{number}." for number in range(256, size))][:size]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(directory)


@contextlib.contextmanager
def serving(engine: AnyEngine, pair: Pair, context: int) -> Iterator[str]:
    """Serve an engine until the context ends; yield the URL."""
    from peagle.serve.app import create_app
    from peagle.serve.engine_loop import EngineLoop
    from peagle.serve.request_builder import RequestBuilder
    from peagle.serve.server import Server, ServerOptions, listen
    from peagle.serve.shared_state import SharedState

    ready: queue.Queue[str] = queue.Queue()
    loop = EngineLoop(engine, max_queue=1024)
    app = create_app(SharedState(loop, RequestBuilder(pair, context, "2026-01-01", 0), "random"))
    server = Server(app, loop, ServerOptions(ready=ready.put))
    with listen("127.0.0.1", 0) as address:
        thread = threading.Thread(target=server.run, args=([address],))
        thread.start()
        try:
            yield ready.get(timeout=START_S)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()


def of_clients(url: str, load: Load, prompts: Sequence[Sequence[int]]) -> Json:
    """Send a round's requests from a process of its own; return its figures. Raises RuntimeError if it fails."""
    bodies = [body_of(prompt, load, PLAIN) for prompt in prompts]
    command = [sys.executable, "-m", "scripts.gpu.serving"]
    sent = dumps({"url": url, "clients": load.clients, "bodies": bodies})
    done = subprocess.run(command, input=sent, capture_output=True, text=True, cwd=ROOT, timeout=ROUND_S, check=False)
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-500:])
    line: Json = json.loads(done.stdout)
    return line


if __name__ == "__main__":
    sent = json.load(sys.stdin)
    print(dumps(figures(together(sent["url"], sent["bodies"], sent["clients"]))))
