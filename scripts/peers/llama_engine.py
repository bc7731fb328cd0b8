"""Drive llama.cpp through the low-level interface of llama-cpp-python.

Runs under the Python that has it. Needs numpy and stepwise.py.
"""

import ctypes
import importlib.metadata
import re
import time
from typing import Any

import llama_cpp
import numpy as np

from scripts.peers.stepwise import StepwiseEngine

CACHES = {False: "one for each sequence", True: "one for all sequences, kv_unified"}  # by kv_unified
TRIALS, TRIED_TOKENS = 2, 17


def load(path: str, context: int, num_threads: int) -> "Llama":
    """Load a GGUF file, with room for `context` tokens and llama.cpp's defaults."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        raise RuntimeError("llama.cpp cannot load the GGUF file")
    return Llama(model, context, num_threads)


class Context:
    """A context of several sequences of `room` tokens. unified: they share one cache."""

    def __init__(self, model: Any, room: int, num_threads: int, num_sequences: int = 1, unified: bool = False) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = room * num_sequences
        params.n_batch = max(room, num_sequences)
        params.n_seq_max = num_sequences
        params.kv_unified = unified
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._num_outputs = 0

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the first sequence."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError("llama.cpp cannot roll its cache back")

    def run(self, rows: list[tuple[int, int, int]], all_logits: bool) -> None:
        """Append rows (sequence, position, token), and keep the logits of all or of the last."""
        batch, last = self._batch, len(rows) - 1
        batch.n_tokens = len(rows)
        for i, (sequence, position, token) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = all_logits or i == last
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gives {status}")
        self._num_outputs = len(rows) if all_logits else 1

    def logits(self) -> np.ndarray:
        """Return float32 [rows, vocabulary], a view of llama.cpp's own memory."""
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self._num_outputs, self._vocab_size))

    def greedy(self) -> list[int]:
        """Find the likeliest token of each row of the logits."""
        tokens: list[int] = self.logits().argmax(-1).tolist()
        return tokens

    def decode_many(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Decode a prompt in each sequence; a step is a batch of one token per sequence."""
        self.clear()
        token_ids = []
        for sequence, prompt_ids in enumerate(prompts):
            self.run([(sequence, i, token) for i, token in enumerate(prompt_ids)], all_logits=False)
            token_ids.append(self.greedy())
        lengths = [len(prompt_ids) for prompt_ids in prompts]
        started = time.perf_counter()
        for step in range(num_tokens - 1):
            self.run([(i, lengths[i] + step, tokens[-1]) for i, tokens in enumerate(token_ids)], all_logits=True)
            for tokens, token in zip(token_ids, self.greedy(), strict=True):
                tokens.append(token)
        return {"decode_s": time.perf_counter() - started, "token_ids": token_ids}

    def close(self) -> None:
        """Free its memory."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


class Llama(StepwiseEngine):
    """See worker.BatchingEngine."""

    def __init__(self, model: Any, room: int, num_threads: int) -> None:
        self._model, self._room, self._num_threads = model, room, num_threads
        self._context = Context(model, room, num_threads)
        self._length = 0
        self._of_many: dict[int, tuple[bool, Context]] = {}  # by number of requests: whether unified, the context

    def describe(self) -> dict[str, Any]:
        features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        return {
            "version": f"llama-cpp-python {importlib.metadata.version('llama_cpp_python')}",
            "computes": ", ".join(features),
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def begin(self, prompt_ids: list[int]) -> int:
        self._context.clear()
        self._length = 0
        self._run(prompt_ids, all_logits=False)
        (greedy,) = self._context.greedy()
        return greedy

    def extend(self, token_ids: list[int]) -> list[int]:
        self._run(token_ids, all_logits=True)
        return self._context.greedy()

    def roll_back(self, count: int) -> None:
        self._length -= count
        self._context.cut(self._length)

    def last_logits(self) -> np.ndarray:
        return self._context.logits().copy()

    def decode_many(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """See worker.BatchingEngine. The first call for a batch size chooses the faster cache."""
        if len(prompts) not in self._of_many:
            self._of_many[len(prompts)] = self._faster(prompts, min(num_tokens, TRIED_TOKENS))
        unified, context = self._of_many[len(prompts)]
        return {**context.decode_many(prompts, num_tokens), "way": CACHES[unified]}

    def _faster(self, prompts: list[list[int]], num_tokens: int) -> tuple[bool, Context]:
        """Return (whether unified, the faster context), and close the other."""
        contexts = {
            unified: Context(self._model, self._room, self._num_threads, len(prompts), unified) for unified in CACHES
        }
        runs = [
            (context.decode_many(prompts, num_tokens)["decode_s"], unified)
            for _ in range(TRIALS)
            for unified, context in contexts.items()
        ]
        _, best = min(runs)
        contexts[not best].close()
        return best, contexts[best]

    def _run(self, token_ids: list[int], all_logits: bool) -> None:
        self._context.run([(0, self._length + i, token) for i, token in enumerate(token_ids)], all_logits)
        self._length += len(token_ids)
