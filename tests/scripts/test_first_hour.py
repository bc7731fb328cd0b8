"""The first hour: its commands are those that exist, its page names times and acceptance, a failure is one line."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from peagle.measure.pages import markdown
from peagle.ops.errors import InputError
from scripts import first_hour
from scripts.demo import corpus
from scripts.demo.tasks import digest
from scripts.first_hour import Budget, acceptance, page, run, steps, verdict, write_prompts
from scripts.runs import Json

# the options of all commands
RECORDED = json.loads((Path(__file__).parents[1] / "peagle" / "cli" / "flags.json").read_text())
BUDGET = Budget(minutes=0.5, num_prompts=48, held_out=8, repeats=1)


def test_each_command_has_the_options_that_it_is_given() -> None:
    changed = replace(BUDGET, target="/a target", recipe="/its drafter")
    for _, command in [*steps(BUDGET), *steps(changed)]:
        _, name, *words = shlex.split(command)
        known = {flag for option in RECORDED[name] for flag in option["flags"]}
        assert {word for word in words if word.startswith("-")} <= known, command
    of_target = [command for _, command in steps(changed) if "--target target" in command]
    assert [shlex.split(command)[1] for command in of_target] == [
        "speculate",
        "data",
        "train",
        "speculate",
        "sweep",
        "parity",
    ]


def estimate(value: float) -> Json:
    return {"value": value, "low": value - 0.2, "high": value + 0.2}


def row(k: int, drafter: str, length: float) -> Json:
    return {"k": k, "drafter": drafter, "acceptance_length": estimate(length), "speedup": estimate(1.1), "more": 1}


def test_the_page_has_times_and_acceptance_beside_the_shipped_drafter() -> None:
    rows = [
        row(0, "", 1.0),
        row(3, "run/drafter", 3.2),
        row(3, "demo", 3.3),
        row(7, "run/drafter", 4.0),
        row(7, "demo", 4.7),
    ]
    found = acceptance(rows)
    assert [each["k"] for each in found] == [3, 3, 7, 7]
    assert verdict(found) == "the trained one lies +0.70 behind (aim: 0.8, met)"
    assert verdict([*found, row(7, "recipe", 5.0)]) == "the trained one has 0.80 of the recipe's (aim: 0.9, MISSED)"
    done = {"title": "report", "command": "peagle report sweep", "seconds": 12.3, "exit_code": 0, "lines": ["a page"]}
    device = {"platform": "cpu", "kind": "cpu"}
    source = {"command": "c", "device": device, "cpu": "C", "num_threads": 2, "packages": {"jaxlib": "1"}, "time": "t"}
    record = {"config": asdict(BUDGET), "provenance": source, "steps": [done], "acceptance": found}
    text = markdown(page(record))
    assert "| report | `peagle report sweep` | 12 s |" in text
    assert "| 7 | run/drafter | 4.00 (3.80..4.20) | 1.10 (0.90..1.30) |" in text
    assert "lies +0.70 behind (aim: 0.8, met)" in text
    assert "$ peagle report sweep\na page" in text
    record["config"]["target"] = "/a/theirs"
    assert "with a changed target, `theirs`, for which" in markdown(page(record))


def test_a_command_that_fails_is_one_line_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"peagle nothing ended with 2: .*No such command.*; see .*log.txt"):
        run("first", "peagle nothing", tmp_path, tmp_path / "log.txt")


def test_prompts_are_not_held_out_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the modules among which the library's held-out ones are found, the first in the order of names' hashes, but
    for three large ones; and of ftplib, a function of which has the prompt of a held-out one."""
    wanted, large = corpus.is_wanted, {"multiprocessing", "importlib", "tkinter"}

    def is_read(path: Path) -> bool:
        module = path.parts[0].removesuffix(".py")
        return (digest(module) < "55" or module == "ftplib") and module not in large and wanted(path)

    monkeypatch.setattr(corpus, "is_wanted", is_read)
    found = corpus.build_corpus(corpus.collect_sources({}))
    monkeypatch.setattr(first_hour, "collect_sources", lambda _: [])
    monkeypatch.setattr(first_hour, "build_corpus", lambda _: found)

    def prompts(name: str) -> list[str]:
        return [json.loads(line)["prompt"] for line in (tmp_path / name).read_text("utf-8").splitlines()]

    write_prompts(tmp_path, 10_000)
    every, held_out = prompts("prompts.jsonl"), prompts("heldout.jsonl")
    assert len(every) == len(set(every)) > 500
    assert len(held_out) == 273
    assert not set(every) & set(held_out)
    write_prompts(tmp_path, 500)
    assert prompts("prompts.jsonl") == every[:500]
