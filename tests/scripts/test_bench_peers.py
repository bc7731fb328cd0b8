"""The comparison with peers: figures follow from raw lines, the page shows them, bad input is one line."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.checkpoints import DEMO, resolve
from peagle.measure.reports import markdown
from peagle.ops.errors import InputError
from peagle.workflows.random_checkpoint import (
    SIZES,
    write_random_checkpoint,
    write_random_drafter,
)
from scripts import bench
from scripts.peers import bystanders, figures, measure, ours, page, roster
from scripts.peers.bystanders import Bystanders
from scripts.runs import Progress, rotated
from scripts.scenarios import peers as scenario
from target.load import inspect_target
from tests.scripts.conftest import GEOMETRY


def test_bytes_are_those_of_the_published_model() -> None:
    weights = roster.Storage(2, roster.MXFP4_BYTES).weights(SIZES["20b"])
    assert weights.read(1) == pytest.approx(3.70e9, rel=0.01)
    floors = [weights.floor(width) for width in (1, 2, 4, 8)]
    assert floors == pytest.approx([1, 1.30, 1.79, 2.46], abs=0.005)


def settings(**changes: Any) -> measure.Settings:
    values: dict[str, Any] = {
        "checkpoints": ("small",),
        "engines": ("peagle", "vllm"),
        "prompt_tokens": 16,
        "new_tokens": 11,
        "widths": (1, 4),
        "rounds": 3,
        "seconds": 0.01,
        "check_tokens": 8,
        "seed": 0,
    }
    return measure.Settings(**{**values, **changes})


def test_every_engine_gets_the_same_tokens_and_each_round_new_ones() -> None:
    first, second = measure.Tokens(89, settings()), measure.Tokens(89, settings())
    assert (first.prompt, first.checked) == (second.prompt, second.checked)
    assert [len(one) for one in first.checked] == [1, 1, 1, 1, 4]
    assert first.passes(1, 5, 4) == second.passes(1, 5, 4) != first.passes(2, 5, 4)
    assert first.passes(1, 2, 4) == first.passes(1, 5, 4)[:2]


def test_differences_are_in_standard_deviations() -> None:
    expected = np.array([[0.0, 2.0], [2.0, 0.0]], np.float32)  # of standard deviation 1
    differences = measure.compare(expected + np.array([[0.0, 0.0], [0.0, 3.0]], np.float32), expected)
    assert differences == {"max_difference": 3.0, "rms_difference": 1.5, "top_1_agreement": 0.5}


SITE = roster.Site(Path("small"), True, Path("scratch"), 64, 2, "python")


class Scripted:
    """An engine that answers at once, and notes what it was asked."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append((do, arguments))
        if do == "speculate":
            return {"decode_s": 0.03, "steps": 5.0}
        if do == "decode_many":
            return {"decode_s": 0.02, "token_ids": []}
        return {"prefill_s": 0.1, "decode_s": 0.01, "pass_s": 0.01, "token_ids": []}


def test_requests_are_decoded_together_by_engines_that_can() -> None:
    """The same prompts for each of them, once to warm up, then once a round."""
    names = ("peagle", "transformers-bf16", "vllm")
    chosen = settings(engines=names, requests=(1, 3))
    engines, entries = {name: Scripted() for name in names}, [roster.entry(name, SITE) for name in names]
    tokens = measure.Tokens(89, chosen)
    lines = list(measure.run_rounds(entries, engines, tokens, chosen, Progress()))  # type: ignore[arg-type]
    many = {name: [arguments for do, arguments in engines[name].calls if do == "decode_many"] for name in names}
    assert many["transformers-bf16"] == []
    assert many["peagle"] == many["vllm"]
    prompts = [arguments["prompts"] for arguments in many["peagle"]]
    assert [len(batch) for batch in prompts] == [1, 3] * (1 + chosen.rounds)
    assert prompts[0] == [tokens.prompt] == prompts[1][:1]
    assert {len(prompt) for prompt in prompts[1]} == {16}
    assert len({tuple(prompt) for prompt in prompts[1]}) == 3
    assert {arguments["num_tokens"] for arguments in many["peagle"]} == {11}
    decoded = [line for line in lines if line["what"] == "decode_many"]
    assert [(line["round"], line["engine"], line["requests"]) for line in decoded] == [
        (number, name, count)
        for number in (1, 2, 3)
        for name in rotated(names, number)
        if name != "transformers-bf16"
        for count in (1, 3)
    ]
    assert decoded[0]["decode_s"] == 0.02


