"""`peagle parity` on the demo pair: it finds no fault, and names each planted cause of low acceptance."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peagle.loading.load
from drafter.config import DrafterConfig
from drafter.dialects import open_drafter
from drafter.load import load_drafter, save_drafter
from drafter.params import DrafterParams
from drafter.propose import PEagle
from drafter.vocabulary import Coverage, choose, narrow
from peagle.cli import main
from peagle.loading.checkpoints import DEMO_DIRECTORY, HELD_OUT
from peagle.ops.attention import PagedCache
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import from_ids
from peagle.workflows.draft_parity import DraftedText, Reading, accepted, causes, compare, replay
from peagle.workflows.hf_reference import other_tokens
from peagle.workflows.parity import (
    DraftedTexts,
    Findings,
    ParityConfig,
    draft_texts,
    examine,
    readings,
    with_all_tokens,
)
from target.params import TargetParams
from tests.support.commands import all_refused, run
from tests.support.drafters import random_params
from tests.support.pairs import TARGET, Directories, edit_json

pytestmark = pytest.mark.compile

SETTINGS = ParityConfig(3, 32, 1)
FEW = ["-n", "32", "-k", "3", "--num-prompts", "3"]
CONVERSATIONS = read_prompt_file(HELD_OUT).conversations[:8]
DEMO_DRAFTER = DEMO_DIRECTORY / "drafter"
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.cli.parity.REFERENCE_STEPS", 2)


@pytest.fixture(scope="module")
def demo() -> Pair:
    return peagle.loading.load.load()


@pytest.fixture(scope="module")
def drafted(demo: Pair) -> DraftedTexts:
    """The demo pair's answers to three prompts."""
    return draft_texts(demo, CONVERSATIONS[:3], SETTINGS, raw=False)


