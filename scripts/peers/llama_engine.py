"""llama.cpp through the low-level interface of llama-cpp-python. Runs under the Python that has it: numpy, nothing of
ours but stepwise.py."""

import ctypes
import importlib.metadata
import re
from typing import Any

import llama_cpp
import numpy as np

from scripts.peers.stepwise import StepwiseEngine


def load(path: str, context: int, num_threads: int) -> "Llama":
    """The engine of a GGUF file, with room for `context` tokens; llama.cpp's defaults otherwise."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        raise RuntimeError("llama.cpp cannot load the GGUF file")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = context
    params.n_threads = params.n_threads_batch = num_threads
    context_pointer = llama_cpp.llama_init_from_model(model, params)
    if not context_pointer:
        raise RuntimeError("llama.cpp cannot make a context")
    return Llama(model, context_pointer, context)


class Llama(StepwiseEngine):
    """See worker.Engine."""

    def __init__(self, model: Any, context: Any, room: int) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(room, 0, 1)
        self._length = self._rows = 0

    def describe(self) -> dict[str, Any]:
        features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        return {
            "version": f"llama-cpp-python {importlib.metadata.version('llama_cpp_python')}",
            "computes": ", ".join(features),
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def begin(self, prompt_ids: list[int]) -> int:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._length = 0
        self._run(prompt_ids, all_logits=False)
        return int(self._logits().argmax())

    def extend(self, token_ids: list[int]) -> list[int]:
        self._run(token_ids, all_logits=True)
        greedy: list[int] = self._logits().argmax(-1).tolist()
        return greedy

    def roll_back(self, count: int) -> None:
        self._length -= count
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, self._length, -1):
            raise RuntimeError("llama.cpp cannot roll its cache back")

    def last_logits(self) -> np.ndarray:
        return self._logits().copy()

    def _run(self, token_ids: list[int], all_logits: bool) -> None:
        batch, last = self._batch, len(token_ids) - 1
        batch.n_tokens = len(token_ids)
        for i, token in enumerate(token_ids):
            batch.token[i] = token
            batch.pos[i] = self._length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == last
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gives {status}")
        self._length += len(token_ids)
        self._rows = len(token_ids) if all_logits else 1

    def _logits(self) -> np.ndarray:
        """float32 [rows, vocabulary], a view of llama.cpp's own memory."""
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self._rows, self._vocab_size))