def test_without_requests_none_are_decoded_together() -> None:
    engines = {name: Scripted() for name in ("peagle", "transformers-bf16")}
    entries, chosen = [roster.entry(name, SITE) for name in engines], settings()
    list(measure.run_rounds(entries, engines, measure.Tokens(89, chosen), chosen, Progress()))  # type: ignore[arg-type]
    assert {do for engine in engines.values() for do, _ in engine.calls} == {"decode", "verify"}


def test_vllm_decodes_and_engines_with_drafters_speculate_alone() -> None:
    """vLLM has no verify passes or logits; with a drafter a process of its own times steps, ours and vLLM's alike."""
    chosen = settings(engines=("peagle", "vllm"), requests=(2,), drafters=("p-eagle",), num_drafts=5)
    entries = [roster.entry(name, SITE) for name in chosen.engines]
    entries += [roster.drafting(name, "p-eagle", Path("drafter"), 5, SITE) for name in chosen.engines]
    engines = {entry.name: Scripted() for entry in entries}
    lines = list(measure.run_rounds(entries, engines, measure.Tokens(89, chosen), chosen, Progress()))  # type: ignore[arg-type]
    done = {name: {do for do, _ in engine.calls} for name, engine in engines.items()}
    assert done == {
        "peagle": {"decode", "verify", "decode_many"},
        "vllm": {"decode", "decode_many"},
        "peagle, p-eagle": {"speculate"},
        "vllm, p-eagle": {"speculate"},
    }
    assert {line["steps"] for line in lines if line["what"] == "speculate"} == {5.0}
    options = entries[-1].options
    assert (options["parallel"], options["num_drafts"], options["drafter"]) == (True, 5, "drafter")
    assert options["target"].endswith("unquantised")
    on_gpu = roster.drafting("vllm", "eagle3", Path("drafter"), 5, dataclasses.replace(SITE, gpu=True, num_on_gpu=3))
    assert (on_gpu.options["parallel"], on_gpu.options["gpu_memory_frac"]) == (False, pytest.approx(0.3))
    assert not on_gpu.options["target"].endswith("unquantised")


def test_ours_counts_the_steps_with_drafts_of_a_request(tmp_path: Path) -> None:
    """Random drafts are not accepted: a token a step."""
    write_random_checkpoint(tmp_path / "target", dataclasses.replace(GEOMETRY, layer_types=GEOMETRY.layer_types * 2))
    config = inspect_target(tmp_path / "target").config
    write_random_drafter(tmp_path / "drafter", roster.DRAFTERS["p-eagle"], config)
    engine = ours.load(str(tmp_path / "target"), "xla", "float32", str(tmp_path / "drafter"), 2)
    assert 6 <= engine.speculate([[3, 1, 4], [1, 5, 9]], 12)["steps"] <= 11


@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_the_experts_of_a_step_are_the_ones_that_transformers_chooses(checkpoint: Path, kernels: Any) -> None:
    """Of each prompt's last token, in every layer, best first."""
    torch = pytest.importorskip("torch")
    from transformers import GptOssForCausalLM, Mxfp4Config

    mxfp4 = {"quantization_config": Mxfp4Config(dequantize=True)} if inspect_target(checkpoint).mxfp4 else {}
    model = GptOssForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **mxfp4)
    prompts = measure.Tokens(89, settings()).prompts(3)
    with torch.no_grad():
        outputs = [model(torch.tensor([ids]), output_router_logits=True).router_logits for ids in prompts]
    expected = [[logits[-1].topk(2).indices.tolist() for logits in layers] for layers in outputs]
    engine = ours.load(str(checkpoint), kernels, "float32")
    assert engine.experts(prompts) == {"chosen": expected}


def test_experts_of_several_prompts_are_counted_once() -> None:
    class Routed(Scripted):
        def call(self, do: str, **arguments: Any) -> dict[str, Any]:
            assert (do, len(arguments["prompts"])) == ("experts", 3)
            return {"chosen": [[[0, 1], [2, 3]], [[1, 4], [3, 2]], [[0, 4], [0, 1]]]}

    tokens = measure.Tokens(89, settings())
    assert measure.experts_of(Routed(), tokens, (1, 2, 3)) == {"1": 2.0, "2": 2.5, "3": 3.5}  # type: ignore[arg-type]