def test_the_demo_pair_does_what_it_should(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "parity.json"
    prompts.write_bytes(HELD_OUT.read_bytes() + b'{"prompt": ""}\n')
    command = ["parity", *FEW, "--prompt-file", str(prompts)]
    code, lines, _ = run(capsys, *command, "--json", str(out))
    assert code == 0, lines
    (row,) = json.loads(out.read_text())["skipped"]
    assert row["reason"].endswith(f"line {row['line']} is empty; expected some text")
    assert lines.splitlines()[-1] == f"left out     1 row without a usable prompt, the first: {row['reason']}"
    assert "the same as the float64 reference" in lines
    assert "in every step" in lines
    assert "LIKELY CAUSE" not in lines
    findings = json.loads(out.read_text())["drafter"]
    assert findings["difference"] is None
    assert findings["acceptance_length"] == pytest.approx(findings["expected"], abs=0.02)
    assert findings["other_rendering"] < findings["acceptance_length"]
    assert findings["logits"]["max_difference"] < 1e-4


# Targets whose parameters are not those of their files


def rolled_head(params: TargetParams) -> TargetParams:
    """Make every token wrong."""
    return dataclasses.replace(params, lm_head=jnp.roll(params.lm_head, 1, axis=1))


def other_norm(params: TargetParams) -> TargetParams:
    return dataclasses.replace(params, norm=params.norm * jnp.linspace(0.2, 2.0, params.norm.size))


def other_layer(layer: int, params: TargetParams) -> TargetParams:
    layers = list(params.layers)
    attention = dataclasses.replace(layers[layer].attention, out=-layers[layer].attention.out)
    layers[layer] = dataclasses.replace(layers[layer], attention=attention)
    return dataclasses.replace(params, layers=tuple(layers))


LAST = TARGET.num_layers - 1
TARGET_FAULTS = {
    "none": (lambda params: params, None),
    "head": (rolled_head, "the logits"),
    "norm": (other_norm, "the final norm"),
    "last layer": (functools.partial(other_layer, LAST), f"layer {LAST}"),
    "middle layer": (functools.partial(other_layer, 1), "layer 1"),
}


def prompt_file(directory: Path) -> Path:
    path = directory / "parity_prompts.jsonl"
    path.write_text('{"prompt": "one two three"}\n{"prompt": "the quick brown fox"}\n')
    return path


@pytest.fixture(scope="module")
def small(directories: Directories) -> Pair:
    pytest.importorskip("torch")
    pair = peagle.loading.load.load(directories.target, directories.drafter, kernels="xla")
    return dataclasses.replace(pair, stop_token_ids=())  # every answer takes its budget


@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_a_target_that_computes_something_else_is_named(
    small: Pair,
    directories: Directories,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """From the output on where it begins; the engine's tokens follow its own target, so they are wrong, too."""
    plant, named = TARGET_FAULTS[fault]
    targets = {
        name: dataclasses.replace(getattr(small, name), params=plant(getattr(small, name).params))
        for name in ("target", "plain_target")
    }
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: dataclasses.replace(small, **targets))
    names = ["--target", str(directories.target), "--drafter", str(directories.drafter)]
    code, lines, _ = run(capsys, "parity", *names, "--prompt-file", str(prompt_file(directories.root)), *FEW)
    if named is None:
        assert f"the same as transformers in {TARGET.num_layers} layers, the final norm and the logits" in lines
        assert "tokens are transformers' greedy ones" in lines
    else:
        assert code == 1
        assert f"DIFFERENT from transformers from {named} on" in lines
    assert ("tokens are NOT transformers' greedy ones" in lines) == (named is not None)


def test_a_token_that_is_not_the_references_is_wrong_unless_the_two_tie() -> None:
    logits = np.array([[0.0, 5.0, 4.99, -9.0], [0.0, 5.0, 1.0, -9.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    tied, wrong = other_tokens(0, np.array([3, 3, 3, 2, 2], np.int32), logits)
    assert (tied.ties, wrong.ties) == (True, False)
    assert (wrong.position, wrong.engine, wrong.reference) == (4, 2, 1)
    assert wrong.behind == pytest.approx(4 / logits.std())


# Checkpoints that say something else than they were trained with


def config_says(**changes: Any) -> Callable[[Path], None]:
    """Plant other values in config.json."""

    def plant(directory: Path) -> None:
        shutil.copytree(DEMO_DRAFTER, directory)
        edit_json(directory / "config.json", **changes)

    return plant


Edited = tuple[DrafterParams, DrafterConfig]


def saved(edit: Callable[[DrafterParams, DrafterConfig], Edited]) -> Callable[[Path], None]:
    """Plant other tensors."""
    return lambda directory: save_drafter(directory, *edit(*load_drafter(DEMO_DRAFTER)))


def shuffled_embedding(params: DrafterParams, config: DrafterConfig) -> Edited:
    order = np.random.default_rng(0).permutation(config.vocab_size)
    return dataclasses.replace(params, embedding=params.embedding[order]), config


def absolute_ids(params: DrafterParams, config: DrafterConfig) -> Edited:
    """Write a map that means, as offsets, every second token."""
    half = jnp.arange(config.vocab_size // 2)
    narrowed = dataclasses.replace(params, lm_head=params.lm_head[:, half], draft_to_target=2 * half)
    return narrowed, dataclasses.replace(config, draft_vocab_size=len(half))


def narrowed_to(size: str, params: DrafterParams, config: DrafterConfig) -> Edited:
    return narrow(params, config, choose(size, DEMO_DRAFTER, config.vocab_size, ()))


def rolled_map(params: DrafterParams, config: DrafterConfig) -> Edited:
    """Write a map that marks the tokens of t2d in another order."""
    params, config = narrowed_to("1024", params, config)
    return dataclasses.replace(params, draft_to_target=jnp.roll(params.draft_to_target, 1)), config


DEMO_LAYERS = json.loads((DEMO_DRAFTER / "config.json").read_text())[AUX_LAYER_IDS]
FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {  # (how it is planted, the cause, the cure)
    # the cure has the right value in the file's numbering, which is not the planted one
    "aux layers": (
        config_says(**{AUX_LAYER_IDS: [layer - 1 for layer in DEMO_LAYERS]}),
        "aux layers: every one is off by -1",
        f'"{AUX_LAYER_IDS}": {DEMO_LAYERS}',
    ),
    "mask token": (config_says(ptd_token_id=3), "mask token: 7 instead of 3", '"ptd_token_id": 7'),
    "norm": (config_says(norm_before_residual=True), "norm_before_residual: false", '"norm_before_residual": false'),
    "embedding": (
        saved(shuffled_embedding),
        "embedding: the target's instead of the stored one",
        "take the tensor embed_tokens.weight out",
    ),
    "absolute ids": (
        saved(absolute_ids),
        "vocabulary map: d2t holds absolute ids, not offsets",
        "store d2t - arange(len(d2t))",
    ),
    "map": (saved(rolled_map), "vocabulary map: that of t2d", "store numpy.flatnonzero(t2d)"),
}


def findings_of(directory: Path, drafted: DraftedTexts) -> Findings:
    """Examine a drafter along the demo pair's answers, with the layers that its config names."""
    pair = peagle.loading.load.load("demo", directory)
    layers = list(pair.target.aux_layer_ids)
    texts = tuple(
        dataclasses.replace(text, aux_hidden=hidden[:, layers].reshape(len(hidden), -1))
        for text, hidden in zip(drafted.texts, drafted.hiddens, strict=True)
    )
    along = dataclasses.replace(drafted, texts=texts)
    without_turns = [from_ids([1])]  # which have no other rendering
    drafter: Any = pair.drafter
    return examine(pair, drafter, open_drafter(directory), along, without_turns, SETTINGS, lambda *_: None)


@pytest.mark.filterwarnings("ignore::peagle.base.errors.InputWarning")  # of ids and maps that look wrong
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_says_something_else_than_it_was_trained_with_is_named(
    drafted: DraftedTexts, tmp_path: Path, fault: str
) -> None:
    plant, cause, cure = FAULTS[fault]
    plant(tmp_path / "drafter")
    findings = findings_of(tmp_path / "drafter", drafted)
    assert not findings.fine
    assert cause in findings.causes[0].name
    assert cure in findings.causes[0].cure


def test_a_vocabulary_that_lacks_what_the_target_says_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the command. Trained for few tokens, a drafter is limited by them, not by how it is read."""
    drafter, out = tmp_path / "drafter", tmp_path / "parity.json"
    save_drafter(drafter, *narrowed_to("100", *load_drafter(DEMO_DRAFTER)))
    code, lines, _ = run(capsys, "parity", *FEW, "--drafter", str(drafter), "--json", str(out))
    assert code == 1
    frac = json.loads(out.read_text())["drafter"]["vocabulary"]["frac"]
    assert 0.3 < frac < 0.9
    assert f"vocabulary   of the answers {frac:.1%} of the tokens, so at most" in lines
    assert f"LIKELY CAUSE vocabulary: {1 - frac:.1%} of the answers' tokens are not among its 100" in lines
    assert "to fix it, train with a larger --draft-vocab" in lines
    assert "in every step" in lines  # the engine runs the checkpoint correctly


def test_raw_prompts_are_named(demo: Pair) -> None:
    settings = dataclasses.replace(SETTINGS, raw=True)
    raw = draft_texts(demo, CONVERSATIONS, settings, raw=True)
    drafter: Any = demo.drafter
    findings = examine(demo, drafter, open_drafter(DEMO_DRAFTER), raw, CONVERSATIONS, settings, lambda *_: None)
    assert findings.causes[0].name == "the prompts are raw"


def tried(directory: Path, length: int = 1, **options: Any) -> dict[str, Any]:
    """List the other readings of a drafter, by name, for a text of this length."""
    pair = peagle.loading.load.load("demo", directory, **options)
    hidden = np.zeros((1, 8, 192), np.float32)
    drafted = DraftedTexts((DraftedText(np.zeros(length, np.int32), hidden[:, :3], (), (), ()),), (hidden,), (0,), 0)
    drafter: Any = pair.drafter
    return {reading.name: reading for reading in readings(pair, drafter, open_drafter(directory), drafted)}


def test_windows_that_hide_something_are_tried() -> None:
    short, long = (
        {name: reading for name, reading in tried(DEMO_DRAFTER, length, drafter_window=64).items() if "window" in name}
        for length in (100, 400)
    )
    assert list(short) == ["window: off"]
    assert list(long) == ["window: off", "window: 128", "window: 256"]
    assert set(long["window: 256"].model.config.windows) == {256}
    cure = 'give --drafter-window 256, or write {"drafter_window": 256} into speculation.json beside the drafter'
    assert long["window: 256"].cure == cure


def test_a_drafter_is_held_back_by_the_tokens_that_it_cannot_propose() -> None:
    """Counted as right until the first draft that is wrong for another reason."""
    text = DraftedText(np.array([1, 5, 9, 9, 6, 7], np.int32), np.zeros((6, 1)), (1, 3), ((4, 9, 6), (6, 8)), (0, 1))
    drafts = [np.array([[4, 9, 6], [6, 8, 0]])]
    reading = with_all_tokens([text], drafts, np.array([4, 6, 7, 8]), Coverage(0.5, 2.0, 3))
    assert reading.accepted.tolist() == [3, 1]
    assert accepted(drafts[0], text).tolist() == [0, 1]


def test_a_gain_that_is_luck_is_no_cause() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, 80)
    better = Reading("better", np.minimum(counts + 1, 4))
    luck = Reading("luck", rng.permutation(counts))
    assert [cause.name for cause in causes(counts, [luck, Reading("same", counts), better])] == ["better"]


# Engines that do something else


@flax.struct.dataclass
class Blind(PEagle):
    """Forgets everything before the tokens committed last."""

    def propose(
        self, state: PagedCache, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, PagedCache]:
        empty = PagedCache(jax.tree.map(jnp.zeros_like, state.pages), state.tables)
        return PEagle.propose(self, empty, fresh, widths, num_drafts, choose)


def test_an_engine_that_does_something_else_is_found(demo: Pair) -> None:
    healthy = demo.drafter
    assert isinstance(healthy, PEagle)
    pair = dataclasses.replace(demo, drafter=Blind(healthy.params, healthy.config, retain_full_kv=True))
    texts = draft_texts(pair, CONVERSATIONS[:3], ParityConfig(3, 48, 2), raw=False).texts
    difference = compare(texts, [replay(healthy, text, 3).token_ids for text in texts])
    assert difference is not None
    assert difference.frac > 0.05


# Other kinds of drafters


def in_turn(params: DrafterParams, config: DrafterConfig) -> Edited:
    """Make an EAGLE-3 drafter of the demo's first layer."""
    layers = dataclasses.replace(params, mask_hidden=None, layers=params.layers[:1])
    return layers, dataclasses.replace(config, mask_token_id=None, num_layers=1)


def in_blocks(_: DrafterParams, config: DrafterConfig) -> Edited:
    config = dataclasses.replace(config, block_size=8, qk_norm=True, num_target_layers=8)
    return random_params(config), config


KINDS: dict[str, tuple[Any, set[str], bool]] = {  # (how it is made, kinds of readings, whether it has logits)
    "EAGLE-3": (in_turn, {"aux layers", "norm_before_residual", "embedding", "norm_output", "window"}, False),
    "DFlash": (in_blocks, {"aux layers", "mask token", "window"}, True),
}


@pytest.mark.parametrize("kind", [pytest.param("EAGLE-3", marks=pytest.mark.slow), "DFlash"])
def test_a_drafter_of_another_kind_is_compared_too(kind: str, tmp_path: Path) -> None:
    """With the target's embedding and head if it has none; its own readings are tried."""
    make, kinds, has_logits = KINDS[kind]
    drafter, out = tmp_path / "drafter", tmp_path / "parity.json"
    save_drafter(drafter, *make(*load_drafter(DEMO_DRAFTER)))
    command = ["parity", "-n", "16", "-k", "3", "--num-prompts", "2"]
    assert main([*command, "--drafter", str(drafter), "--json", str(out)]) in (0, 1)
    findings = json.loads(out.read_text())["drafter"]
    assert (findings["logits"] is not None) == has_logits
    assert findings["logits"] is None or findings["logits"]["max_difference"] < 1e-4
    assert findings["same_drafts_frac"] == 1
    assert findings["difference"] is None
    assert {name.partition(":")[0] for name in findings["readings"]} == kinds


def test_readings_of_an_eagle3_drafter_are_its_own(tmp_path: Path) -> None:
    save_drafter(tmp_path / "drafter", *in_turn(*load_drafter(DEMO_DRAFTER)))
    names = tried(tmp_path / "drafter").keys()
    assert "norm_output: true" in names
    assert not any(name.startswith("mask token") for name in names)


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    own_target = ["--target", str(DEMO_DIRECTORY / "target"), "--drafter", str(DEMO_DRAFTER)]
    table = [
        (["--drafter", "ngram"], "has no weights to compare"),
        (["--drafter", "absent"], "absent"),
        (own_target, "with --prompt-file FILE"),
        (["--prompt-file", "absent.jsonl"], "cannot be read"),
    ]
    all_refused(capsys, ["parity"], table)
