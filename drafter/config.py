"""The geometry of a drafter, which dialects.py reads from a config.json."""

import dataclasses
from typing import Literal

from drafter.aux_layers import check_aux_layer_ids
from peagle.base.errors import InputError
from peagle.ops.rope import RopeConfig

Kind = Literal["P-EAGLE", "EAGLE-3", "DFlash"]


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Geometry and constants of one drafter. Hashable: it may be a static argument of a jitted function.

    Trainings record the fields in recipe.json, so a training cannot be resumed after a field is renamed.

        mask_token_id         the token of a mask slot. None: EAGLE-3, which has no mask slots and takes K passes
        block_size            rows of a DFlash block: the pending token and its mask slots. None: another kind
        num_target_layers     of a DFlash drafter's target. None: not in config.json
        vocab_size            the target's: input tokens and drafts are ids of it
        draft_vocab_size      how many tokens the drafter can propose
        num_aux_layers        number of aux layers
        aux_layer_ids         the aux layers, 0-based, by OUTPUT. None: the target's default
        aux_norm              norm of aux_hidden before fc: of the joint vector, or per layer
        qk_norm               each head's query and key are normalised before RoPE, as in Qwen3's layers
        norm_before_residual  the residual stream starts from the normalised hidden state instead of the raw one
        norm_output           an EAGLE-3 drafter's next pass reads the output of the final norm, not its input
        num_mask_hiddens      of P-EAGLE. 1: all mask slots share one (the paper's best). More: one per depth; deeper
                              slots share the last
        windows               by layer: positions that a row sees, its own included. None: all before it. RoPE positions
                              stay absolute
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int | None
    rope: RopeConfig
    num_aux_layers: int = 3
    aux_layer_ids: tuple[int, ...] | None = None
    aux_norm: Literal["joint", "per_layer"] | None = None
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    num_mask_hiddens: int = 1
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    max_positions: int | None = None
    windows: tuple[int | None, ...] | None = None
    block_size: int | None = None
    num_target_layers: int | None = None

    def __post_init__(self) -> None:
        geometry = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "num_aux_layers")
        for name in (*geometry, "num_mask_hiddens", "target_hidden_size", "vocab_size", "draft_vocab_size"):
            if getattr(self, name) < 1:
                raise InputError(f"the drafter's {name} is {getattr(self, name)}; expected 1 or more")
        if self.aux_norm not in (None, "joint", "per_layer"):
            raise InputError(f"the drafter's aux_norm is {self.aux_norm!r}; expected 'joint', 'per_layer' or none")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"the drafter's {self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2 or self.rope.head_dim != self.head_dim:
            raise InputError(
                f"the drafter's head_dim is {self.head_dim}, its RoPE's {self.rope.head_dim}; expected one even number"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(f"the drafter's mask token {self.mask_token_id} lies outside 0..{self.vocab_size - 1}")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"the drafter's draft_vocab_size {self.draft_vocab_size} exceeds its vocab_size {self.vocab_size}"
            )
        if self.aux_layer_ids is not None:
            check_aux_layer_ids(self.aux_layer_ids, self.num_aux_layers, "the drafter")
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise InputError(
                f"the drafter has {len(self.windows)} windows for {self.num_layers} layers; expected one for each"
            )
        if self.block_size is not None:
            self._check_block(self.block_size)
        if wrong := [window for window in self.windows or () if window is not None and window < 1]:
            raise InputError(f"the drafter's window is {wrong[0]}; expected 1 position or more")

    def _check_block(self, block_size: int) -> None:
        if block_size < 2:
            raise InputError(
                f"the drafter's block_size is {block_size}; expected 2 or more: a token and its mask slots"
            )
        if self.mask_token_id is None:
            raise InputError("the drafter has a block_size and no mask token; expected both (DFlash)")
        if self.hidden_size != self.target_hidden_size:
            raise InputError(
                f"the drafter's hidden_size is {self.hidden_size}, its target's {self.target_hidden_size}; expected "
                "them equal: a DFlash drafter has the target's embedding and head"
            )

    @property
    def kind(self) -> Kind:
        if self.block_size is not None:
            return "DFlash"
        return "EAGLE-3" if self.mask_token_id is None else "P-EAGLE"

    @property
    def parallel(self) -> bool:
        """Whether one pass proposes all drafts (P-EAGLE, DFlash), not one draft per pass (EAGLE-3)."""
        return self.mask_token_id is not None

    @property
    def block_drafts(self) -> int | None:
        """Most drafts of a step; None: any number."""
        return None if self.block_size is None else self.block_size - 1

    @property
    def aux_width(self) -> int:
        """Width A of aux_hidden, the input of fc: num_aux_layers hidden states, concatenated."""
        return self.num_aux_layers * self.target_hidden_size

    def window(self, layer: int) -> int | None:
        """Positions that a row of a layer sees, its own included; None: all before it."""
        return None if self.windows is None else self.windows[layer]

    @property
    def narrowest_window(self) -> int | None:
        """Smallest window of a layer; None: no layer has one."""
        return min((window for window in self.windows or () if window is not None), default=None)

    @property
    def receptive_field(self) -> int | None:
        """How many positions before a row its output depends on: the sum of window - 1 over layers; None: all.

        For DFlash the widest window - 1, because every layer reads the same context.
        """
        windows = self.windows or (None,)
        fields = [window - 1 for window in windows if window is not None]
        if None in windows:
            return None
        return max(fields) if self.kind == "DFlash" else sum(fields)

    def with_window(self, window: int | None) -> "DrafterConfig":
        return dataclasses.replace(self, windows=None if window is None else (window,) * self.num_layers)

    def layer_input(self, layer: int) -> int:
        """Return the input width of a layer's qkv projection.

        Layer 0 of P-EAGLE and EAGLE-3 reads [embedding, hidden], every other layer the hidden state.
        """
        return self.hidden_size * (2 if layer == 0 and self.block_size is None else 1)
