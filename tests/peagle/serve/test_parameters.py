"""What the fields of a body do: parameters, prompts, limits, log-probabilities, figures, and the tokenizer's routes."""

import itertools
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from peagle.answers.result import Piece, Result
from peagle.engine.request import Request, TokenChunk, TokenLogprobs
from peagle.loading.checkpoints import DEMO_DIRECTORY
from peagle.pair import Pair
from peagle.serve.completions import CompletionFormatter
from peagle.text.tokenizer import Tokenizer, detokenize, load_tokenizer
from tests.support.pairs import toy_pair
from tests.support.servers import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    DATE,
    MODEL,
    RESPONSES,
    K,
    answer,
    client_of,
    stream,
)

pytestmark = pytest.mark.compile

PROMPT = [40, 41, 42]
SEEDED = {"temperature": 1.5, "seed": 3}
USER = [{"role": "user", "content": "hello"}]
# fields, and the same for Pair.generate; each changes what the fields before it give
PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (SEEDED, {}),
    "seed": ({**SEEDED, "seed": 4}, SEEDED),
    "a seed of 64 bits": ({**SEEDED, "seed": 2**64 - 2}, SEEDED),
    "a negative seed": ({**SEEDED, "seed": -1}, SEEDED),
    "top_k": ({**SEEDED, "top_k": 2}, SEEDED),
    "top_p": ({**SEEDED, "top_p": 0.5}, SEEDED),
    "min_p": ({**SEEDED, "min_p": 0.3}, SEEDED),
    "presence_penalty": ({"presence_penalty": 2.0}, {}),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {}),
    "repetition_penalty": ({"repetition_penalty": 4.0}, {}),
    "logit_bias": ({"logit_bias": {36: -100.0}}, {}),
    "stop": ({"stop": [">?"]}, {}),
    "stop as one text": ({"stop": ">"}, {}),
    "max_tokens": ({"max_tokens": 7}, {}),
}


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer) -> Pair:
    return toy_pair(tokenizer)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    loaded = load_tokenizer(DEMO_DIRECTORY / "target")
    assert loaded is not None
    return loaded


def python(pair: Pair, fields: dict[str, Any], prompt: Any = PROMPT) -> Result:
    options = {"max_new_tokens": fields.get("max_tokens", 40), "num_speculative_tokens": K, "context": CONTEXT}
    return pair.generate(prompt, **options, **{key: value for key, value in fields.items() if key != "max_tokens"})


def complete(client: TestClient, **fields: Any) -> dict[str, Any]:
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {str(token): value for token, value in fields["logit_bias"].items()}
    return answer(client, COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields})


def text_of(client: TestClient, **fields: Any) -> str:
    (choice,) = complete(client, **fields)["choices"]
    return choice["text"]


def chat(client: TestClient, **fields: Any) -> dict[str, Any]:
    return answer(client, CHAT, {"messages": USER, "max_tokens": 12, "temperature": 0, **fields})


def tokens_of(client: TestClient, **body: Any) -> list[int]:
    return answer(client, "/tokenize", body)["tokens"]


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_acts_as_in_python_and_changes_the_answer(client: TestClient, alone: Pair, name: str) -> None:
    fields, before = PARAMETERS[name]
    expected = python(alone, fields)
    assert expected.output_ids != python(alone, before).output_ids
    (choice,) = complete(client, **fields)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)


def test_stop_tokens_end_the_answer_but_not_before_min_tokens_nor_with_ignore_eos(
    client: TestClient, make: Any
) -> None:
    (early,) = complete(client, stop_token_ids=[36])["choices"]
    assert early["finish_reason"] == "stop"
    assert text_of(client).startswith(early["text"])
    assert len(early["text"]) < 9
    reply = complete(client, stop_token_ids=[36], min_tokens=8)
    assert reply["choices"][0]["text"] != early["text"]
    assert reply["usage"]["completion_tokens"] >= 8
    ending = client_of(make(stops=(36,)))
    for fields, reason in (({}, "stop"), ({"ignore_eos": True}, "length")):
        assert complete(ending, **fields)["choices"][0]["finish_reason"] == reason


def test_n_answers_have_the_random_numbers_of_their_places_and_one_prompt(client: TestClient) -> None:
    three, two = complete(client, n=3, **SEEDED), complete(client, n=2, **SEEDED)
    texts = [choice["text"] for choice in three["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in two["choices"]] == texts[:2]
    assert (three["usage"]["prompt_tokens"], three["usage"]["completion_tokens"]) == (len(PROMPT), 120)


def test_without_a_seed_answers_differ(client: TestClient) -> None:
    assert len({text_of(client, temperature=1.5) for _ in range(3)}) > 1


def test_no_mass_at_all_is_the_likeliest_token(client: TestClient) -> None:
    """As OpenAI's API takes top_p 0, whatever the temperature."""
    greedy = complete(client)["choices"]
    assert complete(client, temperature=1.5, top_p=0)["choices"] == greedy
    assert chat(client, temperature=1.5, top_p=0.0)["choices"] == chat(client)["choices"]
    body = {"input": "hello", "max_output_tokens": 9}
    texts = [
        answer(client, RESPONSES, {**body, **fields})["output"][0]["content"]
        for fields in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0})
    ]
    assert texts[0] == texts[1]


