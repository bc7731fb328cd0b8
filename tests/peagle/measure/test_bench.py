"""`peagle bench`: counts, formulas, output and errors. No test depends on a measured time."""

import dataclasses
import json
import re
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peagle.cli.processes
import peagle.loading.load
import peagle.measure.bench
from peagle.base.errors import InputError
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import Handle
from peagle.engine.host.scheduler import Steps
from peagle.engine.request import Request, StepRecord, TokenChunk
from peagle.measure.bench import (
    Bench,
    BenchOptions,
    Case,
    Measurement,
    Progress,
    Stage,
    bench,
    time_steps,
)
from peagle.pair import Pair
from tests.support import commands
from tests.support.commands import refused
from tests.support.pairs import MAX_POSITIONS, Directories, toy_pair
from tests.support.toys import tiny_target

pytestmark = pytest.mark.compile

OPTIONS = BenchOptions(prompt_lengths=(5,), new_tokens=(3,), widths=(2,), context=7, slots=(2,), repeats=3)
KINDS = [("pp", 5), ("tg", 3), ("verify", 1), ("verify", 2)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peagle.measure.bench, "SHORTEST_S", 1e-3)


@pytest.fixture(scope="module")
def tiny() -> Pair:
    target = tiny_target()
    return Pair(target, target, None, None)


# --- formulas ---


def test_ratios_are_of_medians_and_spreads_of_all() -> None:
    one = Measurement(Case("verify", 1), 10, (0.1, 0.3, 0.2))
    four = Measurement(Case("verify", 4), 5, (0.3, 0.1, 0.15))
    prompt = Measurement(Case("pp", 128, 2), 1, (0.5, 0.25))
    done = Bench(BenchOptions(), (prompt, one, four))
    assert [done.v(measured) for measured in (prompt, one, four)] == [None, 1, pytest.approx(1.5)]
    assert Bench(BenchOptions(), (four,)).v(four) is None
    assert (four.ms_per_pass.lowest, four.ms_per_pass.highest) == (20, 60)
    assert prompt.num_tokens == 256
    assert (prompt.tok_per_s.lowest, prompt.tok_per_s.highest) == (512, 1024)


def test_decoding_is_asked_for_at_each_number_of_slots() -> None:
    """One slot is always included; prefill and verify then use one sequence; no case is repeated."""
    options = BenchOptions((5,), (3,), (2,), slots=(4, 2, 4), drafts=(2, 1))
    assert [(case.kind, case.size, case.slots, case.num_drafts) for case in options.cases] == [
        ("pp", 5, 1, 0),
        *(("tg", 3, slots, k) for slots in (1, 2, 4) for k in (0, 2, 1)),
        ("verify", 1, 1, 0),
        ("verify", 2, 1, 0),
    ]
    assert {case.slots for case in BenchOptions((5,), (3,), (2,), slots=(4,)).cases} == {4}


def test_costs_of_drafts_are_of_medians_at_as_many_slots() -> None:
    """Three steps, in tenths of a second."""
    seconds = {
        Case("tg", 3): (0.3, 0.9, 0.3),
        Case("tg", 3, 4): (0.6, 0.6, 0.1),
        Case("tg", 3, 4, num_drafts=2): (1.5, 1.5, 9.0),
    }
    done = Bench(BenchOptions(slots=(1, 4)), tuple(Measurement(case, 3, times) for case, times in seconds.items()))
    one, four, drafted = done.measurements
    assert four.tok_per_s.median == pytest.approx(4 * 3 / 0.6)
    assert [done.cost(measured) for measured in (one, four, drafted)] == [None, None, pytest.approx(2.5)]
    assert [done.v(measured) for measured in done.measurements] == [None] * 3


# --- measurements ---


def scheduled(*chunks: tuple[int, float, int]) -> Generator[tuple[int, TokenChunk], None, None]:
    """Make an engine's chunks from (place, time, steps)."""
    for place, time_s, steps in chunks:
        record = StepRecord(1, (), 0, 0)
        yield place, TokenChunk(Request((1,), 99), (0,) * max(steps, 1), time_s, (record,) * steps)


