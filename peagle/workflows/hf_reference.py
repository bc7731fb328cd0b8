"""Compare a target with the GPT-OSS of transformers, if torch is installed.

No other module of the packages may import torch.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from peagle.ops.memory import available_memory_bytes, format_size
from target.load import inspect_target

# by our dtype, the largest difference from the float32 reference that counts as equal, in standard deviations of a
# layer's output
CLOSE = {"float32": 2e-2, "bfloat16": 0.5}


@dataclasses.dataclass(frozen=True)
class Layers:
    """Differences of our hidden states from the reference's, layer by layer."""

    reference: str | None  # None: not compared
    why_not: str | None
    max_difference: tuple[float, ...] = ()  # in standard deviations of the layer's output
    cosine: tuple[float, ...] = ()  # the least of any token
    close: float = 0.0  # as CLOSE

    @property
    def first_wrong(self) -> int | None:
        """The first layer whose output differs from the reference's."""
        return next((layer for layer, most in enumerate(self.max_difference) if most > self.close), None)

    @property
    def fine(self) -> bool:
        return self.first_wrong is None

    @property
    def lines(self) -> list[str]:
        if self.reference is None:
            return [f"target       not compared: {self.why_not}"]
        if self.fine:
            return [
                f"target       the same as {self.reference} in {len(self.max_difference)} layers: largest difference "
                f"{max(self.max_difference):.1e} of a layer's spread, cosine {min(self.cosine):.6f}"
            ]
        layer = self.first_wrong or 0
        return [
            f"target       DIFFERENT from {self.reference} from layer {layer} on: {self.max_difference[layer]:.1e} of "
            f"the layer's spread, cosine {self.cosine[layer]:.6f}"
        ]


def layer_by_layer(directory: Path, token_ids: np.ndarray, hidden: np.ndarray, dtype: str) -> Layers:
    """Compare our layer outputs, hidden [n, L, D], with those of transformers' model.

    Leaves out the last layer, whose output transformers returns only after the final norm.
    """
    if importlib.util.find_spec("torch") is None:
        return Layers(None, "transformers' model needs torch, which is not installed; pip install torch")
    needed = 4 * inspect_target(directory).num_parameters
    if needed > available_memory_bytes():
        return Layers(None, f"transformers' model takes {format_size(needed)} in float32, more than is available")
    import torch
    import transformers
    from transformers.utils import logging

    hf: Any = transformers  # its names are made at run time
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    eager: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        quantised = (
            hf.Mxfp4Config(dequantize=True)
            if "quantization_config" in (directory / "config.json").read_text()
            else None
        )
        model = hf.GptOssForCausalLM.from_pretrained(
            directory, dtype=torch.float32, quantization_config=quantised, local_files_only=True, **eager
        ).eval()
    except Exception as error:  # transformers raises many kinds
        return Layers(None, f"transformers cannot read it: {' '.join(str(error).split())[:200]}")
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids[None].astype(np.int64)), output_hidden_states=True, use_cache=False)
    differences, cosines = [], []
    for layer, state in enumerate(out.hidden_states[1:-1]):
        ours, theirs = hidden[:, layer], state[0].float().numpy()
        differences.append(float(np.abs(ours - theirs).max() / theirs.std()))
        dots = (ours * theirs).sum(-1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)
        cosines.append(float(dots.min()))
    return Layers("transformers", None, tuple(differences), tuple(cosines), CLOSE[dtype])
