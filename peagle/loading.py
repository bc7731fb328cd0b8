"""Checkpoints to a pair: do they fit together, how much memory do they take, which kernels compute. See `load`.

Beside workflows/ and the commands, the only place in peagle/ that names target/ and drafter/.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from peagle.api import AUTO, DEFAULT_WIDTHS, Pair
from peagle.drafters.ngram import NGram
from peagle.engine.widths import OFF, SPECULATION_FILE, read_widths, read_window
from peagle.ops import cuda
from peagle.ops.checkpoint import Checkpoint, read_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.kernels import Implementation, for_weights
from peagle.ops.kernels import in_words as kernels_in_words
from peagle.ops.memory import refuse_too_large, size_in_words
from peagle.ops.native import available as native_available
from peagle.protocols import Drafter, PyTree
from peagle.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from drafter.config import DrafterConfig
    from drafter.load import NamedAuxLayers
    from drafter.vocabulary import DraftVocab
    from target.config import TargetConfig

DEMO, DEMO_EAGLE3, NGRAM = "demo", "demo-eagle3", "ngram"
DEMO_DIRECTORY = Path(__file__).parent / "demo"
HELD_OUT = DEMO_DIRECTORY / "heldout_prompts.jsonl"  # prompts the demo pair was not trained on
MOST_STEPS_PER_DISPATCH = 24
NO_STOP_TOKEN = (  # behind the directory
    "no stop token is named in generation_config.json, config.json or the tokenizer's files, so every answer takes its "
    "whole budget; expected eos_token_id in generation_config.json"
)
DtypeName = Literal["float32", "bfloat16"]
ExpertsChoice = Literal["auto", "packed", "expanded"]
KernelsChoice = Literal["auto", "native", "xla"]


def load(
    target: str | Path = DEMO,
    drafter: str | Path | None = DEMO,
    *,
    dtype: DtypeName | None = None,
    experts: ExpertsChoice = "auto",
    kernels: KernelsChoice = "auto",
    draft_vocab: int | str | None = None,
    drafter_window: int | str = AUTO,
    aux_layer_ids: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pair:
    """The pair of two checkpoint directories, or the demo pair, which comes with the package.

    drafter "demo-eagle3" is the demo target's autoregressive one, to compare with; "ngram" needs no weights; None
    leaves plain decoding only. A directory that is called like one of these words is given as "./demo". dtype: float32
    on CPU and bfloat16 elsewhere by default. experts: "packed" keeps MXFP4 in memory, "expanded" dequantises at load,
    "auto" takes what is fastest and fits. kernels: "native" runs the compiled CPU kernels or refuses, "xla" does
    without them, "auto" takes them where they run (`peagle info` says). draft_vocab: the drafter proposes so many of
    the most frequent tokens alone, or those listed in a file (drafter.vocabulary). drafter_window: the drafter's
    attention sees the last so many positions alone, or all if it is "off"; "auto" takes what speculation.json beside
    the drafter names, else the windows of its config.json (`Pair.drafter_window` says which). aux_layer_ids: the
    0-based layers of the target whose outputs the drafter reads, in place of those that its config.json names
    (`Pair.aux_layers` says which, and why). progress is told (bytes of the target read, bytes in all) while it is read.

    Raises InputError, in one line, for whatever does not work or does not fit, if it can be told before any weights are
    read; weights that take more memory than there is are among that. Warns, an InputWarning, of what works but may be
    meant otherwise: aux layers or a vocabulary map that look like another convention's, a window that hides nothing,
    no stop token.
    """
    from drafter.load import weight_bytes as drafter_bytes
    from target.load import inspect_target, load_target
    from target.load import weight_bytes as target_bytes
    from target.model import GptOss

    target_directory = resolve(target, "target")
    drafter_directory = drafter_path(target, drafter)
    _aux_layers(target_directory, drafter_directory, aux_layer_ids)
    if draft_vocab is not None:
        _vocabulary(target_directory, drafter_directory, draft_vocab)
    asked_window(drafter_directory, drafter_window)
    tokenizer = load_tokenizer(target_directory)
    dtype = dtype or default_dtype()
    implementation = _implementation(kernels)

    def needed(dtype: DtypeName, experts: ExpertsChoice) -> dict[str, int]:
        wanted = jnp.dtype(dtype)
        of_target = target_bytes(target_directory, dtype=wanted, experts=experts, implementation=implementation)
        if drafter_directory is None:
            return {"the target": of_target}
        of_drafter = drafter_bytes(drafter_directory, wanted, implementation=implementation)
        return {"the target": of_target, "the drafter": of_drafter}

    def least() -> str:
        packed = inspect_target(target_directory).mxfp4
        size = size_in_words(sum(needed("bfloat16", "packed" if packed else "auto").values()))
        options = "--experts packed --dtype bfloat16" if packed else "--dtype bfloat16"
        return f"{options} takes {size}, which is the least; or take a smaller model"

    refuse_too_large(needed(dtype, experts), least)
    loaded = load_target(
        target_directory,
        dtype=jnp.dtype(dtype),
        experts=experts,
        implementation=implementation,
        progress=progress,
    )
    if not loaded.stop_token_ids:
        warnings.warn(f"{target_directory}: {NO_STOP_TOKEN}", InputWarning, stacklevel=2)
    plain = GptOss(loaded.params, loaded.config)
    pair = Pair(
        target=plain,
        plain_target=plain,
        drafter=None,
        tokenizer=tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        dtype=dtype,
        experts=loaded.experts,
        kernels=kernels_in_words() if kernels != "xla" else "XLA",
        steps_per_dispatch=_steps_per_dispatch(loaded.params),
        programs_by_width=implementation != "native",
    )
    return with_drafter(
        pair, target, drafter, draft_vocab=draft_vocab, drafter_window=drafter_window, aux_layer_ids=aux_layer_ids
    )


def with_drafter(
    pair: Pair,
    target: str | Path,
    drafter: str | Path | None,
    *,
    draft_vocab: int | str | None = None,
    drafter_window: int | str = AUTO,
    aux_layer_ids: Sequence[int] | None = None,
) -> Pair:
    """The pair with another drafter, as `load` would give it; the target's weights are the pair's own. `target` is what
    the pair was loaded from. Raises InputError, and warns, as `load` does."""
    from drafter.load import load_drafter, weight_bytes
    from drafter.propose import drafter_of
    from drafter.vocabulary import narrow
    from target.model import GptOss

    target_directory, drafter_directory = resolve(target, "target"), drafter_path(target, drafter)
    plain = pair.plain_target
    assert isinstance(plain, GptOss)
    drafting: Drafter | None = NGram() if drafter == NGRAM else None
    layers = _aux_layers(target_directory, drafter_directory, aux_layer_ids)
    said = window_said = None
    widths = DEFAULT_WIDTHS
    window = asked_window(drafter_directory, drafter_window)
    vocab = None if draft_vocab is None else _vocabulary(target_directory, drafter_directory, draft_vocab)
    if drafter_directory is not None:
        dtype, implementation = jnp.dtype(pair.dtype), plain.params.implementation
        widths = read_widths(drafter_directory) or widths
        size = weight_bytes(drafter_directory, dtype, implementation=implementation)
        refuse_too_large({f"the drafter {drafter}": size}, lambda: "take a smaller drafter, or --dtype bfloat16")
        params, config = load_drafter(
            drafter_directory,
            dtype,
            implementation=implementation,
            target_embedding=plain.params.embedding,
            target_lm_head=plain.params.lm_head,
            aux_layer_ids=aux_layer_ids,
        )
        if vocab is not None:
            params, config = narrow(params, config, vocab)
            said = f"{config.draft_vocab_size} tokens, by {vocab.source}"
        config, window_said = windowed(config, window, given=drafter_window != AUTO)
        if (widest := max((each or 0 for each in config.windows or ()), default=0)) > plain.max_positions:
            warnings.warn(
                f"the drafter's window of {widest} positions is larger than the target's {plain.max_positions}, so it "
                "hides nothing",
                InputWarning,
                stacklevel=2,
            )
        drafting = drafter_of(params, config)
    if layers is not None and layers.doubt is not None:
        warnings.warn(layers.doubt, InputWarning, stacklevel=2)
    tapped = GptOss(plain.params, plain.config, aux_layer_ids=() if layers is None else layers.outputs)
    return dataclasses.replace(
        pair,
        target=tapped,
        drafter=drafting,
        aux_layers=None if layers is None else layers.said,
        draft_vocab=said,
        drafter_window=window_said,
        widths=widths,
        _engines={},
    )


def _aux_layers(
    target_directory: Path, drafter_directory: Path | None, asked: Sequence[int] | None
) -> "AuxLayers | None":
    """What a drafter with weights reads of the target; None where there is no such drafter. Raises InputError as
    `check_fit` does, and for layers that are asked for without one."""
    if drafter_directory is not None:
        return check_fit(target_directory, drafter_directory, asked)
    if asked is not None:
        raise InputError("aux layers are given, but there is no drafter with weights that reads any; leave them out")
    return None


def _vocabulary(target_directory: Path, drafter_directory: Path | None, asked: int | str) -> "DraftVocab":
    """The draft vocabulary asked for. Raises InputError for one that cannot be, and without a drafter to narrow."""
    from drafter.vocabulary import choose
    from target.load import inspect_target

    if drafter_directory is None:
        raise InputError("a draft vocabulary is given, but there is no drafter with weights whose head it narrows")
    files = inspect_target(target_directory)
    return choose(str(asked), drafter_directory, files.config.vocab_size, files.stop_token_ids)


def asked_window(drafter_directory: Path | None, asked: int | str) -> int | Literal["off"] | None:
    """Read the window asked for, or the one in speculation.json; None: neither, so config.json decides.

    Raises InputError for a value that is no window, and for a window without a drafter.
    """
    if asked == AUTO:
        return None if drafter_directory is None else read_window(drafter_directory)
    if drafter_directory is None:
        raise InputError("a drafter window is given, but there is no drafter with weights; leave it out")
    if asked == OFF:
        return OFF
    try:
        window = int(asked)
    except ValueError:
        window = 0
    if window < 1:
        raise InputError(
            f"the drafter window is {asked!r}; expected the positions that its attention sees, {AUTO} or {OFF}"
        )
    return window


def windowed(
    config: "DrafterConfig", window: int | Literal["off"] | None, *, given: bool
) -> tuple["DrafterConfig", str]:
    """Give every layer that window, None leaving the config as it is; with the windows in words, and their source."""
    if window is None:
        return config, windows_in_words(config)
    source = "given" if given else f"by {SPECULATION_FILE}"
    if isinstance(window, int):
        return config.with_window(window), f"{window} positions, {source}"
    return config.with_window(None), f"{OFF}, {source}"


def windows_in_words(config: "DrafterConfig") -> str:
    """Say how far the layers of a drafter see by its config.json. Example: 2048 positions in 3 of 4 layers, by
    config.json."""
    windows = [window for window in config.windows or () if window is not None]
    if not windows:
        return f"{OFF}, by default: no file names one"
    where = "" if len(windows) == config.num_layers else f" in {len(windows)} of {config.num_layers} layers"
    return f"{' and '.join(map(str, sorted(set(windows))))} positions{where}, by config.json"


def resolve(name: str | Path, part: Literal["target", "drafter"]) -> Path:
    """The directory a name stands for: one of the demo's, or itself. Raises InputError where there is no demo."""
    if name == DEMO_EAGLE3 and part == "drafter":
        directory = DEMO_DIRECTORY / "drafter_eagle3"
    elif name == DEMO:
        directory = DEMO_DIRECTORY / part
    else:
        return Path(name)
    if not (directory / "config.json").is_file():
        raise InputError(
            f"this installation of peagle comes without the demo {part}; give checkpoint directories with --target and "
            "--drafter, or train the demo with scripts/demo"
        )
    return directory