def test_the_default_temperature_is_one(client: TestClient, alone: Pair) -> None:
    (choice,) = answer(client, COMPLETIONS, {"prompt": PROMPT, "seed": 9})["choices"]
    assert choice["text"] == python(alone, {"temperature": 1.0, "seed": 9, "max_tokens": 16}).text


# --- prompts and limits -----------------------------------------------------------------------------------------------


def test_a_text_is_a_raw_prompt_and_echo_returns_it(client: TestClient, alone: Pair) -> None:
    expected = python(alone, {"raw": True}, "1 + 2 <|return|>").text
    assert text_of(client, prompt="1 + 2 <|return|>", echo=True) == f"1 + 2 <|return|>{expected}"
    both = complete(client, prompt=["a", "b"], echo=True, n=2)["choices"]
    assert [choice["text"][0] for choice in both] == ["a", "a", "b", "b"]


def test_an_empty_prompt_is_what_the_tokenizer_puts_before_a_text(make: Any, demo: Tokenizer) -> None:
    """In a list or not, as in vLLM. A tokenizer that puts nothing there has nothing to go on from: test_errors."""
    client = client_of(make(tokenizer=demo))
    before = list(demo.encode(""))
    replies = [complete(client, prompt=prompt) for prompt in ("", [""], before)]
    assert {reply["usage"]["prompt_tokens"] for reply in replies} == {len(before)} == {1}
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1


def test_a_chat_is_the_templates(client: TestClient, alone: Pair) -> None:
    expected = python(alone, {"max_tokens": 12}, "hello")
    reply = chat(client)
    assert reply["choices"][0]["message"]["content"] == expected.text
    assert reply["usage"]["prompt_tokens"] == len(expected.request.prompt_ids)


