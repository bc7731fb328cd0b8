"""Load and run a pair from Python; errors of pairs that do not fit name both sides."""

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peagle
from peagle.base.errors import InputError, InputWarning
from peagle.config import Drafts, EngineConfig, SamplingParams
from peagle.engine.devices.free_memory import LEAST_PREFIX_BYTES, FreeMemory
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO_DIRECTORY, drafter_path, resolve
from peagle.loading.defaults import default_dtype
from peagle.loading.fit import check_fit
from peagle.loading.load import load, with_drafter
from peagle.pair import Pair
from peagle.text.prompts import Rendering, from_ids
from peagle.workflows.random_checkpoint import random_tensors
from target.load import load_target, save_target, write_target
from tests.support.pairs import (
    DRAFTER,
    MAX_POSITIONS,
    STOP,
    TARGET,
    VOCAB_SIZE,
    Directories,
    edit_json,
    toy_pair,
    write_drafter,
)

pytestmark = pytest.mark.compile


def test_the_names_of_the_package_are_those_of_their_modules() -> None:
    assert peagle.load is load
    assert peagle.Pair is Pair
    assert set(peagle.__all__) <= set(dir(peagle))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = peagle.nothing


def test_a_loaded_pair_streams_what_plain_decoding_says(pair: Pair) -> None:
    """With the real target and drafter, text comes in pieces, and speculation changes no token."""
    stream = pair.stream("hello", max_new_tokens=24, num_speculative_tokens=3, ignore_eos=True)
    pieces = list(stream)
    plain = pair.generate("hello", max_new_tokens=24, num_speculative_tokens=0, ignore_eos=True)
    assert "".join(pieces) == stream.result.text
    assert stream.result.output_ids == plain.output_ids
    assert len(set(plain.output_ids)) > 5  # not stuck
    assert stream.result.acceptance_length is not None
    assert plain.acceptance_length is None
    assert stream.result.tok_per_s is not None
    assert stream.result.finish_reason == "length"


def test_default_dtype_is_the_targets_own_where_the_cpu_multiplies_it(directories: Directories, tmp_path: Path) -> None:
    loaded = load_target(directories.target)
    save_target(tmp_path / "float32", loaded.params, loaded.config, dtype=np.float32, mxfp4=False)
    assert default_dtype(directories.target, "native") == "bfloat16"
    assert default_dtype(tmp_path / "float32", "native") == "float32"
    for implementation in ("xla", None):  # slow in bfloat16
        assert default_dtype(directories.target, implementation) == "float32"


def test_a_pair_knows_what_was_loaded(pair: Pair) -> None:
    assert pair.stop_token_ids == (STOP,)
    assert pair.max_positions == MAX_POSITIONS
    assert pair.loaded.dtype == "bfloat16"  # as it is stored
    assert pair.target.vocab_size == VOCAB_SIZE
    assert getattr(pair.target, "aux_layer_ids", None) == DRAFTER.aux_layer_ids
    assert getattr(pair.plain_target, "aux_layer_ids", None) == ()


def test_a_stream_says_so_far_and_then_all(toy: Pair) -> None:
    stream = toy.stream([50], max_new_tokens=12, num_speculative_tokens=3)
    assert stream.result.output_ids == ()
    first = next(stream)
    assert (stream.result.finish_reason, stream.result.text) == (None, first)
    rest = list(stream)
    assert (stream.result.finish_reason, stream.result.text) == ("length", first + "".join(rest))


def test_without_a_tokenizer_a_stream_shows_ids() -> None:
    stream = toy_pair(None).stream([50], max_new_tokens=5, num_speculative_tokens=2)
    assert "".join(stream).split() == list(map(str, stream.result.output_ids))


def test_without_a_drafter_a_pair_decodes_plainly(toy: Pair) -> None:
    alone = dataclasses.replace(toy, drafter=None)
    assert alone.generate([50], max_new_tokens=5).output_ids == toy.generate([50], max_new_tokens=5).output_ids
    with pytest.raises(InputError, match="no drafter"):
        alone.stream([50], num_speculative_tokens=2)