def drafter_path(target: str | Path, drafter: str | Path | None) -> Path | None:
    """The drafter's directory; None for one without weights. Raises InputError for the demo's beside another target."""
    if drafter is None or drafter == NGRAM:
        return None
    if drafter in (DEMO, DEMO_EAGLE3) and target != DEMO:
        if not Path(target).exists():
            raise InputError(f"{target} does not exist; expected a checkpoint's directory")
        raise InputError(
            f"the target {target} needs a drafter of its own (the demo's drafters fit the demo target only); give "
            "--drafter DIR, or --drafter ngram, which needs no weights"
        )
    directory = resolve(drafter, "drafter")
    if not directory.exists():
        raise InputError(
            f"{directory} does not exist; expected a drafter's directory, {DEMO}, {DEMO_EAGLE3}, or {NGRAM}"
        )
    return directory


@dataclass(frozen=True)
class AuxLayers:
    """The layers of a target whose outputs a drafter reads."""

    outputs: tuple[int, ...]
    said: str  # the same in words, and what decided
    doubt: str | None = None  # a line, where it looks as if something else was meant


def check_fit(target_directory: Path, drafter_directory: Path, aux_layer_ids: Sequence[int] | None = None) -> AuxLayers:
    """Check that a drafter fits a target, and find the aux layers it reads: those given, or its config.json's, or the
    target's default. No weights are read.

    Raises InputError naming both sides where hidden size, vocabulary or aux layers do not fit.
    """
    from target.load import inspect_target

    target = inspect_target(target_directory).config
    return fitting_aux_layers(
        target, read_checkpoint(drafter_directory), target_directory, drafter_directory, aux_layer_ids
    )


