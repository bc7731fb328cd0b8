"""Drive transformers' GptOssForCausalLM.

It runs with the fastest of its expert implementations at every width and, on a GPU, with the faster of its caches.
"""

import inspect
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, GptOssForCausalLM, Mxfp4Config

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
# batched_mm copies the weights of all selected experts of all rows: too much at a prompt's width
COPYING, WIDEST_COPY = "batched_mm", 8
TRIALS = 3
GROWING, STATIC = "growing cache, eager", "static cache, compiled"
TRIED_TOKENS = 16


def load(directory: str, dtype: str, mxfp4: bool, num_threads: int, device: str) -> "Transformers":
    """Load a checkpoint in `dtype` on a device; transformers dequantises MXFP4 experts."""
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
    return Transformers(model.to(device).eval(), tries_static=device != "cpu")


class Transformers:
    """See worker.Engine."""

    def __init__(self, model: GptOssForCausalLM, tries_static: bool) -> None:
        self._model = model
        self._tries_static, self._static = tries_static, False  # decoding
        self._best: dict[int, str] = {}  # by width
        self._cache = DynamicCache()
        # transformers before 5.24 calls it past_key_values, and warns of that name since
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def describe(self) -> dict[str, Any]:
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "computes": f"torch {torch.__version__}, {self._model.dtype}, {self._model.device}".replace("torch.", ""),
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:
        """Time all implementations: {"best": {width: name}, "seconds": {width: {name: least}}}.

        If there are two caches, also {"decoding": {cache: seconds of some tokens, or its error}}, and `describe` with
        the faster cache.
        """
        seconds = {width: self._time_all(prompt_ids, width) for width in {*widths, len(prompt_ids)}}
        self._best = {width: min(times, key=times.__getitem__) for width, times in seconds.items()}
        choice: dict[str, Any] = {"best": self._best, "seconds": seconds}
        if self._tries_static:
            choice["decoding"] = self._time_decoding(prompt_ids)
            way = STATIC if self._static else GROWING
            choice |= {**self.describe(), "computes": f"{self.describe()['computes']}, {way}"}
        return choice

    def decode(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        if self._static:
            self._choose(1)
            (prefill_s, _), (all_s, token_ids) = self._generate(prompt_ids, 1), self._generate(prompt_ids, num_tokens)
            return {"prefill_s": prefill_s, "decode_s": all_s - prefill_s, "token_ids": token_ids}
        self._choose(len(prompt_ids))
        started = time.perf_counter()
        token_ids = [self._begin(prompt_ids)]
        prefilled = time.perf_counter()
        self._choose(1)
        while len(token_ids) < num_tokens:
            token_ids += self._extend(token_ids[-1:])[1]
        ended = time.perf_counter()
        return {"prefill_s": prefilled - started, "decode_s": ended - prefilled, "token_ids": token_ids}

    def verify(self, prompt_ids: list[int], passes: list[list[int]]) -> dict[str, Any]:
        """See worker.Engine."""
        self._choose(len(prompt_ids))
        self._begin(prompt_ids)
        self._choose(len(passes[0]))
        self._pass(passes[-1])
        started = time.perf_counter()
        for token_ids in passes:
            self._pass(token_ids)
        return {"pass_s": (time.perf_counter() - started) / len(passes)}

    def logits(self, prompt_ids: list[int], passes: list[list[int]], path: str) -> dict[str, Any]:
        """See worker.Engine."""
        self._choose(len(prompt_ids))
        self._begin(prompt_ids)
        rows = []
        for token_ids in passes:
            self._choose(len(token_ids))
            rows.append(self._extend(token_ids)[0].float().cpu().numpy())
        np.save(path, np.concatenate(rows))
        return {}

    def _choose(self, width: int) -> None:
        # before `prepare`, transformers chooses
        if width in self._best:
            self._model.set_experts_implementation(self._best[width])

    @torch.inference_mode()
    def _begin(self, prompt_ids: list[int]) -> int:
        """Fill a new cache with the prompt; return the greedy token after it."""
        # without the config sliding layers keep all tokens, so that they can be rolled back
        self._cache = DynamicCache()
        output = self._run(prompt_ids, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    @torch.inference_mode()
    def _extend(self, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Append tokens to the cache; return the logits and the greedy token after each."""
        logits = self._run(token_ids).logits[0]
        greedy: list[int] = logits.argmax(-1).tolist()
        return logits, greedy

    def _pass(self, token_ids: list[int]) -> None:
        self._extend(token_ids)
        self._cache.crop(-len(token_ids))

    def _run(self, token_ids: list[int], **options: int) -> Any:
        return self._model(self._tensor(token_ids), **{self._cache_name: self._cache}, **options)

    def _tensor(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor([token_ids], device=self._model.device)

    @torch.inference_mode()
    def _generate(self, prompt_ids: list[int], num_tokens: int) -> tuple[float, list[int]]:
        """Decode by transformers' own loop with a static cache; return (seconds, greedy tokens)."""
        config = GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        prompt = self._tensor(prompt_ids)
        started = time.perf_counter()
        tokens = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        token_ids: list[int] = tokens[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - started
        if len(token_ids) < num_tokens:
            raise RuntimeError(f"{len(token_ids)} tokens came; expected {num_tokens}")
        return seconds, token_ids

    def _time_decoding(self, prompt_ids: list[int]) -> dict[str, float | str]:
        """Time both caches, and keep the faster."""
        tried: dict[str, float | str] = {}
        for way, static in ((GROWING, False), (STATIC, True)):
            self._static = static
            try:
                runs = [self.decode(prompt_ids, TRIED_TOKENS)["decode_s"] for _ in range(TRIALS)]
                tried[way] = min(runs[1:])
            except Exception as error:  # an unusable cache is recorded by its error
                tried[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        times = {way: seconds for way, seconds in tried.items() if isinstance(seconds, float)}
        self._static = bool(times) and min(times, key=times.__getitem__) == STATIC
        return tried

    def _time_all(self, prompt_ids: list[int], width: int) -> dict[str, float]:
        names = [name for name in IMPLEMENTATIONS if name != COPYING or width <= WIDEST_COPY]
        return {name: self._time(name, prompt_ids, width) for name in names}

    def _time(self, implementation: str, prompt_ids: list[int], width: int) -> float:
        self._model.set_experts_implementation(implementation)
        tokens = np.random.default_rng(width).integers(0, self._model.config.vocab_size, (TRIALS + 1, width)).tolist()
        seconds = []
        self._begin(prompt_ids[:1])
        for token_ids in tokens:
            started = time.perf_counter()
            self._pass(token_ids)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])