# options of a request, and a pattern of the line
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_speculative_tokens": 129}, r"K is 129; expected 0 .* to 128 drafted"),
    ({"num_speculative_tokens": "auto:0"}, "K is 'auto:0'; expected auto:N, N from 1 to 128"),
    *(({"num_speculative_tokens": k}, f"K is {k!r}; expected a number of drafted tokens") for k in ("5", "auto:x", "")),
    ({"temprature": 1.0}, "temprature is not an option; did you mean temperature"),
    ({"kv_memory_bytes": 1}, "kv_memory_bytes is not an option; did you mean kv_memory"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_options_that_cannot_be_are_refused(toy: Pair, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        toy.stream([50], **options)


def test_a_k_beyond_the_positions_is_refused(toy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(toy.target), "max_positions", 64)
    with pytest.raises(InputError, match="K is 63; expected at most 62"):
        toy.stream([50], num_speculative_tokens=63)


def test_the_default_k_is_the_pairs(toy: Pair) -> None:
    best = dataclasses.replace(toy, auto_drafts=5)
    assert best.drafts("auto") == Drafts(5, True)
    assert best.drafts(None) == Drafts(5, True)
    assert best.drafts(3) == Drafts(3, False)
    assert dataclasses.replace(toy, drafter=None).drafts(None) == Drafts(0, False)


def test_auto_with_a_number_adapts_with_at_most_so_many_drafts_a_step(toy: Pair) -> None:
    """Fewer than the drafter's file says, or more; and the tokens stay plain decoding's."""
    best = dataclasses.replace(toy, auto_drafts=5)
    assert best.drafts("auto:2") == Drafts(2, True)
    assert best.drafts("auto:9") == Drafts(9, True)
    assert best.engine_config("auto:2", context=128).adaptive
    result = best.generate([50], max_new_tokens=20, num_speculative_tokens="auto:2")
    assert result.num_speculative_tokens == 2
    assert max(len(step.draft_token_ids) for step in result.steps) <= 2
    assert result.output_ids == best.generate([50], max_new_tokens=20, num_speculative_tokens=0).output_ids


def test_capacity_is_the_smallest_multiple_of_128_that_holds_it(toy: Pair) -> None:
    def capacity(prompt: int, budget: int) -> int:
        return toy.capacity([Request((5,) * prompt, budget)])

    assert [capacity(100, 28), capacity(100, 29), capacity(1, 1)] == [128, 256, 128]
    assert capacity(300, 80) == MAX_POSITIONS  # 384 is a multiple, and all there is
    assert toy.capacity([Request((5,), 1), Request((5,) * 200, 10)]) == 256


def test_equal_shapes_share_an_engine(toy: Pair) -> None:
    def engine(k: int = 3, **options: Any) -> Engine:
        return toy.engine(toy.engine_config(k, **{"context": 128, **options}))

    assert engine() is engine()
    assert engine(adaptive=True) is engine(adaptive=True)
    different = [engine(), engine(2), engine(0), engine(context=256), engine(slots=2), engine(adaptive=True)]
    assert len(set(map(id, different))) == len(different)


def test_no_parameter_of_a_request_needs_an_engine_of_its_own(toy: Pair) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "num_speculative_tokens": 3}
    greedy = toy.generate([50], **options).output_ids
    assert toy.generate([50], temperature=1.5, top_k=9, top_p=0.9, seed=3, **options).output_ids != greedy
    assert toy.generate([50], ignore_eos=True, **options).output_ids == greedy
    stop = greedy[5]
    stopping = dataclasses.replace(toy, stop_token_ids=(stop,))
    assert stopping.generate([50], **options).output_ids == greedy[: greedy.index(stop) + 1]
    assert stopping.generate([50], ignore_eos=True, **options).output_ids == greedy
    assert [len(pair.engines) for pair in (toy, stopping)] == [1, 1]


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_many_requests_at_once_get_what_each_gets_alone(pair: Pair, k: int) -> None:
    """Prompts past a chunk and past the sliding window, three slots for five requests, one of them sampled."""
    assert pair.tokenizer is not None
    prompts = [
        pair.tokenizer.encode(text) for text in ("1 + 2 = ", "def mean(values):\n" * 4, "naïve café", "a", "дом")
    ]
    requests = [Request(ids, 20 + number, stop_token_ids=()) for number, ids in enumerate(prompts)]
    requests[1] = dataclasses.replace(requests[1], sampling=SamplingParams(0.9, top_k=40, seed=5))

    def decoded(k: int, slots: int, requests: Sequence[Request], **options: Any) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]
        engine = pair.engine(pair.engine_config(k, slots=slots, context=128, **options))
        for place, chunk in engine.generate(requests):
            outputs[place] += chunk.token_ids
        return outputs

    alone = [decoded(0, 1, [request])[0] for request in requests]
    assert decoded(k, 3, requests, prefill_chunk=16) == alone
    assert [len(output) for output in alone] == [20, 21, 22, 23, 24]
    greedy = dataclasses.replace(requests[1], sampling=SamplingParams())
    assert decoded(0, 1, [greedy])[0] != alone[1]


