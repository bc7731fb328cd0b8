"""Sweeps of many requests at once: decoding, figures, and interrupted runs."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.measure.metrics import busy_s
from peagle.measure.sweep.figures import concurrent, rows
from peagle.measure.sweep.plan import PLAIN
from peagle.measure.sweep.store import RAW, Folder, open_run
from tests.peagle.measure.sweep.runs import SWEPT, Lab, lines_of, swept, with_lines, with_plan

pytestmark = pytest.mark.compile

SLOTS = (1, 3)
KS = (0, 1, 3)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts, plainly and by K = 1 and 3; two repeats; at one and at three at once."""
    return swept(tmp_path_factory.mktemp("swept"), "--concurrency 3,1").path


@pytest.fixture
def finished(together: Path, tmp_path: Path) -> Folder:
    return open_run(Path(shutil.copytree(together, tmp_path / "run")))


def rewrite(folder: Folder, change: Callable[[dict[str, Any]], object], repeats: int = 2) -> Folder:
    """Give every line made-up times, then `change` it; more repeats are copies of the first two."""
    lines = lines_of(folder)
    lines = [{**line, "repeat": n} for n in range(repeats) for line in lines if line["repeat"] == n % 2]
    for line in lines:
        line |= {"ttft_s": 1.0, "decode_s": 2.0}
        change(line)
    with_lines(folder, lines)
    return with_plan(folder, repeats=repeats)


def row_at(folder: Folder, k: int, slots: int) -> dict[str, Any]:
    (row,) = [row for row in rows(folder) if (row.k, row.concurrency) == (k, slots)]
    return row.to_json()


# --- decoding ---


def test_every_variant_decodes_all_requests_with_every_number_of_slots(finished: Folder) -> None:
    keys = [sample.key for sample in finished.samples()]
    assert len(keys) == len(set(keys))
    at_once = [key for key in keys if key[1].concurrency is not None]
    assert {(variant.k, variant.concurrency, repeat, request) for _, variant, repeat, request in at_once} == set(
        itertools.product(KS, SLOTS, range(2), range(8))
    )
    assert len(keys) - len(at_once) == 3 * 2 * 8, "and one at a time, as without it"
    plain = {(s.repeat, s.request): s.output_sha256 for s in finished.samples() if s.variant == PLAIN}
    assert all(sample.output_sha256 == plain[sample.repeat, sample.request] for sample in finished.samples())


def test_variants_with_as_many_slots_follow_one_another_and_take_turns(finished: Folder) -> None:
    """So that drift of the machine affects all variants and plain decoding equally."""
    variants = [(s.repeat, s.variant.concurrency, s.variant.k) for s in finished.samples() if s.variant.concurrency]
    order = [variant for variant, _ in itertools.groupby(variants)]
    assert len(order) == len(set(order)) == 2 * 2 * 3
    assert [slots for _, slots, _ in order] == [1] * 3 + [3] * 6 + [1] * 3
    first = [order[number][2] for number in range(0, 12, 3)]
    assert first == [0, 1, 1, 3]


# --- figures ---


def test_figures_follow_from_raw_lines(finished: Folder) -> None:
    raw = lines_of(finished)
    figures = finished.record["by_concurrency"]
    assert [(row["concurrency"], row["k"]) for row in figures] == list(itertools.product(SLOTS, KS))
    assert figures == json.loads(json.dumps([row.to_json() for row in concurrent(rows(finished))]))
    for row in figures:
        rates = {}
        for k, repeat in itertools.product((row["k"], 0), range(2)):
            some = [r for r in raw if (r["k"], r.get("concurrency"), r["repeat"]) == (k, row["concurrency"], repeat)]
            seconds = busy_s((line["ttft_s"], line["ttft_s"] + line["decode_s"]) for line in some)
            rates[k, repeat] = sum(line["output_tokens"] - 1 for line in some) / seconds
        ratios = [rates[row["k"], repeat] / rates[0, repeat] for repeat in range(2)]
        assert row["speedup_repeats"] == pytest.approx(ratios)
        assert min(ratios) <= row["speedup"]["value"] * (1 + 1e-9)
        assert row["speedup"]["value"] <= max(ratios) * (1 + 1e-9)
        assert (row["num_requests"], row["num_repeats"], row["num_differing"]) == (8, 2, 0)
        assert (row["acceptance_length"] is None) == (row["k"] == 0)
        if row["k"]:
            assert row["acceptance_length"]["low"] is not None, "of eight conversations one does"


