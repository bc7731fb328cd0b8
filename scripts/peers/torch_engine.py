"""Drive transformers' GptOssForCausalLM, one request at a time, with the fastest of its expert implementations."""

import inspect
import time
from typing import Any

import torch
import transformers
from transformers import DynamicCache, GptOssForCausalLM, Mxfp4Config

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
    engine.choose(list(range(prompt_tokens)))
    return engine


class Transformers:
    """See worker.Engine."""

    def __init__(self, model: GptOssForCausalLM) -> None:
        self._model, self._errors = model, dict[str, str]()
        self._for_prompts, self._for_decoding = FOR_PROMPTS[0], FOR_DECODING[0]
        self._cache = DynamicCache()
        # transformers before 5.24 calls it past_key_values, and warns of that name since
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def describe(self) -> dict[str, Any]:
        kind = f"{self._model.dtype}, {self._model.device}".replace("torch.", "")
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "computes": f"{kind}; experts {self._for_prompts}, decoding {self._for_decoding}; eager",
            "errors": self._errors,
        }

    def choose(self, prompt_ids: list[int]) -> None:
        """Choose the fastest implementations."""

        def seconds(figure: str, num_tokens: int, name: str) -> float:
            try:
                runs = [self.decode([prompt_ids], num_tokens, [])[figure] for _ in range(TRIALS)]
            except Exception as error:  # what does not run is recorded by its error
                self._errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return float("inf")
            return float(min(runs[1:]))

        def prompts_by(name: str) -> float:
            self._for_prompts = name
            return seconds("prefill_s", 1, name)

        def decoding_by(name: str) -> float:
            self._for_decoding = name
            return seconds("decode_s", TRIED_TOKENS, name)

        self._for_prompts = min(FOR_PROMPTS, key=prompts_by)
        self._for_decoding = min(FOR_DECODING, key=decoding_by)

    def decode(self, prompts: list[list[int]], num_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
        """See worker.Engine."""
        (prompt_ids,) = prompts
        started = time.perf_counter()
        token_ids = [self._begin(prompt_ids)]
        prefill_s = time.perf_counter() - started
        while len(token_ids) < num_tokens and token_ids[-1] not in stop_token_ids:
            token_ids.append(self._next(token_ids[-1]))
        decode_s, steps = time.perf_counter() - started - prefill_s, len(token_ids) - 1
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
        tokens = torch.tensor([token_ids], device=self._model.device)
        return self._model(tokens, **{self._cache_name: self._cache}, **options)