def test_an_engine_takes_a_config_as_a_person_says_it(toy: Pair) -> None:
    engine = toy.engine(EngineConfig(3, slots=2, context=64))
    assert (engine.config.num_speculative_tokens, engine.config.slots, engine.config.context) == (3, 2, 64)
    assert toy.engine(toy.resolve(EngineConfig(3, slots=2, context=64))) is engine


def test_a_pair_with_another_drafter_has_engines_of_its_own_and_shares_the_rest(toy: Pair) -> None:
    other = dataclasses.replace(toy, drafter=None)
    assert other.engines is not toy.engines
    assert (other.grammars, other.memory) == (toy.grammars, toy.memory)


def test_slots_that_cannot_be_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="slots is 0; expected 1 or more"):
        pair.engine_config(0, slots=0, context=64)
    with pytest.raises(InputError, match="context is 1 positions; expected room"):
        pair.engine_config(0, context=1)
    one = sum(pair.engine(pair.engine_config(0, context=128)).memory_bytes())
    for module in ("peagle.base.memory", "peagle.engine.devices.free_memory"):
        monkeypatch.setattr(f"{module}.available_memory_bytes", lambda: 3 * one)
    line = r"positions for 64 slots, .* for the state of the slots and .* for a step's logits, .* together, do not fit"
    with pytest.raises(InputError, match=line + r".*each slot takes .* slots fit: lower") as refused:
        pair.engine(pair.engine_config(0, slots=64, context=128))
    fit = int(re.findall(r"(\d+) slots fit", str(refused.value))[0])
    assert pair.engine(pair.engine_config(0, slots=fit, context=128))
    with pytest.raises(InputError, match="do not fit"):
        pair.engine(pair.engine_config(0, slots=fit + 1, context=128))


def test_memory_for_keys_and_values_is_refused_if_it_is_too_small_or_is_not_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(size: int) -> Any:
        return pair.engine(pair.engine_config(3, slots=4, context=256, kv_memory=size))

    with pytest.raises(InputError, match=r"is 1\.0 kB; expected .* which hold one request of 256 positions") as refused:
        engine(1000)
    enough = float(re.findall(r"expected ([\d.]+) kB or more", str(refused.value))[0]) * 1e3
    assert engine(round(enough)).page_use.num_tokens < 2 * 256
    assert engine(int(enough * 3)).page_use.num_tokens > 2 * 256
    monkeypatch.setattr("peagle.engine.devices.free_memory.available_memory_bytes", lambda: int(enough * 4))
    with pytest.raises(
        InputError, match=r"keys and values may take .* [kM]B, but .* are available; .* smaller --kv-memory"
    ):
        engine(int(enough * 5))


def test_the_prefix_cache_takes_a_part_of_the_free_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(size: Any, pair: Pair = pair, **options: Any) -> int:
        return pair.engine_config(3, context=256, prefix_cache=size, **options).prefix_cache

    assert [kept(size) for size in ("off", 0, 4096)] == [0, 0, 4096]
    assert kept("on", kv_memory=1 << 24) == 1  # no page more
    for free, part in ((100_000_000, 10_000_000), (10_000_000_000, LEAST_PREFIX_BYTES)):
        monkeypatch.setattr("peagle.engine.devices.free_memory.available_memory_bytes", lambda free=free: free)
        fresh = dataclasses.replace(pair, memory=FreeMemory())
        assert kept("on", fresh) == part
        monkeypatch.setattr("peagle.engine.devices.free_memory.available_memory_bytes", lambda: 7)
        assert kept("on", fresh) == part  # equal arguments make equal engines


