"""The sweep: figures follow from raw lines; nothing is overwritten, decoded twice or lost."""

import dataclasses
import itertools
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peagle.cli.sweeping
import peagle.measure.sweep.run
from peagle.cli import main
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.engine.warmup import WarmUp
from peagle.measure.estimates import Estimate
from peagle.measure.sweep.figures import best, rows
from peagle.measure.sweep.plan import Plan, Variant, Workload, short_names
from peagle.measure.sweep.run import SweepRun
from peagle.measure.sweep.store import ASKING, PROMPTS, RAW, RUN, Folder, open_run
from peagle.ops.errors import InputError
from peagle.ops.files import alone
from peagle.pair import Pair
from peagle.result import Result, decode
from peagle.text.tokenizer import ByteLevelTokenizer, Tokenizer
from tests.peagle.measure.sweep.runs import TEXTS, Killed, Tokens, prompt_file, shared_pair, sweep, swept
from tests.support.pairs import SPECIALS, press_ctrl_c_at, toy_pair
from tests.support.toys import costs

pytestmark = pytest.mark.usefixtures("quickly")
profiling = SweepRun.profile


def counts(folder: Folder) -> dict[Any, Any]:
    """Read the decoded results, without times."""
    return {sample.key: (sample.output_sha256, sample.counters) for sample in folder.samples()}


def test_a_plan_comes_back_from_json(finished: Folder) -> None:
    for plan in (finished.plan, dataclasses.replace(finished.plan, aux_layer_ids=(1, 4, 7), concurrencies=(3, 1))):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    older = finished.plan.to_json()
    del older["aux_layer_ids"], older["drafter_windows"], older["concurrencies"]
    assert Plan.from_json(older) == finished.plan


def test_figures_follow_from_raw_lines(finished: Folder) -> None:
    raw = [json.loads(line) for line in (finished.path / RAW).read_text().splitlines()]
    assert len(raw) == 3 * 2 * 8
    figures = finished.record["rows"]
    assert [row["k"] for row in figures] == [0, 1, 3]
    plain = {(line["repeat"], line["request"]): line for line in raw if line["k"] == 0}
    for row in figures[1:]:
        mine = [line for line in raw if line["k"] == row["k"]]
        histogram = np.sum([line["histogram"] for line in mine], axis=0)
        steps, accepted = histogram.sum(), histogram @ np.arange(row["k"] + 1)
        assert (row["num_spec_steps"], row["num_accepted_draft_tokens"]) == (steps, accepted)
        assert row["num_draft_tokens"] == steps * row["k"]
        assert row["acceptance_length"]["value"] == pytest.approx(1 + accepted / steps)
        assert row["acceptance_length"]["value"] > 1  # the toy walks in circles, which an n-gram drafter learns
        for place, rate in enumerate(row["rate_per_position"]):
            assert rate["value"] == pytest.approx(histogram[place + 1 :].sum() / steps)
        tokens = sum(line["output_tokens"] - 1 for line in mine)
        seconds, plain_seconds = (sum(line["decode_s"] for line in some) for some in (mine, plain.values()))
        assert row["tok_per_s"]["value"] == pytest.approx(tokens / seconds)
        assert row["speedup"]["value"] == pytest.approx(plain_seconds / seconds)  # as many tokens, greedy
        assert row["step_s"]["value"] == pytest.approx(seconds / steps)
        assert row["tokens_per_step"]["value"] == pytest.approx(tokens / steps)
        assert row["speedup"]["value"] == pytest.approx(tokens / steps / row["cycle_cost"]["value"])
        assert row["equal_to_plain_frac"] == 1
        for figure in ("acceptance_length", "speedup", "ttft_s"):
            assert row[figure]["low"] <= row[figure]["value"] <= row[figure]["high"]
        parts = [row[f"{part}_s"] for part in ("draft", "verify", "host")]
        assert sum(part["value"] for part in parts) == pytest.approx(row["step_s"]["value"])
        assert all(part["value"] >= 0 for part in parts)
    assert figures[0]["speedup"]["value"] == 1
    assert figures == json.loads(json.dumps([row.to_json() for row in rows(finished)]))


