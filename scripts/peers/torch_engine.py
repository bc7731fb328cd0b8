"""Drive transformers' GptOssForCausalLM, one request at a time.

It runs with the fastest of its expert implementations and, on a GPU, with the faster of its caches.
"""

import inspect
import time
from typing import Any

import torch
import transformers
from transformers import DynamicCache, GenerationConfig, GptOssForCausalLM, Mxfp4Config

FOR_PROMPTS = ("eager", "grouped_mm")
# copies the weights of all selected experts of all rows: too much at a prompt's width
FOR_DECODING = (*FOR_PROMPTS, "batched_mm")
TRIALS = 3
TRIED_TOKENS = 8


def load(directory: str, dtype: str, mxfp4: bool, num_threads: int, device: str, prompt_tokens: int) -> "Transformers":
    """Load a checkpoint in `dtype` on a device; transformers dequantises MXFP4 experts.

    What is fastest for prompts of so many tokens is chosen.
    """
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
    engine = Transformers(model.to(device).eval())
    engine.choose(list(range(prompt_tokens)), tries_static=device != "cpu")
    return engine


class Transformers:
    """See worker.Engine."""

    def __init__(self, model: GptOssForCausalLM) -> None:
        self._model, self._errors = model, dict[str, str]()
        self._for_prompts, self._for_decoding, self._static = FOR_PROMPTS[0], FOR_DECODING[0], False
        self._cache = DynamicCache()
        # transformers before 5.24 calls it past_key_values, and warns of that name since
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def describe(self) -> dict[str, Any]:
        kind = f"{self._model.dtype}, {self._model.device}".replace("torch.", "")
        cache = "static cache, compiled" if self._static else "growing cache, eager"
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "computes": f"{kind}; experts {self._for_prompts}, decoding {self._for_decoding}; {cache}",
            "errors": self._errors,
        }

    def choose(self, prompt_ids: list[int], tries_static: bool) -> None:
        """Choose the fastest implementations and cache."""

        def seconds(figure: str, num_tokens: int, way: str) -> float:
            try:
                runs = [self.decode([prompt_ids], num_tokens, [])[figure] for _ in range(TRIALS)]
            except Exception as error:  # what does not run is recorded by its error
                self._errors[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return float("inf")
            return float(min(runs[1:]))

        def prompts_by(name: str) -> float:
            self._for_prompts = name
            return seconds("prefill_s", 1, name)

        def decoding_by(way: tuple[str, bool]) -> float:
            self._for_decoding, self._static = way
            return seconds("decode_s", TRIED_TOKENS, f"{way[0]}{', static' * way[1]}")

        self._for_prompts = min(FOR_PROMPTS, key=prompts_by)
        caches = (False, True) if tries_static else (False,)
        ways = [(name, static) for name in FOR_DECODING for static in caches]
        self._for_decoding, self._static = min(ways, key=decoding_by)

    def decode(self, prompts: list[list[int]], num_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
        """See worker.Engine."""
        (prompt_ids,) = prompts
        if self._static:
            self._model.set_experts_implementation(self._for_decoding)
            prefill_s, _ = self._generate(prompt_ids, 1, [])
            whole_s, token_ids = self._generate(prompt_ids, num_tokens, stop_token_ids)
        else:
            started = time.perf_counter()
            token_ids = [self._begin(prompt_ids)]
            prefill_s = time.perf_counter() - started
            while len(token_ids) < num_tokens and token_ids[-1] not in stop_token_ids:
                token_ids.append(self._next(token_ids[-1]))
            whole_s = time.perf_counter() - started
        decode_s, steps = whole_s - prefill_s, len(token_ids) - 1
        return {"prefill_s": prefill_s, "decode_s": decode_s, "steps": steps, "token_ids": [token_ids]}

    @torch.inference_mode()
    def _begin(self, prompt_ids: list[int]) -> int:
        """Fill a new cache with the prompt; return the greedy token after it."""
        self._model.set_experts_implementation(self._for_prompts)
        self._cache = DynamicCache()
        token = int(self._run(prompt_ids, logits_to_keep=1).logits[0, -1].argmax())
        self._model.set_experts_implementation(self._for_decoding)
        return token

    @torch.inference_mode()
    def _next(self, token: int) -> int:
        """Append a token to the cache; return the greedy token after it."""
        return int(self._run([token]).logits[0, -1].argmax())

    def _run(self, token_ids: list[int], **options: int) -> Any:
        return self._model(self._tensor(token_ids), **{self._cache_name: self._cache}, **options)

    def _tensor(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor([token_ids], device=self._model.device)

    @torch.inference_mode()
    def _generate(self, prompt_ids: list[int], num_tokens: int, stops: list[int]) -> tuple[float, list[int]]:
        """Decode by transformers' own loop with a static cache; return (seconds, greedy tokens)."""
        config = GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=None if stops else num_tokens,
            eos_token_id=stops or None,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        prompt = self._tensor(prompt_ids)
        started = time.perf_counter()
        tokens = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        token_ids: list[int] = tokens[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - started
        if len(token_ids) < num_tokens and not stops:
            raise RuntimeError(f"{len(token_ids)} tokens came; expected {num_tokens}")
        return seconds, token_ids