def test_requests_decoded_together_get_the_tokens_that_each_gets_alone() -> None:
    engine = ours.load(str(resolve(DEMO, "target")), "auto", "float32")
    prompts, num_tokens = measure.Tokens(89, settings()).prompts(3), 60
    together = engine.decode_many(prompts, num_tokens)
    assert together["decode_s"] > 0
    for prompt_ids, token_ids in zip(prompts, together["token_ids"], strict=True):
        assert len(token_ids) > num_tokens // 2
        assert token_ids == engine.decode(prompt_ids, len(token_ids))["token_ids"]
    assert len({tuple(token_ids[:9]) for token_ids in together["token_ids"]}) == 3


FACTORS = {"peagle": 1.0, "transformers-bf16": 2.0, "vllm": 4.0}  # an engine's time over ours
DRIFT = {1: 1.0, 2: 3.0, 3: 1.5}  # of the machine, by round: ratios within a round do not see it


def fake_lines() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for engine, factor in FACTORS.items():
            line = {"engine": engine, "round": number, "others_frac": 0.01 * number}
            seconds = factor * drift
            yield {**line, "what": "decode", "prefill_s": 0.1 * seconds, "decode_s": 0.01 * seconds}
            yield {**line, "what": "verify", "rows": 1, "passes": 3, "pass_s": 0.001 * seconds}
            yield {**line, "what": "verify", "rows": 4, "passes": 3, "pass_s": 0.0015 * seconds}
            yield {**line, "what": "decode_many", "requests": 4, "decode_s": 0.02 * seconds}
            drafted = {**line, "engine": f"{engine}, p-eagle", "what": "speculate", "requests": 4}
            yield {**drafted, "decode_s": 0.03 * seconds, "steps": 5.0}


