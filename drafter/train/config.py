"""Options of a training: the shape of its drafter, and how it learns. Imports neither JAX nor training libraries.

Each field is an option of `peagle train`, whose help is the docstring below the field, and a key of recipe.json.
"""

import math
import operator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from peagle.base.errors import InputError
from peagle.base.flag import DRAFTER, LEARNING, Flag, check_least, layers_reader

# cross_entropy        with the token in the data
# soft_cross_entropy   with the target's distribution
# kl                   soft_cross_entropy minus the distribution's entropy: 0 is perfect, gradients are equal
# half                 half soft_cross_entropy, half cross-entropy with the target's best token, which greedy acceptance
#                      needs (the best loss in the first measurements)
# total_variation      1 - sum min(p, q), p the target's and q the drafter's distribution: the share of sampled drafts
#                      that are rejected at temperature 1 (arXiv 2211.17192)
LossName = Literal["half", "cross_entropy", "soft_cross_entropy", "kl", "total_variation"]
LOSSES: tuple[str, ...] = get_args(LossName)
OptimizerName = Literal["adamw", "muon"]
KindName = Literal["p-eagle", "eagle-3", "dflash"]


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The drafter to train: that of `init`, or a new one. None: a default that depends on the target."""

    init: Annotated[str | None, Flag(DRAFTER, "DIR")] = None
    """Start from this drafter: its weights and its shape."""
    kind: Annotated[KindName | None, Flag(DRAFTER, "KIND", ("--drafter",))] = None
    """p-eagle, eagle-3 or dflash. Default: that of --init, else p-eagle."""
    layers: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Decoder layers. Default: 4, 1 for EAGLE-3, 5 for DFlash."""
    hidden_size: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Hidden size. Default: the target's."""
    heads: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Query heads. Default: the target's."""
    kv_heads: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Key/value heads. Default: the target's."""
    head_dim: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Size of a head, 2 or more. Default: the target's."""
    mlp_width: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Width of the MLP. Default: twice the hidden size."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(DRAFTER, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """Target layers (0-based) that the drafter reads. Default: of n 1, n/2 - 1 and n - 4; for DFlash one per layer."""
    drafter_window: Annotated[str, Flag(DRAFTER, "N|auto|off")] = "auto"
    """Positions that the drafter sees, for long prompts; auto: as --init, else all."""
    mask_token: Annotated[int | None, Flag(DRAFTER, "ID")] = None
    """Placeholder for an unknown token. Default: the highest id not in the data."""
    mask_hiddens: Annotated[int, Flag(DRAFTER, "N")] = 1
    """Learned mask_hidden vectors, up to --depth - 1."""
    draft_vocab: Annotated[str | None, Flag(DRAFTER, "N|FILE")] = None
    """Draft only the data's N most frequent tokens, or a JSON list of ids."""

    def __post_init__(self) -> None:
        check_least(self, layers=1, hidden_size=1, heads=1, kv_heads=1, head_dim=2, mlp_width=1, mask_hiddens=1)
        if self.kind not in (None, *get_args(KindName)):
            names = ", ".join(get_args(KindName))
            raise InputError(f"the drafter is {self.kind!r}; expected one of {names}", "kind")


