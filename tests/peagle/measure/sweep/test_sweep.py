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

import peagle.measure.sweep.runner
from peagle.base.errors import InputError
from peagle.base.files import locked
from peagle.cli import main
from peagle.engine.auto.speculation import Speculation
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO_DIRECTORY
from peagle.measure.estimates import Estimate
from peagle.measure.sweep.figures import best, rows
from peagle.measure.sweep.plan import Plan, Variant, Workload, short_names
from peagle.measure.sweep.runner import SweepRun
from peagle.measure.sweep.store import CONVERSATIONS, PROMPTS, RAW, RUN, Folder, SweepRequest, open_run
from peagle.pair import Pair
from tests.peagle.measure.sweep.runs import (
    SMALL,
    SWEPT,
    TEXTS,
    Killed,
    Lab,
    lines_of,
    load_in_place,
    prompt_file,
    shared_pair,
)
from tests.support.commands import words
from tests.support.pairs import press_ctrl_c_at
from tests.support.toys import costs

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("quickly")]
profiling = SweepRun.profile


def counts(folder: Folder) -> dict[Any, Any]:
    """Read the decoded results, without times."""
    return {sample.key: (sample.output_sha256, sample.counters) for sample in folder.samples()}


def requests_of(folder: Folder) -> list[SweepRequest]:
    requests, _ = folder.prompts() or ([], [])
    return requests


def test_a_plan_comes_back_from_json(finished: Folder) -> None:
    for plan in (finished.plan, dataclasses.replace(finished.plan, concurrencies=(3, 1))):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_figures_follow_from_raw_lines(finished: Folder) -> None:
    raw = lines_of(finished)
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
        tokens = sum(line["output_tokens"] - 1 for line in mine)
        assert row["num_truncated_tokens"] == steps + accepted - tokens > 0
        assert row["acceptance_length"]["value"] == pytest.approx(tokens / steps)
        assert row["acceptance_length"]["value"] > 1  # the toy walks in circles, which an n-gram drafter learns
        of_requests = [
            sum(line["output_tokens"] - 1 for line in own) / sum(sum(line["histogram"]) for line in own)
            for own in ([line for line in mine if line["request"] == request] for request in range(8))
        ]
        assert row["acceptance_length_mean"]["value"] == pytest.approx(np.mean(of_requests))
        for place, rate in enumerate(row["rate_per_position"]):
            assert rate["value"] == pytest.approx(histogram[place + 1 :].sum() / steps)
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


def test_steps_of_some_conversations_are_profiled_and_those_missing_again(lab: Lab) -> None:
    """One request of each conversation, by every variant, exactly once, even after a kill and a failure."""
    lab.monkeypatch.setattr(SweepRun, "profile", profiling)
    lab.monkeypatch.setattr(peagle.measure.sweep.runner, "PROFILED", 2)
    profiles: list[tuple[int, int]] = []
    profile = peagle.measure.sweep.runner.profile

    def failing(engine: Engine, requests: Sequence[Request], *rest: Any, **options: Any) -> Any:
        profiles.append((engine.config.num_speculative_tokens, requests[0].index))
        if len(profiles) == 2:
            raise RuntimeError("no trace")
        if len(profiles) == 4:
            raise Killed
        return profile(engine, requests, *rest, **options)

    lab.monkeypatch.setattr(peagle.measure.sweep.runner, "profile", failing)
    prompt_file(lab.root, {"turns": ["a", "b"]}, {"turns": ["c", "d"]}, {"turns": ["e"]})
    with pytest.raises(Killed):
        lab.sweep("-k 2 --render chat")
    assert [share.get("why_not") for share in lab.folder.record["shares"]] == [None, "no trace", None]
    lab.resume()
    shares = lab.folder.record["shares"]
    profiled = sorted((share["k"], share["request"]) for share in shares)
    assert len(profiled) == len(set(profiled)) == 4  # plain decoding and K = 2
    rows_of = {request.request: request.row for request in requests_of(lab.folder)}
    assert len({rows_of[request] for _, request in profiled}) == 2
    assert profiles[4:] == [(2, profiles[1][1]), (2, profiles[3][1])]
    assert not any("why_not" in share for share in shares)


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


