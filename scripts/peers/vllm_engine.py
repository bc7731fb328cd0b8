"""Drive vLLM's speculative decoding on CPU, under the Python of an environment that has vLLM.

float32, one request at a time, no prefix cache, no compiled graphs: nothing that could change acceptance. It imports
nothing of this project.
"""

import os
from typing import Any

# before vLLM is imported, which reads them
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process but this one, which its parent ends
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm
from vllm import LLM, SamplingParams


def load(
    target: str, drafter: str, parallel: bool, num_drafts: int, max_positions: int, stop_token_ids: list[int]
) -> "Vllm":
    """Load an unquantised target with a drafter. parallel: P-EAGLE."""
    speculation: dict[str, Any] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": num_drafts}
    if parallel:
        speculation["parallel_drafting"] = True
    llm = LLM(
        model=target,
        speculative_config=speculation,
        dtype="float32",
        max_model_len=max_positions,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        # else: "All drafting layers should belong to the same kv cache group"
        disable_hybrid_kv_cache_manager=True,
        per_request_spec_decode_metrics="detailed",
        skip_tokenizer_init=True,
    )
    return Vllm(llm, stop_token_ids)


class Vllm:
    """Serve `describe` of worker.Engine, and `speculate`."""

    def __init__(self, llm: LLM, stop_token_ids: list[int]) -> None:
        self._llm, self._stop_token_ids = llm, stop_token_ids

    def describe(self) -> dict[str, Any]:
        return {"version": f"vLLM {vllm.__version__}, torch {torch.__version__}", "computes": "float32"}

    def speculate(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Decode greedily: {"token_ids": with the stop token, "speculative_decoding": counts}.

        The counts are vLLM's per-request block at its level `detailed`. It counts steps in full, even if a stop token
        or the budget cut their output.
        """
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, stop_token_ids=self._stop_token_ids, detokenize=False
        )
        (answer,) = self._llm.generate({"prompt_token_ids": prompt_ids}, sampling, use_tqdm=False)
        (output,) = answer.outputs
        if output.spec_decode_metrics is None:
            raise RuntimeError("vLLM counted no steps of this request")
        return {"token_ids": list(output.token_ids), "speculative_decoding": output.spec_decode_metrics.to_dict()}