def fitting_aux_layers(
    target: "TargetConfig",
    checkpoint: Checkpoint,
    target_name: str | Path,
    drafter_name: str | Path,
    aux_layer_ids: Sequence[int] | None = None,
) -> AuxLayers:
    """See `check_fit`; the names are for its messages."""
    from drafter.load import TOP_AUX_LAYERS, named_aux_layers, parse_config
    from target.config import default_aux_layer_ids

    drafter = parse_config(checkpoint, aux_layer_ids)

    def refuse(what: str) -> InputError:
        return InputError(f"the drafter {drafter_name} does not fit the target {target_name}: {what}")

    def other(what: str, drafters: object, targets: object) -> InputError:
        return refuse(f"{what} {drafters}, the target's is {targets}; use the drafter that was trained for this target")

    if drafter.target_hidden_size != target.hidden_size:
        raise other("it reads hidden states of size", drafter.target_hidden_size, target.hidden_size)
    if drafter.vocab_size != target.vocab_size:
        raise other("its vocabulary has size", drafter.vocab_size, target.vocab_size)
    n, named = target.num_layers, named_aux_layers(checkpoint.config)
    outputs = drafter.aux_layer_ids
    if outputs is None:
        outputs = default_aux_layer_ids(n)
        if len(outputs) != drafter.num_taps:
            raise InputError(
                f"the drafter {drafter_name} reads {drafter.num_taps} aux layers and does not name them, and the "
                f"default for the target {target_name} is {len(outputs)}: {list(outputs)}; give --aux-layer-ids, or "
                f"name the layers whose inputs they are in its config.json, under {TOP_AUX_LAYERS.key}"
            )
        return AuxLayers(outputs, aux_layers_in_words(outputs, named))
    if outside := [layer for layer in outputs if not 0 <= layer < n]:
        if aux_layer_ids is not None:
            raise refuse(f"--aux-layer-ids names the output of layer {outside[0]}; expected 0..{n - 1}")
        (wrong,), (first, last) = named[0].written(outside[:1]), named[0].written((0, n - 1))
        raise refuse(
            f"{named[0].key} in its config.json is {list(named[0].ids)}, and {wrong} is no layer's; expected "
            f"{first}..{last} there, for the target's layers 0..{n - 1}: use the drafter that was trained for it, or "
            "give --aux-layer-ids"
        )
    given = aux_layer_ids is not None
    doubt = None if given else doubtful_aux_layers(named, drafter_name, n)
    return AuxLayers(outputs, aux_layers_in_words(outputs, named, given), doubt)


