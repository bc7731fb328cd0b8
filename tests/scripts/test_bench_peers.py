"""The comparison with peers: all get the same tokens, ratios follow from lines, bad input is one line."""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.loading.checkpoints import DEMO, resolve
from peagle.workflows.random_checkpoint import write_random_checkpoint, write_random_drafter
from scripts import bench
from scripts.peers import bystanders, ours
from scripts.peers.bystanders import Bystanders
from scripts.runs import Progress, rotated
from scripts.scenarios import peers
from scripts.scenarios.peers import Measured, Site, Tokens, drafting, entry, rows_of, run_rounds
from target.load import inspect_target
from tests.scripts.conftest import GEOMETRY

pytestmark = pytest.mark.compile

OPTIONS = argparse.Namespace(prompt_tokens=16, new_tokens=11, rounds=3, seed=0, requests=[1, 3])
SITE = Site(Path("small"), True, Path("scratch"), 64, "python")
DRIFT = {1: 1.0, 2: 3.0, 3: 1.5}  # of the machine, by round: ratios within a round do not see it


def test_every_engine_gets_the_same_tokens() -> None:
    first, second = Tokens(89, OPTIONS), Tokens(89, OPTIONS)
    assert first.prompts(3) == second.prompts(3)
    assert first.prompts(1) == first.prompts(3)[:1]
    assert len({tuple(prompt) for prompt in first.prompts(3)}) == 3


