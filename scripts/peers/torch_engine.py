"""transformers' GptOssForCausalLM on CPU, with the fastest of its expert implementations at each width."""

import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GptOssForCausalLM, Mxfp4Config

from scripts.peers.stepwise import StepwiseEngine

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
# batched_mm copies the weights of every selected expert of every row: at a prompt's width more than memory holds
COPYING, WIDEST_COPY = "batched_mm", 8
TRIALS = 3


def load(directory: str, dtype: str, mxfp4: bool, num_threads: int) -> "Transformers":
    """The engine of a checkpoint in `dtype`, MXFP4 experts dequantised to it by transformers."""
    torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    model = GptOssForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        **({"quantization_config": Mxfp4Config(dequantize=True)} if mxfp4 else {}),
    )
    wrong = {str(p.dtype) for p in model.parameters()} - {f"torch.{dtype}"}
    if wrong:
        raise TypeError(f"transformers loaded parameters in {sorted(wrong)}; expected {dtype} only")
    return Transformers(model.eval())


class Transformers(StepwiseEngine):
    """See worker.Engine."""

    def __init__(self, model: GptOssForCausalLM) -> None:
        self._model = model
        self._best: dict[int, str] = {}  # by width
        self._last = torch.empty(0)
        self._cache = DynamicCache()

    def describe(self) -> dict[str, Any]:
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "computes": f"torch {torch.__version__}, {self._model.dtype}".replace("torch.", ""),
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:
        """{"best": {width: implementation}, "seconds": {width: {implementation: best of some passes}}}."""
        seconds = {width: self._time_all(prompt_ids, width) for width in {*widths, len(prompt_ids)}}
        self._best = {width: min(times, key=times.__getitem__) for width, times in seconds.items()}
        return {"best": self._best, "seconds": seconds}

    def choose(self, width: int) -> None:
        # without `prepare`, what transformers itself would take
        if width in self._best:
            self._model.set_experts_implementation(self._best[width])

    @torch.inference_mode()
    def begin(self, prompt_ids: list[int]) -> int:
        # a cache without the config: sliding layers keep all, so that they can be rolled back
        self._cache = DynamicCache()
        output = self._model(torch.tensor([prompt_ids]), past_key_values=self._cache, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    @torch.inference_mode()
    def extend(self, token_ids: list[int]) -> list[int]:
        self._last = self._model(torch.tensor([token_ids]), past_key_values=self._cache).logits[0]
        greedy: list[int] = self._last.argmax(-1).tolist()
        return greedy

    def roll_back(self, count: int) -> None:
        self._cache.crop(-count)

    def last_logits(self) -> np.ndarray:
        return self._last.float().numpy()

    def _time_all(self, prompt_ids: list[int], width: int) -> dict[str, float]:
        names = [name for name in IMPLEMENTATIONS if name != COPYING or width <= WIDEST_COPY]
        return {name: self._time(name, prompt_ids, width) for name in names}

    def _time(self, implementation: str, prompt_ids: list[int], width: int) -> float:
        self._model.set_experts_implementation(implementation)
        tokens = np.random.default_rng(width).integers(0, self._model.config.vocab_size, (TRIALS + 1, width)).tolist()
        seconds = []
        self.begin(prompt_ids[:1])
        for token_ids in tokens:
            started = time.perf_counter()
            self._pass(token_ids)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])
