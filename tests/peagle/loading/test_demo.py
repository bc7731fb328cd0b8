"""The package's demo pair: small, complete, and lossless on held-out prompts."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

import peagle.loading.checkpoints
import peagle.loading.load
from drafter.propose import DFlash, Eagle3, PEagle
from peagle.cli.speculate import EXAMPLE
from peagle.config import Drafts, EngineConfig
from peagle.engine.host.inspection import step_programs
from peagle.loading.checkpoints import DEMO, DEMO_DFLASH, DEMO_DIRECTORY, DEMO_EAGLE3, HELD_OUT
from peagle.loading.defaults import MOST_STEPS_PER_DISPATCH
from peagle.loading.load import with_drafter
from peagle.loading.speculation import read_auto_drafts
from peagle.ops import native
from peagle.ops.linear import PackedMatrix
from peagle.pair import Pair, RequestOptions
from peagle.text.prompt_files import read_prompt_file
from peagle.workflows.run import Run, RunConfig, run
from scripts.golden import acceptance

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def demo() -> Pair:
    return peagle.loading.load.load()


KINDS = {DEMO: PEagle, DEMO_EAGLE3: Eagle3, DEMO_DFLASH: DFlash}


@pytest.fixture(scope="module", params=list(KINDS.items()), ids=list(KINDS))
def answers(demo: Pair, request: pytest.FixtureRequest) -> Run:
    """With each of its drafters."""
    name, kind = request.param
    demo = with_drafter(demo, DEMO, name)
    assert isinstance(demo.drafter, kind)
    conversations = read_prompt_file(HELD_OUT).conversations[:6]
    return run(demo, conversations, RunConfig(answer=RequestOptions(max_new_tokens=48), engine=EngineConfig(3)))


def test_drafters_head_is_rounded_to_mxfp4_in_bfloat16_alone(demo: Pair) -> None:
    exact = peagle.loading.load.load(dtype="float32")
    for pair, rounded in ((demo, True), (exact, False)):
        assert isinstance(pair.drafter, PEagle)
        assert isinstance(pair.drafter.params.lm_head, PackedMatrix)
        assert (pair.drafter.params.lm_head.scales is not None) == rounded


def test_it_is_small_and_its_card_names_what_is_held_out() -> None:
    assert sum(path.stat().st_size for path in DEMO_DIRECTORY.rglob("*") if path.is_file()) < 30e6
    records = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 100
    card = (DEMO_DIRECTORY / "README.md").read_text(encoding="utf-8")
    assert all(record["module"] in card for record in records)


def test_it_drafts_by_the_file_that_it_ships(demo: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.auto_drafts == read_auto_drafts(DEMO_DIRECTORY / "drafter")
    shutil.copytree(DEMO_DIRECTORY / "drafter", tmp_path / "drafter")
    (tmp_path / "target").symlink_to(DEMO_DIRECTORY / "target")
    (tmp_path / "drafter" / "speculation.json").write_text('{"num_speculative_tokens": 6}')
    monkeypatch.setattr(peagle.loading.checkpoints, "DEMO_DIRECTORY", tmp_path)
    assert with_drafter(demo, DEMO, DEMO).drafts("auto") == Drafts(6, True)


def test_it_answers_the_example_of_the_first_command_rightly_and_at_length(demo: Pair) -> None:
    wish, _, function = EXAMPLE.partition("\n\n")
    assert wish == "Rename the function to `handle`."
    result = demo.generate(EXAMPLE, num_speculative_tokens=0)  # speculation says the same
    assert result.text == function.replace("def load", "def handle")
    assert result.finish_reason == "stop"
    assert len(result.output_ids) >= 200


def test_it_accepts_what_it_did(demo: Pair) -> None:
    """The regression gate: 95 % of the recorded acceptance (python -m scripts.golden.acceptance)."""
    known, counters = acceptance.recorded(), acceptance.measure(demo)
    assert (counters.mean_acceptance_length or 0) >= 0.95 * known["mean_acceptance_length"]
    rates = [rate or 0.0 for rate in counters.acceptance_rate_per_position]
    assert all(now >= 0.95 * then for now, then in zip(rates, known["rate_per_position"], strict=True)), rates


def test_speculation_says_what_plain_decoding_says(answers: Run) -> None:
    for outcome in answers.outcomes:
        # passes of different width may round a tie apart, and nothing more
        assert outcome.first_divergence is None or outcome.first_divergence.margin < 1e-3


@pytest.mark.skipif(not native.available(), reason="no native kernels: " + native.status()[1])
@pytest.mark.parametrize(
    ("together", "adaptive", "slots"), [(1, False, 1), (4, False, 4), (MOST_STEPS_PER_DISPATCH, True, 1)]
)
def test_steps_keep_no_copy_of_weights_or_caches(demo: Pair, together: int, adaptive: bool, slots: int) -> None:
    # an adaptive step may let the drafter read the 128 rows of its input, which takes room of its own
    context = 8192 if adaptive else 1024
    shape = demo.engine_config(3, context=context, adaptive=adaptive, slots=slots)
    engine = demo.engine(dataclasses.replace(shape, steps_per_dispatch=together))
    pages = engine.executor.shapes.target_cache.pages
    leaves = jax.tree.leaves((engine.target, pages))
    programs = step_programs(engine)
    assert len(programs) == (2 if adaptive else 1)
    for program in programs:
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < min(max(map(num_bytes, leaves)), num_bytes(pages[1].key))


def num_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


@pytest.mark.skipif(not native.available(), reason="no native kernels: " + native.status()[1])
@pytest.mark.parametrize("together", [1, 4])
def test_plain_steps_are_dispatched_and_not_waited_for(demo: Pair, together: int) -> None:
    """XLA on CPU runs a program that counts fewer than 1000 operations inside the dispatching call."""
    shape = dataclasses.replace(demo.engine_config(0, context=512), steps_per_dispatch=together)
    (program,) = step_programs(demo.engine(shape))
    analysis = program.cost_analysis()
    assert analysis is not None
    assert analysis["flops"] > 4000


def test_the_drafter_is_of_use(answers: Run) -> None:
    accepted = sum(outcome.result.counters.num_accepted for outcome in answers.outcomes)
    steps = sum(outcome.result.counters.num_steps for outcome in answers.outcomes)
    assert 1 + accepted / steps > 1.2