def test_drafters_workloads_and_windows_stand_side_by_side(lab: Lab) -> None:
    lab.monkeypatch.setattr("peagle.loading.fit.check_fit", lambda *_: ())
    for name in ("one", "two"):
        (lab.root / name).mkdir()
    drafters = f"--drafter {lab.root / 'one'},{lab.root / 'two'} --drafter-window 128,off"
    lab.sweep("-k 2 --num-prompts 1 -n 12 --render both --temperature 0,0.5", drafters)
    figures = lab.folder.record["rows"]
    assert {sample.variant.drafter_window for sample in lab.folder.samples()} == {None, "128", "off"}  # None: plain
    workloads = dict.fromkeys((row["raw"], row["temperature"]) for row in figures)
    assert list(workloads) == [(False, 0), (False, 0.5), (True, 0), (True, 0.5)]
    variants = [(f"2, {name}, window {window}", window) for name in ("one", "two") for window in ("128", "off")]
    assert [(row["label"], row["drafter_window"]) for row in figures[:5]] == [("0", None), *variants]
    assert "| 2, two, window 128 |" in lab.page
    for label in ("chat, greedy", "chat, temperature 0.5", "raw, greedy", "raw, temperature 0.5"):
        assert f"\n- **prompts, {label}: " in lab.page, "a headline for each workload"


def test_variants_take_turns_by_in_a_row_requests(finished: Folder) -> None:
    order = [(sample.variant, sample.repeat, sample.request) for sample in finished.samples()]
    assert len(order) == len(set(order)) == 3 * 2 * 8
    turns = [list(turn) for _, turn in itertools.groupby(order, key=lambda entry: entry[:2])]
    assert [entry[2] for entry in turns[0]] == [0, 1, 2]
    assert {len(turn) for turn in turns} == {3, 2}, "eight requests, by three"
    assert len({turn[0][0] for turn in turns[:3]}) == 3, "each variant has its turn"
    assert "variants take turns after 3 requests;" in (finished.path / "README.md").read_text()


def test_repeats_at_a_temperature_are_other_draws_and_greedy_ones_the_same(lab: Lab) -> None:
    lab.sweep("--temperature 0,1.5 --num-prompts 1 --repeats 2 -n 24")
    outputs: dict[tuple[float, int], set[str]] = {(t, k): set() for t in (0.0, 1.5) for k in (0, 1)}
    samples = lab.folder.samples()
    for sample in samples:
        outputs[sample.workload.temperature, sample.variant.k].add(sample.output_sha256)
    assert [len(texts) for texts in outputs.values()] == [1, 1, 2, 2]
    # what the temperature allows is measured once, and of drafts alone
    assert [(s.workload.temperature, s.variant.k, s.repeat) for s in samples if s.bound is not None] == [(1.5, 1, 0)]
    _, greedy, _, hot = (row["bounds"] for row in lab.folder.record["rows"])
    assert greedy is None
    assert hot["sampled"]["length"] is None  # n-grams have no distribution
    assert 1 <= hot["one_hot"]["length"]["value"] <= hot["best"]["length"]["value"] <= 2
    assert lab.page.count("| length at most |") == 1, "of the workload with a temperature"
    assert f"| {hot['best']['length']['value']:.2f} |" in lab.page


def test_later_turns_are_the_same_for_every_variant(lab: Lab) -> None:
    prompt_file(lab.root, {"turns": ["a", "b", "c"], "category": "x"}, {"prompt": "d", "category": "y"})
    lab.sweep("-k 2 --turns 2 --render chat")
    folder = lab.folder
    requests = requests_of(folder)
    places = [(request.row, request.turn, request.category) for request in requests]
    assert places == [(0, 0, "x"), (0, 1, "x"), (1, 0, "y")]
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
    lab.sweep("-k 2 --turns 2", out=lab.root / "raw")
    _, left_out = open_run(lab.root / "raw").prompts() or ([], [])
    assert "raw text has one turn" in left_out[0].why


# --- cut off, and failed ---


