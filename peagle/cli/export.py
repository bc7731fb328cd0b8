"""`peagle export`: a drafter in another dialect, bit for bit, with a model card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from drafter.config import DrafterConfig
from drafter.load import DRAFTS_ELSEWHERE, Dialect, load_drafter, save_drafter
from drafter.params import DrafterParams
from drafter.train.folder import LOG, RECIPE, read_log
from drafter.vocabulary import FREQUENT_TOKENS
from peagle.cli.display import Display
from peagle.cli.settings import ExportSettings
from peagle.metrics import figure_text
from peagle.ops.errors import InputError
from peagle.pair import resolve

CARD = """\
# {kind} drafter for {target}

It proposes what {target} says next, reading {taps} hidden states of it; the target checks every proposal, so its
output stays its own.

- {layers} of width {hidden}, {heads} query and {kv_heads} key/value heads of {head_dim}, MLP {mlp_width}
- reads the outputs of the target's layers {layer_ids}, {target_hidden} wide
- proposes {proposes}
- {slots}
{training}
## Use

    peagle speculate --target {target} --drafter DIR "..."

{elsewhere}
"""
VLLM = """\
vLLM: `vllm serve {target} --speculative-config '{config}'`"""
SPECULATORS = """\
The files are in the layout of the speculators package (`SpeculatorModel.from_pretrained`), which vLLM serves, too."""


def export_command(settings: ExportSettings) -> int:
    """--out holds the drafter in the dialect, and its card; what was read back from it is the same bit for bit. Returns
    the exit code.

    Raises InputError for what cannot be read, for a folder that holds files, and for a drafter that the dialect cannot
    say.
    """
    source, out = resolve(settings.drafter, "drafter"), Path(settings.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists; expected a new folder, so that nothing is overwritten")
    dialect = cast(Dialect, settings.dialect)
    if dialect == "speculators" and settings.verifier is None:
        raise InputError("--dialect speculators needs --verifier, the target: it does not load a drafter without")
    params, config = load_drafter(source)
    beside = {FREQUENT_TOKENS: source / FREQUENT_TOKENS}  # what --draft-vocab N goes by
    files = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    write_with_card(out, params, config, dialect, settings.verifier, source.parent, files)
    again, config_again = load_drafter(out)
    if config_again != config or not _equal(params, again):
        raise InputError(f"what was written to {out} does not read back the same; please report this drafter")
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    display.summary([f"drafter      {out} | {dialect} | read back bit for bit"])
    return 0


def write_with_card(
    out: Path,
    params: DrafterParams,
    config: DrafterConfig,
    dialect: Dialect,
    verifier: str | None,
    run: Path,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """The folder holds the drafter, its card and the other files. verifier: the target, as others name it. run: a
    folder of peagle train, if the drafter comes from one."""
    text = card(config, dialect, verifier, run).encode()
    try:
        save_drafter(out, params, config, dialect, verifier, {**(files or {}), "README.md": text})
    except OSError as error:
        raise InputError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None


def card(config: DrafterConfig, dialect: Dialect, verifier: str | None, run: Path) -> str:
    """The model card."""
    c = config
    kind = "peagle" if c.parallel else "eagle3"
    served: dict[str, Any] = {"method": "eagle3", "model": "DIR", "num_speculative_tokens": DRAFTS_ELSEWHERE[kind]}
    if c.parallel:
        served["parallel_drafting"] = True
    target = verifier or "TARGET"
    all_tokens = c.draft_vocab_size == c.vocab_size
    return CARD.format(
        kind="P-EAGLE" if c.parallel else "EAGLE-3",
        target=target,
        taps=c.num_taps,
        layers="1 layer" if c.num_layers == 1 else f"{c.num_layers} layers",
        hidden=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        mlp_width=c.mlp_width,
        layer_ids="by default" if c.aux_layer_ids is None else ", ".join(map(str, c.aux_layer_ids)),
        target_hidden=c.target_hidden_size,
        proposes=f"{'all' if all_tokens else f'{c.draft_vocab_size:,}'} of the target's {c.vocab_size:,} tokens",
        slots=f"all drafts in one pass; mask token {c.mask_token_id}" if c.parallel else "one draft a pass",
        training=_training(run),
        elsewhere=(VLLM.format(target=target, config=json.dumps(served)) if dialect == "vllm" else SPECULATORS),
    )


def _training(run: Path) -> str:
    """How it was trained and what it reached, if the folder is that of a training."""
    if not (run / RECIPE).is_file() or not (run / LOG).is_file():
        return ""
    record = json.loads((run / RECIPE).read_text(encoding="utf-8"))
    recipe, log = record["recipe"], list(read_log(run / LOG))
    done = max((line["step"] for line in log), default=0)
    of = "" if done == recipe["steps"] else f" of {recipe['steps']}"
    lines = [
        "",
        "## Training",
        "",
        f"{done}{of} steps of {record['rows_per_step']} rows of {recipe['width']} tokens, "
        f"{recipe['optimizer']}, loss {recipe['loss']}, K_train {recipe['cod']['depth']}, r {recipe['cod']['ratio']}, "
        f"from {record['data']['documents']:,} documents of {record['data']['tokens']:,} tokens. All of it: "
        "recipe.json of the training.",
        "",
    ]
    if evaluations := [line["evaluation"] for line in log if "evaluation" in line]:
        found = evaluations[-1]
        calm, quiet = found["acceptance_length_without_loops"], found["num_outputs_without_loops"]
        lines += [
            f"Acceptance length on {found['num_outputs']} held-out prompts, greedy, "
            f"K = {found['num_speculative_tokens']}: {figure_text(found['acceptance_length'], '.2f')}"
            + ("." if calm is None else f"; {calm:.2f} on the {quiet} whose output does not loop."),
            "",
        ]
    return "\n".join(lines)


def _equal(one: DrafterParams, other: DrafterParams) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
