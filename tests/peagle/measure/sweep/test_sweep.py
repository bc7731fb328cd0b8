"""The sweep: figures follow from raw lines; nothing is overwritten, decoded twice or lost."""

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peagle.measure.sweep.runner
from peagle.base.errors import InputError
from peagle.base.files import locked
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO_DIRECTORY
from peagle.measure.estimates import Estimate
from peagle.measure.sweep.figures import best, rows
from peagle.measure.sweep.plan import Plan, Variant, short_names
from peagle.measure.sweep.store import PROMPTS, RAW, RUN, Folder, SweepRequest, open_run
from peagle.pair import Pair
from tests.peagle.measure.sweep.runs import (
    SMALL,
    SWEPT,
    Lab,
    lines_of,
    prompt_file,
)
from tests.support.pairs import press_ctrl_c_at

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("quickly")]


def counts(folder: Folder) -> dict[Any, Any]:
    """Read the decoded results, without times."""
    return {sample.key: (sample.output_sha256, sample.counters) for sample in folder.samples()}


def requests_of(folder: Folder) -> list[SweepRequest]:
    return [request for conversation in folder.conversations() for request in conversation.requests]


def left_out(folder: Folder) -> list[str]:
    return [conversation.why for conversation in folder.conversations() if conversation.why]


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
        steps = histogram.sum()
        tokens = sum(line["output_tokens"] - 1 for line in mine)
        assert row["counters"]["histogram"] == histogram.tolist()
        assert row["counters"]["num_truncated"] == steps + histogram @ np.arange(row["k"] + 1) - tokens > 0
        assert row["acceptance_length"]["value"] == pytest.approx(tokens / steps)
        assert row["acceptance_length"]["value"] > 1  # the toy walks in circles, which an n-gram drafter learns
        for place, rate in enumerate(row["rate_per_position"]):
            assert rate["value"] == pytest.approx(histogram[place + 1 :].sum() / steps)
        seconds, plain_seconds = (sum(line["decode_s"] for line in some) for some in (mine, plain.values()))
        assert row["tok_per_s"]["value"] == pytest.approx(tokens / seconds)
        assert row["speedup"]["value"] == pytest.approx(plain_seconds / seconds)  # as many tokens, greedy
        assert row["speedup"]["value"] == pytest.approx(tokens / steps / row["cycle_cost"]["value"])
        of_rounds = [
            sum(line["decode_s"] for line in plain.values() if line["repeat"] == repeat)
            / sum(line["decode_s"] for line in mine if line["repeat"] == repeat)
            for repeat in range(2)
        ]
        assert row["speedup_repeats"] == pytest.approx(of_rounds)
        assert row["num_differing"] == 0
        assert row["acceptance_length"]["low"] <= row["acceptance_length"]["value"] <= row["acceptance_length"]["high"]
        assert row["speedup"]["low"] is None, "two rounds have no spread"
    assert figures[0]["speedup"]["value"] == 1
    assert figures == json.loads(json.dumps([row.to_json() for row in rows(finished)]))


def test_drafters_vocabularies_and_workloads_stand_side_by_side(lab: Lab) -> None:
    lab.monkeypatch.setattr("peagle.loading.fit.check_fit", lambda *_: ())
    for name in ("one", "two"):
        (lab.root / name).mkdir()
    drafters = f"--drafter {lab.root / 'one'},{lab.root / 'two'} --draft-vocab full,9 --drafter-window 128"
    lab.sweep("-k 2 --num-prompts 1 -n 12 --render both --temperature 0,0.5", drafters)
    figures, plan = lab.folder.record["rows"], lab.folder.plan
    assert (plan.draft_vocabs, plan.drafter_window) == ((None, "9"), "128")
    workloads = dict.fromkeys((row["raw"], row["temperature"]) for row in figures)
    assert list(workloads) == [(False, 0), (False, 0.5), (True, 0), (True, 0.5)]
    variants = [f"2, {name}{vocab}" for name in ("one", "two") for vocab in ("", ", 9 tokens")]
    assert [row["label"] for row in figures[:5]] == ["0", *variants]
    assert "| 2, two, 9 tokens |" in lab.page
    for label in ("chat, greedy", "chat, temperature 0.5", "raw, greedy", "raw, temperature 0.5"):
        assert f"\n- **prompts, {label}: " in lab.page, "a headline for each workload"