def aux_layers_in_words(outputs: Sequence[int] | None, named: Sequence["NamedAuxLayers"], given: bool = False) -> str:
    """Which outputs of the target's layers a drafter reads (None: the default of whatever target), and what said so."""
    which = "outputs" if outputs is None else f"outputs {', '.join(map(str, outputs))}"
    if not named:
        return f"{which}, given" if given else f"{which} by the target's default, as config.json names none"
    says = f"config.json's {named[0].key} {list(named[0].ids)}"
    return f"{which}, given instead of {says}" if given else f"{which}: {says} are {named[0].meaning}"


def doubtful_aux_layers(
    named: Sequence["NamedAuxLayers"], drafter_name: str | Path, num_layers: int | None = None
) -> str | None:
    """A line where the ids of a config.json look as if they were numbered in the other way, or where it names several;
    None where all is well. num_layers: the target's, if it is known."""
    if not named:
        return None
    used = named[0]

    def line(but: str, outputs: Sequence[int]) -> str:
        typed = ",".join(map(str, outputs))
        return (
            f"{drafter_name}: {used.key} {list(used.ids)} in config.json are read as {used.meaning}, but {but}; if few "
            f"drafts are accepted, try --aux-layer-ids {typed}, and if it helps write {used.written(outputs)} there"
        )

    for each in named[1:]:
        if each.outputs != used.outputs:
            return line(f"{each.key} {list(each.ids)}, which are {each.meaning}, name others", each.outputs)
    # the default everywhere begins with the output of layer 1, which is the input of layer 2
    flipped = dataclasses.replace(used, are_outputs=not used.are_outputs)
    usual = flipped.ids[0] == flipped.written((1,))[0]
    if usual and (num_layers is None or all(0 <= layer < num_layers for layer in flipped.outputs)):
        kind = "outputs" if flipped.are_outputs else "inputs"
        return line(f"{kind} as a rule begin with {used.ids[0]}", flipped.outputs)
    return None


def _steps_per_dispatch(params: PyTree) -> int:
    """As many steps as some 640 MB of weights allow: 10 to 30 ms on a CPU, beside which the millisecond that the host
    takes to send off a program with all its arguments does not count (at a step of 4 ms it did, by 8 %). One where a
    loop over steps on the device would ask the host after each."""
    if jax.default_backend() != "cpu":
        return 1
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return int(np.clip(640_000_000 // weights, 1, MOST_STEPS_PER_DISPATCH))


def _implementation(kernels: KernelsChoice) -> Implementation | None:
    """Choose the implementation of a pair's ops. Raises InputError if "native" is named and no kernels run here."""
    if kernels == "native" and not (native_available() or cuda.available()):
        raise InputError(f"the native kernels do not run here: {kernels_in_words().removeprefix('XLA: ')}")
    return "xla" if kernels == "xla" else for_weights()


def default_dtype() -> DtypeName:
    """float32 on CPU, bfloat16 elsewhere. Raises InputError where JAX cannot start on the platform it was told."""
    try:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    except RuntimeError as error:
        raise InputError(
            f"JAX cannot start: {' '.join(str(error).split())}; check JAX_PLATFORMS and the installed jax"
        ) from None