class Scripted:
    """An engine that answers at once, and notes what it was asked."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert do == "decode"
        self.asked.append(arguments)
        return {"prefill_s": 0.1, "decode_s": 0.02, "steps": 5, "token_ids": []}


def test_requests_are_decoded_together_by_engines_that_can() -> None:
    """The same prompts for each of them, once to warm up, then once a round."""
    entries = [entry(name, SITE) for name in ("peagle", "transformers-bf16", "vllm")]
    entries.append(drafting("vllm", "p-eagle", Path("drafter"), 5, SITE))
    engines, tokens = {own.name: Scripted() for own in entries}, Tokens(89, OPTIONS)
    lines = list(run_rounds(entries, engines, tokens, OPTIONS, Progress()))  # type: ignore[arg-type]
    every = [{"prompts": tokens.prompts(count), "num_tokens": 11} for count in (1, 3)] * 4
    for own in entries:
        assert engines[own.name].asked == (every if own.several else every[::2])
    assert [(line["round"], line["engine"], line["requests"]) for line in lines] == [
        (number, own.name, count)
        for number in (1, 2, 3)
        for own in rotated(entries, number)
        for count in ((1, 3) if own.several else (1,))
    ]
    line = next(line for line in lines if line["requests"] == 3)
    figures = {"tok_per_s": 1500, "prefill_tok_per_s": 480, "step_ms": 4, "tokens_a_step": 2}
    assert {name: line[name] for name in figures} == pytest.approx(figures)


def fake_lines() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for engine, factor in {"peagle": 1.0, "vllm": 4.0, "peagle, p-eagle": 2.0, "vllm, p-eagle": 3.0}.items():
            rate = 600 / factor / drift
            line = {"engine": engine, "round": number, "requests": 4, "tok_per_s": rate, "prefill_tok_per_s": 2 * rate}
            yield line | {"step_ms": factor * drift, "tokens_a_step": 1.0, "others_frac": 0.01 * number}


def test_ratios_are_taken_within_a_round() -> None:
    entries = [entry(name, SITE) for name in ("peagle", "vllm")]
    entries += [drafting(name, "p-eagle", Path("drafter"), 5, SITE) for name in ("peagle", "vllm")]
    ours, vllm, _, drafted = rows_of(Measured(entries, lines=list(fake_lines())))
    assert ours["tok_per_s"] == {"median": 400, "lowest": 200, "highest": 600}
    assert ours["ours_over_peer"] is None
    assert vllm["ours_over_peer"] == vllm["ours_over_peer_prefill"] == {"median": 4, "lowest": 4, "highest": 4}
    assert drafted["ours_over_peer"] == pytest.approx({"median": 1.5, "lowest": 1.5, "highest": 1.5})
    assert bystanders.others_of(fake_lines()) == {"median": 0.02, "lowest": 0.01, "highest": 0.03}


def test_options_of_engines_with_drafters() -> None:
    options = drafting("vllm", "p-eagle", Path("drafter"), 5, SITE).options
    assert (options["parallel"], options["num_drafts"], options["drafter"]) == (True, 5, "drafter")
    assert options["target"].endswith("unquantised")
    on_gpu = drafting("vllm", "eagle3", Path("drafter"), 5, dataclasses.replace(SITE, gpu=True, num_on_gpu=3)).options
    assert (on_gpu["parallel"], on_gpu["gpu_memory_frac"]) == (False, pytest.approx(0.3))
    assert not on_gpu["target"].endswith("unquantised")


def test_on_a_gpu_all_compute_there_in_bfloat16() -> None:
    site = dataclasses.replace(SITE, gpu=True)
    options = {name: entry(name, site).options for name in ("peagle", "peagle-xla", "transformers-bf16")}
    assert [options[name]["dtype"] for name in options] == ["bfloat16"] * 3
    assert options["transformers-bf16"]["device"] == "cuda"
    assert entry("peagle", SITE).options["dtype"] == "float32"
    assert entry("transformers-fp32", SITE).options["device"] == "cpu"


def test_ours_counts_the_steps_with_drafts_of_a_request(tmp_path: Path) -> None:
    """Random drafts are not accepted: a token a step."""
    write_random_checkpoint(tmp_path / "target", dataclasses.replace(GEOMETRY, layer_types=GEOMETRY.layer_types * 2))
    config = inspect_target(tmp_path / "target").config
    write_random_drafter(tmp_path / "drafter", peers.DRAFTERS["p-eagle"], config)
    engine = ours.load(str(tmp_path / "target"), "xla", "float32", str(tmp_path / "drafter"), 2)
    assert 6 <= engine.decode([[3, 1, 4], [1, 5, 9]], 12)["steps"] <= 11


def test_requests_decoded_together_get_the_tokens_that_each_gets_alone() -> None:
    engine = ours.load(str(resolve(DEMO, "target")), "auto", "float32")
    prompts = Tokens(89, OPTIONS).prompts(3)
    together = engine.decode(prompts, 20)
    assert together["decode_s"] > 0
    assert together["steps"] == 19
    assert together["token_ids"] == [engine.decode([prompt], 20)["token_ids"][0] for prompt in prompts]


def test_transformers_and_ours_decode_the_same(checkpoint: Path) -> None:
    torch_engine = pytest.importorskip("scripts.peers.torch_engine")
    theirs = torch_engine.load(str(checkpoint), "float32", inspect_target(checkpoint).mxfp4, 1, "cpu", 8)
    mine = ours.load(str(checkpoint), "xla", "float32")
    first, second = (engine.decode([[3, 1, 4]], 12)["token_ids"] for engine in (theirs, mine))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "unheard-of"], "--engines names 'unheard-of'"),
        (["--drafters", "medusa"], "--drafters names 'medusa'"),
        (["--drafters", "p-eagle"], "has 3 layers; expected 4 or more"),
        (["--requests", "0,4"], "expected numbers of 1 or more"),
        (["--requests", ""], "expected numbers with commas between"),
        (["--rounds", "0"], "--rounds is 0; expected 1 or more"),
        (["-n", "1"], "--new-tokens is 1; expected 2 or more"),
        (["--prompt-tokens", "131072"], "has 131072 positions"),
        (["{checkpoint}"], "two checkpoints have the same name"),
        (["{out}/nowhere"], "does not exist; expected a directory with config.json"),
        (["--out", "{checkpoint}"], "expected a new folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "run"
    typed = [word.format(checkpoint=checkpoint, out=out) for word in arguments]
    assert bench.main(["peers", str(checkpoint), "--engines", "peagle", "--out", str(out), *typed]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_work_of_others_is_told_from_that_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processors, ten seconds: of 40 s all processes together worked 16, and the engine 10 of them."""
    monkeypatch.setattr(bystanders, "PROC", tmp_path)
    monkeypatch.setattr("os.sysconf", lambda _: 100)  # ticks of a second
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    clock = iter([5.0, 15.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    (tmp_path / "7").mkdir()

    def say(user: int, system: int, idle: int, own: tuple[int, int]) -> None:
        (tmp_path / "stat").write_text(f"cpu  {user} 10 {system} {idle} 70 0 0 0 0 0\ncpu0 1 2 3 4\n")
        (tmp_path / "7" / "stat").write_text(f"7 (a (name) of) R{' 1' * 10} {own[0]} {own[1]} 0 0\n")

    say(1000, 500, 90_000, (300, 40))
    with Bystanders(7) as others:
        say(2100, 1000, 92_400, (1200, 140))
    assert others.frac == pytest.approx(6 / 40)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="not Linux")
def test_work_of_others_is_known_here() -> None:
    with Bystanders(os.getpid()) as others:
        pass
    assert others.frac is not None
    assert 0 <= others.frac <= 1


def test_an_engine_that_is_not_there_is_named_with_the_reason() -> None:
    assert peers.engines("vllm", None) == (["peagle"], {"vllm": "no --vllm-python was given"})
    why = "there is no such program as --vllm-python names"
    assert peers.engines("vllm", "/no/such/python") == (["peagle"], {"vllm": why})


def test_an_engine_that_fails_is_one_line(tmp_path: Path) -> None:
    site = dataclasses.replace(SITE, checkpoint=tmp_path / "nothing")
    with pytest.raises(InputError, match=r"^peagle-xla: InputError: .*nothing does not exist[^\n]*$"):
        entry("peagle-xla", site).start()
