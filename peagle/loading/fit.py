"""Check whether a drafter fits a target: sizes, aux layers, window."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from peagle.base.checkpoint import Checkpoint
from peagle.base.errors import InputError, InputWarning
from peagle.config import AUTO, check_block
from peagle.loading.speculation import OFF, SPECULATION_FILE, read_window

if TYPE_CHECKING:
    from drafter.aux_layers import NamedAuxLayers
    from drafter.config import DrafterConfig
    from target.config import TargetConfig


@dataclass(frozen=True)
class AuxLayers:
    """The layers of a target whose outputs a drafter reads."""

    outputs: tuple[int, ...]
    description: str  # the layers and the source of their ids
    warning: str | None = None  # the ids may follow another convention
    converted_from_inputs: bool = False  # config.json counts inputs of layers: no other reading fits


def check_fit(
    target_directory: Path,
    drafter_directory: Path,
    aux_layer_ids: Sequence[int] | None = None,
    num_drafts: Iterable[int] = (),
) -> AuxLayers:
    """Check that a drafter fits a target and return its aux layers, without reading weights.

    The aux layers are the argument's, else those of config.json, else the target's default. num_drafts: values of K to
    check. Raises InputError, naming both sides, if hidden size, vocabulary or aux layers do not fit, and for a K that
    exceeds the drafter's block.
    """
    from drafter.load import inspect_drafter
    from target.load import inspect_target

    target = inspect_target(target_directory).config
    checkpoint, drafter = inspect_drafter(drafter_directory, aux_layer_ids)
    layers = fitting_aux_layers(target, checkpoint, target_directory, drafter_directory, aux_layer_ids)
    for k in num_drafts:
        check_block(k, drafter.block_drafts, str(drafter_directory))
    return layers


def fitting_aux_layers(
    target: "TargetConfig",
    checkpoint: Checkpoint,
    target_name: str | Path,
    drafter_name: str | Path,
    aux_layer_ids: Sequence[int] | None = None,
) -> AuxLayers:
    """See `check_fit`. target_name, drafter_name: for messages."""
    from drafter.aux_layers import TOP_AUX_LAYERS, default_dflash_layers, named_aux_layers
    from drafter.dialects import parse_config
    from drafter.load import shared_tensors
    from target.config import default_aux_layer_ids

    drafter = parse_config(checkpoint, aux_layer_ids)

    def refuse(why: str) -> InputError:
        return InputError(f"the drafter {drafter_name} does not fit the target {target_name}: {why}")

    def other(what: str, drafters: object, targets: object) -> InputError:
        return refuse(f"{what} {drafters}, the target's is {targets}; use the drafter that was trained for this target")

    if drafter.target_hidden_size != target.hidden_size:
        raise other("it reads hidden states of size", drafter.target_hidden_size, target.hidden_size)
    if drafter.vocab_size != target.vocab_size:
        raise other("its vocabulary has size", drafter.vocab_size, target.vocab_size)
    if (shared := shared_tensors(checkpoint)) and drafter.hidden_size != target.hidden_size:
        raise other(f"it takes {shared[0]} from its target and has a width of", drafter.hidden_size, target.hidden_size)
    n, named = target.num_layers, named_aux_layers(checkpoint.config)
    if drafter.num_target_layers not in (None, n):
        raise other("its config.json says num_target_layers", drafter.num_target_layers, n)
    outputs = drafter.aux_layer_ids
    nested = aux_layer_ids is None and bool(named) and named[0].are_outputs and not named[0].certain
    if nested and max(named[0].ids) == n:
        inputs = dataclasses.replace(named[0], are_outputs=False)
        why = (
            f"{drafter_name}: {inputs.key} in config.json counts layer inputs ({list(inputs.ids)} of {n} layers); "
            f"using outputs {list(inputs.outputs)}; if acceptance is low, peagle parity tries others"
        )
        return AuxLayers(inputs.outputs, describe_aux_layers(inputs.outputs, [inputs]), why, converted_from_inputs=True)
    if outputs is None:
        of_block = drafter.kind == "DFlash"
        outputs = default_dflash_layers(drafter.num_layers, n) if of_block else default_aux_layer_ids(n)
        if len(outputs) != drafter.num_aux_layers:
            raise InputError(
                f"the drafter {drafter_name} reads {drafter.num_aux_layers} aux layers and does not name them, and the "
                f"default for the target {target_name} is {len(outputs)}: {list(outputs)}; give --aux-layer-ids, or "
                f"name the layers whose inputs they are in its config.json, under {TOP_AUX_LAYERS.key}"
            )
        return AuxLayers(outputs, describe_aux_layers(outputs, named))
    if outside := [layer for layer in outputs if not 0 <= layer < n]:
        if aux_layer_ids is not None:
            raise refuse(f"--aux-layer-ids names the output of layer {outside[0]}; expected 0..{n - 1}")
        (wrong,), (first, last) = named[0].written(outside[:1]), named[0].written((0, n - 1))
        raise refuse(
            f"{named[0].key} in its config.json is {list(named[0].ids)}, and {wrong} names no layer; expected "
            f"{first}..{last} there, for the target's layers 0..{n - 1}: use the drafter that was trained for it, or "
            "correct them there"
        )
    by_option = aux_layer_ids is not None
    warning = None if by_option else aux_layers_warning(named, drafter_name, n)
    return AuxLayers(outputs, describe_aux_layers(outputs, named, by_option), warning)


def describe_aux_layers(
    outputs: Sequence[int] | None, named: Sequence["NamedAuxLayers"], by_option: bool = False
) -> str:
    """Describe the aux layers of a drafter (None: the target's default) and the source of their ids."""
    which = "outputs" if outputs is None else f"outputs {', '.join(map(str, outputs))}"
    if not named:
        return f"{which}, given" if by_option else f"{which} by the target's default, as config.json names none"
    ids = f"config.json's {named[0].key} {list(named[0].ids)}"
    return f"{which}, given instead of {ids}" if by_option else f"{which}: {ids} are {named[0].meaning}"


def aux_layers_warning(
    named: Sequence["NamedAuxLayers"], drafter_name: str | Path, num_layers: int | None = None
) -> str | None:
    """Return a warning if the ids in config.json may follow the other convention, or if several keys disagree.

    num_layers: the target's, if known.
    """
    if not named:
        return None
    used = named[0]

    def line(but: str, outputs: Sequence[int]) -> str:
        typed = ",".join(map(str, outputs))
        return (
            f"{drafter_name}: {used.key} {list(used.ids)} in config.json are read as {used.meaning}, but {but}; if few "
            f"drafts are accepted, try --aux-layer-ids {typed}, and if it helps write {used.written(outputs)} there"
        )

    def names_layers(ids: "NamedAuxLayers") -> bool:
        return min(ids.ids) >= ids.written((0,))[0] and (num_layers is None or max(ids.outputs) < num_layers)

    for other in named[1:]:
        if names_layers(other) and other.outputs != used.outputs:
            return line(f"{other.key} {list(other.ids)}, which are {other.meaning}, name others", other.outputs)
    # all known defaults begin with the output of layer 1, which is the input of layer 2. Some exporters write inputs
    # under a key for outputs, or the reverse: ids that begin with another layer raise the warning
    if used.certain:
        return None
    flipped = dataclasses.replace(used, are_outputs=not used.are_outputs)
    unusual = min(used.ids) != 1 if used.are_outputs else min(used.ids) == 1
    if unusual and names_layers(flipped):
        if used.are_outputs and min(used.ids) != 2:
            return line("outputs usually begin with 1, and some exporters write inputs there", flipped.outputs)
        kind = "outputs" if flipped.are_outputs else "inputs"
        return line(f"{kind} usually begin with {min(used.ids)}", flipped.outputs)
    return None


def chosen_window(drafter_directory: Path | None, window: int | str) -> int | Literal["off"] | None:
    """Read the window of the option, or of speculation.json; None: neither has one, so config.json decides.

    Raises InputError for a malformed window, and for a window without a drafter.
    """
    if window == AUTO:
        return None if drafter_directory is None else read_window(drafter_directory)
    if drafter_directory is None:
        raise InputError("a drafter window is given, but there is no drafter with weights; leave it out")
    return parse_window(window)


def parse_window(window: int | str) -> int | Literal["off"]:
    """Read a window option other than "auto". Raises InputError for anything else."""
    if window == OFF:
        return OFF
    try:
        positions = int(window)
    except ValueError:
        positions = 0
    if positions < 1:
        raise InputError(
            f"the drafter window is {window!r}; expected the positions that its attention sees, {AUTO} or {OFF}",
            "drafter_window",
        )
    return positions


def windowed(
    config: "DrafterConfig", window: int | Literal["off"] | None, *, by_option: bool
) -> tuple["DrafterConfig", str]:
    """Return (the config with this window in every layer, a description). None: the windows of the config."""
    if window is None:
        return config, describe_windows(config)
    source = "given" if by_option else f"by {SPECULATION_FILE}"
    if isinstance(window, int):
        return config.with_window(window), f"{window} positions, {source}"
    return config.with_window(None), f"{OFF}, {source}"


def describe_windows(config: "DrafterConfig") -> str:
    """Describe the windows in a drafter's config.json: 2048 positions in 3 of 4 layers, by config.json."""
    windows = [window for window in config.windows or () if window is not None]
    if not windows:
        return f"{OFF}, by default: no file names one"
    where = "" if len(windows) == config.num_layers else f" in {len(windows)} of {config.num_layers} layers"
    return f"{' and '.join(map(str, sorted(set(windows))))} positions{where}, by config.json"


def warn_of_windows(config: "DrafterConfig", max_positions: int) -> None:
    """Warn if a window is wider than the target's positions."""
    if (widest := max((window or 0 for window in config.windows or ()), default=0)) > max_positions:
        warnings.warn(
            f"the drafter's window of {widest} positions is larger than the target's {max_positions}, so it hides "
            "nothing",
            InputWarning,
            stacklevel=3,
        )
