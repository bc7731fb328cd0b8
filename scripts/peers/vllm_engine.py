"""Drive vLLM, plain or with a drafter, under the Python of an environment that has vLLM.

No prefix cache, no tokenizer. On a CPU no compiled graphs, and no process but this one, which its parent ends. It
imports nothing of this project.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

# before vLLM is imported, which reads them
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm
from vllm import LLM, SamplingParams

DRAFT_STEPS = "vllm:spec_decode_num_drafts"  # a counter: steps with drafts, of all requests


def load(
    target: str,
    dtype: str,
    max_positions: int,
    max_requests: int,
    drafter: str | None = None,
    num_drafts: int = 0,
    parallel: bool = False,
    gpu_memory_frac: float | None = None,
    counts_steps: bool = False,
) -> "Vllm":
    """Load a target, with a drafter or without.

    dtype: float32 or bfloat16. parallel: the drafter is a P-EAGLE. gpu_memory_frac: of the GPU's memory, for weights
    and caches; None: a CPU. counts_steps: keep each step's number of accepted drafts, for `answer`.
    """
    options: dict[str, Any] = {"enforce_eager": True} if gpu_memory_frac is None else {}
    if gpu_memory_frac is not None:
        options["gpu_memory_utilization"] = gpu_memory_frac
    if drafter is not None:
        options["speculative_config"] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": num_drafts}
        if parallel:
            options["speculative_config"]["parallel_drafting"] = True
            # else: "All drafting layers should belong to the same kv cache group"
            options["disable_hybrid_kv_cache_manager"] = True
    if counts_steps:
        options["per_request_spec_decode_metrics"] = "detailed"
    llm = LLM(
        model=target,
        dtype=dtype,
        max_model_len=max_positions,
        max_num_seqs=max_requests,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **options,
    )
    return Vllm(llm, f"{dtype} on a CPU, without compiled graphs" if gpu_memory_frac is None else dtype)


class Vllm:
    """See worker.Engine."""

    def __init__(self, llm: LLM, computes: str) -> None:
        self._llm, self._computes = llm, computes

    def describe(self) -> dict[str, Any]:
        return {"version": f"vLLM {vllm.__version__}, torch {torch.__version__}", "computes": self._computes}

    def decode(self, prompts: list[list[int]], num_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
        """See worker.Engine."""
        prefill_s, _ = self._timed(prompts, 1, stop_token_ids)
        before = self._num_steps()
        whole_s, token_ids = self._timed(prompts, num_tokens, stop_token_ids)
        steps = (self._num_steps() - before) / len(prompts) or num_tokens - 1  # counted with drafts alone
        return {"prefill_s": prefill_s, "decode_s": whole_s - prefill_s, "steps": steps, "token_ids": token_ids}

    def answer(self, prompt_ids: list[int], num_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
        """Decode greedily: {"token_ids": with the stop token, "speculative_decoding": counts}.

        The counts are vLLM's per-request block at its level `detailed`. It counts steps in full, even if a stop token
        or the budget cut their output.
        """
        (output,) = self._generate([prompt_ids], num_tokens, stop_token_ids=stop_token_ids)
        if output.spec_decode_metrics is None:
            raise RuntimeError("vLLM counted no steps of this request")
        return {"token_ids": list(output.token_ids), "speculative_decoding": output.spec_decode_metrics.to_dict()}

    def _timed(
        self, prompts: Sequence[list[int]], num_tokens: int, stop_token_ids: list[int]
    ) -> tuple[float, list[list[int]]]:
        """Decode so many tokens of every prompt; return (seconds, the tokens)."""
        started = time.perf_counter()
        outputs = self._generate(prompts, num_tokens, ignore_eos=True, stop_token_ids=stop_token_ids)
        return time.perf_counter() - started, [list(output.token_ids) for output in outputs]

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int, **options: Any) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False, **options)
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [answer.outputs[0] for answer in answers]

    def _num_steps(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == DRAFT_STEPS)
