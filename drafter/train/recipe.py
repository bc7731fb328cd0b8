"""A training's recipe: the shape of its drafter, and how it learns. Imports neither JAX nor training libraries.

A field with a docstring below it is an option of `peagle train`; a Recipe's fields are keys of recipe.json.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

from peagle.base.errors import InputError
from peagle.base.flag import DRAFTER, LEARNING, Flag, check_least, check_type, layers_reader
from peagle.base.settings import brief

# cross_entropy        with the token in the data
# kl                   with the target's distribution, minus its entropy: 0 is perfect
# half                 half of that without the entropy, half cross-entropy with the target's best token, which greedy
#                      acceptance needs (the best loss in the first measurements)
# total_variation      1 - sum min(p, q), p the target's and q the drafter's distribution: the share of sampled drafts
#                      that are rejected at temperature 1 (arXiv 2211.17192)
LossName = Literal["half", "cross_entropy", "kl", "total_variation"]
LOSSES: tuple[str, ...] = get_args(LossName)
OptimizerName = Literal["adamw", "muon"]
KindName = Literal["p-eagle", "eagle-3", "dflash"]
DECIDED = ("other_rate", "warmup_frac", "decay_frac", "draft_decay", "room")  # fields of Recipe that nobody types


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
    mlp_width: Annotated[int | None, Flag(DRAFTER, "N")] = None
    """Width of the MLP. Default: twice the hidden size."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(DRAFTER, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """Target layers (0-based) that the drafter reads. Default: of n 1, n/2 - 1 and n - 4; for DFlash one per layer."""
    drafter_window: Annotated[str, Flag(DRAFTER, "N|auto|off")] = "auto"
    """Positions that the drafter sees, for long prompts; auto: as --init, else all."""
    mask_hiddens: Annotated[int, Flag(DRAFTER, "N")] = 1
    """Learned mask_hidden vectors, up to --depth - 1."""
    draft_vocab: Annotated[str | None, Flag(DRAFTER, "N|FILE")] = None
    """Draft only the data's N most frequent tokens, or a JSON list of ids."""

    def __post_init__(self) -> None:
        check_least(self, layers=1, hidden_size=1, mlp_width=1, mask_hiddens=1)
        if self.kind not in (None, *get_args(KindName)):
            names = ", ".join(get_args(KindName))
            raise InputError(f"the drafter is {self.kind!r}; expected one of {names}", "kind")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter learns: as typed, and after `fill` (drafter/train/fill.py) with every value decided. Hashable.

    The learning rate rises from 0 over the first warmup_frac of the steps, stays, and falls to 0 over the last
    decay_frac. With adamw learning_rate is for all parameters. With muon it is for matrices, and other_rate for
    embedding, head, norms and mask_hidden.

    The number of steps is not part of it, so that a training can be resumed with more of them. Every later step has the
    rate of a training of the new length. So a training of 1000 steps, resumed up to 2000, differs from one of 2000
    steps: with decay_frac 1 its rate falls to 0 at step 1000, then continues at half its peak.
    """

    rows: Annotated[int, Flag(LEARNING, "N")] = 8
    """Rows per step, over all devices."""
    width: Annotated[int, Flag(LEARNING, "N")] = 512
    """Tokens per row, 3 or more."""
    depth: Annotated[int, Flag(LEARNING, "N")] = 8
    """Drafts that are trained per position (K_train)."""
    ratio: Annotated[float, Flag(LEARNING, "P")] = 0.8
    """Share of a draft's positions at which the next is trained (COD)."""
    blocks: Annotated[int | None, Flag(LEARNING, "N")] = None
    """With DFlash: blocks per row. Default: a sixth of its tokens."""
    parts: Annotated[int | None, Flag(LEARNING, "N")] = None
    """Split rows into N parts: less memory, the same gradient. Default: 1, more with --drafter-window."""
    loss: Annotated[LossName, Flag(LEARNING, "LOSS")] = "half"
    """cross_entropy: with the data's token; kl: with the target's distribution; half: half of each, with the target's
    best token; total_variation: for --init."""
    optimizer: Annotated[OptimizerName | None, Flag(LEARNING, "NAME")] = None
    """adamw or muon. Default: muon below 3,000 steps, else, and with --init, adamw."""
    learning_rate: Annotated[float | None, Flag(LEARNING, "X")] = None
    """Peak learning rate; alone it is adamw's. Default: the optimizer's own."""
    weight_decay: Annotated[float, Flag(LEARNING, "X")] = 0.0
    """Weight decay."""
    compute_dtype: Annotated[Literal["float32", "bfloat16"], Flag(LEARNING, "DTYPE", ("--dtype",))] = "float32"
    """Compute in float32 or bfloat16; weights stay float32."""
    seed: Annotated[int, Flag(LEARNING, "S")] = 0
    """Random seed."""
    other_rate: float | None = None  # None: adamw
    warmup_frac: float = 0.0025  # of the paper, arXiv 2602.01469, as decay_frac
    decay_frac: float = 1.0
    draft_decay: float | None = None  # of DFlash: draft i counts exp(-i / draft_decay) in the loss
    room: tuple[tuple[int, ...], ...] = ()  # for chains: by part, at depth 1, 2, ... (`Partition.counts`)

    def __post_init__(self) -> None:
        check_least(self, rows=1, width=3, depth=1, blocks=1, seed=0)
        if self.parts is not None and not 1 <= self.parts <= self.width:
            raise InputError(f"parts is {self.parts}; expected 1 to {self.width}, the tokens of a row", "parts")
        if not 0 < self.ratio <= 1:
            raise InputError(f"ratio is {self.ratio}; expected a number above 0 and at most 1", "ratio")
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}; expected one of {', '.join(LOSSES)}", "loss")
        if self.optimizer not in (None, *get_args(OptimizerName)):
            names = ", ".join(get_args(OptimizerName))
            raise InputError(f"optimizer is {self.optimizer!r}; expected one of {names}", "optimizer")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate is {self.learning_rate}; expected a number above 0", "learning_rate")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay is {self.weight_decay}; expected 0 or more", "weight_decay")

    def over(self, recorded: Mapping[str, Any]) -> "Recipe":
        """Read the recipe of a recipe.json (`read_recipe`), and replace what is typed in this one."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        typed = {name: value for name, value in own.items() if value is not None and name not in DECIDED}
        return dataclasses.replace(read_recipe(recorded), **typed)

    def describe(self) -> str:
        """Example: muon at rates of 0.008 and 0.003, rising over 2% of the steps and falling over the last 60%."""
        rates = f"a rate of {self.learning_rate:.2g}"
        if self.other_rate is not None:
            rates = f"rates of {self.learning_rate:.2g} and {self.other_rate:.2g}"
        rises, falls = (f"{100 * frac:.3g}%" for frac in (self.warmup_frac, self.decay_frac))
        return f"{self.optimizer} at {rates}, rising over {rises} of the steps and falling over the last {falls}"


def read_recipe(recorded: Mapping[str, Any]) -> Recipe:
    """Read a recipe as `fill` decided it from a recipe.json. Raises InputError that names a bad value."""
    kinds = {**get_type_hints(Recipe), "optimizer": OptimizerName, "learning_rate": float}
    if recorded.get("optimizer") == "muon":
        kinds["other_rate"] = float
    values = {name: _tuples(recorded.get(name)) for name in kinds}
    for name, value in values.items():
        check_type(f"recipe.{name}", value, kinds[name])
    recipe = Recipe(**values)
    parts, depths = recipe.parts or 1, recipe.depth - 1
    if [len(part) for part in recipe.room] != [depths] * parts:
        raise InputError(
            f"recipe.room is {brief(recorded['room'])}; expected numbers for {depths} depths of {parts} "
            f"{'part' if parts == 1 else 'parts'}"
        )
    return recipe


def _tuples(value: Any) -> Any:
    """Turn the lists of a JSON value into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