def test_the_default_context_is_the_models_or_what_the_memory_holds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.default_context(3) == pair.max_positions == MAX_POSITIONS
    size = sum(pair.engine(pair.engine_config(3, context=256)).memory.num_bytes)
    assert pair.default_context(3, kv_memory_bytes=int(1.2 * size)) == 256
    assert pair.default_context(3, slots=4, kv_memory_bytes=100 * size) == MAX_POSITIONS
    fresh = dataclasses.replace(pair, memory=FreeMemory())
    monkeypatch.setattr("peagle.engine.devices.free_memory.available_memory_bytes", lambda: int(1.3 * size))
    assert fresh.default_context(3) == 256
    assert fresh.default_context(3, num_engines=2) == 128
    monkeypatch.setattr("peagle.pair.MOST_RESERVED", 100)
    assert [pair.default_context(3, slots=slots) for slots in (1, 2)] == [100, 200], "slots share what is set aside"


def test_a_later_stream_begins_with_what_an_earlier_one_computed(pair: Pair) -> None:
    prompt = [5 + place % 7 for place in range(80)]
    options: dict[str, Any] = {"max_new_tokens": 8, "num_speculative_tokens": 3, "context": 256, "ignore_eos": True}
    cold = pair.generate(prompt, **options)
    warm = pair.generate([*prompt, *cold.output_ids], **options)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    off = pair.generate([*prompt, *cold.output_ids], **options, prefix_cache="off")
    assert off.num_cached_tokens == 0
    assert off.output_ids == warm.output_ids


@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sampled_answers_are_those_of_plain_decoding_with_the_same_seed(pair: Pair, num_drafts: int) -> None:
    """Drafts are drawn by the same noise, so that some are accepted."""
    options = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    plain = [pair.generate("hello", num_speculative_tokens=0, seed=seed, **options).output_ids for seed in (3, 4)]
    drafted = [pair.generate("hello", num_speculative_tokens=num_drafts, seed=seed, **options) for seed in (3, 4)]
    assert [result.output_ids for result in drafted] == plain
    assert plain[0] != plain[1]
    assert sum(step.num_accepted for result in drafted for step in result.steps) > 0


def test_prompts_are_checked_against_the_model(toy: Pair) -> None:
    def request(ids: list[int], **options: Any) -> Request:
        return toy.request(from_ids(ids), [], Rendering(), **{"max_new_tokens": 10, **options})

    assert request([5] * (MAX_POSITIONS - 4)).max_new_tokens == 4
    assert request([5] * 5, context=8).max_new_tokens == 3
    for ids, options, line in (
        ([VOCAB_SIZE], {}, "outside the target's vocabulary"),
        ([5] * MAX_POSITIONS, {}, f"the model has {MAX_POSITIONS} positions"),
        ([5] * 8, {"context": 8}, "raise --context"),
        ([5], {"context": MAX_POSITIONS + 1}, "context is"),
        ([5], {"max_new_tokens": 0}, "expected 1 or more"),
        ([5], {"index": -1}, "index is -1"),
    ):
        with pytest.raises(InputError, match=line):
            request(ids, **options)
    with pytest.raises(InputError, match=f"seed is {2**64}; expected an integer of 64 bits"):
        SamplingParams(seed=2**64)


def test_names_stand_for_the_demo_and_for_directories(directories: Directories) -> None:
    assert resolve(str(directories.target), "target") == directories.target
    assert drafter_path("anything", None) is None
    assert drafter_path("anything", "ngram") is None
    names = ("demo", "demo-eagle3", "demo-dflash")
    assert len({drafter_path("demo", name) for name in names}) == 3
    for name in names:
        with pytest.raises(InputError, match="give --drafter DIR, or --drafter ngram"):
            drafter_path(directories.target, name)