def test_shares_of_a_step_are_those_of_all_profiled_steps(finished: Folder) -> None:
    """Weighted by the steps of requests. What was not profiled has none."""
    like = next(share for share in finished.record["shares"] if share["k"] == 3)
    parts = [(1, 2.0, 6.0, 2.0), (3, 1.0, 8.0, 1.0)]  # steps; ms of drafting, verifying and the rest of a step
    finished.record["shares"] = [
        like | {"request": n, "num_steps": steps, "draft_ms": draft, "verify_ms": verify, "other_ms": other}
        for n, (steps, draft, verify, other) in enumerate(parts)
    ]
    _, unprofiled, row = rows(finished)
    assert unprofiled.draft_s is None
    assert row.step_s is not None
    shares = [part.value / row.step_s.value for part in (row.draft_s, row.verify_s, row.host_s) if part]
    assert shares == pytest.approx([(1 * 2 + 3 * 1) / 40, (1 * 6 + 3 * 8) / 40, (1 * 2 + 3 * 1) / 40])


def test_steps_of_some_conversations_are_profiled_and_those_missing_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One request of each conversation, by every variant, exactly once, even after a kill and a failure."""
    monkeypatch.setattr(SweepRun, "profile", profiling)
    monkeypatch.setattr(peagle.measure.sweep.run, "PROFILED", 2)
    profiles: list[tuple[int, int]] = []
    real = peagle.measure.sweep.run.profile

    def profile(engine: Engine, requests: Sequence[Request], *rest: Any, **options: Any) -> Any:
        profiles.append((engine.config.num_speculative_tokens, requests[0].index))
        if len(profiles) == 2:
            raise RuntimeError("no trace")
        if len(profiles) == 4:
            raise Killed
        return real(engine, requests, *rest, **options)

    monkeypatch.setattr(peagle.measure.sweep.run, "profile", profile)
    turns = [{"turns": ["a", "b"]}, {"turns": ["c", "d"]}, {"turns": ["e"]}]
    options = ["--prompts", prompt_file(tmp_path, *turns), "-k", "2", "--repeats", 1, "-n", 9]
    with pytest.raises(Killed):
        sweep(monkeypatch, "--out", tmp_path / "run", *options)
    assert [share.get("why_not") for share in open_run(tmp_path / "run").record["shares"]] == [None, "no trace", None]
    assert sweep(monkeypatch, "--out", tmp_path / "run", "--resume") == 0
    shares = open_run(tmp_path / "run").record["shares"]
    profiled = sorted((share["k"], share["request"]) for share in shares)
    assert len(profiled) == len(set(profiled)) == 4  # plain decoding and K = 2
    rows_of = {request.request: request.row for request in (open_run(tmp_path / "run").prompts() or ([], []))[0]}
    assert len({rows_of[request] for _, request in profiled}) == 2
    assert profiles[4:] == [(2, profiles[1][1]), (2, profiles[3][1])]
    assert not any("why_not" in share for share in shares)


def test_a_run_of_the_schema_before_has_its_figures_but_the_shares(finished: Folder) -> None:
    record = json.loads((finished.path / RUN).read_text())
    old = {"temperature": 0.0, "k": 3, "drafter": "demo", "draft_frac": 0.2, "verify_frac": 0.7, "host_frac": 0.1}
    (finished.path / RUN).write_text(json.dumps(record | {"schema": 2, "shares": [old]}))
    for before, now in zip(rows(open_run(finished.path)), rows(finished), strict=True):
        assert before.speedup == now.speedup
        assert before.draft_s is None
    assert main(["report", str(finished.path), "--quiet"]) == 0
    assert "draft + verify + rest" not in (finished.path / "README.md").read_text()


def test_the_folder_holds_the_requests_and_shows_them(finished: Folder) -> None:
    requests, left_out = finished.prompts() or ([], [])
    assert [bytes(request.prompt_ids).decode() for request in requests] == list(TEXTS[:8])
    assert left_out == []
    page, html = ((finished.path / name).read_text() for name in ("README.md", "report.html"))
    assert "| 3 |" in page
    for name in re.findall(r"\((\w+\.svg)\)", page):
        assert (finished.path / name).read_text().startswith("<?xml")
    assert html.count('<img src="data:image/svg+xml;base64,') == 2
    assert not re.search(r"(src|href)=.(?!data:)", html)  # needs no network


def test_drafters_workloads_and_windows_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("peagle.cli.sweeping.check_fit", lambda *_: ())
    out = tmp_path / "run"
    options = ["--num-prompts", 1, "--repeats", 1, "-n", 12, "--render", "both", "--temperature", "0,0.5", "-k", "2"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    drafters = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    options += ["--drafter", drafters, "--drafter-window", "128,off"]
    assert sweep(monkeypatch, "--out", out, "--prompts", prompt_file(tmp_path), *options) == 0
    folder = open_run(out)
    figures = folder.record["rows"]
    assert {sample.variant.drafter_window for sample in folder.samples()} == {
        None,
        "128",
        "off",
    }  # None: plain decoding
    workloads = dict.fromkeys((row["raw"], row["temperature"]) for row in figures)
    assert list(workloads) == [(False, 0), (False, 0.5), (True, 0), (True, 0.5)]
    variants = [(f"2, {name}, window {window}", window) for name in ("one", "two") for window in ("128", "off")]
    assert [(row["label"], row["drafter_window"]) for row in figures[:5]] == [("0", None), *variants]
    text = (out / "README.md").read_text()
    assert "| 2, two, window 128 |" in text
    for how in ("chat, greedy", "chat, temperature 0.5", "raw, greedy", "raw, temperature 0.5"):
        assert f"\n- **prompts, {how}: " in text, "a headline for each workload"


def test_variants_take_turns_by_in_a_row_requests(finished: Folder) -> None:
    order = [(sample.variant, sample.repeat, sample.request) for sample in finished.samples()]
    assert len(order) == len(set(order)) == 3 * 2 * 8
    turns = [list(turn) for _, turn in itertools.groupby(order, key=lambda entry: entry[:2])]
    assert [entry[2] for entry in turns[0]] == [0, 1, 2]
    assert {len(turn) for turn in turns} == {3, 2}, "eight requests, by three"
    assert len({turn[0][0] for turn in turns[:3]}) == 3, "each variant has its turn"
    assert "variants take turns after 3 requests;" in (finished.path / "README.md").read_text()


def test_repeats_at_a_temperature_are_other_draws_and_greedy_ones_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = swept(monkeypatch, tmp_path / "run", "--temperature", "0,1.5", "-k", "1", "--num-prompts", 1)
    outputs: dict[tuple[float, int], set[str]] = {(t, k): set() for t in (0.0, 1.5) for k in (0, 1)}
    for sample in folder.samples():
        outputs[sample.workload.temperature, sample.variant.k].add(sample.output_sha256)
    assert [len(texts) for texts in outputs.values()] == [1, 1, 2, 2]
    # what the temperature allows is measured once, and of drafts alone
    measured = [(s.workload.temperature, s.variant.k, s.repeat) for s in folder.samples() if s.bound is not None]
    assert measured == [(1.5, 1, 0)]
    greedy, _, hot = (row["bounds"] for row in folder.record["rows"] if (row["temperature"], row["k"]) != (0.0, 0))
    assert greedy is None
    assert hot["sampled"]["length"] is None  # n-grams have no distribution
    assert 1 <= hot["one_hot"]["length"]["value"] <= hot["best"]["length"]["value"] <= 2
    text = (folder.path / "README.md").read_text()
    assert text.count("| length at most |") == 1, "of the workload with a temperature"
    assert f"| {hot['best']['length']['value']:.2f} |" in text


def test_later_turns_are_the_same_for_every_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, {"turns": ["a", "b", "c"], "category": "x"}, {"prompt": "d", "category": "y"})
    options = ["--prompts", prompts, "-k", "2", "--repeats", 1, "-n", 9, "--turns", 2]
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options) == 0
    folder = open_run(tmp_path / "run")
    requests, _ = folder.prompts() or ([], [])
    assert [(request.row, request.turn, request.category) for request in requests] == [
        (0, 0, "x"),
        (0, 1, "x"),
        (1, 0, "y"),
    ]
    answer = next(sample.output_ids for sample in folder.samples() if sample.variant.k == 0 and sample.request == 0)
    assert answer is not None
    assert repr(bytes(answer).decode(errors="replace"))[1:-1] in bytes(requests[1].prompt_ids).decode()
    parts = folder.record["rows"][1]["by_category"]
    assert [(part["part"], part["num_requests"]) for part in parts] == [("x", 2), ("y", 1)]
    whole = {name for name in folder.record["rows"][1] if name not in parts[0]}  # a part has every other figure
    names = {field.name for kind in (Workload, Variant) for field in dataclasses.fields(kind)}
    of_rows = {"label", "by_category", "by_bucket", "num_slower", "num_compared"}
    assert whole == {*names, *of_rows, "num_repeats", "tok_per_s_repeats", "speedup_repeats"}
    everything = (folder.path / PROMPTS).read_text().splitlines(keepends=True)
    for part, lines in zip(parts, (everything[:2], everything[2:]), strict=True):
        (folder.path / PROMPTS).write_text("".join(lines))  # as if the others had not been used
        alone = json.loads(json.dumps(rows(folder)[1].to_json()))
        assert part == {name: alone.get(name, part["part"]) for name in part}
    assert sweep(monkeypatch, "--out", tmp_path / "raw", *options, "--render", "raw") == 0
    _, left_out = open_run(tmp_path / "raw").prompts() or ([], [])
    assert "raw text has one turn" in left_out[0].why


def dying(after: int) -> Any:
    """decode, which so many requests outlive."""
    decoded: list[int] = []

    def decode_some(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Result]:
        if len(decoded) == after:
            raise Killed
        decoded.append(requests[0].index)
        return decode(engine, requests, tokenizer)

    return decode_some


def test_killed_five_times_it_gives_the_counters_of_an_uninterrupted_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Folder
) -> None:
    """Between two lines and within one; after lines of this process, and after none."""
    options = ["-k", "3,1", "--prompts", prompt_file(tmp_path), "--num-prompts", 8, "--repeats", 2, "-n", 24]
    options += ["--render", "raw"]
    out, torn = tmp_path / "killed", '{"prompts": "prom'
    for number, (after, begun) in enumerate(zip((1, 0, 4, 2, 1), ("", torn, torn, "", torn), strict=True)):
        monkeypatch.setattr("peagle.measure.sweep.run.decode", dying(after))
        with pytest.raises(Killed):
            sweep(monkeypatch, "--out", out, *(["--resume"] if number else options))
        with (out / RAW).open("a") as file:
            file.write(begun)  # a line that was being written
        assert len(open_run(out).samples()) == sum((1, 0, 4, 2, 1)[: number + 1])
    monkeypatch.setattr("peagle.measure.sweep.run.decode", decode)
    assert sweep(monkeypatch, "--out", out, "--resume") == 0
    resumed = open_run(out)
    assert counts(resumed) == counts(finished)
    assert len((out / RAW).read_text().splitlines()) == len(finished.samples())
    assert len(resumed.record["sittings"]) == 6
    for one, two in zip(resumed.record["rows"], finished.record["rows"], strict=True):
        assert one["acceptance_length"] == two["acceptance_length"]


def test_ctrl_c_keeps_the_decoded_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pressed as the third of four requests begins."""
    options = ["-k", "1", "--prompts", prompt_file(tmp_path), "--num-prompts", 2, "--repeats", 1, "-n", 8]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.measure.sweep.run, "decode", 3)
        assert sweep(patch, "--out", out, *options, "--render", "raw") == 130
    assert f"interrupted; to go on: peagle sweep --out {out} --resume" in capsys.readouterr().err
    assert len(open_run(out).samples()) == 2
    assert sweep(monkeypatch, "--out", out, "--resume") == 0
    assert len(open_run(out).samples()) == 4