def test_messages_system_and_effort_are_in_the_prompt(client: TestClient, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "reasoning_content": "hm"},
        {"role": "user", "content": "four"},
    ]
    ids = tokens_of(client, messages=messages, reasoning_effort="low")
    assert detokenize(tokenizer, ids) == (
        f"<|start|>system<|message|>Today: {DATE} Reasoning: low<|end|><|start|>system<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>one two<|end|><|start|>assistant<|channel|>final<|message|>three<|end|>"
        "<|start|>user<|message|>four<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    assert "Reasoning" not in detokenize(tokenizer, tokens_of(client, messages=messages))
    assert chat(client, messages=messages, reasoning_effort="low")["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_chat_has_both_names_of_its_limit(client: TestClient, limit: str) -> None:
    reply = answer(client, CHAT, {"messages": USER, "temperature": 0, limit: 5})
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (5, "length")


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(client: TestClient) -> None:
    assert answer(client, CHAT, {"messages": USER, "temperature": 0})["usage"]["total_tokens"] == CONTEXT


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_engines(client: TestClient, alone: Pair) -> None:
    expected = python(alone, {"logprobs": 2, "max_tokens": 12}).logprobs
    logprobs = complete(client, logprobs=2, max_tokens=12)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([token.logprob for token in expected])
    assert [len(best) for best in logprobs["top_logprobs"]] == [2] * 12
    assert logprobs["text_offset"] == list(range(12))
    of_chat = chat(client, logprobs=True, top_logprobs=3)["choices"][0]
    entries = of_chat["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == of_chat["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert [len(entry["top_logprobs"]) for entry in entries] == [3] * 12
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(client)["choices"][0]["logprobs"] is None


def test_an_echoed_prompt_has_log_probabilities_too(client: TestClient, alone: Pair) -> None:
    """As clients that score texts ask for: the prompt's tokens, then those of the answer; whole and in a stream."""
    likeliest = python(alone, {"logprobs": 2, "max_tokens": 50}, [40])
    prompt = [40, *likeliest.output_ids[:20]]
    fields = {"prompt": [prompt, [50, 51]], "echo": True, "logprobs": 2, "max_tokens": 4}
    first, second = complete(client, **fields)["choices"]
    columns = first["logprobs"]
    assert first["text"].startswith("".join(columns["tokens"][:21]))
    assert (len(columns["tokens"]), len(second["logprobs"]["tokens"])) == (21 + 4, 2 + 4)
    # the prompt goes on as the answer to its beginning did, so its tokens are the likeliest ones
    (none, *logprobs), (nothing, *best) = columns["token_logprobs"], columns["top_logprobs"]
    assert none is nothing is None
    assert logprobs[:20] == pytest.approx([token.logprob for token in likeliest.logprobs[:20]], abs=1e-4)
    assert logprobs == [max(tokens.values()) for tokens in best]
    assert {len(tokens) for tokens in best} == {2}
    assert columns["text_offset"] == list(itertools.accumulate(map(len, columns["tokens"][:-1]), initial=0))
    events = [event["choices"][0] for event in stream(client, COMPLETIONS, {"temperature": 0, **fields})]
    parts = [event["logprobs"] for event in events if event["index"] == 0 and event["logprobs"]]
    assert {key: [entry for part in parts for entry in part[key]] for key in columns} == columns


@pytest.mark.parametrize("prompt", ["ab cd", ["ab", "cd e"], PROMPT])
def test_an_echo_without_new_tokens_is_the_prompt_alone(client: TestClient, prompt: Any) -> None:
    """As clients ask that want its log-probabilities alone."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "temperature": 1.0, "seed": 5}
    more, echoed = complete(client, **fields, max_tokens=1), complete(client, **fields, max_tokens=0)
    assert echoed["usage"]["completion_tokens"] == 0
    assert echoed["usage"]["prompt_tokens"] == echoed["usage"]["total_tokens"] == more["usage"]["prompt_tokens"]
    assert len(echoed["choices"]) == len(more["choices"])
    for choice, longer in zip(echoed["choices"], more["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert longer["text"].startswith(choice["text"])
        assert choice["logprobs"] == {name: column[:-1] for name, column in longer["logprobs"].items()}
    events = stream(client, COMPLETIONS, {**fields, "max_tokens": 0})
    choices = [event["choices"][0] for event in events]
    for place, choice in enumerate(echoed["choices"]):
        first, last = (event for event in choices if event["index"] == place)
        assert (first["text"], first["logprobs"]) == (choice["text"], choice["logprobs"])
        assert (last["text"], last["finish_reason"]) == ("", "length")


def test_offsets_are_those_of_the_text(client: TestClient) -> None:
    ids = tokens_of(client, prompt="1 + 2")
    for prompt in ("1 + 2", ids, [0, *ids]):  # the last begins with <|startoftext|>
        (choice,) = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=3)["choices"]
        logprobs = choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)


def test_a_first_token_that_is_not_in_the_text_has_no_length(tokenizer: Tokenizer) -> None:
    form = CompletionFormatter("toy", tokenizer, logprobs=True, echoed=["ab"], prompts=[(0, 97 - 26, 98 - 26)])
    form.prompt_logprobs = [[TokenLogprobs(71, -1.0, ()), TokenLogprobs(72, -1.0, ())]]
    event = form.event(*form.read(Piece(TokenChunk(Request((0,), 1), (), 0.0))))
    (choice,) = json.loads(event.removeprefix("data: "))["choices"]
    assert choice["logprobs"]["tokens"] == ["<|startoftext|>", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


# --- figures ----------------------------------------------------------------------------------------------------------


def test_a_known_prompt_counts_as_cached(client: TestClient) -> None:
    prompt = [100 + place % 50 for place in range(140)]
    complete(client, prompt=prompt, max_tokens=2)
    usage = complete(client, prompt=prompt, max_tokens=2)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= 140


def test_a_requests_own_k_bounds_its_drafts_and_changes_no_token(client: TestClient) -> None:
    """The engine's property; here the fields of the body and of the reply."""
    whole = complete(client)
    for k, reply in (
        (1, complete(client, speculative={"num_speculative_tokens": 1})),
        (3, complete(client, speculative={})),
    ):
        assert reply["choices"] == whole["choices"]
        figures = reply["metrics"]["speculative_decoding"]
        assert (figures["num_spec_tokens"], len(figures["acceptance_histogram"])) == (k, k + 1)
    plain = complete(client, speculative={"num_speculative_tokens": 0})
    assert plain["choices"] == whole["choices"]
    assert "metrics" not in plain
    in_chat = chat(client, speculative={"num_speculative_tokens": 2}, max_tokens=40)
    assert in_chat["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_the_server_is_described(client: TestClient) -> None:
    """As clients ask that encode by the server (lm-eval's tokenizer_backend=remote)."""
    info = client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["unk_token"]) == ("<|startoftext|>", "<|return|>", None)
    assert "strftime_now" in info["chat_template"]
    assert info["model_max_length"] == CONTEXT


def test_tokens_before_a_text_can_be_left_out(make: Any, demo: Tokenizer) -> None:
    client = client_of(make(tokenizer=demo))
    first, *bare = tokens_of(client, prompt="def f")
    assert tokens_of(client, prompt="def f", add_special_tokens=False) == bare
    assert [first] == [*demo.encode("")]
    assert detokenize(demo, bare) == "def f"