def test_time_that_requests_share_counts_once(finished: Folder) -> None:
    """Three that overlap fully, in twice the time of plain decoding's: as fast as plain ones in sequence."""

    def change(line: dict[str, Any]) -> None:
        line["output_tokens"] = 5
        if line.get("concurrency") == 3:
            line["ttft_s"] = 1.0 if line["k"] else 1.0 + line["request"]
            line["decode_s"] = 2.0 if line["k"] else 0.5

    changed = rewrite(finished, change)
    fast, plain = row_at(changed, 3, 3), row_at(changed, 0, 3)
    assert plain["tok_per_s"]["value"] == pytest.approx(8 * 4 / (8 * 0.5))
    assert fast["tok_per_s"]["value"] == pytest.approx(8 * 4 / 2.0)
    assert fast["speedup"]["value"] == pytest.approx(2)


def test_intervals_of_times_are_over_rounds_and_of_acceptance_over_conversations(finished: Folder) -> None:
    """A machine that is slow in half of the rounds slows both: the ratio has a narrow interval."""

    def change(line: dict[str, Any]) -> None:
        line["decode_s"] = (2.0 if line["k"] else 3.0) * (1 + line["repeat"] % 2)

    row = row_at(rewrite(finished, change, repeats=8), 3, 3)
    assert row["tok_per_s"]["low"] < 0.9 * row["tok_per_s"]["value"] < 1.1 * row["tok_per_s"]["high"]
    for name in ("low", "value", "high"):
        assert row["speedup"][name] == pytest.approx(1.5)


def test_an_incomplete_repeat_counts_for_nothing(finished: Folder) -> None:
    lines = (finished.path / RAW).read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    (finished.path / RAW).write_text("".join(lines[:-1]))
    assert (last["concurrency"], last["repeat"]) == (1, 1)
    assert {(row.k, row.concurrency): row.num_repeats for row in concurrent(rows(finished))} == {
        (k, slots): 1 if last["k"] in (0, k) and slots == 1 else 2 for slots, k in itertools.product(SLOTS, KS)
    }


def test_spans_that_overlap_count_once() -> None:
    assert busy_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4
    assert busy_s([]) == 0


# --- pages ---


# --- cut off, and failed ---


@pytest.mark.usefixtures("quickly")
def test_a_killed_run_goes_on_with_the_missing_requests(lab: Lab, together: Path) -> None:
    """After a kill between loads and a lost line, the load of that line is decoded again, whole and once."""
    lab.kill(lab.sweep, SWEPT, "--concurrency 3,1", after=3 * 8 + 4)  # in the first repeat, after four loads of six
    lines = (lab.out / RAW).read_text().splitlines(keepends=True)
    assert len(lines) == (3 + 4) * 8
    (lab.out / RAW).write_text("".join(lines[:-1]))
    before = [sample.key for sample in lab.folder.samples()]
    decoded: list[tuple[int, int, int]] = []
    lab.before_decoding(
        lambda engine, requests: decoded.append(
            (engine.config.slots, engine.config.num_speculative_tokens, len(requests))
        )
    )
    lab.resume()
    assert decoded[:2] == [(3, 1, 8), (3, 3, 8)], "the load that lost a line, then the next"
    keys = [sample.key for sample in lab.folder.samples()]
    assert set(keys) == {sample.key for sample in open_run(together).samples()}
    assert [key for key in keys if keys.count(key) > 1] == 2 * before[-7:]
    assert {row["num_repeats"] for row in lab.folder.record["by_concurrency"]} == {2}
