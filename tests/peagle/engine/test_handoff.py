"""What goes on in another engine gets what it gets in one: tokens, acceptance, log-probabilities, bit for bit."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy

from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.beside import Beside
from peagle.engine.engine import Engine
from peagle.engine.handle import Handle
from peagle.engine.handoff import Fingerprints, HandOff, parse
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.widths import CostTable
from peagle.ops import native
from peagle.ops.attention import PAGE_SIZE
from peagle.ops.errors import InputError
from tests.support.models import FAST, TARGET, Models, models
from tests.support.toys import WINDOW, decode, tiny_target

BLOCK = PAGE_SIZE
CAPACITY, K, NEW = 2 * BLOCK + 90, 3, 65
TOKENS = tuple(np.random.default_rng(11).integers(0, TARGET.vocab_size, CAPACITY).tolist())
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.8, seed=5),
    SamplingParams(0.9, top_k=9, seed=2, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=40),
]
needs_native = pytest.mark.skipif(not native.available(), reason=native.status()[1])


def engine_of(given: Models, k: int = K, **options: object) -> Engine:
    shape = {"num_speculative_tokens": k, "slots": 2, "context": CAPACITY, "prefill_chunk": 64}
    fingerprints = Fingerprints("the target", "the drafter")
    return Engine(given.target, given.drafter, ResolvedConfig(**{**shape, **options}), (), fingerprints)


def facts(chunks: list[TokenChunk]) -> tuple[list, list, list]:
    """Tokens, steps and log-probabilities."""
    return tuple(
        [each for chunk in chunks for each in getattr(chunk, name)] for name in ("token_ids", "steps", "logprobs")
    )


def asked(length: int, sampling: int = 0, budget: int = NEW) -> Request:
    return Request(TOKENS[:length], budget, SAMPLINGS[sampling], (), logprobs=2, index=sampling)


def prefilled(sender: Engine, request: Request) -> tuple[list[TokenChunk], HandOff]:
    """Return (the chunks of a prefill engine, its message as it arrives elsewhere)."""
    handle = sender.add(request)
    chunks = list(sender.follow(handle))
    assert handle.finished == "handed_off"
    assert handle.hand_off is not None
    return chunks, parse(handle.hand_off.data.tobytes())


def until(engine: Engine, handle: Handle, tokens: int) -> list[TokenChunk]:
    """Step until so many tokens of a request were read."""
    chunks = []
    while sum(len(chunk.token_ids) for chunk in chunks) < tokens:
        chunks += [chunk for other, chunk in engine.step() if other is handle]
    return chunks


@needs_native
@pytest.mark.parametrize(
    ("k", "dtype", "drafter"),
    [
        pytest.param(0, "float32", "P-EAGLE", marks=pytest.mark.slow),
        (K, "float32", "P-EAGLE"),
        pytest.param(K, "bfloat16", "P-EAGLE", marks=pytest.mark.slow),
        (K, "float32", "DFlash"),
    ],
)
def test_a_fresh_prompt_goes_on_in_an_engine_of_another_shape(
    k: int, dtype: str, drafter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prompts around blocks, chunks and the window; rings of the sender's chunks go into rings of single steps."""
    given = models(f"native {dtype}", tmp_path_factory.getbasetemp(), drafter)
    local, decoder = engine_of(given, k), engine_of(given, k, role="decode", context=CAPACITY + 30)
    for chunk, lengths in ((64, (1, WINDOW, 45, BLOCK + 1)), (100, (2, BLOCK, 2 * BLOCK + 20))):
        sender = engine_of(given, k, prefill_chunk=chunk, role="prefill", context=CAPACITY - chunk % 3)
        for place, length in enumerate(lengths):
            request = asked(length, place % len(SAMPLINGS))
            expected = facts(list(local.follow(local.add(request))))
            first, message = prefilled(sender, request)
            rest = list(decoder.follow(decoder.add(request, hand_off=message)))
            assert facts(first + rest) == expected, (chunk, length)