def test_killed_five_times_it_gives_the_counters_of_an_uninterrupted_run(lab: Lab, once: Path) -> None:
    """Between two lines and within one; after lines of this process, and after none."""
    num_decoded, torn = 0, '{"prompts": "prom'
    for after, rest_of_a_line in ((1, ""), (0, torn), (4, torn), (2, ""), (1, torn)):
        lab.kill(*((lab.resume,) if lab.out.exists() else (lab.sweep, SWEPT)), after=after)
        with (lab.out / RAW).open("a") as file:
            file.write(rest_of_a_line)
        num_decoded += after
        assert len(lab.folder.samples()) == num_decoded
    lab.resume()
    resumed, uninterrupted = lab.folder, open_run(once)
    assert counts(resumed) == counts(uninterrupted)
    assert len((lab.out / RAW).read_text().splitlines()) == len(uninterrupted.samples())
    assert len(resumed.record["origins"]) == 6
    for one, two in zip(resumed.record["rows"], uninterrupted.record["rows"], strict=True):
        assert one["acceptance_length"] == two["acceptance_length"]


def test_ctrl_c_keeps_the_decoded_requests(lab: Lab) -> None:
    """Pressed as the third of four requests begins."""
    with lab.monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.measure.sweep.runner, "decode", 3)
        errors = lab.sweep("--num-prompts 2", code=130)
    assert f"interrupted; to go on: peagle sweep --out {lab.out} --resume" in errors
    assert len(lab.folder.samples()) == 2
    lab.resume()
    assert len(lab.folder.samples()) == 4