@pytest.fixture
def rows(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """By engine."""
    site = dataclasses.replace(SITE, checkpoint=checkpoint)
    entries = [roster.entry(name, site) for name in FACTORS]
    entries += [roster.drafting(name, "p-eagle", Path("drafter"), 5, site) for name in ("peagle", "vllm")]
    measured = measure.Measured(
        inspect_target(checkpoint),
        tuple(entries),
        {entry.name: {"version": f"{entry.name} 1", "computes": "in its way"} for entry in entries},
        {"peagle": {"max_difference": 0.25, "rms_difference": 0.0625, "top_1_agreement": 0.75}},
        {"peagle": {"4": 3.25}},
        list(fake_lines()),
    )
    chosen = settings(requests=(4,), drafters=("p-eagle",), num_drafts=5)
    return {row["engine"]: row for row in figures.rows("small", measured, chosen)}


def test_ratios_are_taken_within_a_round(rows: dict[str, dict[str, Any]]) -> None:
    ours, slow, vllm = (rows[name] for name in FACTORS)
    assert ours["decode_tok_per_s"] == pytest.approx({"median": 1000 / 1.5, "lowest": 1000 / 3, "highest": 1000})
    assert slow["ours_over_peer_decode"] == pytest.approx({"median": 2, "lowest": 2, "highest": 2})
    assert slow["ours_over_peer_pass"]["4"]["median"] == pytest.approx(2)
    assert ours["v"]["4"] == pytest.approx({"median": 1.5, "lowest": 1.5, "highest": 1.5})
    assert ours["gb_per_s"]["highest"] == pytest.approx(ours["bytes_per_token"] / 0.001 / 1e9)
    assert ours["together"]["4"]["tok_per_s"]["highest"] == pytest.approx(4 * 10 / 0.02)
    assert vllm["together"]["4"]["ours_over_peer"] == pytest.approx({"median": 4, "lowest": 4, "highest": 4})
    drafting = rows["vllm, p-eagle"]["drafting"]["4"]
    assert drafting["ours_over_peer"] == pytest.approx({"median": 4, "lowest": 4, "highest": 4})
    assert drafting["tokens_a_step"]["median"] == 2


def test_the_page_shows_every_engine_and_who_was_left_out(rows: dict[str, dict[str, Any]]) -> None:
    run = {
        "provenance": {
            "command": "python -m scripts.bench peers",
            "cpu": "a processor",
            "num_threads": 2,
            "packages": {"jaxlib": "1"},
            "time": "now",
            "device": {"platform": "cpu", "kind": "cpu", "count": 1},
            "git": None,
        },
        "config": dataclasses.asdict(settings(requests=(4,), drafters=("p-eagle",), num_drafts=5)),
        "left_out": {"transformers-fp32": "torch is not installed"},
        "checkpoints": [
            {
                "name": "small",
                "parameters": 123e6,
                "geometry": {"num_experts": 5},
                "v_by_bytes": {"1": 1.0, "4": 1.2},
                "others_frac": {"median": 0.02, "lowest": 0.01, "highest": 0.03},
            }
        ],
        "rows": list(rows.values()),
    }
    text = markdown(page.page(json.loads(json.dumps(run))))
    assert "Left out: transformers-fp32 (torch is not installed)." in text
    for name in rows:
        assert f"| {name} |" in text
    for title in (
        "| requests | ours tok/s | vllm tok/s | ours / vllm |",
        "| engine, drafter |",
        "of 5 | requests: 4 |",
    ):
        assert title in text
    run["provenance"]["device"] = {"platform": "gpu", "kind": "NVIDIA H100", "count": 1}  # type: ignore[index]
    assert markdown(page.page(run)).startswith("# Against peers on one GPU\n")


def test_on_a_gpu_all_compute_there_in_bfloat16_but_for_the_reference(checkpoint: Path) -> None:
    site = dataclasses.replace(SITE, checkpoint=checkpoint, gpu=True)
    entries = {name: roster.entry(name, site) for name in ("peagle", "peagle-xla", "transformers-bf16")}
    assert [entries[name].options["dtype"] for name in entries] == ["bfloat16"] * 3
    assert entries["transformers-bf16"].options["device"] == "cuda"
    assert entries["peagle-xla"].weights == "bfloat16, MXFP4 experts"
    assert roster.reference(site).options == {**entries["peagle-xla"].options, "dtype": "float32"}
    on_cpu = dataclasses.replace(SITE, checkpoint=checkpoint)
    assert roster.entry("peagle", on_cpu).options["dtype"] == "float32"
    assert roster.entry("transformers-fp32", on_cpu).options["device"] == "cpu"


def test_transformers_and_ours_compute_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    """Token by token and in wider passes, after other passes were rolled back."""
    torch_engine = pytest.importorskip("scripts.peers.torch_engine")
    engines = {
        "theirs": torch_engine.load(str(checkpoint), "float32", inspect_target(checkpoint).mxfp4, 1, "cpu"),
        "ours": ours.load(str(checkpoint), "xla", "float32"),
    }
    logits = {}
    for name, engine in engines.items():
        assert engine.verify([3, 1, 4], [[5, 9], [2, 6]])["pass_s"] > 0
        engine.logits([3, 1, 4], [[1], [5], [9, 2, 6]], str(tmp_path / f"{name}.npy"))
        logits[name] = np.load(tmp_path / f"{name}.npy")
    assert measure.compare(logits["theirs"], logits["ours"])["max_difference"] < 1e-3
    tokens = [engine.decode([3, 1, 4], 12)["token_ids"] for engine in engines.values()]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "sglang"], "--engines names 'sglang'; expected names of peagle, "),
        (["--drafters", "medusa"], "--drafters names 'medusa'; expected names of p-eagle, eagle3"),
        (["--drafters", "p-eagle"], "has 3 layers; expected 4 or more, of which a drafter reads three"),
        (["--drafters", "p-eagle", "-k", "0"], "--num-drafts is 0; expected 1 or more"),
        (["--widths", "1,x"], "expected numbers with commas between"),
        (["--widths", "0,2"], "expected numbers of 1 or more"),
        (["--requests", "1,x"], "--requests is '1,x'; expected numbers with commas between"),
        (["--requests", "0,4"], "expected numbers of 1 or more"),
        (["--requests", ""], "expected numbers with commas between"),
        (["--requests", "256", "--prompt-tokens", "100000"], "has 131072 positions"),
        (["--rounds", "0"], "--rounds is 0; expected 1 or more"),
        (["-n", "1"], "--new-tokens is 1; expected 2 or more"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--check-tokens", "12"], "expected 0 or a multiple of 8"),
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
    names, left_out = scenario.engines("vllm", None)
    assert (names, left_out) == (("peagle",), {"vllm": "no --vllm-python was given"})
    names, left_out = scenario.engines("vllm", "/no/such/python")
    assert (names, left_out) == (("peagle",), {"vllm": "there is no such program as --vllm-python names"})


def test_an_engine_that_fails_is_one_line(tmp_path: Path) -> None:
    site = dataclasses.replace(SITE, checkpoint=tmp_path / "nothing")
    with pytest.raises(InputError, match=r"^peagle-xla: InputError: .*nothing does not exist[^\n]*$"):
        roster.entry("peagle-xla", site).start()
