"""The geometry of a GPT-OSS model. 20b, 120b and the demo differ only by these values, which dialects.py reads."""

import dataclasses

from peagle.base.errors import InputError
from peagle.ops.rope import RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"
SWIGLU_ALPHA = 1.702


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Geometry and constants of one model. Hashable: it may be a static argument of a jitted function."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None  # None: no layer has a window
    num_experts: int
    top_k: int
    expert_width: int
    swiglu_limit: float
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads")
        if not 1 <= self.top_k <= self.num_experts:
            raise InputError(f"{self.top_k} experts per token of {self.num_experts}: expected 1..{self.num_experts}")
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise InputError(f"unknown layer types {sorted(unknown)}; expected {SLIDING} or {FULL}")
        if self.sliding_window is None and SLIDING in self.layer_types:
            raise InputError(f"sliding_window is null, with layers of {SLIDING}; expected the positions they see")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def window(self, layer: int) -> int | None:
        """Return how many keys a query of the layer attends to, its own included; None: all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return the default aux layers of P-EAGLE drafters: the OUTPUTS of the 0-based layers 1, n//2 - 1, n - 4.

    These are 1, 11, 20 of the 20b and 1, 17, 32 of the 120b. vLLM names the same layers by their INPUT: 2, n//2, n - 3.
    Raises InputError below 7 layers, where the rule is not defined.
    """
    if num_layers < 7:
        raise InputError(
            f"a target of {num_layers} layers has no default aux layers (defined from 7 layers on); name them in the "
            "drafter's config.json, under eagle_aux_hidden_state_layer_ids, or with --aux-layer-ids"
        )
    return (1, num_layers // 2 - 1, num_layers - 4)
