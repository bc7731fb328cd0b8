"""Beyond the context that a model was first trained with (YaRN): the engine against transformers."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.kernels import Implementation
from target.load import load_target
from target.model import GptOss
from tests.support.oracle import CONFIGS, EAGER
from tests.support.toys import Scripted

INITIAL, NEW, K = 4096, 24, 3


def decoded(engine: Engine, prompt: np.ndarray) -> tuple[list[int], list[float], list[int]]:
    """Return (tokens, their log-probabilities, drafts accepted by each step) of a request."""
    tokens, logprobs, accepted = [], [], []
    for _, chunk in engine.generate([Request(tuple(prompt.tolist()), NEW, stop_token_ids=(), logprobs=0)]):
        tokens += chunk.token_ids
        logprobs += [token.logprob for token in chunk.logprobs]
        accepted += [step.num_accepted for step in chunk.steps]
    return tokens, logprobs, accepted


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "length"), [("xla", 5000), ("native", 9000)])
def test_positions_beyond_the_initial_context_are_transformers(
    tmp_path: Path, implementation: Implementation, length: int
) -> None:
    """Prefilled in chunks, or whole and in blocks of rows, then decoded, also with drafts of which some are wrong."""
    rope = {**CONFIGS["fused"]["rope_parameters"], "original_max_position_embeddings": INITIAL}
    sizes = CONFIGS["fused"] | {"num_hidden_layers": 2, "rope_parameters": rope, "max_position_embeddings": 8 * INITIAL}
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(**sizes, **EAGER)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)

    loaded = load_target(tmp_path, dtype=jnp.float32, implementation=implementation)
    target = GptOss(loaded.params, loaded.config)
    prompt = np.random.default_rng(4).integers(0, loaded.config.vocab_size, length)
    plain, in_chunks, _ = decoded(Engine(target, None, ResolvedConfig(context=length + NEW)), prompt)
    in_blocks = dataclasses.replace(target, query_blocks=64, ffn_blocks=4)
    at_once = ResolvedConfig(context=length + NEW, prefill_chunk=length)
    same, whole, _ = decoded(Engine(in_blocks, None, at_once), prompt)
    assert same == plain
    if implementation == "native":
        assert whole == in_chunks
    script = np.concatenate([prompt, plain, np.zeros(K, int)])
    script[length + 4 :: 5] = (script[length + 4 :: 5] + 1) % loaded.config.vocab_size
    drafter = Scripted(jnp.asarray(script[None], jnp.int32))
    engine = Engine(target, drafter, ResolvedConfig(K, context=length + NEW))
    tokens, logprobs, accepted = decoded(engine, prompt)
    assert tokens == plain
    assert min(accepted) < K
    assert max(accepted) == K

    whole = torch.from_numpy(np.concatenate([prompt, tokens])[None])
    with torch.no_grad():
        logits = model(whole, use_cache=False).logits[0, length - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    expected = torch.log_softmax(logits, -1)[torch.arange(NEW), torch.tensor(tokens)].numpy()
    np.testing.assert_allclose(logprobs, expected, atol=1e-4 * float(logits.std()))