def test_a_repository_in_the_local_cache_is_found_by_its_name(
    cached_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is fetched for another name."""
    assert resolve("openai/gpt-oss-20b", "target") == cached_target
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it asks the network"))
    for name in ("openai/gpt-oss-120b", "run/drafter"):
        with pytest.raises(InputError, match=rf"{name} is no directory, .* local .* peagle download {name}"):
            resolve(name, "drafter")


def test_a_pair_that_fits_has_the_drafters_aux_layers(directories: Directories) -> None:
    assert check_fit(directories.target, directories.drafter).outputs == DRAFTER.aux_layer_ids


KEY = "eagle_aux_hidden_state_layer_ids"


def demo_drafter_that_says(directory: Path, **changes: object) -> Path:
    shutil.copytree(DEMO_DIRECTORY / "drafter", directory)
    edit_json(directory / "config.json", **{KEY: None, **changes})
    return directory


@pytest.mark.parametrize(
    ("changes", "outputs", "description", "warning"),
    [
        ({KEY: [2, 5, 8]}, (1, 4, 7), "inputs, .* as vLLM reads them", None),
        ({KEY: [1, 3, 4]}, (0, 2, 3), "inputs", r"begin with 1; .* try --aux-layer-ids 1,3,4, .* \[2, 4, 5\] there"),
        ({KEY: [1, 3, 8]}, (0, 2, 7), "inputs", None),  # no output of 8 layers has the number 8
        ({"eagle_config": {KEY: [1, 3, 4]}}, (1, 3, 4), "outputs, as SpecForge and SGLang", None),
        (  # some exporters write inputs there
            {"eagle_config": {KEY: [3, 4, 6]}},
            (3, 4, 6),
            "outputs",
            r"outputs usually begin with 1, .* --aux-layer-ids 2,3,5, .* \[2, 3, 5\] there",
        ),
        (  # 8 can only be an input of eight layers' successor
            {"eagle_config": {KEY: [3, 6, 8]}},
            (2, 5, 7),
            "inputs",
            r"in config.json counts layer inputs \(\[3, 6, 8\] of 8 layers\); using outputs \[2, 5, 7\]",
        ),
        (
            {"eagle_config": {KEY: [2, 4, 5]}},
            (2, 4, 5),
            "outputs",
            r"inputs usually begin with 2; .* --aux-layer-ids 1,3,4, .* \[1, 3, 4\] there",
        ),
        ({KEY: [2, 5, 8], "eagle_config": {KEY: [1, 4, 7]}}, (1, 4, 7), "inputs", None),
        ({KEY: [2, 5, 8], "eagle_config": {KEY: [2, 5, 8]}}, (1, 4, 7), "inputs", None),  # 8 is no output
        ({KEY: [3, 5, 7], "eagle_config": {KEY: [3, 5, 7]}}, (2, 4, 6), "inputs", "eagle_config.* name others"),
        ({}, (1, 3, 4), "the target's default, as config.json names none", None),
    ],
)
def test_the_reading_of_aux_layer_ids_is_said_with_a_warning(
    tmp_path: Path, changes: dict[str, object], outputs: tuple[int, ...], description: str, warning: str | None
) -> None:
    """By their key; a warning if they look like the other convention's, which is never assumed."""
    directory = demo_drafter_that_says(tmp_path / "drafter", **changes)
    fit = check_fit(DEMO_DIRECTORY / "target", directory)
    assert fit.outputs == outputs
    assert re.search(description, fit.description)
    assert fit.warning is None if warning is None else re.search(warning, fit.warning or "")
    chosen = check_fit(DEMO_DIRECTORY / "target", directory, (1, 4, 7))
    assert (chosen.outputs, chosen.warning) == ((1, 4, 7), None)
    assert "given" in chosen.description


def test_aux_layer_ids_that_are_given_win(tmp_path: Path) -> None:
    directory = demo_drafter_that_says(tmp_path / "drafter", **{KEY: [1, 4, 7]})
    plain = load("demo", None)
    with pytest.warns(InputWarning, match="begin with 1"):
        warned = with_drafter(plain, "demo", directory)
    chosen = with_drafter(plain, "demo", directory, aux_layer_ids=(1, 4, 7))
    assert [getattr(pair.target, "aux_layer_ids", None) for pair in (warned, chosen)] == [(0, 3, 6), (1, 4, 7)]
    for name in (None, "ngram"):
        with pytest.raises(InputError, match="no drafter with weights"):
            load("demo", name, aux_layer_ids=(1, 4, 7))
    with pytest.raises(InputError, match=r"--aux-layer-ids names the output of layer 8; expected 0\.\.7"):
        check_fit(DEMO_DIRECTORY / "target", directory, (1, 4, 8))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"target_hidden_size": 32}, ("32", "64", "hidden states")),
        ({"vocab_size": 300, "draft_vocab_size": 300}, ("300", str(VOCAB_SIZE), "vocabulary")),
        ({"aux_layer_ids": (0, 1, 3)}, ("[1, 2, 4]", "4 names no layer", "1..3")),
        ({"aux_layer_ids": None}, ("no default aux layers", "eagle_aux_hidden_state_layer_ids")),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    directories: Directories, tmp_path: Path, changes: dict[str, object], parts: tuple[str, ...]
) -> None:
    write_drafter(tmp_path / "other", dataclasses.replace(DRAFTER, **changes))  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        load(directories.target, tmp_path / "other")
    assert all(part in str(caught.value) for part in parts)
    if changes.get("aux_layer_ids", 0) is not None:
        assert str(directories.target) in str(caught.value)
        assert str(tmp_path / "other") in str(caught.value)