def test_a_run_that_had_not_read_its_prompts_goes_on_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("peagle.cli.sweeping.make_requests", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            swept(patched, tmp_path / "run")
    assert not (tmp_path / "run" / PROMPTS).exists()
    assert sweep(monkeypatch, "--out", tmp_path / "run", "--resume") == 0
    assert open_run(tmp_path / "run").finished


def test_answers_to_earlier_turns_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, {"turns": ["a", "b"]}, {"turns": ["c", "d", "e"]}, {"prompt": "f"})
    options = ["--prompts", prompts, "-k", "1", "--repeats", 1, "-n", 9]
    assert sweep(monkeypatch, "--out", tmp_path / "whole", *options) == 0
    out = tmp_path / "run"
    monkeypatch.setattr("peagle.measure.sweep.run.decode", dying(after=2))
    with pytest.raises(Killed):
        sweep(monkeypatch, "--out", out, *options)
    assert len((out / ASKING).read_text().splitlines()) == 1  # the second conversation lacked an answer
    with (out / ASKING).open("a") as file:
        file.write('{"prompts": ')  # a line that was being written
    monkeypatch.setattr(peagle.measure.sweep.run, "decode", dying(after=2 + 6 * 2))  # its two answers, then everything
    assert sweep(monkeypatch, "--out", out, "--resume") == 0
    assert (out / PROMPTS).read_text() == (tmp_path / "whole" / PROMPTS).read_text()
    assert not (out / ASKING).exists()