def test_a_run_that_had_not_read_its_prompts_goes_on_too(lab: Lab) -> None:
    with lab.monkeypatch.context() as patch:
        patch.setattr("peagle.measure.sweep.runner.make_requests", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            lab.sweep()
    assert not (lab.out / PROMPTS).exists()
    lab.resume()
    assert lab.folder.finished


def test_answers_to_earlier_turns_are_not_decoded_again(lab: Lab) -> None:
    prompt_file(lab.root, {"turns": ["a", "b"]}, {"turns": ["c", "d", "e"]}, {"prompt": "f"})
    lab.sweep("--render chat", out=lab.root / "whole")
    lab.kill(lab.sweep, "--render chat", after=2)
    assert len((lab.out / CONVERSATIONS).read_text().splitlines()) == 1  # the second conversation lacked an answer
    with (lab.out / CONVERSATIONS).open("a") as file:
        file.write('{"prompts": ')  # a line that was being written
    decoded: list[int] = []
    lab.before_decoding(lambda engine, _: decoded.append(engine.config.num_speculative_tokens))
    lab.resume()
    assert len(decoded) == 2 + 6 * 2, "the second conversation's two answers, then everything"
    assert (lab.out / PROMPTS).read_text() == (lab.root / "whole" / PROMPTS).read_text()
    assert not (lab.out / CONVERSATIONS).exists()


def test_programs_that_the_system_has_no_mappings_for_are_refused_before_anything_is_decoded(lab: Lab) -> None:
    """XLA crashes without free mappings, so the error must come before."""
    shares = iter([0.1, 0.5, 0.9])
    lab.monkeypatch.setattr(peagle.measure.sweep.runner, "share_of_mappings", lambda: next(shares))
    line = "K = 2: the programs of 2 variants take 90% of the memory mappings"
    assert line in lab.sweep("-k 1,2", code=2)
    assert not lab.folder.samples()


def test_a_variant_that_fails_stops_the_run_and_loses_nothing(lab: Lab) -> None:
    def fail(engine: Engine, _: Sequence[Request]) -> None:
        if engine.config.num_speculative_tokens == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    def ks() -> list[int]:
        return [row["k"] for row in lab.folder.record["rows"]]

    lab.before_decoding(fail)
    assert "K = 2: RESOURCE_EXHAUSTED: out of memory" in lab.sweep("-k 1,2", code=2)
    assert len(lab.folder.samples()) == 2
    lab.resume("--continue-on-error", code=1)
    assert ks() == [0, 1]
    assert "**Failed:** prompts, raw, greedy, K = 2: RESOURCE_EXHAUSTED" in lab.page.partition("\n## ")[0]
    lab.before_decoding(lambda *_: None)
    lab.resume()
    assert ks() == [0, 1, 2]
    assert lab.folder.errors() == {}


def test_a_drafter_that_cannot_be_loaded_need_not_cost_the_others(lab: Lab) -> None:
    def with_drafter(pair: Pair, _: str, drafter: str, **__: object) -> Pair:
        if drafter == "ngram":
            return pair
        raise InputError("its weights are damaged")

    lab.monkeypatch.setattr("peagle.loading.fit.check_fit", lambda *_: ())
    lab.monkeypatch.setattr("peagle.loading.load.with_drafter", with_drafter)
    (lab.root / "bad").mkdir()
    drafters = f"--drafter ngram,{lab.root / 'bad'}"
    lab.sweep(drafters, code=2)
    assert not lab.out.exists()
    lab.sweep(drafters, "--continue-on-error", code=1)
    assert [row["label"] for row in lab.folder.record["rows"]] == ["0", "1, ngram"]
    assert "its weights are damaged" in lab.page


# --- what is refused, left out or told ---


def test_names_of_a_run_hold_in_any_folder(lab: Lab) -> None:
    for part in ("target", "drafter"):
        (lab.root / "models").mkdir(exist_ok=True)
        (lab.root / "models" / part).symlink_to(DEMO_DIRECTORY / part)
    prompt_file(lab.root)
    lab.monkeypatch.chdir(lab.root)
    typed = f"sweep {SMALL} --prompt-file prompts.jsonl --target models/target --drafter models/drafter,ngram --out run"
    lab.run(0, typed)
    plan = lab.folder.plan
    assert (plan.target, plan.drafters) == (str(DEMO_DIRECTORY / "target"), (str(DEMO_DIRECTORY / "drafter"), "ngram"))
    assert [source.file for source in plan.sources] == [str(lab.root / "prompts.jsonl")]
    (lab.root / "elsewhere").mkdir()
    lab.monkeypatch.chdir(lab.root / "elsewhere")
    lab.resume()
    (lab.root / "run" / "run.json").write_text(
        (lab.root / "run" / "run.json").read_text().replace(str(DEMO_DIRECTORY / "target"), str(lab.root / "gone"))
    )
    assert f"the target {lab.root / 'gone'} is not there; expected" in lab.resume(code=2)


def test_a_dry_run_writes_nothing(lab: Lab) -> None:
    for options, expected, decodings in (
        ("-k 0-2 --repeats 3", "K = 0; 1; 2", 3 * 9 * 3),
        ("-k 2 --concurrency 4,2", "at once      2, 4", 9 * (2 + 2 * 2)),
    ):
        assert (
            main(words("sweep", SMALL, "--prompt-file", prompt_file(lab.root), "--out", lab.out, options, "--dry-run"))
            == 0
        )
        plan = lab.capsys.readouterr().out
        assert expected in plan
        assert f"{decodings} requests" in plan
    assert not lab.out.exists()


def test_prompts_that_are_too_long_are_left_out_and_counted(lab: Lab) -> None:
    errors = lab.sweep("--max-prompt-tokens 5")
    assert re.search(r"warning: prompts: 1 conversation left out or cut, .*has 15 tokens", errors)
    assert (len(requests_of(lab.folder)), len((lab.folder.prompts() or ([], []))[1])) == (8, 1)
    assert "has 15 tokens; expected at most 5" in lab.page


# options without a file of prompts, and a part of the line
REFUSED = [
    ("-k x", "-k is 'x'; expected numbers, ranges, auto or auto:N"),
    ("-k 3-", "expected numbers, ranges, auto or auto:N"),
    ("-k 1,auto:0", "-k is 'auto:0'; expected auto:N, N from 1 to 128"),
    ("-k 0", "at least one K of 1 to 128"),
    ("-k 1,100000 --dry-run", "-k is 100000; expected 0 (plain decoding) to 128 drafted tokens"),
    ("--temperature hot", "--temperature is 'hot'; expected numbers separated by commas"),
    ("--temperature -1", "expected finite numbers"),
    ("--buckets 5,3", "ascending numbers of tokens"),
    ("--repeats 0", "--repeats is 0"),
    ("--prompt-file absent.jsonl", "cannot be read"),
    ("--drafter absent", "absent"),
    ("--resume", "cannot be read"),
    ("--max-prompt-tokens 1", "demo has no usable prompt"),
    ("--concurrency x", "--concurrency is 'x'; expected numbers separated by commas"),
    ("--concurrency=", "--concurrency is ''"),
    ("--concurrency 1,0", "--concurrency is 0; expected 1 or more"),
    ("--concurrency 2,61", "--concurrency is 61, but demo has 60 requests"),
    ("--write-widths table.json -k 1-3", "-k does not name it; add it, as -k 1-7,auto"),
    ("--write-widths no/table.json --concurrency 1", "no does not exist"),
    ("--write-widths /dev/null --concurrency 1", "/dev/null exists"),
    ("--write-widths draftr --concurrency 1", "--write-widths draftr is no folder; expected a drafter's directory"),
    ("--write-widths table.json --drafter demo,ngram", "one drafter"),
    ("--write-widths table.json --draft-vocab 9,full", "one vocabulary"),
    ("--write-widths table.json --drafter-window 9,off", "one window"),
    ("--drafter-window 128,wide", "drafter-window is 'wide'; expected the positions"),
    ("--drafter-window 128 --drafter ngram", "no drafter with weights"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(lab: Lab, options: str, line: str) -> None:
    assert line in lab.run(2, "sweep --out", lab.out, options)
    assert not lab.out.exists()


def test_a_run_is_never_overwritten(lab: Lab, finished: Folder) -> None:
    """An option that no other folder could mend is named first."""
    before = {path.name: path.read_bytes() for path in finished.path.iterdir()}
    assert "exists; expected a new folder" in lab.sweep(code=2)
    assert "leave out --num-speculative-tokens" in lab.resume("-k 5", code=2)
    for option in ("-k x", "--temperature hot", "--repeats 0", "--concurrency 0"):
        assert option.split()[0] in lab.run(2, "sweep --out", finished.path, option)
    assert {path.name: path.read_bytes() for path in finished.path.iterdir()} == before


def test_two_processes_do_not_write_to_one_run(lab: Lab, finished: Folder) -> None:
    with locked(finished.path):
        assert "is being written by another run" in lab.resume(code=2)


def test_another_schema_another_checkpoint_and_damage_are_refused(lab: Lab, finished: Folder) -> None:
    record = json.loads((finished.path / RUN).read_text())
    plan, origin = record["plan"], record["origins"][0]
    for change, line in (
        ({"schema": 4}, "holds no run of peagle sweep (schema 4)"),
        ({"kind": "other"}, "holds no run of peagle sweep"),
        ({"kind": "sweep in short"}, "with its raw lines"),
        ({"shares": None}, "is incomplete (shares)"),
        ({"plan": {}}, "is incomplete"),
        ({"plan": []}, "is incomplete"),
        ({"plan": plan | {"ks": ["x"]}}, "run.json: K is 'x'; expected a number of drafted tokens"),
        ({"origins": [origin | {"ran": origin["ran"] | {"kernels": "other"}}]}, "kernels other; now it is dtype"),
        ({"plan": plan | {"fingerprints": plan["fingerprints"] | {"target": "0"}}}, "target has changed since"),
    ):
        damaged = {name: value for name, value in (record | change).items() if value is not None}
        (finished.path / RUN).write_text(json.dumps(damaged))
        assert line in lab.resume(code=2)
    (finished.path / RUN).write_text(json.dumps(record))
    whole = (finished.path / RAW).read_text()
    for line, why in (("damage", "Expecting value"), ('{"prompts": "a"}', "'raw' is missing)")):
        (finished.path / RAW).write_text(f"{whole}{line}\n")
        assert f"raw.jsonl line 49 is damaged ({why}" in lab.run(2, "report", finished.path)


def test_conversations_that_need_a_template_are_left_out_of_raw(lab: Lab) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt_file(lab.root, {"messages": messages}, {"messages": messages[1:]})
    lab.sweep("--render both")
    requests, left_out = lab.folder.prompts() or ([], [])
    assert [(request.raw, request.row) for request in requests] == [(False, 0), (False, 1), (True, 1)]
    assert [(left.raw, left.row) for left in left_out] == [(True, 0)]
    assert "Conversations left out: 1," in lab.page
    prompt_file(lab.root, {"messages": messages})
    lab.sweep("--render both", out=lab.root / "both")
    sentence = "**prompts, raw, greedy: nothing was decoded, because every prompt was left out.**"
    assert sentence in (lab.root / "both" / "README.md").read_text()
    assert "which needs the chat template" in lab.sweep(out=lab.root / "raw", code=2)
    assert not (lab.root / "raw").exists()


def test_no_text_costs_a_sweep_its_report(lab: Lab) -> None:
    """File names that are not UTF-8, odd categories, malformed rows; also in the files of a run."""
    prompts, out = (Path(os.fsdecode(os.fsencode(lab.root) + name)) for name in (b"/caf\xe9 $x^{.jsonl", b"/run\xe9"))
    odd = [{"prompt": text, "category": f"$a_{{\n|\x00{n % 2}"} for n, text in enumerate(TEXTS[:3])]
    prompt_file(lab.root, *odd, {"prompt": "a", "category": "\ud800"}, {"prompt": ""}).rename(prompts)
    command: list[Any] = ["sweep", SMALL, "--prompt-file", prompts, "--out", out]
    assert "2 rows without a usable prompt, the first: " in lab.run(0, *command)
    folder = open_run(out)
    assert (folder.plan.sources[0].num_rows, folder.plan.sources[0].num_skipped) == (5, 2)
    _, left_out = folder.prompts() or ([], [])
    assert [left.why.partition(".jsonl ")[2] for left in left_out] == [
        "line 4: category is not valid Unicode text: it holds the lone surrogate \\ud800; expected UTF-8",
        "line 5 is empty; expected some text",
    ]
    for name in ("README.md", "report.html"):
        text = (out / name).read_text(encoding="utf-8")
        for part in ("usable prompt: 2, the first: ", "caf\\udce9 $x^{, raw, greedy", "$a_{\\n"):
            assert part in text
    record = json.loads((out / RUN).read_text())
    record["plan"]["sources"][0]["name"] = "caf\udce9 $x^{"
    (out / RUN).write_text(json.dumps(record))
    for name in (RAW, PROMPTS):
        text = (out / name).read_text()
        (out / name).write_text(text.replace("caf\\\\udce9", "caf\\udce9").replace("$a_{\\\\n", "$a_{\\ud800"))
    lab.run(0, "report", out)
    assert "caf\\udce9 $x^{, raw, greedy" in (out / "README.md").read_text(encoding="utf-8")


def test_auto_that_never_drafted_is_told(lab: Lab) -> None:
    load_in_place(lab.monkeypatch, dataclasses.replace(shared_pair(), speculation=Speculation(1)))
    lab.monkeypatch.setattr("peagle.engine.auto.measure.measure_costs", lambda *_: costs(7, {1: False}))
    idle, alone, together = lab.sweep("-k auto --concurrency 2 --quiet --seed 3").splitlines()
    assert idle == "peagle: warning: --seed: no effect at temperature 0, where the likeliest token is taken"
    why = "K = auto verified no draft, since by measured times none was likely enough to save time"
    assert alone.startswith(f"peagle: warning: prompts, raw, greedy: {why}")
    assert together.startswith(f"peagle: warning: prompts, raw, greedy, 2 at once: {why}")


def test_auto_that_never_drafted_is_not_the_k_to_use(finished: Folder) -> None:
    plain, *_, last = rows(finished)
    ahead = dataclasses.replace(last, variant=Variant("auto", "demo"), speedup=Estimate(9.0, 8.0, 10.0))
    assert best([plain, ahead]) == ahead
    assert best([plain, dataclasses.replace(ahead, num_spec_steps=0)]) == plain


def test_files_and_drafters_of_the_same_name_are_told_apart() -> None:
    assert short_names(["a/question", "b/question"]) == ["a/question", "b/question"]
    assert short_names(["runs/a/drafter", "runs/b/drafter", "ngram"]) == ["a/drafter", "b/drafter", "ngram"]
    assert short_names(["x"]) == ["x"]


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
