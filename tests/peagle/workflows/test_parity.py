"""`peagle parity` on the demo pair: it finds no fault, and names each planted cause of low acceptance."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peagle.loading
from drafter.load import load_drafter, save_drafter
from drafter.propose import PEagle, drafter_of
from drafter.vocabulary import Coverage, choose, narrow
from peagle.checkpoints import DEMO_DIRECTORY, HELD_OUT
from peagle.cli import main
from peagle.ops.attention import PagedCache, Pages
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.workflows.hf_reference import Layers, layer_by_layer
from peagle.workflows.parity import Reading, Text, accepted, causes, compare, replay
from peagle.workflows.parity_check import ParityConfig, Replies, ask, readings, with_all_tokens
from tests.support.drafters import random_params
from tests.support.pairs import edit_json

K = 3
OPTIONS = ["-n", "32", "-k", str(K)]
FEW = ["--num-prompts", "6", "--reference-steps", "1"]
TAPS = "eagle_aux_hidden_state_layer_ids"
DEMO_DRAFTER = DEMO_DIRECTORY / "drafter"


@pytest.fixture(scope="module", autouse=True)
def _transformers_computes_a_text_once() -> Iterator[None]:
    """Several tests compare the same hidden states of the demo's target with transformers' model."""
    found: dict[tuple[object, ...], Layers] = {}
    compared = layer_by_layer

    def once(directory: Path, token_ids: np.ndarray, hidden: np.ndarray, dtype: str) -> Layers:
        key = directory, token_ids.tobytes(), hidden.tobytes(), dtype
        if key not in found:
            found[key] = compared(directory, token_ids, hidden, dtype)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.cli.comparing.layer_by_layer", once)
        yield


def parity(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["parity", *OPTIONS, *map(str, arguments)])
    return code, capsys.readouterr().out


def test_the_demo_pair_does_what_it_should(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(HELD_OUT.read_bytes() + b'{"prompt": ""}\n')
    assert parity(capsys, *FEW, "--prompts", prompts, "--strict")[0] == 2
    code, said = parity(capsys, *FEW, "--prompts", prompts, "--json", tmp_path / "parity.json")
    assert code == 0, said
    (row,) = json.loads((tmp_path / "parity.json").read_text())["skipped"]
    assert row["reason"].endswith(f"line {row['line']} is empty; expected some text")
    assert said.splitlines()[-1] == f"left out     1 row without a usable prompt, the first: {row['reason']}"
    assert "the same as the float64 reference" in said
    assert "in every step" in said
    assert "LIKELY CAUSE" not in said
    found = json.loads((tmp_path / "parity.json").read_text())["drafter"]
    assert found["difference"] is None
    assert found["seen"] == pytest.approx(found["expected"], abs=0.02)
    assert found["other_rendering"] < found["seen"]
    assert found["logits"]["max_difference"] < 1e-4


def edited(tmp_path: Path, **changes: object) -> Path:
    directory = tmp_path / "drafter"
    shutil.copytree(DEMO_DRAFTER, directory)
    edit_json(directory / "config.json", **changes)
    return directory


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (lambda config: {TAPS: [i - 1 for i in config[TAPS]]}, "taps: "),
        # the same way: other readings of the same checkpoint; that they are tried is tested below
        pytest.param(lambda _: {"ptd_token_id": 3}, "mask token: 7 instead of 3", marks=pytest.mark.slow),
        pytest.param(lambda _: {"norm_before_residual": True}, "norm_before_residual: false", marks=pytest.mark.slow),
    ],
    ids=["taps", "mask token", "norm"],
)  # fmt: skip
def test_a_checkpoint_that_says_something_else_than_it_was_trained_with_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: Any, cause: str
) -> None:
    config = json.loads((DEMO_DRAFTER / "config.json").read_text())
    code, said = parity(capsys, *FEW, "--drafter", edited(tmp_path, **changes(config)))
    assert code == 1
    first = next(line for line in said.splitlines() if "LIKELY CAUSE" in line)
    assert cause in first
    if cause == "taps: ":
        assert "off by -1" in first
        # the right value in the file's numbering, which is not the planted one
        assert '"eagle_aux_hidden_state_layer_ids": [2, 5, 8]' in said
    if cause.startswith("mask token"):
        assert '"ptd_token_id": 7' in said
    assert "in every step" in said  # the engine runs the checkpoint correctly


def test_a_wrong_vocabulary_map_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    params, config = load_drafter(DEMO_DRAFTER)
    vocab = choose("1024", DEMO_DRAFTER, config.vocab_size, ())
    params, config = narrow(params, config, vocab)
    ids = np.asarray(params.draft_to_target)
    save_drafter(
        tmp_path / "drafter", dataclasses.replace(params, draft_to_target=jnp.roll(jnp.asarray(ids), 1)), config
    )
    assert read_checkpoint(tmp_path / "drafter").has("t2d")
    code, said = parity(capsys, *FEW, "--drafter", tmp_path / "drafter")
    assert code == 1
    assert "LIKELY CAUSE vocabulary map: that of t2d" in said


def test_a_vocabulary_that_lacks_what_the_target_says_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Trained for few tokens, a drafter is limited by them, not by how it is read."""
    params, config = load_drafter(DEMO_DRAFTER)
    params, config = narrow(params, config, choose("100", DEMO_DRAFTER, config.vocab_size, ()))
    save_drafter(tmp_path / "drafter", params, config)
    code, said = parity(capsys, *FEW, "--drafter", tmp_path / "drafter", "--json", tmp_path / "parity.json")
    covered = json.loads((tmp_path / "parity.json").read_text())["drafter"]["vocabulary"]
    assert code == 1
    assert 0.3 < covered["frac"] < 0.9
    assert f"vocabulary   of the answers {covered['frac']:.1%} of the tokens, so at most" in said
    assert f"LIKELY CAUSE vocabulary: {1 - covered['frac']:.1%} of the answers' tokens are not among its 100" in said
    assert "train with a larger --draft-vocab" in said