@dataclass(frozen=True)
class Cod:
    """How chains are sampled (drafter/train/cod.py). depth: rows of a full chain (depths 0..depth-1)."""

    depth: Annotated[int, Flag(LEARNING, "N")] = 8
    """Drafts that are trained per position (K_train)."""
    ratio: Annotated[float, Flag(LEARNING, "P")] = 0.8
    """Share of a draft's positions at which the next is trained (COD)."""
    min_ratio: Annotated[float, Flag(LEARNING, "P")] = 0.2
    """Least share of positions at any depth (COD)."""

    def __post_init__(self) -> None:
        check_least(self, depth=1)
        if not 0 < self.ratio <= 1:
            raise InputError(f"ratio is {self.ratio}; expected a number above 0 and at most 1", "ratio")
        if not 0 <= self.min_ratio <= 1:
            raise InputError(f"min_ratio is {self.min_ratio}; expected a number from 0 to 1", "min_ratio")

    def counts(self, num_anchors: int) -> tuple[int, ...]:
        """Count the chains that reach depth 1, 2, ..., depth - 1, of num_anchors at depth 0 (arXiv 2602.01469)."""
        return tuple(max(0, int((num_anchors - d) * max(self.ratio**d, self.min_ratio))) for d in range(1, self.depth))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter learns, as users set it. None: depends on the number of steps (drafter.train.recipe). Hashable.

    The learning rate rises from 0 over the first warmup_frac of the steps, stays, and falls to 0 over the last
    decay_frac. learning_rate is for matrices, other_rate for embedding, head, norms and mask_hidden (with adamw,
    learning_rate is for all).
    """

    width: Annotated[int, Flag(LEARNING, "N")] = 512
    """Tokens per row, 3 or more."""
    cod: Cod = Cod()
    blocks: Annotated[int | None, Flag(LEARNING, "N")] = None
    """With DFlash: blocks per row. Default: a sixth of its tokens."""
    draft_decay: Annotated[float | None, Flag(LEARNING, "X")] = None
    """With DFlash: draft i counts exp(-i/X) in the loss. Default: 4 to 7."""
    parts: Annotated[int | None, Flag(LEARNING, "N")] = None
    """Split rows into N parts: less memory, the same gradient. Default: 1, more with --drafter-window."""
    loss: Annotated[LossName, Flag(LEARNING, "LOSS")] = "half"
    """cross_entropy: with the data's token; soft_cross_entropy, kl: with the target's distribution; half: half of each,
    with the target's best token; total_variation: for --init."""
    optimizer: Annotated[OptimizerName | None, Flag(LEARNING, "NAME")] = None
    """adamw or muon. Default: muon below 3,000 steps, else, and with --init, adamw."""
    learning_rate: Annotated[float | None, Flag(LEARNING, "X")] = None
    """Peak learning rate. Default: the optimizer's own."""
    other_rate: Annotated[float | None, Flag(LEARNING, "X")] = None
    """With muon: peak learning rate of all but the layers' matrices."""
    weight_decay: Annotated[float, Flag(LEARNING, "X")] = 0.0
    """Weight decay."""
    warmup_frac: Annotated[float | None, Flag(LEARNING, "P", ("--warmup",))] = None
    """Fraction of the steps, at the start, in which the rate rises."""
    decay_frac: Annotated[float | None, Flag(LEARNING, "P", ("--decay",))] = None
    """Fraction of the steps, at the end, in which it falls."""
    clip_norm: Annotated[float | None, Flag(LEARNING, "X", ("--clip",))] = None
    """Maximum gradient norm. Default: no clipping."""
    train_embedding: Annotated[bool, Flag(LEARNING, names=("--freeze-embedding",), read=operator.not_)] = True
    """Do not train the embedding."""
    compute_dtype: Annotated[Literal["float32", "bfloat16"], Flag(LEARNING, "DTYPE", ("--dtype",))] = "float32"
    """Compute in float32 or bfloat16; weights stay float32."""
    seed: Annotated[int, Flag(LEARNING, "S")] = 0
    """Random seed."""

    def __post_init__(self) -> None:
        check_least(self, width=3, seed=0, blocks=1)
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}; expected one of {', '.join(LOSSES)}", "loss")
        if self.optimizer not in (None, *get_args(OptimizerName)):
            names = ", ".join(get_args(OptimizerName))
            raise InputError(f"optimizer is {self.optimizer!r}; expected one of {names}", "optimizer")
        for name in ("learning_rate", "other_rate", "clip_norm", "draft_decay"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; expected a number above 0", name)
        of_steps = "a fraction of the steps"
        for name, valid, expected in (
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("warmup_frac", 0 <= (self.warmup_frac or 0) < 1, f"{of_steps}, 0 or more and below 1"),
            ("decay_frac", self.decay_frac is None or 0 < self.decay_frac <= 1, f"{of_steps}, above 0 and at most 1"),
        ):
            if not valid:
                raise InputError(f"{name} is {getattr(self, name)}; expected {expected}", name)
