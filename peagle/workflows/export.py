"""Write a drafter in another dialect, with the same bits in its tensors, and with a model card."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drafter.config import DrafterConfig
from drafter.dialects import DEFAULT_DRAFTS, PACKAGE, VLLM, Dialect, open_drafter, refused_by
from drafter.load import load_drafter, save_drafter, shared_tensors, sort_aux_layers
from drafter.params import DrafterParams
from drafter.train.folder import COMMAND, LOG, read_log
from drafter.trained import DRAFTER, RECIPE, read_record, recorded_coverage, trained_depth
from drafter.vocabulary import FREQUENT_TOKENS, Coverage
from peagle.base.errors import InputError
from peagle.base.files import encoded
from peagle.base.strict_json import dumps
from peagle.loading.checkpoints import DEMO, auto_drafts, name_for_others, target_folder
from peagle.loading.fit import check_fit, describe_windows
from peagle.loading.speculation import SPECULATION_FILE
from peagle.measure.metrics import figure_text
from target.config import TargetConfig
from target.load import inspect_target, load_embedding_and_head

CARD = """\
# {kind} drafter for {target}

It drafts the next tokens of {target} from {aux_layers} of its hidden states. The target verifies every draft, so the
output is exactly its own.

- {layers} of width {hidden}, {heads} query and {kv_heads} key/value heads of {head_dim}, MLP {mlp_width}
- reads the outputs of the target's layers {layer_ids}, {target_hidden} wide
- {sees}
- proposes {proposes}
- {slots}
{training}
## Use

In this folder:

    peagle speculate --target {target} --drafter . "..."

{elsewhere}
"""
CURVE = "curve.svg"  # of a training, beside its log; a card has a copy
IN_GROUPS = "All drafting layers should belong to the same kv cache group"  # vLLM's error
ONE_GROUP = "--disable-hybrid-kv-cache-manager"


@dataclasses.dataclass(frozen=True)
class Exported:
    """A written drafter."""

    stored: DrafterConfig  # before
    config: DrafterConfig  # as written
    refused: Mapping[str, str]  # by engine that cannot load it: the reason
    verifier: str | None  # the target, as written


def export(
    source: Path, out: Path, dialect: Dialect, verifier: str | None, aux_layer_ids: tuple[int, ...] | None
) -> Exported:
    """Write the drafter in the dialect with its card, and check that it reads back bit for bit.

    verifier: the target; None: that in the record of the drafter's training. A folder provides the embedding, head and
    positions that the drafter does not store. Raises InputError for files that cannot be read, for a folder that holds
    files, and for a drafter that vLLM cannot load in that dialect.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists; expected a new folder, so that nothing is overwritten")
    open_drafter(source)  # raises for an absent folder, before other errors
    trained_for = _trained_for(source) if verifier is None else None
    verifier = name_for_others(trained_for) if verifier is None else name_for_others(verifier) or verifier
    if dialect == "speculators" and verifier is None:
        why = f"; {trained_for}, the target of its training, is not there" if trained_for else ""
        raise InputError(f"--dialect speculators needs --verifier, the name or folder of the target{why}")
    target_directory = None if verifier is None else target_folder(verifier)
    target = None
    if target_directory is not None:
        target = inspect_target(target_directory).config
        layers = check_fit(target_directory, source, aux_layer_ids)
        aux_layer_ids = layers.outputs if layers.converted_from_inputs else aux_layer_ids
    params, stored = _load(source, target_directory, aux_layer_ids)
    refused = refused_by(stored, dialect)
    if VLLM in refused:  # vLLM reads both dialects
        remedy = "" if VLLM in refused_by(stored, "speculators") else "; take --dialect speculators, which it does load"
        raise InputError(f"{source} cannot be loaded by {' or '.join(refused)}: {refused[VLLM]}{remedy}")
    params, config = sort_aux_layers(params, with_positions(stored, target, source))
    beside = {name: source / name for name in (FREQUENT_TOKENS, SPECULATION_FILE)}
    files = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    if SPECULATION_FILE not in files and trained_depth(source) is not None:  # by the recipe, which stays behind
        files[SPECULATION_FILE] = encoded(dumps({"num_speculative_tokens": auto_drafts(source)}) + "\n")
    write_with_card(out, params, config, dialect, verifier, source.parent, files)
    shared = shared_tensors(open_drafter(out))
    ends: dict[str, Any] = {"target_embedding": params.embedding, "target_lm_head": params.lm_head} if shared else {}
    read_back = load_drafter(out, **ends)
    if read_back[1] != config or not _equal(params, read_back[0]):
        raise InputError(f"the files in {out} do not read back the same; please report this drafter")
    return Exported(stored, config, refused, verifier)


