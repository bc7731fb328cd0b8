"""The comparison with peers: the GGUF file holds the checkpoint's own bits, figures follow from raw lines, the page
shows them, bad input is one line."""

import ctypes
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peagle.checkpoints import DEMO, resolve
from peagle.measure.reports import markdown
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.mxfp4 import CODES
from peagle.workflows.random_checkpoint import (
    SIZES,
    geometry,
    random_tensors,
    write_random_checkpoint,
    write_random_drafter,
)
from scripts import bench
from scripts.peers import bystanders, figures, gguf_file, measure, ours, page, roster
from scripts.peers.bystanders import Bystanders
from scripts.peers.stepwise import StepwiseEngine
from scripts.runs import Progress, rotated
from scripts.scenarios import peers as scenario
from target.load import inspect_target, write_target

GEOMETRY = geometry(
    hidden=96, layers=3, heads=(6, 2), head_dim=16, vocab=89, experts=(5, 2), expert_width=64, window=24
)


@pytest.fixture(scope="module", params=[True, False], ids=["mxfp4", "unquantised"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    write_random_checkpoint(directory, GEOMETRY, mxfp4=request.param, seed=1)
    return directory


@pytest.fixture(scope="module")
def gguf_reader(checkpoint: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    path = checkpoint.parent / "model.gguf"
    gguf_file.write_gguf(checkpoint, path)
    return gguf.GGUFReader(path)


def ggml_codes(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [..., 32], scales) of ggml's blocks, by the rule of block_mxfp4: byte j holds values j and j + 16."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 17)
    return np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1), blocks[..., 0]


def test_mxfp4_blocks_keep_every_code_and_scale() -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 4, 2, 16), np.uint8), rng.integers(0, 255, (3, 4, 2), np.uint8)
    packed = gguf_file.ggml_mxfp4(blocks, scales)
    assert packed.shape == (3, 4, 34)
    codes, kept = ggml_codes(packed)
    np.testing.assert_array_equal(kept, scales)
    np.testing.assert_array_equal(codes[..., 0::2], blocks & 15)
    np.testing.assert_array_equal(codes[..., 1::2], blocks >> 4)