def test_a_refusal_costs_no_answer_that_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompt_file(tmp_path, {"turns": ["a", "b"]}, {"prompt": "f" * 400})
    options = ["--prompts", prompts, "-k", "1", "--max-prompt-tokens", 300, "--too-long", "error", "-n", 9]
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options) == 2
    assert "expected at most 300" in capsys.readouterr().err
    assert [len(conversation.requests) for conversation in open_run(tmp_path / "run").begun()] == [2]


def failing(on: int) -> Any:
    def decode_some(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Result]:
        if engine.config.num_speculative_tokens == on:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")
        return decode(engine, requests, tokenizer)

    return decode_some


def test_programs_that_the_system_has_no_mappings_for_are_refused_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA crashes without free mappings, so the error must come before."""
    options = ["-k", "1,2", "--prompts", prompt_file(tmp_path), "--repeats", 1, "-n", 9, "--render", "raw"]
    shares = iter([0.1, 0.5, 0.9])
    monkeypatch.setattr(peagle.measure.sweep.run, "share_of_mappings", lambda: next(shares))
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options) == 2
    assert "K = 2: the programs of 2 variants take 90% of the memory mappings" in capsys.readouterr().err
    assert not open_run(tmp_path / "run").samples()


def test_a_variant_that_fails_stops_the_run_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-k", "1,2", "--prompts", prompt_file(tmp_path), "--repeats", 1, "-n", 9, "--render", "raw"]
    monkeypatch.setattr("peagle.measure.sweep.run.decode", failing(on=2))
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert "K = 2: RESOURCE_EXHAUSTED: out of memory" in error
    assert error.count("\n") == 1
    kept = len(open_run(tmp_path / "run").samples())
    assert kept == 2
    assert sweep(monkeypatch, "--out", tmp_path / "run", "--resume", "--continue-on-error") == 1
    folder = open_run(tmp_path / "run")
    assert [row["k"] for row in folder.record["rows"]] == [0, 1]
    text = (tmp_path / "run" / "README.md").read_text()
    assert "**Failed:** prompts, raw, greedy, K = 2: RESOURCE_EXHAUSTED" in text.partition("\n## ")[0]
    monkeypatch.setattr("peagle.measure.sweep.run.decode", decode)
    assert sweep(monkeypatch, "--out", tmp_path / "run", "--resume") == 0
    assert [row["k"] for row in open_run(tmp_path / "run").record["rows"]] == [0, 1, 2]
    assert open_run(tmp_path / "run").errors() == {}


def test_a_dry_run_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompt_file(tmp_path)
    assert sweep(monkeypatch, "--out", tmp_path / "run", "--prompts", prompts, "-k", "0-2", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "K = 0; 1; 2" in said
    assert f"{3 * 9 * 3} requests" in said
    typed = ["--prompts", prompts, "-k", "2", "--concurrency", "4,2", "--repeats", 1, "--dry-run"]
    assert sweep(monkeypatch, "--out", tmp_path / "run", *typed) == 0
    said = capsys.readouterr().out
    assert "at once      2, 4" in said
    assert f"{9 * (2 + 2 * 2)} requests" in said
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_too_long_are_left_out_and_counted_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", prompt_file(tmp_path), "-k", "1", "--repeats", 1, "-n", 4, "--render", "raw"]
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options, "--max-prompt-tokens", 5) == 0
    requests, left_out = open_run(tmp_path / "run").prompts() or ([], [])
    assert (len(requests), len(left_out)) == (8, 1)
    assert "has 15 tokens; expected at most 5" in (tmp_path / "run" / "README.md").read_text()
    assert re.search(r"warning: prompts: 1 conversation left out or cut, .*has 15 tokens", capsys.readouterr().err)
    options += ["--max-prompt-tokens", 5, "--too-long", "error"]
    assert sweep(monkeypatch, "--out", tmp_path / "other", *options) == 2
    assert "--too-long skip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "x"], "expected numbers, ranges, auto or auto:N"),
        (["-k", "3-"], "expected numbers, ranges, auto or auto:N"),
        (["-k", "1,auto:0"], "-k is 'auto:0'; expected auto:1 to auto:128"),
        (["-k", "0"], "at least one K of 1 to 128"),
        (["-k", "1,100000", "--dry-run"], "-k is 100000; expected 0 (plain decoding) to 128 drafted tokens"),
        (["--temperature", "hot"], "expected numbers separated by commas"),
        (["--temperature", "-1"], "expected finite numbers"),
        (["--buckets", "5,3"], "tokens that rise"),
        (["--repeats", "0"], "--repeats"),
        (["--prompts", "absent.jsonl"], "cannot be read"),
        (["--drafter", "absent"], "absent"),
        (["--resume"], "cannot be read"),
        (["--max-prompt-tokens", "1"], "demo has no usable prompt"),
        (["--max-prompt-tokens", "1", "--too-long", "error"], "expected at most 1"),
        (["--concurrency", "x"], "--concurrency is 'x'; expected numbers separated by commas"),
        (["--concurrency", ""], "--concurrency is ''"),
        (["--concurrency", "1,0"], "--concurrency is 0; expected 1 or more"),
        (["--concurrency", "2,61"], "--concurrency is 61, but demo has 60 requests"),
        (["--write-widths", "table.json", "-k", "1-3"], "-k does not name it; add it, as -k 1-7,auto"),
        (["--write-widths", "no/table.json", "--concurrency", "1"], "no does not exist"),
        (["--write-widths", "/dev/null", "--concurrency", "1"], "/dev/null exists"),
        (
            ["--write-widths", "draftr", "--concurrency", "1"],
            "--write-widths draftr is no folder; expected a drafter's directory",
        ),
        (["--write-widths", "table.json", "--concurrency", "1", "--drafter", "demo,ngram"], "one drafter"),
        (["--write-widths", "table.json", "--concurrency", "1", "--draft-vocab", "9,full"], "one vocabulary"),
        (["--write-widths", "table.json", "--concurrency", "1", "--drafter-window", "9,off"], "one window"),
        (["--drafter-window", "128,wide"], "drafter-window is 'wide'; expected the positions"),
        (["--drafter-window", "128", "--drafter", "ngram"], "no drafter with weights"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert sweep(monkeypatch, "--out", tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: Folder
) -> None:
    before = {path.name: path.read_bytes() for path in finished.path.iterdir()}
    assert sweep(monkeypatch, "--out", finished.path, "--prompts", prompt_file(tmp_path)) == 2
    assert sweep(monkeypatch, "--out", finished.path, "--resume", "-k", "5") == 2
    assert "leave out --num-speculative-tokens" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in finished.path.iterdir()} == before


def test_a_slip_in_an_option_is_named_before_a_folder_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another folder alone the command would fail again."""
    for arguments in (["-k", "x"], ["--temperature", "hot"], ["--repeats", "0"], ["--concurrency", "0"], ["--strict"]):
        assert sweep(monkeypatch, "--out", tmp_path, *arguments) == 2
        error = capsys.readouterr().err
        assert arguments[0] in error
        assert "exists" not in error
    assert sweep(monkeypatch, "--out", tmp_path) == 2
    assert "exists; expected a new folder" in capsys.readouterr().err