@needs_native
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), K])
def test_a_sequence_goes_on_from_the_midst_of_its_answer(k: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Beside others, that are not disturbed; twice, so that what was received is handed over, too."""
    given = models("native float32", tmp_path_factory.getbasetemp())
    first, second = (
        engine_of(given, k, steps_per_dispatch=3),
        engine_of(given, k, prefill_chunk=32, context=CAPACITY + 7),
    )
    alone = engine_of(given, k)
    for place, length in enumerate((3, 45, BLOCK + 9)):
        moved, stays = asked(length, place), asked(20 + length, 1)
        expected, others = (facts(list(alone.follow(alone.add(each)))) for each in (moved, stays))
        beside, handle = first.add(stays), first.add(moved)
        chunks = until(first, handle, 12)
        message = parse(first.hand_over(handle).data.tobytes())
        chunks += handle.inbox
        assert len(message.token_ids) == length + sum(len(chunk.token_ids) for chunk in chunks)
        received = second.add(moved, hand_off=message)
        chunks += until(second, received, 15)
        again = second.hand_over(received)
        chunks += received.inbox
        chunks += first.follow(first.add(moved, hand_off=again))
        assert facts(chunks) == expected, length
        assert list(first.follow(beside))
        assert beside.output_ids == list(others[0])


@needs_native
@pytest.mark.parametrize("whole", [True, False])
def test_all_keys_of_sliding_layers_go_into_rings_and_back(
    whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = models("native float32", tmp_path_factory.getbasetemp())
    retaining = dataclasses.replace(given, target=dataclasses.replace(given.target, retain_full_kv=True))
    ends = (retaining, given) if whole else (given, retaining)
    request, local = asked(BLOCK + 30), engine_of(given)
    first, message = prefilled(engine_of(ends[0], role="prefill"), request)
    receiver = engine_of(ends[1], prefix_cache=1 << 24)
    assert facts([*first, *receiver.follow(receiver.add(request, hand_off=message))]) == facts(
        list(local.follow(local.add(request)))
    )
    # its layers may lack rows, so nothing that begins with it is known
    assert receiver.prefix_cache_use is not None
    assert receiver.prefix_cache_use.num_entries == 0


def test_n_grams_and_rows_that_draft_no_more_are_handed_over_too() -> None:
    shape = ResolvedConfig(K, 2, 96, prefill_chunk=8, k_per_request=True)
    local = Engine(tiny_target(), NGram(), shape)
    sender = Engine(tiny_target(), NGram(), dataclasses.replace(shape, role="prefill", context=80, prefill_chunk=16))
    receiver = Engine(tiny_target(), NGram(), dataclasses.replace(shape, role="decode", context=120))
    for sampling, own_k in ((SAMPLINGS[0], None), (SAMPLINGS[1], 0)):
        request = Request(TOKENS[:40], 30, sampling, (), num_speculative_tokens=own_k)
        (tokens,), (steps,) = decode(local, [request])
        chunks, message = prefilled(sender, request)
        assert message.drafts == (own_k is None)
        chunks += receiver.follow(receiver.add(request, hand_off=message))
        assert facts(chunks)[:2] == (tokens, steps)
    paused = local.add(request)
    chunks = until(local, paused, 9)
    message = local.hand_over(paused)
    assert not message.drafts
    chunks += [*paused.inbox, *receiver.follow(receiver.add(request, hand_off=message))]
    assert facts(chunks)[:2] == (tokens, steps)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return models(FAST, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("draft_time", [1e-4, 50.0])
def test_adaptive_engines_hand_over_and_a_drafter_that_was_left_out_sends_no_rows(
    pair: Models, draft_time: float
) -> None:
    """Handed over at its prompt, and once more after more tokens than the input of a drafter that stands still holds.

    The tokens are plain decoding's; a drafter that is too dear to read them leaves a gap, and the message says so.
    """
    request = asked(10, budget=CAPACITY - 10)
    plain, *_ = facts(list((alone := engine_of(pair, 0)).follow(alone.add(request))))
    both = dataclasses.replace(pair, drafter=Beside(pair.drafter, NGram()))
    first, second = (engine_of(both, role="decode", adaptive=True, steps_per_dispatch=4) for _ in range(2))
    for engine in (first, second):
        engine.costs = CostTable(
            {1: ((1, 1.0), (K + 1, 1.0 + 1e-4))}, {1: ((0, 0.0), (1, draft_time), (K, draft_time))}
        )
    chunks, message = prefilled(engine_of(pair, role="prefill"), request)
    handle = first.add(request, hand_off=message)
    chunks += until(first, handle, 150)
    message = parse(first.hand_over(handle).data.tobytes())
    assert message.drafts == (draft_time < 1)
    chunks += [*handle.inbox, *second.follow(second.add(request, hand_off=message))]
    tokens, steps, _ = facts(chunks)
    assert tokens == plain
    assert any(step.num_drafted and not step.source for step in steps) == message.drafts
    assert any(step.source for step in steps)


@pytest.fixture(scope="module")
def sent(pair: Models) -> HandOff:
    return prefilled(engine_of(pair, role="prefill"), asked(45))[1]


def test_a_message_is_a_safetensors_file_of_the_valid_rows_alone(pair: Models, sent: HandOff) -> None:
    read = safetensors.numpy.load(sent.data.tobytes())
    assert read["token_ids"].tolist() == list(sent.token_ids)
    for name, rows in read.items():
        np.testing.assert_array_equal(rows, sent.tensors[name])
    windows = [pair.target.config.window(layer) for layer in range(TARGET.num_layers)]
    assert [len(read[f"target.{layer}.key"]) for layer in range(TARGET.num_layers)] == [w or 45 for w in windows]
    assert [len(read[f"drafter.{layer}.key"]) for layer in range(2)] == [WINDOW, 44]
    assert len(read) == 1 + 2 * (TARGET.num_layers + 2)


def rewritten(message: HandOff, change: Callable[[dict], object]) -> bytes:
    """Change the header of a message."""
    size = int.from_bytes(message.data[:8].tobytes(), "little")
    header = json.loads(message.data[8 : 8 + size].tobytes())
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + message.data[8 + size :].tobytes()


def changed(message: HandOff, **metadata: str) -> HandOff:
    """Write other metadata into a header."""
    return parse(rewritten(message, lambda header: header["__metadata__"].update(metadata)))


def test_what_does_not_fit_is_refused_by_name(pair: Models, sent: HandOff) -> None:
    request, decoder = asked(45), engine_of(pair, role="decode")

    def refused(match: str, message: HandOff | None, request: Request = request, engine: Engine = decoder) -> None:
        with pytest.raises(InputError, match=match):
            engine.add(request, hand_off=message)

    refused("another target", changed(sent, target="another"))
    refused("another drafter", changed(sent, drafter="another"))
    refused("another drafter", prefilled(engine_of(pair, 0, role="prefill"), request)[1])
    refused("46 tokens; expected at most 40", sent, engine=engine_of(pair, context=40))
    other = dataclasses.replace(request, prompt_ids=(*TOKENS[:44], (TOKENS[44] + 1) % TARGET.vocab_size))
    refused("does not begin with the prompt", sent, other)
    refused("does not begin with the prompt", sent, asked(46))
    refused("had ended", sent, dataclasses.replace(request, stop_token_ids=(sent.token_ids[-1],)))
    refused("had ended", sent, asked(45, budget=1))
    refused("only decodes", None)
    refused("only prefills", sent, engine=engine_of(pair, role="prefill"))
    in_bfloat16 = {**sent.tensors, "target.1.key": sent.tensors["target.1.key"].astype(np.float16)}
    refused(r"target.1.key has rows of float16", dataclasses.replace(sent, tensors=in_bfloat16))
    longer = {**sent.tensors, "drafter.1.value": np.concatenate([sent.tensors["drafter.1.value"]] * 2)}
    refused("drafter.1.value has 88 rows of 44", dataclasses.replace(sent, tensors=longer))
    shorter = {**sent.tensors, "target.0.key": sent.tensors["target.0.key"][1:]}
    refused(f"target.0.key has {WINDOW - 1} rows of {WINDOW}", dataclasses.replace(sent, tensors=shorter))
    missing = {name: rows for name, rows in sent.tensors.items() if name != "drafter.0.key"}
    refused("drafter.0.key is missing", dataclasses.replace(sent, tensors=missing))
    assert engine_of(pair, 0).add(request, hand_off=sent), "a drafter that is not run needs no rows"


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "no hand-off"),
        (b"x" * 100, "no hand-off"),
        ((1 << 30).to_bytes(8, "little") + b" " * 64, "no hand-off"),
        ((8).to_bytes(8, "little") + b"[" * 8, "no JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "the format 'None'"),
    ],
)
def test_bytes_that_are_no_hand_off_are_refused(message: bytes, match: str) -> None:
    with pytest.raises(InputError, match=match):
        parse(message)


def test_a_message_that_is_cut_or_of_another_version_is_refused(sent: HandOff) -> None:
    whole = sent.data.tobytes()
    for length in (9, 200, len(whole) // 2, len(whole) - 1):
        with pytest.raises(InputError, match="cut off"):
            parse(whole[:length])
    with pytest.raises(InputError, match="format 'peagle hand-off 0'"):
        changed(sent, format="peagle hand-off 0")
    with pytest.raises(InputError, match="contradicts itself"):
        parse(whole.replace(b'"shape": [46]', b'"shape": [47]'))
    with pytest.raises(InputError, match="its header names"):
        parse(whole + b"0123")


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([1] * 100, [0, 4]),  # more axes than an array has
        ([0, 10**30], [0, 0]),
        ([0, 2**62, 2**62], [0, 0]),
        ([True], [0, 4]),
        ([-1, -1], [0, 4]),
        ([1.0], [0, 4]),
        ("1", [0, 4]),
        (1, [0, 4]),
        ([1], [4, 0]),
        ([1], [0, 4, 8]),
    ],
)
def test_an_entry_that_no_array_has_is_refused(sent: HandOff, shape: object, offsets: list[int]) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    with pytest.raises(InputError, match="entry of 'more' contradicts itself"):
        parse(rewritten(sent, lambda header: header.update(more=entry)))


@pytest.mark.parametrize("name", ["target", "drafter", "drafts"])
@pytest.mark.parametrize("value", [None, 3])
def test_metadata_that_is_missing_is_refused(sent: HandOff, name: str, value: object) -> None:
    with pytest.raises(InputError, match=r"no fingerprints|does not say"):
        parse(rewritten(sent, lambda header: header["__metadata__"].update({name: value})))
    with pytest.raises(InputError, match=r"no fingerprints|does not say"):
        parse(rewritten(sent, lambda header: header["__metadata__"].pop(name)))


def test_a_message_of_numbers_that_are_not_finite_ends_its_own_request_alone(pair: Models, sent: HandOff) -> None:
    """Neither its neighbour nor who has its slot next sees them."""
    engine, alone = engine_of(pair, role="decode"), engine_of(pair)
    expected = facts(list(alone.follow(alone.add(asked(45)))))
    tensors = {name: rows if name == "token_ids" else np.full_like(rows, np.nan) for name, rows in sent.tensors.items()}
    poisoned = dataclasses.replace(sent, tensors=tensors)
    for _ in range(2):  # both slots, and the lane
        bad = [engine.add(asked(45), hand_off=poisoned) for _ in range(2)]
        for handle in bad:
            with pytest.raises(InputError, match="not finite"):
                list(engine.follow(handle))
        good = [engine.add(asked(45), hand_off=sent) for _ in range(2)]
        for handle in good:
            assert facts(list(engine.follow(handle)))[1] == expected[1]


def test_a_prefill_engine_answers_what_ends_with_its_first_token(pair: Models) -> None:
    sender = engine_of(pair, role="prefill")
    whole = asked(45, budget=1)
    handle = sender.add(whole)
    (chunk,) = sender.follow(handle)
    assert (chunk.finish_reason, handle.hand_off) == ("length", None)
    stops = dataclasses.replace(whole, max_new_tokens=9, stop_token_ids=chunk.token_ids)
    assert [each.finish_reason for each in sender.follow(sender.add(stops))] == ["stop"]


def test_many_prompts_pass_a_prefill_engine_with_its_prefix_cache(pair: Models) -> None:
    sender, cold = engine_of(pair, role="prefill", prefix_cache=1 << 24), engine_of(pair, role="prefill")
    requests = [asked(length) for length in (BLOCK + 9, BLOCK + 20, 12)]
    handles = sender.add_all(requests)
    assert len(list(sender.run(handles))) == len(requests)
    for handle, request in zip(handles, requests, strict=True):
        assert handle.hand_off is not None
        assert handle.hand_off.token_ids == prefilled(cold, request)[1].token_ids
    assert sender.prefix_cache_use is not None
    assert sender.prefix_cache_use.num_hits >= 1


def test_an_abandoned_message_is_dropped(pair: Models, sent: HandOff) -> None:
    """With the request that waits for a slot, at its deadline or an abort; and a sender keeps none."""
    receiver = engine_of(pair)
    running = receiver.add_all([asked(20), asked(21)])
    receiver.step()
    receiver.step()
    late = receiver.add(asked(45), timeout_s=0.0, hand_off=sent)
    gone = receiver.add(asked(45), hand_off=sent)
    receiver.step()
    receiver.abort(gone)
    receiver.step()
    assert (late.finished, gone.finished) == ("timeout", "aborted")
    assert late.hand_off is None
    assert gone.hand_off is None
    assert all(each.finished is None for each in running)
    sender = engine_of(pair, role="prefill")
    handle = sender.add(asked(45))
    list(sender.follow(handle))
    message = weakref.ref(handle.hand_off)
    del handle
    gc.collect()
    assert message() is None


def test_a_request_without_a_slot_is_not_handed_over(pair: Models) -> None:
    engine = engine_of(pair)
    handle = engine.add(asked(20, budget=3))
    with pytest.raises(InputError, match="is not being decoded"):
        engine.hand_over(handle)
    list(engine.follow(handle))
    with pytest.raises(InputError, match="is not being decoded"):
        engine.hand_over(handle)


def test_packing_takes_little_beside_the_message(pair: Models) -> None:
    """A layer at a time, so less than the message again."""
    import tracemalloc

    engine = engine_of(pair)
    for budget in (9, 20):  # the first one compiles
        handle = engine.add(asked(2 * BLOCK + 60, budget=budget))
        until(engine, handle, 3)
        if budget == 9:
            engine.hand_over(handle)
    tracemalloc.start()
    message = engine.hand_over(handle)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * message.data.nbytes


def test_a_role_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="computes no prompts"):
        ResolvedConfig(role="decode", prefix_cache=1)