def test_fewer_aux_layers_than_the_default_must_be_named(tmp_path: Path) -> None:
    deep = dataclasses.replace(TARGET, layer_types=TARGET.layer_types * 3)
    write_target(tmp_path / "deep", deep, random_tensors(deep, True, 1), mxfp4=True)
    write_drafter(tmp_path / "two", dataclasses.replace(DRAFTER, num_aux_layers=2, aux_layer_ids=None))
    write_drafter(tmp_path / "three", dataclasses.replace(DRAFTER, aux_layer_ids=None))
    assert check_fit(tmp_path / "deep", tmp_path / "three").outputs == (1, 3, 5)
    with pytest.raises(InputError, match=r"reads 2 aux layers .* 3: \[1, 3, 5\]"):
        check_fit(tmp_path / "deep", tmp_path / "two")


def test_dtype_and_experts_are_as_asked(directories: Directories) -> None:
    packed = load(directories.target, None, dtype="bfloat16", experts="packed", kernels="xla")
    assert (packed.loaded.dtype, packed.loaded.experts, packed.loaded.kernels) == ("bfloat16", "packed", "XLA")
    embedding = packed.plain_target.params.embedding  # type: ignore[attr-defined]
    assert embedding.dtype == np.dtype("bfloat16")


def test_kernels_are_as_asked_and_refused_where_they_do_not_run(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, options = [5, 6, 7], {"max_new_tokens": 12, "ignore_eos": True, "num_speculative_tokens": 3}
    outputs = {
        kernels: load(directories.target, directories.drafter, kernels=kernels).generate(prompt, **options).output_ids
        for kernels in ("native", "xla")
    }
    assert outputs["native"] == outputs["xla"]
    for module in ("defaults", "load"):
        monkeypatch.setattr(f"peagle.loading.{module}.describe_kernels", lambda: "XLA: no compiler was found")
    monkeypatch.setattr("peagle.loading.defaults.for_weights", lambda: None)
    with pytest.raises(InputError, match="no compiler was found"):
        load(directories.target, None, kernels="native")
    assert load(directories.target, None).loaded.kernels == "XLA: no compiler was found"


def test_a_target_without_stop_tokens_is_a_warning(directories: Directories, tmp_path: Path) -> None:
    """Neither its configs nor its tokenizer name any."""
    shutil.copytree(directories.target, tmp_path / "target")
    edit_json(tmp_path / "target" / "config.json", eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "target" / name).unlink(missing_ok=True)
    with pytest.warns(InputWarning, match="no stop token is named"):
        assert load(tmp_path / "target", None).stop_token_ids == ()
