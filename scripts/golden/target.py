"""Record what transformers computes for a tiny MXFP4 checkpoint: parity for machines without torch.

    python -m scripts.golden.target

Writes tests/golden/target/: the checkpoint (drawn from a seed) and expected.npz with token ids, logits and every
layer's output, all from transformers' GptOssForCausalLM in float32, eager, its own dequantisation. Needs torch.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

from peagle.workflows.random_checkpoint import geometry, random_tensors
from scripts.runs import ROOT, new_parser
from target.load import write_target

DIRECTORY = ROOT / "tests" / "golden" / "target"
# long enough to wrap the ring of a window of 6 twice, and to exceed YaRN's original length
BATCH, LENGTH, SEED = 2, 30, 0
CONFIG = geometry(
    hidden=32,
    layers=3,
    heads=(6, 2),
    head_dim=10,
    vocab=47,
    experts=(5, 2),
    expert_width=64,
    window=6,
    original_length=16,
    max_positions=512,
)


def record(directory: Path) -> None:
    write_target(directory, CONFIG, random_tensors(CONFIG, mxfp4=True, seed=SEED), mxfp4=True, stop_token_ids=(46, 3))
    model = transformers.GptOssForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    token_ids = np.random.default_rng(SEED).integers(0, CONFIG.vocab_size, (BATCH, LENGTH))
    outputs: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(first(output).numpy()))
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids), use_cache=False).logits.numpy()
    np.savez_compressed(
        directory / "expected.npz",
        token_ids=token_ids.astype(np.int32),
        logits=logits,
        layer_outputs=np.stack(outputs),  # [layers, BATCH, LENGTH, D]
        recorded_with=np.array(f"transformers {transformers.__version__}, torch {torch.__version__}, seed {SEED}"),
    )


def first(output: object) -> torch.Tensor:
    """Take a layer's hidden state, which it returns alone or in a tuple."""
    state = output[0] if isinstance(output, tuple) else output
    assert isinstance(state, torch.Tensor)
    return state


if __name__ == "__main__":
    new_parser(__doc__).parse_args()
    record(DIRECTORY)