def test_variants_take_turns(finished: Folder) -> None:
    """All decode a request before the next one's turn, each in its turn first."""
    order = [(sample.repeat, sample.request, sample.variant.k) for sample in finished.samples()]
    turns = [[k for *_, k in turn] for _, turn in itertools.groupby(order, key=lambda entry: entry[:2])]
    assert len(turns) == 2 * 8
    assert all(sorted(turn) == [0, 1, 3] for turn in turns)
    assert [turn[0] for turn in turns[:3]] == [0, 1, 3]


def test_repeats_at_a_temperature_are_other_draws_and_greedy_ones_the_same(lab: Lab) -> None:
    lab.sweep("--temperature 0,1.5 --num-prompts 1 --repeats 2 -n 24")
    outputs: dict[tuple[float, int], set[str]] = {(t, k): set() for t in (0.0, 1.5) for k in (0, 1)}
    for sample in lab.folder.samples():
        outputs[sample.workload.temperature, sample.variant.k].add(sample.output_sha256)
    assert [len(texts) for texts in outputs.values()] == [1, 1, 2, 2]


def test_later_turns_are_the_same_for_every_variant(lab: Lab) -> None:
    prompt_file(lab.root, {"turns": ["a", "b", "c"]}, {"prompt": "d"})
    lab.sweep("-k 2 --turns 2 --render chat")
    folder = lab.folder
    requests = requests_of(folder)
    assert [(request.request, request.row) for request in requests] == [(0, 0), (1, 0), (2, 1)]
    answer = next(sample.output_ids for sample in folder.samples() if sample.variant.k == 0 and sample.request == 0)
    assert answer is not None
    assert repr(bytes(answer).decode(errors="replace"))[1:-1] in bytes(requests[1].prompt_ids).decode()
    lab.sweep("-k 2 --turns 2", out=lab.root / "raw")
    assert "raw text has one turn" in left_out(open_run(lab.root / "raw"))[0]


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


def test_answers_to_earlier_turns_are_not_decoded_again(lab: Lab) -> None:
    prompt_file(lab.root, {"turns": ["a", "b"]}, {"turns": ["c", "d", "e"]}, {"prompt": "f"})
    lab.sweep("--render chat", out=lab.root / "whole")
    lab.kill(lab.sweep, "--render chat", after=2)
    assert len((lab.out / PROMPTS).read_text().splitlines()) == 1  # the second conversation lacked an answer
    with (lab.out / PROMPTS).open("a") as file:
        file.write('{"prompts": ')  # a line that was being written
    decoded: list[int] = []
    lab.before_decoding(lambda engine, _: decoded.append(engine.config.num_speculative_tokens))
    lab.resume()
    assert len(decoded) == 2 + 6 * 2, "the second conversation's two answers, then everything"
    assert (lab.out / PROMPTS).read_text() == (lab.root / "whole" / PROMPTS).read_text()


def test_programs_that_the_system_has_no_mappings_for_are_not_compiled(lab: Lab) -> None:
    """XLA crashes without free mappings, so the error must come before."""
    shares = iter([0.1, 0.5, 0.9])
    lab.monkeypatch.setattr(peagle.measure.sweep.runner, "share_of_mappings", lambda: next(shares))
    line = "K = 2: the programs of 2 variants take 90% of the memory mappings"
    assert line in lab.sweep("-k 1,2", code=1)
    assert {sample.variant.k for sample in lab.folder.samples()} == {0, 1}


def test_a_variant_that_fails_costs_nothing_of_the_others_and_is_tried_again(lab: Lab) -> None:
    def fail(engine: Engine, _: Sequence[Request]) -> None:
        if engine.config.num_speculative_tokens == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    def ks() -> list[int]:
        return [row["k"] for row in lab.folder.record["rows"]]

    lab.before_decoding(fail)
    assert "K = 2: RESOURCE_EXHAUSTED: out of memory" in lab.sweep("-k 1,2", code=1)
    assert ks() == [0, 1]
    assert "Failed: prompts, raw, greedy, K = 2: RESOURCE" in lab.page.partition("\n## ")[0].replace("\\_", "_")
    lab.before_decoding(lambda *_: None)
    lab.resume()
    assert ks() == [0, 1, 2]
    assert lab.folder.errors() == {}