def test_steps_are_timed_while_all_requests_are_at_work() -> None:
    """From the last request's first token: earlier steps of the first one do not count, even if read later."""
    ready = ((0, 1.0, 0), (0, 2.0, 5), (0, 11.0, 3), (1, 10.0, 0), (1, 11.0, 3))
    for more in ((), ((0, 11.5, 1), (1, 11.5, 1))):
        chunks = scheduled(*ready, *more, (0, 13.0, 3), (1, 13.0, 3), (0, 99.0, 3))
        assert time_steps(chunks, 2, 6) == pytest.approx(3.0 * 6 / (7 if more else 6))
        assert next(chunks, None) is None, "closed: an engine aborts what is left"
    with pytest.raises(RuntimeError, match="ended before all 2 had decoded 9 steps together"):
        time_steps(scheduled(*ready), 2, 9)


@pytest.mark.parametrize("steps_per_dispatch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_all_slots_are_at_work_while_it_is_timed(monkeypatch: pytest.MonkeyPatch, steps_per_dispatch: int) -> None:
    """For all chunks and dispatches, drafted or plain."""
    begun: dict[int, list[int]] = {}
    real = Engine._send_steps

    def watched(self: Engine, action: Steps) -> None:
        real(self, action)
        requests = self._in_flight[-1].requests
        begun.setdefault(self.config.slots, []).append(sum(handle is not None for handle in requests))

    monkeypatch.setattr(Engine, "_send_steps", watched)
    pair = dataclasses.replace(toy_pair(None), steps_per_dispatch=steps_per_dispatch)
    options = BenchOptions((), (5,), (), context=3, slots=(1, 3), drafts=(2,), repeats=1)
    done = bench(pair, options)
    cases = [measured.case for measured in done.measurements]
    assert [(case.slots, case.num_drafts) for case in cases] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert all(
        measured.passes == 5 and measured.num_tokens == 5 * measured.case.slots for measured in done.measurements
    )
    assert set(begun[1]) == {1}
    assert begun[3].count(3) >= 2 * 2 * -(-5 // steps_per_dispatch), "warm and timed, plain and drafted"


def test_all_drafts_are_refused_so_that_a_drafted_step_is_at_a_plain_ones_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target counts in cycles, which the n-gram drafter learns, so drafts would be accepted otherwise."""
    drafts: list[tuple[int, int, int]] = []
    real = Engine._emit

    def watched(self: Engine, handle: Handle, chunk: TokenChunk, broken: object) -> None:
        k = self.config.num_speculative_tokens
        drafts.extend((k, len(record.draft_token_ids), record.num_accepted) for record in chunk.steps)
        real(self, handle, chunk, broken)

    monkeypatch.setattr(Engine, "_emit", watched)
    bench(toy_pair(None), BenchOptions((), (30,), (), context=20, drafts=(2,), repeats=1))
    assert set(drafts) == {(0, 0, 0), (2, 2, 0)}


def test_every_test_is_measured_and_its_tokens_counted(tiny: Pair) -> None:
    calls: list[tuple[str, int, int]] = []
    left: list[float | None] = []

    def progress(stage: Stage, done: int, total: int, left_s: float | None) -> None:
        calls.append((stage, done, total))
        left.append(left_s)

    done = bench(tiny, OPTIONS, progress)
    assert not done.interrupted
    assert [(measured.case.kind, measured.case.size) for measured in done.measurements] == KINDS
    for measured in done.measurements:
        assert (measured.case.slots, len(measured.seconds)) == (2, 3)
        assert min(measured.seconds) > 0
        kind, size = measured.case.kind, measured.case.size
        assert measured.passes == {"pp": 1, "tg": size, "verify": measured.passes}[kind]
        assert measured.num_tokens == {"pp": 2 * size, "tg": 2 * size, "verify": 2 * size * measured.passes}[kind]
    assert calls == [("compiling", n, 4) for n in range(4)] + [("measuring", n, 12) for n in range(12)]
    assert left[:8] == [None] * 8  # until each test ran once
    assert all(seconds is not None and seconds > 0 for seconds in left[8:])


def test_a_measurement_of_verify_is_that_many_passes_over_new_tokens(tiny: Pair) -> None:
    """Its digest holds the logits of each pass, cycling through the sets of tokens."""
    target, rng = tiny.plain_target, np.random.default_rng(0)
    prompt, rows = rng.integers(0, 37, (2, 7), np.int32), rng.integers(0, 37, (4, 2, 2), np.int32)
    lengths, extend = jnp.full((2,), 7, jnp.int32), jax.jit(target.extend)
    positions = jnp.asarray([[7, 8]] * 2, jnp.int32)

    def filled() -> Any:
        return peagle.measure.bench.prefill(target, prompt, capacity=9, chunk=3, widest_write=2)

    def verify(tokens: np.ndarray) -> Any:
        return extend(jnp.asarray(tokens), positions, filled())

    caches, digest = peagle.measure.bench._verify_passes(
        target, filled(), jnp.asarray(rows), lengths, jnp.int32(3), jnp.int32(2)
    )
    expected = sum(jnp.sum(jnp.max(verify(rows[index])[0].logits, axis=-1)) for index in (3, 0))
    np.testing.assert_allclose(digest, expected, rtol=1e-5)
    for left, right in zip(caches.pages, verify(rows[0])[1].pages, strict=True):
        np.testing.assert_allclose(left.key, right.key, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prompts_of_both_sequences_are_in_the_caches_however_they_are_cut(tiny: Pair, chunk: int) -> None:
    target, prompt = tiny.plain_target, np.random.default_rng(1).integers(0, 37, (2, 7), np.int32)
    caches = peagle.measure.bench.prefill(target, prompt, capacity=9, chunk=chunk, widest_write=2)
    positions = jnp.asarray([list(range(7))] * 2, jnp.int32)
    _, whole = jax.jit(target.extend)(jnp.asarray(prompt), positions, target.init_cache(2, 9, 7))
    behind = jnp.asarray([[7, 8]] * 2, jnp.int32)
    logits, expected = (jax.jit(target.extend)(behind, behind, cache)[0].logits for cache in (caches, whole))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


# (prompts, new tokens, widths, context, slots, steps of a dispatch), the positions that it takes, a pattern of the line
POSITIONS: list[tuple[tuple[Any, ...], int, str]] = [
    (((16,), (5,), (1, 6), 10, (), 1), 16, r"pp 16 takes 16 positions; expected at most 15, the target.s: lower -p$"),
    # two prompts of a chunk follow the first, with a step before each
    (((), (5,), (1,), 9, (3, 1), 1), 9 + 1 + 2 + 5, "tg 5 after a context of 9 takes 17 positions"),
    (((), (5,), (1,), 9, (3, 1), 4), 9 + 1 + 2 * 4 + 8, "takes 26 positions"),
    (((), (6,), (1,), 10, (), 1), 17, "tg 6 after a context of 10 takes 17 positions.*lower -n or --context"),
    (((), (), (7,), 10, (), 1), 17, "verify 7 after a context of 10 takes 17 positions"),
]


@pytest.mark.parametrize(("sizes", "positions", "line"), POSITIONS)
def test_sizes_of_more_positions_than_the_targets_are_refused(sizes: Any, positions: int, line: str) -> None:
    prompts, new, widths, context, slots, steps = sizes
    options = BenchOptions(prompts, new, widths, context=context, **({"slots": slots} if slots else {}))
    options.check(positions, steps_per_dispatch=steps)
    with pytest.raises(InputError, match=line):
        options.check(positions - 1, steps_per_dispatch=steps)


def test_caches_that_do_not_fit_are_refused(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peagle.base.memory, "available_memory_bytes", lambda: 1000)
    with pytest.raises(InputError, match=r"out of memory: .* for the caches of 5 positions"):
        bench(tiny, OPTIONS)


# --- the command ---

ARGUMENTS = ("-p", "8", "-n", "3", "-t", "2,1,2", "--context", "6", "--repeats", "2")
TOP = {"schema", "provenance", "config", "weight_bytes", "tests", "peak_memory_bytes"}
CONFIG = {
    "command", "target", "prompt_lengths", "new_tokens", "widths", "context", "slots", "drafts", "repeats",
    "drafter", "drafter_window", "dtype", "experts", "kernels", "mesh", "steps_per_dispatch", "interrupted",
    "prefill_chunk",
}  # fmt: skip
TEST = {
    "kind", "size", "context", "slots", "num_speculative_tokens", "num_passes", "num_tokens",
    "seconds", "tok_per_s", "ms_per_pass", "v", "cost",
}  # fmt: skip
SPREAD = {"median", "lowest", "highest"}
Run = Callable[..., commands.Captured]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], directories: Directories) -> Run:
    """Run `peagle bench` on the tiny checkpoint."""
    return lambda *options: commands.run(capsys, *commands.last_of_each(["bench", str(directories.target), *options]))


def test_json_has_every_key(run: Run) -> None:
    code, out, err = run(*ARGUMENTS, "--prefill-chunk", "all", "--json", "-")
    value = json.loads(out)
    assert code == 0
    assert "verify 2 @ 6" in err  # the table, since standard output is taken
    assert (value["schema"], set(value), set(value["config"])) == (1, TOP, CONFIG)
    assert (value["config"]["dtype"], value["config"]["widths"]) == ("bfloat16", [2, 1, 2])
    assert [(test["kind"], test["size"], test["context"]) for test in value["tests"]] == [
        ("pp", 8, 0), ("tg", 3, 6), ("verify", 1, 6), ("verify", 2, 6)
    ]  # fmt: skip
    for test in value["tests"]:
        assert set(test) == TEST
        assert len(test["seconds"]) == 2
        assert set(test["ms_per_pass"]) == SPREAD
        assert (test["v"] is None, test["tok_per_s"] is not None) == (test["kind"] != "verify",) * 2
    assert value["tests"][2]["v"] == 1


def test_ctrl_c_shows_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from peagle.cli.display import Display

    begin_run = Display.begin_run

    def interrupting(self: Display, what: str, done: int, *more: Any) -> None:
        begin_run(self, what, done, *more)
        if (what, done) == ("measuring", 3):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "begin_run", interrupting)
    code, out, _ = run(*ARGUMENTS, "--json", str(tmp_path / "out.json"))
    value = json.loads((tmp_path / "out.json").read_text())
    assert code == 130
    assert "interrupted" in out
    assert "verify 1 @ 6" in out
    assert value["config"]["interrupted"] is True
    assert [len(test["seconds"]) for test in value["tests"]] == [1, 1, 1]


# options, and a pattern of the line
REFUSED = [
    ("-p 12,x", "-p is '12,x'; expected whole numbers with commas between"),
    ("-t 1,,2", "-t is '1,,2'"),
    ("-t 0", "-t is 0; expected 1 or more"),
    ("-p 8,0", "-p is 0"),
    ("--context 0", "--context is 0"),
    ("--slots 0", "--slots is 0"),
    ("--slots 1,x", "--slots is '1,x'.*commas"),
    ("--slots 1,2 -n 0", "several --slots are given, but no decoding test"),
    ("--slots 1,400", f"tg 3 .*at most {MAX_POSITIONS}, the target's"),
    ("-k 0 --drafter ngram", "-k is 0; expected 1 to 128 drafted"),
    ("-k 200 --drafter ngram", "-k is 200.*128"),
    ("-k 2 -n 0 --drafter ngram", "-k is given, but no decoding test"),
    ("-k 2", "needs its own drafter"),
    ("-k 2 --drafter absent", "absent does not exist"),
    ("--drafter ngram", "--drafter is given without -k"),
    ("--repeats 0", "--repeats is 0"),
    ("--json no/such/folder/x", "--json.*cannot be written"),
    ("--experts huge", "huge"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_bad_input_is_refused_in_one_line_before_weights_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: str, line: str
) -> None:
    monkeypatch.setattr(peagle.cli.processes, "load_models", lambda *_, **__: pytest.fail("weights were read"))
    result = run(*ARGUMENTS, *options.split())
    refused(result)
    assert re.search(line, result[2]), result[2]


def test_an_interruption_leaves_what_there_is(tiny: Pair) -> None:
    def stop_at(*last: object) -> Progress:
        def progress(*call: object) -> None:
            if call[:2] == last:
                raise KeyboardInterrupt

        return progress

    done = bench(tiny, OPTIONS, stop_at("measuring", 4 + 2))  # a round, and two of the next
    assert done.interrupted
    assert sorted(len(measured.seconds) for measured in done.measurements) == [1, 1, 2, 2]
    assert len(bench(tiny, OPTIONS, stop_at("measuring", 2)).measurements) == 2
    assert bench(tiny, OPTIONS, stop_at("compiling", 2)).measurements == ()
