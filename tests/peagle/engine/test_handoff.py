"""A request that is handed to another engine gets what it gets in one: tokens, acceptance, log-probabilities."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.host.handoff import Fingerprints, HandOff, parse
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.attention import PAGE_SIZE
from tests.support.models import TARGET, Models, fast_target, models, needs_native
from tests.support.toys import WINDOW, decode, follow

pytestmark = pytest.mark.compile

CAPACITY, K, NEW = 2 * PAGE_SIZE + 90, 3, 65
LENGTH = 2 * PAGE_SIZE + 5  # of the prompt of `sent`
TOKENS = tuple(np.random.default_rng(11).integers(0, TARGET.vocab_size, CAPACITY).tolist())
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.8, seed=5),
    SamplingParams(0.9, top_k=9, seed=2, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=40),
]


@pytest.fixture(scope="module")
def pair() -> Models:
    return models()


def engine_of(pair: Models, k: int = K, lookup: NGram | None = None, **options: object) -> Engine:
    shape = {"num_speculative_tokens": k, "slots": 2, "context": CAPACITY, "prefill_chunk": 64}
    fingerprints = Fingerprints("the target", "the drafter")
    config = ResolvedConfig(**{**shape, **options})
    return Engine(pair.target, pair.drafter, config, (), fingerprints, lookup=lookup)


def retaining(pair: Models) -> Models:
    """Keep all positions of sliding layers."""
    return Models(*(dataclasses.replace(model, retain_full_kv=True) for model in (pair.target, pair.drafter)))


def output_of(chunks: list[TokenChunk]) -> tuple[list, list, list]:
    """Tokens, steps and log-probabilities."""
    return tuple(
        [item for chunk in chunks for item in getattr(chunk, name)] for name in ("token_ids", "steps", "logprobs")
    )


def request_of(length: int, sampling: int = 0, budget: int = NEW) -> Request:
    return Request(TOKENS[:length], budget, SAMPLINGS[sampling], (), logprobs=2, index=sampling)


def answer(engine: Engine, request: Request, message: HandOff | None = None) -> list[TokenChunk]:
    return list(follow(engine, engine.add(request, hand_off=message)))


def prefill(sender: Engine, request: Request) -> tuple[list[TokenChunk], HandOff]:
    """Return (the chunks of a prefill engine, its message as it arrives elsewhere)."""
    handle = sender.add(request)
    chunks = list(follow(sender, handle))
    assert handle.finished == "handed_off"
    assert handle.hand_off is not None
    return chunks, parse(handle.hand_off.data.tobytes())


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
def test_a_fresh_prompt_goes_on_in_an_engine_of_another_shape(k: int, dtype: str, drafter: str) -> None:
    """Prompts around pages, chunks and the window."""
    pair = models(f"native {dtype}", drafter)
    local, decoder = engine_of(pair, k), engine_of(pair, k, context=CAPACITY + 30)
    for chunk, lengths in ((64, (1, WINDOW, 45, PAGE_SIZE + 1)), (100, (2, PAGE_SIZE, 2 * PAGE_SIZE + 20))):
        sender = engine_of(pair, k, prefill_chunk=chunk, prefill_only=True, context=CAPACITY - chunk % 3)
        for number, length in enumerate(lengths):
            request = request_of(length, number % len(SAMPLINGS))
            first, message = prefill(sender, request)
            rest = answer(decoder, request, message)
            assert output_of(first + rest) == output_of(answer(local, request)), (chunk, length)


@pytest.mark.parametrize(("prefix_cache", "shared"), [(0, 0), (1, 11)])
def test_long_prompts_are_handed_to_all_slots_at_once(pair: Models, prefix_cache: int, shared: int) -> None:
    """Each has more rows than the pages of windowed layers hold in all; the engine goes on after them.

    With a prefix cache there are more pages, and all share those of the first, since they begin alike.
    """
    context = 16 * PAGE_SIZE
    tokens = np.random.default_rng(12).integers(0, TARGET.vocab_size, context).tolist()
    requests = [Request(tuple(tokens[: context - cut]), 20, SAMPLINGS[0], ()) for cut in (300, 30, 200, 21)]
    sender, local = engine_of(pair, prefill_only=True, context=context), engine_of(pair, context=context)
    decoder = engine_of(pair, context=context, steps_per_dispatch=1, prefix_cache=prefix_cache)
    windowed = [
        size for size, group in zip(decoder.memory.num_pages, decoder.memory.groups, strict=True) if group.window
    ]
    assert prefix_cache or max(windowed) * PAGE_SIZE < context - 300
    firsts, messages = zip(*(prefill(sender, request) for request in requests), strict=True)
    handles = [decoder.add(request, hand_off=message) for request, message in zip(requests, messages, strict=True)]
    while handles[1].table is None:
        decoder.step()
    assert handles[1].table.num_cached_tokens == shared * PAGE_SIZE
    for request, first, handle in zip(requests, firsts, handles, strict=True):
        assert output_of(first + list(follow(decoder, handle))) == output_of(answer(local, request))
    decoder.memory.pool.check_integrity()


@needs_native
def test_keys_of_sliding_layers_go_to_an_engine_that_keeps_as_many_or_less() -> None:
    pair = models("native float32")
    request, local = request_of(2 * PAGE_SIZE + 5), engine_of(pair)
    first, message = prefill(engine_of(retaining(pair), prefill_only=True), request)
    assert output_of(first + answer(engine_of(pair), request, message)) == output_of(answer(local, request))
    _, windows = prefill(engine_of(pair, prefill_only=True), request)
    with pytest.raises(InputError, match=r"target.0.key has 69 rows of 133; .* and retain_full_kv"):
        engine_of(retaining(pair)).add(request, hand_off=windows)


@needs_native
@pytest.mark.parametrize(("whole", "third"), [(False, 3), (True, 4)])
def test_turns_over_two_engines_begin_with_the_pages_that_one_engine_has(whole: bool, third: int) -> None:
    """The engine that decoded a turn continues it, if it has most of it; after its loss, turns are only slower.

    The first turn does not draft. The third leaves out the end of the answer before it.
    """
    pair = retaining(models("native float32")) if whole else models("native float32")
    options = {"context": 12 * PAGE_SIZE, "prefix_cache": 1 << 24, "k_per_request": True}
    local, receiver, sender = (engine_of(pair, **options, prefill_only=only) for only in (False, False, True))
    prompt, pages, pages_alone = TOKENS[: PAGE_SIZE + 9], [], []
    for turn, (k, left_out) in enumerate([(0, 0), (None, 50), (None, 0), (None, 0), (None, 0)]):
        if turn == 4:
            receiver = engine_of(pair, **options)
        request = dataclasses.replace(request_of(1, 1, 2 * PAGE_SIZE + 10), prompt_ids=prompt, num_speculative_tokens=k)
        alone, chunks, message = answer(local, request), [], None
        if 2 * receiver.num_known(prompt) <= len(prompt):
            chunks, message = prefill(sender, request)
        chunks += answer(receiver, request, message)
        assert output_of(chunks) == output_of(alone)
        pages.append(chunks[0].num_cached_tokens // PAGE_SIZE)
        pages_alone.append(alone[0].num_cached_tokens // PAGE_SIZE)
        receiver.memory.pool.check_integrity()
        tokens, *_ = output_of(chunks)
        prompt = (*prompt, *tokens[: len(tokens) - left_out], *TOKENS[7:20])
    assert pages_alone[:3] == [0, 1, third]
    assert pages[:4] == pages_alone[:4]
    assert pages[4] == 3, "the prompt of the second turn, which the sender computed"


def test_n_grams_and_rows_that_draft_no_more_are_handed_over_too() -> None:
    shape = ResolvedConfig(K, 2, 96, prefill_chunk=8, k_per_request=True)
    local = Engine(fast_target(), NGram(), shape)
    sender = Engine(fast_target(), NGram(), dataclasses.replace(shape, prefill_only=True, context=80, prefill_chunk=16))
    receiver = Engine(fast_target(), NGram(), dataclasses.replace(shape, context=120))
    for sampling, own_k in ((SAMPLINGS[0], None), (SAMPLINGS[1], 0)):
        request = Request(TOKENS[:40], 30, sampling, (), num_speculative_tokens=own_k)
        (tokens,), (steps,) = decode(local, [request])
        chunks, message = prefill(sender, request)
        assert message.with_drafter == (own_k is None)
        assert output_of(chunks + answer(receiver, request, message))[:2] == (tokens, steps)


@pytest.fixture(scope="module")
def sent(pair: Models) -> HandOff:
    return prefill(engine_of(pair, prefill_only=True), request_of(LENGTH))[1]


def test_a_message_is_a_safetensors_file_of_the_valid_rows_alone(sent: HandOff) -> None:
    read = safetensors.numpy.load(sent.data.tobytes())
    assert read["token_ids"].tolist() == list(sent.token_ids)
    for name, rows in read.items():
        np.testing.assert_array_equal(rows, sent.tensors[name])
    # a request that continues at the last whole page sees the rows of a page before it
    assert [len(read[f"target.{layer}.key"]) for layer in range(TARGET.num_layers)] == [PAGE_SIZE + 5, LENGTH]
    assert [len(read[f"drafter.{layer}.key"]) for layer in range(2)] == [PAGE_SIZE + 5, LENGTH - 1]
    assert len(read) == 1 + 2 * (TARGET.num_layers + 2)


# Refusals


def with_header(message: HandOff, change: Callable[[dict], object]) -> bytes:
    """Change the header of a message."""
    size = int.from_bytes(message.data[:8].tobytes(), "little")
    header = json.loads(message.data[8 : 8 + size].tobytes())
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + message.data[8 + size :].tobytes()


def with_metadata(message: HandOff, **metadata: object) -> bytes:
    return with_header(message, lambda header: header["__metadata__"].update(metadata))


def with_tensor(message: HandOff, name: str, change: Callable[[np.ndarray], np.ndarray]) -> HandOff:
    return dataclasses.replace(message, tensors={**message.tensors, name: change(message.tensors[name])})


def test_hand_off_that_does_not_fit_is_refused_by_name(pair: Models, sent: HandOff) -> None:
    request, decoder = request_of(LENGTH), engine_of(pair)
    without_drafter = prefill(engine_of(pair, 0, prefill_only=True), request)[1]
    other_prompt = (*TOKENS[: LENGTH - 1], (TOKENS[LENGTH - 1] + 1) % TARGET.vocab_size)
    missing = {name: rows for name, rows in sent.tensors.items() if name != "drafter.0.key"}
    # (what the line says, the message, the request, the engine)
    refusals: list[tuple[str, HandOff | None, Request, Engine]] = [
        ("another target", parse(with_metadata(sent, target="another")), request, decoder),
        ("another drafter", parse(with_metadata(sent, drafter="another")), request, decoder),
        ("another drafter", without_drafter, request, decoder),
        ("134 tokens; expected at most 40", sent, request, engine_of(pair, context=40)),
        ("not begin with the prompt", sent, dataclasses.replace(request, prompt_ids=other_prompt), decoder),
        ("not begin with the prompt", sent, request_of(LENGTH + 1), decoder),
        ("had ended", sent, dataclasses.replace(request, stop_token_ids=(sent.token_ids[-1],)), decoder),
        ("had ended", sent, request_of(LENGTH, budget=1), decoder),
        ("only prefills", sent, request, engine_of(pair, prefill_only=True)),
        ("1.key has rows of float16", with_tensor(sent, "target.1.key", np.float16), request, decoder),
        ("drafter.1.value has 264 rows of 132",
         with_tensor(sent, "drafter.1.value", lambda rows: np.concatenate([rows, rows])), request, decoder),
        ("target.0.key has 68 rows of 69",
         with_tensor(sent, "target.0.key", lambda rows: rows[1:]), request, decoder),
        ("drafter.0.key is missing", dataclasses.replace(sent, tensors=missing), request, decoder),
    ]  # fmt: skip
    for says, message, of, engine in refusals:
        with pytest.raises(InputError, match=says):
            engine.add(of, hand_off=message)
    assert engine_of(pair, 0).add(request, hand_off=sent), "a drafter that is not run needs no rows"


def test_bytes_that_are_no_hand_off_are_refused(sent: HandOff) -> None:
    """Whatever their header says, in one error: of another version, cut off, or made to mislead."""
    whole, size = sent.data.tobytes(), len(sent.data)
    no_arrays: list[tuple[object, list[int]]] = [
        *((shape, [size, size + 4]) for shape in ([1] * 100, [True], [-1, -1], [1.0], "1", 1)),
        *((shape, [0, 0]) for shape in ([0, 10**30], [0, 2**62, 2**62])),
        *(([1], offsets) for offsets in ([4, 0], [0, 4, 8])),
    ]
    entries = [{"dtype": "F32", "shape": shape, "data_offsets": offsets} for shape, offsets in no_arrays]
    needed = ("target", "drafter", "drafts")
    for message in (
        *(b"", b"x" * 100, (1 << 30).to_bytes(8, "little") + b" " * 64, whole + b"0123"),
        *((8).to_bytes(8, "little") + text for text in (b"[" * 8, b"{}      ")),
        *(whole[:length] for length in (9, 200, size // 2, size - 1)),
        *(whole.replace(b'"shape": [134]', shape) for shape in (b'"shape": [135]', b'"shape": [133]')),
        *(with_header(sent, lambda header, entry=entry: header.update(more=entry)) for entry in entries),
        with_header(sent, lambda header: header["token_ids"].update(dtype="F" * 99_999)),
        *(with_metadata(sent, **{name: value}) for name in needed for value in (None, 3)),
        *(with_header(sent, lambda header, name=name: header["__metadata__"].pop(name)) for name in needed),
    ):
        with pytest.raises(InputError, match=f"these {len(message)} bytes are no whole hand-off .*: hand") as refused:
            parse(message)
        assert len(str(refused.value)) < 300, "a sender does not fill the receiver's log"
    with pytest.raises(InputError, match="'peagle hand-off 0'"):
        parse(with_metadata(sent, format="peagle hand-off 0"))


# What goes wrong ends its own request


def test_a_message_of_numbers_that_are_not_finite_ends_its_own_request_alone(pair: Models, sent: HandOff) -> None:
    """Neither its neighbour nor who has its slot next sees them."""
    engine, alone = engine_of(pair), engine_of(pair)
    expected = output_of(answer(alone, request_of(LENGTH)))
    tensors = {name: rows if name == "token_ids" else np.full_like(rows, np.nan) for name, rows in sent.tensors.items()}
    poisoned = dataclasses.replace(sent, tensors=tensors)
    for _ in range(2):  # both slots, and the lane
        bad = [engine.add(request_of(LENGTH), hand_off=poisoned) for _ in range(2)]
        for handle in bad:
            with pytest.raises(InputError, match="not finite"):
                list(follow(engine, handle))
        good = [engine.add(request_of(LENGTH), hand_off=sent) for _ in range(2)]
        for handle in good:
            assert output_of(list(follow(engine, handle)))[1] == expected[1]


def test_a_prefill_engine_answers_what_ends_with_its_first_token(pair: Models) -> None:
    sender = engine_of(pair, prefill_only=True)
    whole = request_of(LENGTH, budget=1)
    handle = sender.add(whole)
    (chunk,) = follow(sender, handle)
    assert (chunk.finish_reason, handle.hand_off) == ("length", None)
    stops = dataclasses.replace(whole, max_new_tokens=9, stop_token_ids=chunk.token_ids)
    assert [chunk.finish_reason for chunk in follow(sender, sender.add(stops))] == ["stop"]


def test_many_prompts_pass_a_prefill_engine_with_its_prefix_cache(pair: Models) -> None:
    sender, cold = engine_of(pair, prefill_only=True, prefix_cache=1 << 24), engine_of(pair, prefill_only=True)
    requests = [request_of(length) for length in (PAGE_SIZE + 9, PAGE_SIZE + 20, 12)]
    handles = sender.add_all(requests)
    assert len(list(sender.run(handles))) == len(requests)
    for handle, request in zip(handles, requests, strict=True):
        assert handle.hand_off is not None
        assert handle.hand_off.token_ids == prefill(cold, request)[1].token_ids
    assert sender.prefix_cache_use is not None
    assert sender.prefix_cache_use.num_hits >= 1


def test_an_abandoned_message_is_dropped(pair: Models, sent: HandOff) -> None:
    """With the request that waits for a slot, at an abort; and a sender keeps none."""
    receiver = engine_of(pair)
    running = receiver.add_all([request_of(20), request_of(21)])
    receiver.step()
    receiver.step()
    gone = receiver.add(request_of(LENGTH), hand_off=sent)
    receiver.step()
    receiver.abort(gone)
    receiver.step()
    assert gone.finished == "aborted"
    assert gone.hand_off is None
    assert all(other.finished is None for other in running)
    sender = engine_of(pair, prefill_only=True)
    handle = sender.add(request_of(LENGTH))
    list(follow(sender, handle))
    message = weakref.ref(handle.hand_off)
    del handle
    gc.collect()
    assert message() is None