def test_a_drafter_that_cannot_be_loaded_is_refused_before_anything_is_written(lab: Lab) -> None:
    def with_drafter(*_: object, **__: object) -> Pair:
        raise InputError("its weights are damaged")

    lab.monkeypatch.setattr("peagle.loading.load.with_drafter", with_drafter)
    assert "its weights are damaged" in lab.sweep("--drafter ngram", code=2)
    assert not lab.out.exists()


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


def test_prompts_that_are_too_long_are_left_out_and_counted(lab: Lab) -> None:
    errors = lab.sweep("--max-prompt-tokens 5")
    assert re.search(r"warning: prompts: 1 conversation left out or cut, .*has 15 tokens", errors)
    assert (len(requests_of(lab.folder)), len(left_out(lab.folder))) == (8, 1)
    assert "has 15 tokens; expected at most 5" in lab.page


# options without a file of prompts, and a part of the line
REFUSED = [
    ("-k x", "-k is 'x'; expected numbers, ranges, auto or auto:N"),
    ("-k 3-", "expected numbers, ranges, auto or auto:N"),
    ("-k 1,auto:0", "-k is 'auto:0'; expected auto:N, N from 1 to 128"),
    ("-k 0", "at least one K of 1 to 128"),
    ("-k 1,100000", "-k is 100000; expected 0 (plain decoding) to 128 drafted tokens"),
    ("--temperature hot", "--temperature is 'hot'; expected numbers separated by commas"),
    ("--temperature -1", "expected finite numbers"),
    ("--repeats 0", "--repeats is 0"),
    ("--prompt-file absent.jsonl", "cannot be read"),
    ("--drafter absent", "absent"),
    ("--resume", "cannot be read"),
    ("--max-prompt-tokens 1", "demo has no usable prompt"),
    ("--concurrency x", "--concurrency is 'x'; expected numbers separated by commas"),
    ("--concurrency=", "--concurrency is ''"),
    ("--concurrency 1,0", "--concurrency is 0; expected 1 or more"),
    ("--concurrency 1,3 --num-prompts 2", "--concurrency is 3, but demo has 2 requests; expected at least as many"),
    ("--drafter-window wide", "drafter-window is 'wide'; expected the positions"),
    ("--drafter-window 128 --drafter ngram", "no drafter with weights"),
    ("--mesh dp=2", "--mesh is 'dp=2', but peagle sweep measures one replica; leave dp out"),
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
        ({"schema": 3}, "holds no run of peagle sweep (schema 3)"),
        ({"kind": "other"}, "holds no run of peagle sweep"),
        ({"origins": None}, "is incomplete (origins)"),
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
    used = [(known.raw, known.row) for known in lab.folder.conversations() if known.requests]
    assert used == [(False, 0), (False, 1), (True, 1)]
    assert "left out or cut: 1," in lab.page
    prompt_file(lab.root, {"messages": messages})
    assert "which needs the chat template" in lab.sweep(out=lab.root / "raw", code=2)
    assert not (lab.root / "raw").exists()


def test_auto_that_never_drafted_is_not_the_k_to_use(finished: Folder) -> None:
    plain, *_, last = rows(finished)
    ahead = dataclasses.replace(last, variant=Variant("auto", "demo"), speedup=Estimate(9.0, 8.0, 10.0))
    assert best([plain, ahead]) == ahead
    assert best([plain, dataclasses.replace(ahead, counters=plain.counters)]) is None


def test_files_and_drafters_of_the_same_name_are_told_apart() -> None:
    assert short_names(["a/question", "b/question"]) == ["a/question", "b/question"]
    assert short_names(["runs/a/drafter", "runs/b/drafter", "ngram"]) == ["a/drafter", "b/drafter", "ngram"]
    assert short_names(["x"]) == ["x"]