def test_a_drafter_is_held_back_by_the_tokens_that_it_cannot_propose() -> None:
    """Counted as right until the first draft that is wrong for another reason."""
    text = Text(np.array([1, 5, 9, 9, 6, 7], np.int32), np.zeros((6, 1)), (1, 3), ((4, 9, 6), (6, 8)), (0, 1))
    drafts = [np.array([[4, 9, 6], [6, 8, 0]])]
    reading = with_all_tokens([text], drafts, np.array([4, 6, 7, 8]), Coverage(0.5, 2.0, 3))
    assert reading.accepted.tolist() == [3, 1]
    assert accepted(drafts[0], text).tolist() == [0, 1]


@pytest.mark.slow  # the same way; that these are tried is tested below
@pytest.mark.parametrize("fault", ["embedding", "absolute ids"])
def test_tensors_that_are_not_what_they_should_be_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    directory, cause = faulty(tmp_path, fault)
    code, said = parity(capsys, *FEW, "--drafter", directory)
    assert code == 1
    assert f"LIKELY CAUSE {cause}" in said


def faulty(tmp_path: Path, fault: str) -> tuple[Path, str]:
    """Plant a wrong value in a demo drafter; return it and the name of the cause."""
    if fault == "mask token":
        return edited(tmp_path, ptd_token_id=3), "mask token: 7 instead of 3"
    params, config = load_drafter(DEMO_DRAFTER)
    if fault == "embedding":
        order = np.random.default_rng(0).permutation(config.vocab_size)
        save_drafter(tmp_path / "drafter", dataclasses.replace(params, embedding=params.embedding[order]), config)
        return tmp_path / "drafter", "embedding: the target's instead of the stored one"
    half = jnp.arange(config.vocab_size // 2)
    narrowed = dataclasses.replace(params, lm_head=params.lm_head[:, half], draft_to_target=2 * half)
    save_drafter(tmp_path / "drafter", narrowed, dataclasses.replace(config, draft_vocab_size=len(half)))
    return tmp_path / "drafter", "vocabulary map: d2t holds absolute ids, not offsets"


def tried(pair: Pair, directory: Path, length: int = 1) -> dict[str, Any]:
    """List the other readings of a pair's drafter, by name, for a text of this length."""
    hidden = np.zeros((1, 8, 192), np.float32)
    replies = Replies((Text(np.zeros(length, np.int32), hidden[:, :3], (), (), ()),), (hidden,), (0,), 0)
    return {reading.name: reading for reading in readings(pair, pair.drafter, read_checkpoint(directory), replies)}


@pytest.mark.parametrize("fault", ["mask token", "embedding", "absolute ids"])
def test_other_readings_are_tried(tmp_path: Path, fault: str) -> None:
    """Each once, and as it would be loaded with the cure."""
    directory, cause = faulty(tmp_path, fault)
    pair = peagle.loading.load("demo", directory)
    found = tried(pair, directory)
    params: Any = found[cause].model.params
    if fault == "mask token":
        row = pair.drafter.config.mask_token_id
        np.testing.assert_array_equal(params.embedding[row], pair.drafter.params.embedding[7])
        assert '"ptd_token_id": 7' in found[cause].cure
    elif fault == "embedding":
        np.testing.assert_array_equal(params.embedding, pair.plain_target.params.embedding)
        assert "take the tensor embed_tokens.weight out" in found[cause].cure
    else:
        np.testing.assert_array_equal(params.draft_to_target, np.arange(1024))
        assert "store d2t - arange(len(d2t))" in found[cause].cure
        assert sum(name.startswith("vocabulary map") for name in found) == 1


def test_windows_that_hide_something_are_tried() -> None:
    pair = peagle.loading.load("demo", DEMO_DRAFTER, drafter_window=64)
    short, long = (
        {name: reading for name, reading in tried(pair, DEMO_DRAFTER, length).items() if name.startswith("window")}
        for length in (100, 400)
    )
    assert list(short) == ["window: off"]
    assert list(long) == ["window: off", "window: 128", "window: 256"]
    assert long["window: 256"].model.config.windows == (256,) * pair.drafter.config.num_layers
    cure = 'give --drafter-window 256, or write {"drafter_window": 256} into speculation.json beside the drafter'
    assert long["window: 256"].cure == cure


def test_raw_prompts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = parity(capsys, *FEW, "--num-prompts", "10", "--render", "raw")
    assert code == 1
    assert "LIKELY CAUSE the prompts are raw" in said


@flax.struct.dataclass
class Blind(PEagle):
    """Forgets everything before the tokens committed last."""

    def propose(
        self, state: PagedCache, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, PagedCache]:
        empty = PagedCache(jax.tree.map(jnp.zeros_like, state.pages), state.tables)
        return PEagle.propose(self, empty, fresh, widths, num_drafts, choose)


@flax.struct.dataclass
class TooFarBack(PEagle):
    """Roll back more than the rejected drafts: later rows overwrite earlier ones, in the cache and by position.

    Index 0 of a sequence, which no row sees, holds how many rows are lost.
    """

    def absorb(
        self, state: PagedCache, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array
    ) -> PagedCache:
        state = PEagle.absorb(self, state, token_ids, aux_hidden, positions)
        return put_lost(state, jnp.where(jnp.any(positions == 0, axis=1), 0, lost_rows(state)))

    def propose(
        self, state: PagedCache, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, PagedCache]:
        lost = jnp.minimum(lost_rows(state), jnp.maximum(fresh.first_position, 0))
        behind = fresh.replace(first_position=fresh.first_position - lost)  # type: ignore[attr-defined]
        draft, state = PEagle.propose(self, state, behind, widths, num_drafts, choose)
        return draft, put_lost(state, lost + num_drafts - 1)


def lost_rows(state: PagedCache) -> jax.Array:
    return state.pages[0].key[state.tables[0][:, 0], 0, 0, 0].astype(jnp.int32)


def put_lost(state: PagedCache, count: jax.Array) -> PagedCache:
    first, *others = state.pages
    key = first.key.at[state.tables[0][:, 0], 0, 0, 0].set(count.astype(first.key.dtype))
    return PagedCache((Pages(key, first.value), *others), state.tables)


SETTINGS = ParityConfig(K, 48, 2)


@pytest.mark.parametrize(("fault", "words"), [(Blind, "blind to its context"), (TooFarBack, "not rolled back")])
def test_an_engine_that_does_something_else_is_named(fault: type[PEagle], words: str) -> None:
    demo = peagle.loading.load()
    assert isinstance(demo.drafter, PEagle)
    healthy = demo.drafter
    pair = dataclasses.replace(demo, drafter=fault(healthy.params, healthy.config, retain_full_kv=True))
    replies = ask(pair, read_prompt_file(HELD_OUT).conversations[:10], SETTINGS, raw=False)
    led = [replay(healthy, text, K).token_ids for text in replies.texts]
    blind = [replay(healthy, text, K, blind=True).token_ids for text in replies.texts]
    found = compare(replies.texts, led, blind)
    assert found is not None
    assert words in (found.explanation or "")
    assert found.frac > 0.05


def test_a_gain_that_is_luck_is_no_cause() -> None:
    rng = np.random.default_rng(0)
    given = rng.integers(0, 4, 80)
    better = Reading("better", np.minimum(given + 1, 4))
    shuffled = Reading("luck", rng.permutation(given))
    found = causes(given, [shuffled, Reading("same", given), better])
    assert [cause.name for cause in found] == ["better"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "ngram"], "has no weights to compare"),
        (["--drafter", "absent"], "absent"),
        (["--target", str(DEMO_DIRECTORY / "target"), "--drafter", str(DEMO_DRAFTER)], "with --prompt-file FILE"),
        (["--prompts", "absent.jsonl"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["parity", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def in_turn(tmp_path: Path) -> Path:
    """Write an EAGLE-3 drafter of the demo's first layer."""
    params, config = load_drafter(DEMO_DRAFTER)
    config = dataclasses.replace(config, mask_token_id=None, num_layers=1)
    save_drafter(tmp_path / "drafter", dataclasses.replace(params, mask_hidden=None, layers=params.layers[:1]), config)
    assert not drafter_of(*load_drafter(tmp_path / "drafter")).config.parallel
    return tmp_path / "drafter"


def test_readings_of_an_eagle3_drafter_are_its_own(in_turn: Path) -> None:
    names = tried(peagle.loading.load("demo", in_turn), in_turn).keys()
    assert "norm_output: true" in names
    assert not any(name.startswith("mask token") for name in names)


@pytest.mark.slow  # takes the way of a P-EAGLE drafter, but for the logits
def test_an_eagle3_drafter_is_compared_too(in_turn: Path, tmp_path: Path) -> None:
    """Its drafts, not its logits; and its own readings are tried."""
    given = ["--drafter", str(in_turn), "--json", str(tmp_path / "found.json")]
    assert main(["parity", *OPTIONS, *FEW, *given]) in (0, 1)
    found = json.loads((tmp_path / "found.json").read_text())["drafter"]
    assert found["logits"] is None
    assert found["same_drafts_frac"] == 1
    assert found["difference"] is None
    assert any(name.startswith("norm_output") for name in found["readings"])


def test_a_dflash_drafter_is_compared_too(tmp_path: Path) -> None:
    """Its drafts and logits, with the target's embedding and head; other layers and mask tokens are tried."""
    _, demo = load_drafter(DEMO_DRAFTER)
    config = dataclasses.replace(demo, block_size=8, qk_norm=True, num_target_layers=8)
    save_drafter(tmp_path / "drafter", random_params(config), config)
    given = ["--drafter", str(tmp_path / "drafter"), "--json", str(tmp_path / "found.json"), "--num-prompts", "2"]
    for k in ("3", "7"):
        assert main(["parity", "-n", "16", "-k", k, "--reference-steps", "2", *given]) == 0
        found = json.loads((tmp_path / "found.json").read_text())["drafter"]
        assert found["logits"]["max_difference"] < 1e-4
        assert found["same_drafts_frac"] == 1
        assert found["difference"] is None
    names = {name.partition(":")[0] for name in found["readings"]}
    assert names == {"taps", "mask token", "window"}
