"""Speculation beside llama.cpp: who decodes what, what follows from the raw lines, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peagle.checkpoints import DEMO, resolve
from peagle.engine.warmup import WarmUp
from peagle.measure.pages import markdown
from scripts.peers import ours
from scripts.peers.roster import Site
from scripts.scenarios import answers as scenario
from scripts.scenarios.answers import Answer, decoded, entries, figures, page
from tests.support.toys import costs

DEMO_TARGET, DEMO_DRAFTER = (resolve(DEMO, part) for part in ("target", "drafter"))


class Scripted:
    """An engine that answers with what it was told to, and notes the order of calls."""

    def __init__(self, name: str, seconds: float, tokens: dict[int, list[int]], calls: list[str]) -> None:
        self._name, self._seconds, self._tokens, self._calls = name, seconds, tokens, calls

    def call(self, do: str, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        assert do == "decode"
        self._calls.append(self._name)
        found = self._tokens[prompt_ids[0]]
        assert len(found) == num_tokens
        seconds = self._seconds * (num_tokens - 1)
        return {"prefill_s": 0.1, "decode_s": seconds, "token_ids": found}


def test_all_engines_take_turns_and_the_first_repeat_does_not_count() -> None:
    answers = [Answer([0], [5, 6, 7]), Answer([1], [8, 9])]
    right, wrong = {0: [5, 6, 7], 1: [8, 9]}, {0: [5, 0, 7], 1: [8, 9]}
    calls: list[str] = []
    times = {"peagle": 0.002, "peagle, K = 3": 0.001, "llama.cpp": 0.004}
    engines = {
        name: Scripted(name, seconds, wrong if name == "llama.cpp" else right, calls) for name, seconds in times.items()
    }
    lines = list(decoded(engines, answers, repeats=2))  # type: ignore[arg-type]
    assert len(calls) == 3 * len(answers) * len(engines)
    assert len(lines) == 2 * len(answers) * len(engines)
    turns = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert all(set(turn) == set(times) for turn in turns)
    assert {turn[0] for turn in turns} == set(times)  # everyone is first at times
    found = {name: figures(lines, name) for name in times}
    assert found["peagle, K = 3"]["tok_per_s"] == pytest.approx(1000)
    assert found["peagle, K = 3"]["over_llama"]["value"] == pytest.approx(4)
    assert found["peagle, K = 3"]["over_plain"]["value"] == pytest.approx(2)
    assert found["peagle"]["over_llama"]["value"] == pytest.approx(2)
    assert found["llama.cpp"]["same_answers"] == 0.5
    assert found["peagle"]["same_answers"] == 1
    text = markdown(page(record(found)))
    assert "| peagle, K = 3 | 1000 | 4.00 | 2.00 | 100 % | in its way |" in text
    assert "| llama.cpp | 250 |  | 0.50 | 50 % | in its way |" in text


def record(found: dict[str, Any]) -> dict[str, Any]:
    source = {"command": "python -m scripts.scenario", "cpu": "a processor", "num_threads": 2, "time": "now"}
    source |= {"device": {"platform": "cpu"}}
    config = {"target": "demo", "drafter": "demo", "prompts": "some.jsonl", "num_prompts": 2, "max_new_tokens": 9}
    rows = [{"engine": name, "version": "1", "computes": "in its way", **row} for name, row in found.items()]
    return {
        "provenance": {**source, "packages": {"jaxlib": "1"}},
        "config": {**config, "repeats": 2},
        "rows": rows,
    }


@pytest.mark.parametrize("num_drafts", [2, "auto"])
def test_speculation_writes_what_plain_decoding_does(num_drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WarmUp, "measure_costs", lambda *_: costs(3, {1: True})
    )  # so that auto drafts, whatever the machine does
    plain = ours.load(str(DEMO_TARGET), "auto", "float32").decode([3, 1, 4, 1, 5], 24)
    pair = ours.load(str(DEMO_TARGET), "auto", "float32", str(DEMO_DRAFTER), num_drafts)
    assert pair.decode([3, 1, 4, 1, 5], 24)["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) == 24


def test_the_engines_of_a_comparison() -> None:
    site = Site(DEMO_TARGET, True, Path("model.gguf"), 64, 2, "python")
    made = list(entries(site, DEMO_DRAFTER, [3, "auto"]))
    assert [one.name for one in made] == ["peagle", "peagle, K = 3", "peagle, K = auto", "llama.cpp"]
    assert "drafter" not in made[0].options
    assert made[2].options["num_drafts"] == "auto"
    assert made[1].options["drafter"] == str(DEMO_DRAFTER)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "3,many"], "-k is '3,many'; expected numbers, ranges or auto, separated by commas"),
        (["-k", "0"], "-k is '0'; expected at least one K of 1 to 128"),
        (["--repeats", "0"], "--repeats and --num-prompts must be 1 or more"),
        (["--num-prompts", "0"], "--repeats and --num-prompts must be 1 or more"),
        (["--llama-python", "/no/such/python"], "llama.cpp cannot run here: "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    assert scenario.main(["--out", str(out), "--llama-python", "python", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