def test_the_file_holds_the_checkpoints_experts_bit_for_bit(checkpoint: Path, gguf_reader: Any) -> None:
    """Read back by the gguf package, whose own dequantisation gives the values of the checkpoint."""
    from gguf import dequantize

    files, source = inspect_target(checkpoint), read_checkpoint(checkpoint)
    tensors = {tensor.name: tensor for tensor in gguf_reader.tensors}
    for layer in range(GEOMETRY.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, matrix, rows in (
            ("gate", "gate_up_proj", slice(0, None, 2)),
            ("up", "gate_up_proj", slice(1, None, 2)),
            ("down", "down_proj", slice(None)),
        ):
            written = tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
            values = dequantize(np.asarray(written.data), written.tensor_type)
            if files.mxfp4:
                assert written.tensor_type.name == "MXFP4"
                blocks, scales = source.take(f"{prefix}{matrix}_blocks"), source.take(f"{prefix}{matrix}_scales")
                codes, kept = ggml_codes(np.asarray(written.data))
                np.testing.assert_array_equal(kept, scales[:, rows])
                expected = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
                np.testing.assert_array_equal(codes, expected[:, rows])
                decoded = CODES[codes] * np.exp2(kept.astype(np.float32) - 127)[..., None]
                np.testing.assert_array_equal(values, decoded.reshape(values.shape))
            else:
                expected = source.take(prefix + matrix).swapaxes(-1, -2)[:, rows].astype(np.float32)
                np.testing.assert_array_equal(values, expected)
            bias = tensors[f"blk.{layer}.ffn_{name}_exps.bias"]
            np.testing.assert_array_equal(bias.data, source.take(f"{prefix}{matrix}_bias")[:, rows].astype(np.float32))


def test_the_file_holds_all_else_and_what_describes_it(checkpoint: Path, gguf_reader: Any) -> None:
    from gguf import dequantize

    source = read_checkpoint(checkpoint)
    tensors = {tensor.name: tensor for tensor in gguf_reader.tensors}
    for name, theirs in {
        "output.weight": "lm_head.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.2.attn_sinks.weight": "model.layers.2.self_attn.sinks",
        "blk.0.ffn_gate_inp.weight": "model.layers.0.mlp.router.weight",
    }.items():
        values = dequantize(np.asarray(tensors[name].data), tensors[name].tensor_type)
        np.testing.assert_array_equal(values, source.take(theirs).astype(np.float32))
    described = {key: gguf_reader.get_field(f"gpt-oss.{key}").contents() for key in ("vocab_size", "expert_used_count")}
    assert described == {"vocab_size": 89, "expert_used_count": 2}
    pattern = gguf_reader.get_field("gpt-oss.attention.sliding_window_pattern").contents()
    assert pattern == [True, False, True]


def test_checkpoint_that_gguf_cannot_express_is_refused(tmp_path: Path) -> None:
    other = dataclasses.replace(GEOMETRY, swiglu_limit=5.0)
    write_target(tmp_path / "other", other, random_tensors(other, True, seed=1), mxfp4=True)
    with pytest.raises(InputError, match=r"swiglu_limit is 5\.0"):
        gguf_file.write_gguf(tmp_path / "other", tmp_path / "model.gguf")


def test_bytes_are_those_of_the_published_model() -> None:
    weights = roster.Storage(2, roster.MXFP4_BYTES).weights(SIZES["20b"])
    assert weights.read(1) == pytest.approx(3.70e9, rel=0.01)
    floors = [weights.floor(width) for width in (1, 2, 4, 8)]
    assert floors == pytest.approx([1, 1.30, 1.79, 2.46], abs=0.005)


class Counter(StepwiseEngine):
    """Its greedy token is the number of tokens it holds."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.lengths: list[int] = []

    def begin(self, prompt_ids: list[int]) -> int:
        self.held = list(prompt_ids)
        return len(self.held)

    def extend(self, token_ids: list[int]) -> list[int]:
        start = len(self.held)
        self.lengths.append(start)
        self.held += token_ids
        return [start + i + 1 for i in range(len(token_ids))]

    def roll_back(self, count: int) -> None:
        del self.held[-count:]

    def last_logits(self) -> np.ndarray:
        return np.full((len(self.held) - self.lengths[-1], 2), len(self.held), np.float32)


def test_a_stepwise_engine_decodes_verifies_in_place_and_is_forced(tmp_path: Path) -> None:
    engine = Counter()
    decoded = engine.decode([7, 7, 7], 4)
    assert decoded["token_ids"] == [3, 4, 5, 6]
    assert engine.held == [7, 7, 7, 3, 4, 5]
    engine.lengths.clear()
    assert engine.verify([7, 7], [[1, 2], [3, 4], [5, 6]])["pass_s"] > 0
    assert engine.lengths == [2] * 4
    engine.logits([9], [[1], [2], [3, 4]], str(tmp_path / "logits.npy"))
    assert np.load(tmp_path / "logits.npy")[:, 0].tolist() == [2, 3, 5, 5]
    assert engine.held == [9, 1, 2, 3, 4]


def settings(**changes: Any) -> measure.Settings:
    values: dict[str, Any] = {
        "checkpoints": ("small",),
        "engines": ("peagle", "llama.cpp"),
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


SITE = roster.Site(Path("small"), True, Path("scratch"), 64, 2, {"llama.cpp": "python", "vllm": "python"})


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
            return {"decode_s": 0.02, "token_ids": [], "way": "its only one"}
        return {"prefill_s": 0.1, "decode_s": 0.01, "pass_s": 0.01, "token_ids": []}


def test_requests_are_decoded_together_by_engines_that_can() -> None:
    """The same prompts for each of them, once to warm up, then once a round."""
    names = ("peagle", "transformers-bf16", "llama.cpp")
    chosen = settings(engines=names, requests=(1, 3))
    engines, entries = {name: Scripted() for name in names}, [roster.entry(name, SITE) for name in names]
    tokens = measure.Tokens(89, chosen)
    lines = list(measure.run_rounds(entries, engines, tokens, chosen, Progress()))  # type: ignore[arg-type]
    many = {name: [arguments for do, arguments in engines[name].calls if do == "decode_many"] for name in names}
    assert many["transformers-bf16"] == []
    assert many["peagle"] == many["llama.cpp"]
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
    assert (decoded[0]["decode_s"], decoded[0]["way"]) == (0.02, "its only one")


def test_without_requests_none_are_decoded_together() -> None:
    engines = {name: Scripted() for name in ("peagle", "llama.cpp")}
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


class FakeLlama:
    """As much of llama_cpp as a context takes. The likeliest token of a row is (token + sequence) % 7; a way of caching
    takes as long as `pauses` says."""

    llama_batch_free = llama_free = llama_memory_clear = staticmethod(lambda *_: None)

    def __init__(self, pauses: dict[bool, float]) -> None:
        self.pauses, self.ran, self.contexts = pauses, [], []  # type: ignore[var-annotated]

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_init_from_model(self, model: Any, params: SimpleNamespace) -> SimpleNamespace:
        self.contexts.append(params)
        return params

    def llama_get_memory(self, context: SimpleNamespace) -> SimpleNamespace:
        return context

    def llama_model_get_vocab(self, model: Any) -> None:
        return None

    def llama_vocab_n_tokens(self, vocab: None) -> int:
        return 7

    def llama_batch_init(self, room: int, embedding: int, sequences: int) -> SimpleNamespace:
        return SimpleNamespace(
            **{name: [0] * room for name in ("token", "pos", "n_seq_id", "logits")},
            seq_id=[[0] * sequences for _ in range(room)],
        )

    def llama_decode(self, context: SimpleNamespace, batch: SimpleNamespace) -> int:
        time.sleep(self.pauses[context.kv_unified])
        rows = [(batch.seq_id[i][0], batch.pos[i], batch.token[i], batch.logits[i]) for i in range(batch.n_tokens)]
        self.ran.append(rows)
        context.outputs = np.zeros((sum(row[3] for row in rows), 7), np.float32)
        for output, (sequence, _, token, _) in zip(context.outputs, [row for row in rows if row[3]], strict=True):
            output[(token + sequence) % 7] = 1
        return 0

    def llama_get_logits(self, context: SimpleNamespace) -> Any:
        return context.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@pytest.mark.parametrize("unified", [False, True])
def test_llama_cpp_decodes_a_sequence_for_each_request(unified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlama({unified: 0.0, not unified: 0.01})
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "scripts.peers.llama_engine", raising=False)
    llama_engine = importlib.import_module("scripts.peers.llama_engine")
    monkeypatch.delitem(sys.modules, "scripts.peers.llama_engine")  # no other test gets this one
    engine = llama_engine.Llama("a model", room=8, num_threads=2)
    alone, *tried = fake.contexts
    assert (alone.n_ctx, alone.n_seq_max, alone.kv_unified) == (8, 1, False)
    assert tried == []
    decoded = engine.decode_many([[1, 2], [3, 4], [5, 6]], 3)
    assert decoded["token_ids"] == [[2, 2, 2], [5, 6, 0], [1, 3, 5]]
    assert decoded["way"] == llama_engine.CACHES[unified]
    assert [(context.n_ctx, context.n_batch, context.n_seq_max) for context in fake.contexts[1:]] == [(24, 8, 3)] * 2
    assert {context.kv_unified for context in fake.contexts[1:]} == {False, True}
    fake.ran.clear()
    assert engine.decode_many([[1, 2], [3, 4], [5, 6]], 3)["token_ids"] == decoded["token_ids"]
    assert len(fake.contexts) == 3  # what is faster is found out once
    assert fake.ran == [
        [(0, 0, 1, False), (0, 1, 2, True)],
        [(1, 0, 3, False), (1, 1, 4, True)],
        [(2, 0, 5, False), (2, 1, 6, True)],
        [(0, 2, 2, True), (1, 2, 5, True), (2, 2, 1, True)],
        [(0, 3, 2, True), (1, 3, 6, True), (2, 3, 3, True)],
    ]


FACTORS = {"peagle": 1.0, "llama.cpp": 2.0}
DRIFT = {1: 1.0, 2: 3.0, 3: 1.5}  # of the machine, by round: ratios within a round do not see it


def fake_lines() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for engine, factor in FACTORS.items():
            line = {"engine": engine, "round": number, "others_frac": 0.01 * number}
            seconds = factor * drift
            yield {**line, "what": "decode", "prefill_s": 0.1 * seconds, "decode_s": 0.01 * seconds}
            yield {**line, "what": "verify", "rows": 1, "passes": 3, "pass_s": 0.001 * seconds}
            yield {**line, "what": "verify", "rows": 4, "passes": 3, "pass_s": 0.0015 * seconds}


def fake_lines_with_drafts() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for engine, factor in FACTORS.items():
            line = {"engine": f"{engine}, p-eagle", "round": number, "others_frac": 0.01, "what": "speculate"}
            yield {**line, "requests": 1, "decode_s": 0.03 * factor * drift, "steps": 5.0}


def fake_lines_of_many() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for engine, factor in FACTORS.items():
            for requests in (1, 4):
                line = {"engine": engine, "round": number, "others_frac": 0.01, "what": "decode_many"}
                way = {} if engine == "peagle" else {"way": "one for each sequence"}
                yield {**line, "requests": requests, "decode_s": 0.01 * factor * drift * requests**0.5, **way}


@pytest.fixture
def measured(checkpoint: Path) -> measure.Measured:
    site = dataclasses.replace(SITE, checkpoint=checkpoint)
    check = {"max_difference": 0.25, "rms_difference": 0.0625, "top_1_agreement": 0.75}
    return measure.Measured(
        inspect_target(checkpoint),
        tuple(roster.entry(name, site) for name in FACTORS),
        {name: {"version": f"{name} 1", "computes": "in its way"} for name in FACTORS},
        {"peagle": check, "llama.cpp": {**check, "rounded_yarn": {**check, "max_difference": 0.125}}},
        {},
        list(fake_lines()),
    )


def test_ratios_are_taken_within_a_round(measured: measure.Measured) -> None:
    ours, peer = figures.rows("small", measured, settings())
    assert ours["decode_tok_per_s"] == pytest.approx({"median": 1000 / 1.5, "lowest": 1000 / 3, "highest": 1000})
    assert peer["ours_over_peer_decode"] == pytest.approx({"median": 2, "lowest": 2, "highest": 2})
    assert peer["ours_over_peer_pass"]["4"]["median"] == pytest.approx(2)
    assert ours["v"]["4"] == pytest.approx({"median": 1.5, "lowest": 1.5, "highest": 1.5})
    assert ours["gb_per_s"]["highest"] == pytest.approx(ours["bytes_per_token"] / 0.001 / 1e9)


PROVENANCE = {
    "command": "python -m scripts.bench peers",
    "cpu": "a processor",
    "num_threads": 2,
    "packages": {"jaxlib": "1"},
    "time": "now",
    "device": {"platform": "cpu", "kind": "cpu", "count": 1},
    "git": None,
}


def test_the_page_shows_every_engine_and_who_was_left_out(measured: measure.Measured) -> None:
    chosen = settings()
    run = {
        "provenance": dict(PROVENANCE),
        "config": {"prompt_tokens": 16, "new_tokens": 11, "rounds": 3, "widths": [1, 4], "check_tokens": 8},
        "left_out": {"transformers-bf16": "torch is not installed"},
        "checkpoints": [
            {
                "name": "small",
                "parameters": 123e6,
                "v_by_bytes": figures.floors(measured, chosen),
                "others_frac": figures.others(measured),
            }
        ],
        "rows": figures.rows("small", measured, chosen),
    }
    text = markdown(page.page(json.loads(json.dumps(run))))
    assert "Left out: transformers-bf16 (torch is not installed)." in text
    assert "## small: 123 M parameters" in text
    assert "| llama.cpp | bfloat16, MXFP4 experts | 333 (167..500) | 2.00 (2.00..2.00) |" in text
    assert "| peagle | 1.5 | 2.25 | 1.50 (1.50..1.50) |" in text
    assert "| by bytes |  |  | 1." in text
    assert "| llama.cpp against YaRN rounded as there | 0.12 | 0.062 | 75 % |" in text
    assert "Other processes took 2 % of the processors' time during a measurement (median; at least 1, at" in text
    assert text.startswith("# Against peers on CPU\n")
    assert "peagle 1; llama.cpp 1; a processor, 2 threads; jaxlib 1" in text
    run["provenance"]["device"] = {"platform": "gpu", "kind": "NVIDIA H100", "count": 1}
    on_gpu = markdown(page.page(json.loads(json.dumps(run))))
    assert on_gpu.startswith("# Against peers on one GPU\n")
    assert "llama.cpp 1; NVIDIA H100; jaxlib 1" in on_gpu
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(tables) == {8, 5, 4, 6}


def test_the_page_shows_requests_decoded_together(measured: measure.Measured) -> None:
    """Medians of tokens a second in all, ratios within a round, and who is not there."""
    chosen = settings(requests=(1, 4))
    lines = [*measured.lines, *fake_lines_of_many()]
    experts = {"peagle": {"1": 2.0, "4": 3.25}}
    ours_row, peer_row = figures.rows("small", dataclasses.replace(measured, lines=lines, experts=experts), chosen)
    assert ours_row["together"]["4"]["tok_per_s"] == pytest.approx(
        {"median": 2000 / 1.5, "lowest": 2000 / 3, "highest": 2000}
    )
    assert peer_row["together"]["4"]["ours_over_peer"] == pytest.approx({"median": 2, "lowest": 2, "highest": 2})
    assert peer_row["together"]["1"]["way"] == "one for each sequence"
    assert "together" not in figures.rows("small", measured, settings())[0]
    slow = {key: value for key, value in peer_row.items() if key != "together"} | {"engine": "transformers-bf16"}
    checkpoint = {"name": "small", "parameters": 123e6, "v_by_bytes": {"1": 1.0, "4": 1.2}, "others_frac": None}
    checkpoint["geometry"] = {"num_experts": 5}
    run = {
        "provenance": dict(PROVENANCE),
        "config": dataclasses.asdict(chosen),
        "left_out": {},
        "checkpoints": [checkpoint],
        "rows": [ours_row, slow, peer_row],
    }
    text = markdown(page.page(json.loads(json.dumps(run))))
    assert (
        "\n\n| requests | ours tok/s | llama.cpp tok/s | ours / llama.cpp |\n|---|---:|---:|---:|\n"
        "| 1 | 667 (333..1000) | 333 (167..500) | 2.00 (2.00..2.00) |\n"
        "| 4 | 1333 (667..2000) | 667 (333..1000) | 2.00 (2.00..2.00) |\n\n"
        "The faster cache of llama.cpp: one for each sequence (requests: 1, 4).\n\n" in text
    )
    assert "| experts that a layer reads, of 5 | requests: 1 | requests: 4 |" in text
    assert "| peagle | 2.0 | 3.2 |" in text
    assert "10 steps of all" in text
    assert text.count("one request at a time here: transformers-bf16.") == 1


def test_the_page_shows_steps_with_drafts(measured: measure.Measured) -> None:
    """Each beside our steps with the same drafter: 30 ms a round in 5 steps, which emit 10 tokens."""
    chosen = settings(drafters=("p-eagle",), num_drafts=5)
    entries = [roster.drafting(name, "p-eagle", Path("drafter"), 5, SITE) for name in ("peagle", "vllm")]
    entries[1] = dataclasses.replace(entries[1], name="llama.cpp, p-eagle")  # as the lines name it
    described = {entry.name: measured.described[entry.name.partition(", ")[0]] for entry in entries}
    with_drafts = dataclasses.replace(
        measured,
        entries=(*measured.entries, *entries),
        described=measured.described | described,
        lines=[*measured.lines, *fake_lines_with_drafts()],
    )
    run = {
        "provenance": dict(PROVENANCE),
        "config": dataclasses.asdict(chosen),
        "left_out": {},
        "checkpoints": [{"name": "small", "parameters": 123e6, "v_by_bytes": {"4": 1.2}, "others_frac": None}],
        "rows": figures.rows("small", with_drafts, chosen),
    }
    text = markdown(page.page(json.loads(json.dumps(run))))
    assert "| peagle, p-eagle | 1 | 9.00 (6.00..18.0) | 2.00 (2.00..2.00) |  |" in text
    assert "| llama.cpp, p-eagle | 1 | 18.0 (12.0..36.0) | 2.00 (2.00..2.00) | 2.00 (2.00..2.00) |" in text
    assert "K = 5. Random drafts are hardly ever accepted" in text


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
        (["--requests", "1,257"], "--requests names 257; expected at most 256"),
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
    names, left_out = scenario.engines("llama.cpp,vllm", {"llama.cpp": "/no/such/python", "vllm": None})
    assert names == ("peagle",)
    assert set(left_out) == {"llama.cpp", "vllm"}
    assert left_out["vllm"] == "no --vllm-python was given"


def test_an_engine_that_fails_is_one_line(tmp_path: Path) -> None:
    site = dataclasses.replace(SITE, checkpoint=tmp_path / "nothing")
    with pytest.raises(InputError, match=r"^peagle-xla: InputError: .*nothing does not exist[^\n]*$"):
        roster.entry("peagle-xla", site).start()