def test_another_schema_another_checkpoint_and_damage_are_refused(
    monkeypatch: pytest.MonkeyPatch, finished: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((finished.path / RUN).read_text())
    prints = record["plan"]["fingerprints"]
    for change, message in (
        ({"schema": 4}, "has schema 4 of a newer peagle"),
        ({"schema": 1}, "holds no run of peagle sweep"),
        ({"kind": "other"}, "holds no run of peagle sweep"),
        ({"kind": "sweep in short"}, "with its raw lines"),
        ({"shares": None}, "is incomplete (shares)"),
        ({"plan": {}}, "is incomplete"),
        ({"plan": []}, "is incomplete"),
        ({"plan": record["plan"] | {"ks": ["x"]}}, "is incomplete"),
        (
            {"sittings": [record["sittings"][0] | {"ran": {"dtype": "float32", "experts": "e", "kernels": "other"}}]},
            "kernels other; now it is dtype float32",
        ),
        ({"plan": record["plan"] | {"fingerprints": prints | {"target": "0"}}}, "target has changed since"),
    ):
        damaged = {name: value for name, value in (record | change).items() if value is not None}
        (finished.path / RUN).write_text(json.dumps(damaged))
        assert sweep(monkeypatch, "--out", finished.path, "--resume") == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (finished.path / RUN).write_text(json.dumps(record))
    whole = (finished.path / RAW).read_text()
    for line, message in (
        ("damage", "raw.jsonl line 49 is damaged (Expecting value"),
        ('{"prompts": "a"}', "raw.jsonl line 49 is damaged ('raw' is missing)"),
    ):
        (finished.path / RAW).write_text(f"{whole}{line}\n")
        assert main(["report", str(finished.path)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_conversations_that_need_a_template_are_left_out_of_raw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts = prompt_file(tmp_path, {"messages": messages}, {"messages": messages[1:]})
    options = ["--prompts", prompts, "-k", "1", "--repeats", 1, "-n", 9, "--render", "both"]
    assert sweep(monkeypatch, "--out", tmp_path / "run", *options) == 0
    requests, left_out = open_run(tmp_path / "run").prompts() or ([], [])
    assert [(request.raw, request.row) for request in requests] == [(False, 0), (False, 1), (True, 1)]
    assert [(left.raw, left.row) for left in left_out] == [(True, 0)]
    assert "Conversations left out: 1," in (tmp_path / "run" / "README.md").read_text()
    prompt_file(tmp_path, {"messages": messages})
    assert sweep(monkeypatch, "--out", tmp_path / "both", *options) == 0
    text = (tmp_path / "both" / "README.md").read_text()
    assert "**prompts, raw, greedy: nothing was decoded, because every prompt was left out.**" in text
    capsys.readouterr()
    assert sweep(monkeypatch, "--out", tmp_path / "raw", *options[:-1], "raw") == 2
    assert "which needs the chat template" in capsys.readouterr().err
    assert not (tmp_path / "raw").exists()


def test_no_text_costs_a_sweep_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """File names that are not UTF-8, odd categories, malformed rows; also in a run of an older release."""
    prompts = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 $x^{.jsonl"))
    rows = [{"prompt": text, "category": f"$a_{{\n|\x00{n % 2}"} for n, text in enumerate(TEXTS[:3])]
    prompt_file(tmp_path, *rows, {"prompt": "a", "category": "\ud800"}, {"prompt": ""}).rename(prompts)
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xe9"))
    options = ["--prompts", prompts, "-k", "1", "--repeats", 1, "-n", 4, "--render", "raw", "--out", out]
    assert sweep(monkeypatch, *options, "--strict") == 2
    assert not out.exists()
    assert sweep(monkeypatch, *options) == 0
    folder = open_run(out)
    assert (folder.plan.sources[0].num_rows, folder.plan.sources[0].num_skipped) == (5, 2)
    _, left_out = folder.prompts() or ([], [])
    assert [left.why.partition(".jsonl ")[2] for left in left_out] == [
        "line 4: category is not valid Unicode text: it holds the lone surrogate \\ud800; expected UTF-8",
        "line 5 is empty; expected some text",
    ]
    pages = {name: (out / name).read_text(encoding="utf-8") for name in ("README.md", "report.html")}
    for text in pages.values():
        assert "rows without a usable prompt: 2, the first: " in text
        assert "caf\\udce9 $x^{, raw, greedy" in text
        assert "$a_{\\n" in text
    assert "2 rows without a usable prompt, the first: " in capsys.readouterr().err
    record = json.loads((out / RUN).read_text())
    record["plan"]["sources"][0]["name"] = "caf\udce9 $x^{"
    (out / RUN).write_text(json.dumps(record))
    for name in (RAW, PROMPTS):
        text = (out / name).read_text()
        (out / name).write_text(text.replace("caf\\\\udce9", "caf\\udce9").replace("$a_{\\\\n", "$a_{\\ud800"))
    assert main(["report", str(out)]) == 0
    assert "caf\\udce9 $x^{, raw, greedy" in (out / "README.md").read_text(encoding="utf-8")


def test_special_tokens_are_read_in_raw_text_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: ByteLevelTokenizer
) -> None:
    options = ["--prompts", prompt_file(tmp_path, {"prompt": "<|start|>a"}), "-k", "1", "--repeats", 1, "-n", 2]
    options += ["--special-tokens", "--out", tmp_path / "run"]
    assert sweep(monkeypatch, *options, pair=toy_pair(tokenizer, ())) == 2
    assert "applies to raw text only" in capsys.readouterr().err
    assert sweep(monkeypatch, *options, "--render", "both", pair=toy_pair(tokenizer, ())) == 0
    chat, raw = (request.prompt_ids for request in (open_run(tmp_path / "run").prompts() or ([], []))[0])
    start = SPECIALS.index("<|start|>")
    assert (raw[0], raw.count(start), chat.count(start)) == (start, 1, 3)  # of the chat's all are the template's


def test_auto_that_never_drafted_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmUp, "measure_costs", lambda warm_up, _: costs(warm_up.num_drafts, {1: False}))
    options = ["-k", "auto", "--repeats", 1, "-n", 4, "--concurrency", 2, "--quiet", "--seed", 3]
    arguments = ("--out", tmp_path / "run", "--prompts", prompt_file(tmp_path), *options)
    assert sweep(monkeypatch, *arguments, pair=toy_pair(Tokens(), ())) == 0
    idle, alone, together = capsys.readouterr().err.splitlines()
    assert idle == "peagle: warning: --seed: no effect at temperature 0, where the likeliest token is taken"
    why = "K = auto verified no draft, since by measured times none was likely enough to pay"
    assert alone.startswith(f"peagle: warning: prompts, chat, greedy: {why}")
    assert together.startswith(f"peagle: warning: prompts, chat, greedy, 2 at once: {why}")


def test_auto_that_never_drafted_is_not_the_k_to_use(finished: Folder) -> None:
    plain, *_, last = rows(finished)
    ahead = dataclasses.replace(last, variant=Variant("auto", "demo"), speedup=Estimate(9.0, 8.0, 10.0))
    assert best([plain, ahead]) == ahead
    assert best([plain, dataclasses.replace(ahead, num_spec_steps=0)]) == plain


def test_a_drafter_that_cannot_be_loaded_need_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("peagle.cli.sweeping.check_fit", lambda *_: ())
    (tmp_path / "bad").mkdir()

    def with_drafter(pair: Pair, _: str, drafter: str, **__: object) -> Pair:
        if drafter == "ngram":
            return pair
        raise InputError("its weights are damaged")

    monkeypatch.setattr(peagle.cli.sweeping, "load", lambda *_, **__: shared_pair())
    monkeypatch.setattr(peagle.cli.sweeping, "with_drafter", with_drafter)
    arguments = [
        "sweep",
        "--prompts",
        str(prompt_file(tmp_path)),
        "-k",
        "1",
        "--repeats",
        "1",
        "-n",
        "9",
        "--render",
        "raw",
    ]
    arguments += ["--drafter", f"ngram,{tmp_path / 'bad'}", "--out", str(tmp_path / "run")]
    assert main(arguments) == 2
    assert not (tmp_path / "run").exists()
    assert main([*arguments, "--continue-on-error"]) == 1
    assert [row["label"] for row in open_run(tmp_path / "run").record["rows"]] == ["0", "1, ngram"]
    assert "its weights are damaged" in (tmp_path / "run" / "README.md").read_text()


def test_files_and_drafters_of_the_same_name_are_told_apart() -> None:
    assert short_names(["a/question", "b/question"]) == ["a/question", "b/question"]
    assert short_names(["runs/a/drafter", "runs/b/drafter", "ngram"]) == ["a/drafter", "b/drafter", "ngram"]
    assert short_names(["x"]) == ["x"]


def test_two_processes_do_not_write_to_one_run(
    finished: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(finished.path):
        assert sweep(monkeypatch, "--out", finished.path, "--resume") == 2
    assert "is being written by another run" in capsys.readouterr().err


def test_buckets_of_prompts(finished: Folder) -> None:
    plan = dataclasses.replace(finished.plan, buckets=(4, 16))
    assert [plan.bucket(n) for n in (1, 3, 4, 15, 16, 99)] == ["0..3", "0..3", "4..15", "4..15", "16..", "16.."]


def test_the_script_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[4] / "scripts" / "sweep_acceptance.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--out", "x", "-k", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert "at least one K of 1 to 128" in capsys.readouterr().err