def with_positions(config: DrafterConfig, target: TargetConfig | None, name: Path) -> DrafterConfig:
    """Give a drafter without max_positions those of the target. Raises InputError without a target.

    vLLM reads 2048 from a config.json without them, and stops drafting there.
    """
    if config.max_positions is not None:
        return config
    if target is None:
        raise InputError(
            f"{name} names no max_position_embeddings, and without vLLM stops drafting at position 2048; give "
            "--verifier DIR, the target's folder"
        )
    return dataclasses.replace(config, max_positions=target.max_positions)


def _trained_for(source: Path) -> str | None:
    """Return the target of the training whose folder holds the drafter; None if no record names it."""
    command = (read_record(source.parent) or {}).get(COMMAND)
    return (command["target"] or DEMO) if isinstance(command, dict) and "target" in command else None


def _load(
    source: Path, target_directory: Path | None, aux_layer_ids: tuple[int, ...] | None
) -> tuple[DrafterParams, DrafterConfig]:
    """Load the drafter, with the target's embedding and head if it stores none.

    Raises InputError if it needs them and no target is named.
    """
    shared = shared_tensors(open_drafter(source))
    if shared and target_directory is None:
        raise InputError(
            f"{source} does not store {' and '.join(shared)}: it shares its target's; give --verifier DIR, the "
            "target's folder, to take them from"
        )
    embedding, lm_head = (
        load_embedding_and_head(target_directory) if shared and target_directory is not None else (None, None)
    )
    return load_drafter(source, target_embedding=embedding, target_lm_head=lm_head, aux_layer_ids=aux_layer_ids)


def write_with_card(
    out: Path,
    params: DrafterParams,
    config: DrafterConfig,
    dialect: Dialect,
    verifier: str | None,
    run: Path,
    files: Mapping[str, bytes],
) -> None:
    """Write the drafter, its card and other files into a folder.

    verifier: the target's name for others. run: the drafter's folder of peagle train, if it is one: the card then
    describes the training, with a copy of its curve.
    """
    save_drafter(out, params, config, dialect, verifier, {**files, **card_files(config, dialect, verifier, run)})


def card_files(config: DrafterConfig, dialect: Dialect, verifier: str | None, run: Path) -> dict[str, bytes]:
    """Make the card and the copy of the curve that it shows, by name. The arguments are those of `write_with_card`."""
    written = {"README.md": encoded(card(config, dialect, verifier, run))}
    if _is_training(run) and (run / CURVE).is_file():
        written[CURVE] = (run / CURVE).read_bytes()
    return written


def card(config: DrafterConfig, dialect: Dialect, verifier: str | None, run: Path) -> str:
    c = config
    all_tokens = c.draft_vocab_size == c.vocab_size
    return CARD.format(
        kind=c.kind,
        target=verifier or "TARGET",
        aux_layers=c.num_aux_layers,
        layers="1 layer" if c.num_layers == 1 else f"{c.num_layers} layers",
        hidden=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        mlp_width=c.mlp_width,
        layer_ids="by default" if c.aux_layer_ids is None else ", ".join(map(str, c.aux_layer_ids)),
        target_hidden=c.target_hidden_size,
        proposes=f"{'all' if all_tokens else f'{c.draft_vocab_size:,}'} of the target's {c.vocab_size:,} tokens"
        + coverage_in_data(recorded_coverage(run / DRAFTER)),
        sees="sees all positions" if c.narrowest_window is None else f"sees the last {describe_windows(c)}",
        slots=_slots(c),
        training=_training(run),
        elsewhere=_elsewhere(c, dialect, verifier or "TARGET"),
    )


