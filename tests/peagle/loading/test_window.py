"""The window of the drafter's attention from end to end: counters as with full caches, plain decoding's output, who
decides, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peagle.loading.load
from drafter.dialects import open_drafter, parse_config
from drafter.load import save_drafter
from drafter.propose import Eagle3, PEagle
from drafter.train.recipe import Recipe
from peagle.answers.result import Result
from peagle.base.errors import InputError, InputWarning
from peagle.cli import main
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.loading.checkpoints import DEMO, DEMO_EAGLE3, HELD_OUT, NGRAM, resolve
from peagle.loading.load import with_drafter
from peagle.ops import native
from peagle.pair import Pair
from tests.support.drafters import random_params
from tests.support.models import models
from tests.support.pairs import DRAFTER, MAX_POSITIONS, Directories
from tests.support.toys import CONFIG, decode, drafting_at

pytestmark = pytest.mark.compile

K, WINDOW = 4, 48


@pytest.fixture(scope="module")
def demo() -> Pair:
    return peagle.loading.load.load(DEMO, None)


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("name", [DEMO, pytest.param(DEMO_EAGLE3, marks=pytest.mark.slow)])
def test_pages_of_a_window_accept_what_all_pages_accept_and_emit_plain_decodings_tokens(demo: Pair, name: str) -> None:
    """After a prompt of several windows, of several chunks."""
    pair = with_drafter(demo, DEMO, name, drafter_window=WINDOW)
    drafter = pair.drafter
    assert isinstance(drafter, PEagle | Eagle3)
    other = dataclasses.replace(pair, drafter=dataclasses.replace(drafter, retain_full_kv=True))
    prompt = HELD_OUT.read_text(encoding="utf-8")[:1500]

    def generate(pair: Pair, k: int) -> Result:
        return pair.generate(
            prompt, num_speculative_tokens=k, max_new_tokens=120, prefill_chunk=64, context=896, prefix_cache=0
        )

    plain, ringed, whole = generate(pair, 0), generate(pair, K), generate(other, K)
    assert len(plain.request.prompt_ids) > 5 * WINDOW
    assert ringed.output_ids == whole.output_ids == plain.output_ids
    assert ringed.steps == whole.steps
    assert 0 < ringed.counters.num_accepted < K * ringed.counters.num_steps
    rings = [pair.engine(config) for config in pair.engines if config.num_speculative_tokens]
    assert rings[0].memory_bytes()[0] < other.engine(rings[0].config).memory_bytes()[0]


def test_pages_of_a_window_draft_what_all_pages_draft_behind_plain_steps() -> None:
    """Step by step: the drafter takes in the rows of plain steps late, and beside another row."""
    pair, rng = models(), np.random.default_rng(5)
    requests = [Request(tuple(rng.integers(0, CONFIG.vocab_size, n).tolist()), new) for n, new in ((90, 110), (7, 40))]
    shape = ResolvedConfig(K, slots=2, context=256, prefill_chunk=16, adaptive=True)
    drafters = (dataclasses.replace(pair.drafter, retain_full_kv=retains) for retains in (False, True))
    engines = (Engine(pair.target, drafter, shape) for drafter in drafters)
    ringed, whole = (decode(drafting_at(engine, {1: True, 2: False}), requests, joining=True) for engine in engines)
    assert ringed == whole
    drafted = [bool(step.draft_token_ids) for step in ringed[1][0]]
    assert True in drafted[drafted.index(False) :]  # it went on after the other row had ended


def test_precedence_of_window_settings(directories: Directories, tmp_path: Path, pair: Pair) -> None:
    """The argument, else speculation.json, else config.json; the pair says which."""
    config = dataclasses.replace(DRAFTER, windows=(20, None))
    save_drafter(tmp_path / "drafter", random_params(config), config)

    def windows(**argument: Any) -> tuple[tuple[int | None, ...] | None, str | None]:
        loaded = with_drafter(pair, directories.target, tmp_path / "drafter", **argument)
        assert isinstance(loaded.drafter, PEagle)
        return loaded.drafter.config.windows, loaded.loaded.drafter_window

    assert windows() == ((20, None), "20 positions in 1 of 2 layers, by config.json")
    assert windows(drafter_window=32) == windows(drafter_window="32") == ((32, 32), "32 positions, given")
    assert windows(drafter_window="off") == (None, "off, given")
    table = tmp_path / "drafter" / "speculation.json"
    table.write_text('{"drafter_window": 24}')
    assert windows() == ((24, 24), "24 positions, by speculation.json")
    assert windows(drafter_window="auto") == windows()
    assert windows(drafter_window=40)[1] == "40 positions, given"
    table.write_text('{"num_speculative_tokens": 2, "drafter_window": "off"}')
    assert windows() == (None, "off, by speculation.json")
    table.write_text('{"num_speculative_tokens": 2}')
    assert windows() == ((20, None), "20 positions in 1 of 2 layers, by config.json")
    assert pair.loaded.drafter_window == "off, by default: no file names one"
    assert with_drafter(pair, directories.target, NGRAM).loaded.drafter_window is None
    with pytest.warns(InputWarning, match=f"window of 999 positions is larger than the target's {MAX_POSITIONS}"):
        assert windows(drafter_window=999)[0] == (999, 999)


@pytest.mark.parametrize("window", [0, -3, "0", "some", "", "128,256"])
def test_malformed_window_is_refused(directories: Directories, pair: Pair, window: int | str) -> None:
    with pytest.raises(InputError, match=r"drafter window is .*; expected the positions .*, auto or off"):
        with_drafter(pair, directories.target, directories.drafter, drafter_window=window)


@pytest.mark.parametrize("text", ['{"drafter_window": 0}', '{"drafter_window": "wide"}', '{"drafter_window": true}'])
def test_a_file_that_names_no_window_is_refused(tmp_path: Path, directories: Directories, text: str) -> None:
    shutil.copytree(directories.drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / "speculation.json").write_text(text)
    with pytest.raises(InputError, match=r"speculation\.json has drafter_window .*; expected .*correct it"):
        peagle.loading.load.load(directories.target, tmp_path / "drafter")


def test_a_window_without_a_drafter_is_refused(directories: Directories, pair: Pair) -> None:
    for drafter in (NGRAM, None):
        with pytest.raises(InputError, match="a drafter window is given, but there is no drafter with weights"):
            with_drafter(pair, directories.target, drafter, drafter_window=64)


def test_a_window_smaller_than_a_step_is_refused(directories: Directories, pair: Pair) -> None:
    narrow = with_drafter(pair, directories.target, directories.drafter, drafter_window=4)
    with pytest.raises(InputError, match=r"window is 4 positions; expected 5 or more at K = 4, .*lower -k to 3"):
        narrow.generate([7, 8, 9], num_speculative_tokens=4)
    assert narrow.generate([7, 8, 9], num_speculative_tokens=3, max_new_tokens=5).steps
    assert not narrow.generate([7, 8, 9], num_speculative_tokens=0, max_new_tokens=5).steps[0].draft_token_ids


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_windows_go_through_an_export(tmp_path: Path, dialect: str) -> None:
    config = dataclasses.replace(DRAFTER, windows=(20, 20), max_positions=MAX_POSITIONS)
    save_drafter(tmp_path / "drafter", random_params(config), config)
    arguments = ["export", str(tmp_path / "drafter"), "--out", str(tmp_path / dialect), "--dialect", dialect]
    assert main([*arguments, "--verifier", "some/target"]) == 0
    assert parse_config(open_drafter(tmp_path / dialect)).windows == (20, 20)


def test_more_drafts_than_were_trained_are_told(demo: Pair, tmp_path: Path) -> None:
    """The recipe beside a drafter says how many were: beyond these it may run, but gains nothing."""
    shutil.copytree(resolve(DEMO, "drafter"), tmp_path / "drafter")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": dataclasses.asdict(Recipe(depth=5))}))
    pair = with_drafter(demo, DEMO, tmp_path / "drafter")
    pair.engine(pair.engine_config(5, context=64))
    with pytest.warns(InputWarning, match="K is 9, but the drafter was trained for 5 drafts: .* lower -k to 5"):
        pair.engine(pair.engine_config(9, context=64))


def test_positions_beyond_the_drafters_own_are_told_once(demo: Pair) -> None:
    """Unless its windows bound the distances; plain decoding needs none."""
    pair = with_drafter(demo, DEMO, DEMO, drafter_window="off")
    assert isinstance(pair.drafter, PEagle)
    config = dataclasses.replace(pair.drafter.config, max_positions=256)
    short = dataclasses.replace(pair, drafter=dataclasses.replace(pair.drafter, config=config))
    for k, capacity in ((K, 256), (0, 512)):
        short.engine(short.engine_config(k, context=capacity))
    with pytest.warns(InputWarning, match=r"has 384 positions, but the drafter's config.json says 256: .*window N"):
        short.engine(short.engine_config(K, context=384))
    short.engine(short.engine_config(K, context=512))
    windowed = dataclasses.replace(pair.drafter, config=config.with_window(64))
    dataclasses.replace(pair, drafter=windowed).engine(pair.engine_config(K, context=384))