def _slots(config: DrafterConfig) -> str:
    """Describe how many drafts a pass gives, and by which mask token."""
    if not config.parallel:
        return "one draft a pass"
    block = "" if config.block_drafts is None else f", up to {config.block_drafts} of them"
    return f"all drafts in one pass{block}; mask token {config.mask_token_id}"


def coverage_in_data(measured: Coverage | None) -> str:
    """Continue a line about a draft vocabulary with its coverage, if that was measured."""
    return "" if measured is None else f"; in its training data {measured.describe()}"


def _elsewhere(config: DrafterConfig, dialect: Dialect, name: str) -> str:
    """Say how the speculators package and vLLM load the drafter, or why they cannot."""
    refused = refused_by(config, dialect)
    lines = []
    if dialect == "speculators":
        package = "The files are in the layout of the speculators package"
        cannot = f", which cannot load them: {refused.get(PACKAGE)}."
        lines.append(package + (cannot if PACKAGE in refused else " (`SpeculatorModel.from_pretrained`)."))
    if VLLM in refused:
        return "\n\n".join([*lines, f"vLLM cannot load it: {refused[VLLM]}."])
    served: dict[str, Any] = {"method": "eagle3", "model": ".", "num_speculative_tokens": config.block_drafts}
    if config.kind == "DFlash":
        served["method"] = "dflash"
    elif config.parallel:
        served |= {"num_speculative_tokens": DEFAULT_DRAFTS["peagle"], "parallel_drafting": True}
    else:
        served["num_speculative_tokens"] = DEFAULT_DRAFTS["eagle3"]
    beside_target = config.kind == "DFlash" or dialect == "vllm"
    command = f"vllm serve {name} --speculative-config '{dumps(served)}'" if beside_target else "vllm serve ."
    lines.append(f"vLLM: `{command}`")
    if config.num_layers > 1:  # that stops some versions, by the target's and the drafter's numbers of layers
        lines.append(f'If vLLM stops with "{IN_GROUPS}", add `{ONE_GROUP}`.')
    return "\n\n".join(lines)


def _is_training(run: Path) -> bool:
    return (run / RECIPE).is_file() and (run / LOG).is_file()


def _training(run: Path) -> str:
    """Describe a training and its acceptance; "" for another folder. Raises InputError for a damaged record."""
    if not _is_training(run):
        return ""
    try:
        return _describe_training(run)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{run}: {RECIPE} or {LOG} is damaged ({error!r}); expected what peagle train writes: copy the folder "
            f"{DRAFTER} elsewhere, and export the copy"
        ) from None


def _describe_training(run: Path) -> str:
    record = json.loads((run / RECIPE).read_text(encoding="utf-8"))
    recipe, log = record["recipe"], list(read_log(run / LOG))
    done = max((line["step"] for line in log), default=0)
    of = "" if done == record["steps"] else f" of {record['steps']}"
    lines = [
        "",
        "## Training",
        "",
        f"{done}{of} steps of {recipe['rows']} rows of {recipe['width']} tokens, "
        f"{recipe['optimizer']}, loss {recipe['loss']}, K_train {recipe['depth']}, r {recipe['ratio']}, "
        f"from {record['data']['documents']:,} documents of {record['data']['tokens']:,} tokens. All of it: "
        "recipe.json of the training.",
        "",
    ]
    if evaluations := [line["evaluation"] for line in log if "evaluation" in line]:
        last = evaluations[-1]
        length, num_outputs = last["acceptance_length_without_loops"], last["num_outputs_without_loops"]
        lines += [
            f"Acceptance length on {last['num_outputs']} held-out prompts, K = {last['num_speculative_tokens']}: "
            f"{figure_text(last['acceptance_length'], '.2f')} greedily"
            + ("" if length is None else f", {length:.2f} on the {num_outputs} whose output does not loop")
            + f"; {figure_text(last['acceptance_length_at_temperature_1'], '.2f')} at temperature 1.",
            "",
        ]
    if (run / CURVE).is_file():
        lines += [f"![Loss, right drafts and acceptance length over the steps]({CURVE})", ""]
    return "\n".join(lines)


def _equal(one: DrafterParams, other: DrafterParams) -> bool:
    """Test whether all leaves have equal bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
