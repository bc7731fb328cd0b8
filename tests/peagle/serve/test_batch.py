"""Files of requests: every line is answered once, whatever else the file holds and wherever a run was stopped."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.serving
from peagle.cli import main
from peagle.ops.errors import InputError
from peagle.serve.app import ENDPOINTS
from peagle.serve.batch import BatchFile, alone, check_files
from peagle.serve.bodies import CompletionBody
from peagle.serve.errors import ApiError
from peagle.serve.service import Service
from peagle.text.tokenizer import ByteLevelTokenizer
from tests.support.commands import all_refused
from tests.support.harmony import USER, says
from tests.support.pairs import press_ctrl_c_at, toy_pair
from tests.support.running import Gate
from tests.support.servers import client_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "temperature": 0}),
    "raw": (COMPLETIONS, {"prompt": [40, 41], "max_tokens": 12, "temperature": 1, "seed": 3, "n": 2}),
    "echo": (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}),
    "response": (RESPONSES, {"input": "hello", "max_output_tokens": 7, "temperature": 0}),
    **{f"{n}": (COMPLETIONS, {"prompt": [50 + n], "max_tokens": 5 + n, "temperature": 0}) for n in range(6)},
}
VARY = ("id", "created", "created_at", "usage", "output")  # ids and times; whether a prompt was cached


def line(name: str, **fields: Any) -> str:
    url, body = BODIES[name]
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **fields})


def read(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(text) for text in out.read_text("utf-8").splitlines()]
    assert len({answer["id"] for answer in lines}) == len(lines)
    return {answer["custom_id"]: answer for answer in lines}


def stable(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in VARY}


@pytest.fixture
def run(make: Callable[..., Service], tmp_path: Path) -> Callable[..., BatchFile]:
    """Answer lines; `stop_at`: end early after so many looks."""

    def running(lines: list[str], stop_at: int | None = None, service: Service | None = None) -> BatchFile:
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        looks = iter(range(10**9))
        batch = BatchFile(service or make(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", 3)
        asyncio.run(batch.run(lambda: stop_at is not None and next(looks) >= stop_at, lambda _: None))
        assert batch.service.loop.num_open == 0 or stop_at is not None
        return batch

    return running


def test_each_line_has_the_servers_answer(run: Any, make: Any, tmp_path: Path) -> None:
    batch = run([line(name) for name in BODIES])
    answers, client = read(tmp_path / "out.jsonl"), client_of(make())
    assert answers.keys() == BODIES.keys()
    assert (batch.counts.answered, batch.counts.refused, batch.counts.done) == (len(BODIES), 0, batch.counts.total)
    for name, (url, body) in BODIES.items():
        answer = answers[name]
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
        assert stable(answer["response"]["body"]) == stable(client.post(url, json=body).json())
    assert answers["response"]["response"]["body"]["output"][-1]["content"][0]["text"]


BAD = [
    ("{", None, "line 1 is not valid JSON"),
    ("[1]", None, "line 1 is [1]; expected an object"),
    (line("chat", custom_id=7), None, "the custom_id of line 1 is 7"),
    (line("chat", custom_id=""), None, "the custom_id of line 1 is ''"),
    (line("chat", method="GET"), "chat", "the method of line 1 is 'GET'; expected 'POST'"),
    (line("chat", url="/v1/embeddings"), "chat", "the url of line 1 is '/v1/embeddings'; expected one of /v1/chat"),
    (line("chat", url=["/v1"]), "chat", "the url of line 1"),
    (line("chat", body=[]), "chat", "the body of line 1 is []"),
]


@pytest.mark.parametrize(("text", "custom_id", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_line_that_is_none_gets_an_error_and_the_others_answers(
    run: Any, tmp_path: Path, text: str, custom_id: str | None, message: str
) -> None:
    batch = run([text, "", line("0")])
    answers = read(tmp_path / "out.jsonl")
    assert answers["0"]["response"]["status_code"] == 200
    assert answers[custom_id]["response"] is None
    assert answers[custom_id]["error"]["code"] == "invalid_line"
    assert message in answers[custom_id]["error"]["message"]
    assert (batch.counts.answered, batch.counts.refused, batch.counts.total) == (1, 1, 2)


def test_a_repeated_custom_id_is_an_error(run: Any, tmp_path: Path) -> None:
    for _ in range(2):  # a second run changes nothing
        run([line("0"), line("0"), line("1")])
        lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert len(lines) == 3
        (error,) = (answer["error"] for answer in lines if answer["error"])
        assert error["message"] == "the custom_id '0' of line 2 is that of a line before it"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "stream is set"),
        ({"messages": [{"role": "user", "content": "a"}], "model": "gpt-4"}, "'gpt-4' is not served"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": -1}, "temperature is -1"),
    ],
)
def test_a_body_that_is_none_gets_an_error_object(run: Any, tmp_path: Path, body: Any, part: str) -> None:
    batch = run([line("chat", body=body), line("0")])
    answer = read(tmp_path / "out.jsonl")["chat"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] in (400, 404)
    assert part in answer["response"]["body"]["error"]["message"]
    assert (batch.counts.answered, batch.counts.refused) == (1, 1)


def test_a_run_that_was_stopped_goes_on_and_answers_nothing_twice(run: Any, tmp_path: Path) -> None:
    lines = [line(name) for name in BODIES]
    whole = tmp_path / "out.jsonl"
    run(lines)
    expected = {name: stable(answer["response"]["body"]) for name, answer in read(whole).items()}
    whole.unlink()
    stops = 0
    for stop_at in (1, 4, 6, 9, None):
        batch = run(lines, stop_at)
        stops += batch.counts.done < batch.counts.total
        assert batch.counts.known <= len(BODIES)
    texts = whole.read_text("utf-8").splitlines()
    assert len(texts) == len(BODIES)
    assert {name: stable(answer["response"]["body"]) for name, answer in read(whole).items()} == expected
    assert stops >= 2
    service = run(lines).service
    assert not service.loop.engine.executor.started, "nothing was asked again"


def test_answers_that_the_server_owes_are_asked_again(run: Any, make: Any, tmp_path: Path) -> None:
    """Of an engine that failed, of a last line that was cut off, of lines that were none."""
    out = tmp_path / "out.jsonl"
    service = make()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    run([line("0")])
    service.loop.engine.executor.prefill = broken
    batch = run([line("0"), line("1"), line("2")], service=service)
    assert batch.counts.known == 1
    assert batch.counts.failed >= 1
    assert {name: answer["response"]["status_code"] for name, answer in read(out).items()}["0"] == 200
    with out.open("a") as file:
        file.write('{"id": "x", "custom_id": "1", "response": null, "error": {"code": "invalid_line"}}\n{"id": "batch')
    run([line("0"), line("1"), line("2")])
    assert {name: answer["response"]["status_code"] for name, answer in read(out).items()} == {
        "0": 200,
        "1": 200,
        "2": 200,
    }


def test_a_line_that_the_server_fails_at_is_a_500_and_asked_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out.jsonl"
    endpoint = ENDPOINTS[COMPLETIONS]

    async def fails(service: Service, body: CompletionBody) -> Any:
        if body.prompt == [51]:
            raise ZeroDivisionError("a fault")
        if body.prompt == [52]:
            raise ApiError(503, "the queue is full")
        return await endpoint.start(service, body)

    with monkeypatch.context() as patch:
        patch.setitem(ENDPOINTS, COMPLETIONS, dataclasses.replace(ENDPOINTS[COMPLETIONS], start=fails))
        counts = run([line(str(n)) for n in range(4)]).counts
    assert (counts.answered, counts.failed, counts.done, counts.total) == (2, 2, 4, 4)
    answers = read(out)
    assert [answers[str(n)]["response"]["status_code"] for n in range(4)] == [200, 500, 503, 200]
    assert "ZeroDivisionError" in answers["1"]["response"]["body"]["error"]["message"]
    assert "a fault" in caplog.text
    counts = run([line(str(n)) for n in range(4)]).counts
    assert (counts.answered, counts.known, counts.failed) == (2, 2, 0)
    assert [read(out)[str(n)]["response"]["status_code"] for n in range(4)] == [200] * 4
    assert len(out.read_text().splitlines()) == 4


def test_an_output_that_was_cut_off_anywhere_goes_on(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [line("0"), line("1")]
    run(lines)
    whole = out.read_bytes()
    end, first = len(whole), whole.index(b"\n")
    at_the_end = (end - less for less in (1, 2, 20, 200))
    in_the_first = (first + more for more in (9, 1, 0, -1, -19, -199))
    for cut in (*at_the_end, *in_the_first, 30, 5, 1, 0):
        out.write_bytes(whole[:cut])
        check_files(tmp_path / "in.jsonl", out)
        assert out.read_bytes() == whole[:cut]
        counts = run(lines).counts
        assert counts.done == 2
        assert counts.known == whole[:cut].count(b"\n")
        assert {name: answer["response"]["status_code"] for name, answer in read(out).items()} == {"0": 200, "1": 200}


def test_an_empty_file_is_refused_before_anything_slow(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match=r"in\.jsonl is empty; expected a request as JSON on each line"):
        check_files(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_a_check_writes_nothing(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run([line("0"), "{"])
    with out.open("ab") as file:
        file.write(b'{"id": "batch_re')
    before = out.read_bytes()
    check_files(tmp_path / "in.jsonl", out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_answer_to_another_request_is_not_taken_for_this_ones(run: Any, make: Any, tmp_path: Path) -> None:
    run([line("0"), line("1")])
    before = (tmp_path / "out.jsonl").read_bytes()
    changed = json.dumps({**json.loads(line("1")), "body": {"prompt": [60], "max_tokens": 3}})
    with pytest.raises(InputError, match="another request with the custom_id '1' of line 2"):
        run([line("0"), changed])
    service = make()
    service.model = "other"
    with pytest.raises(InputError, match="answers of the model 'toy', and 'other' is loaded"):
        run([line("0"), line("1")], service=service)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_two_runs_do_not_write_one_output(run: Any, tmp_path: Path) -> None:
    with alone(tmp_path / "out.jsonl"), pytest.raises(InputError, match="is being written by another run"):
        run([line("0")])
    assert not (tmp_path / "out.jsonl").exists()
    assert run([line("0")]).counts.answered == 1


def test_a_line_that_nobody_expected_costs_no_other(
    run: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = make()
    completion = service.builder.completion

    def planted(body: Any) -> Any:
        if body.prompt == [51]:
            raise RecursionError("planted")
        return completion(body)

    monkeypatch.setattr(type(service.builder), "completion", lambda _, body, *__: planted(body))
    batch = run([line("0"), line("1"), line("2")], service=service)
    assert (batch.counts.answered, batch.counts.failed) == (2, 1)
    assert read(tmp_path / "out.jsonl")["1"]["response"]["status_code"] == 500
    assert "planted" in caplog.text
    monkeypatch.undo()
    run([line("0"), line("1"), line("2")])
    assert read(tmp_path / "out.jsonl")["1"]["response"]["status_code"] == 200


def test_many_lines_are_under_way_at_once_but_not_all(make: Any, run: Any) -> None:
    service = make()
    gate, most = Gate(service), 0
    submit = service.loop.submit

    def submitted(requests: Any) -> Any:
        nonlocal most
        call = submit(requests)
        most = max(most, service.loop.num_open)
        return call

    service.loop.submit = submitted
    gate.open()
    run([line(str(n)) for n in range(6)], service=service)
    assert most == 3


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tokenizer: ByteLevelTokenizer, tmp_path: Path) -> Any:
    pair = toy_pair(tokenizer)
    monkeypatch.setattr(peagle.cli.serving, "load_pair", lambda *_: pair)
    monkeypatch.setattr(peagle.cli.serving, "_warm_up", lambda *_: None)  # takes longer than all the answers
    source = tmp_path / "in.jsonl"

    def start(lines: list[str], *options: str) -> int:
        source.write_text("\n".join(lines) + "\n")
        fixed = ["-k", "3", "--slots", "2", "--context", "128", "--prefix-cache", "1MB"]
        return main(["batch", str(source), str(tmp_path / "out.jsonl"), *fixed, *options])

    return start


def test_the_command_answers_and_says_how_much(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert command([line("0"), line("1"), "{"]) == 0
    said = capfd.readouterr().err
    assert "answering as peagle-demo with K = 3: 2 slots with a context of 128" in said
    assert "2 lines answered, 1 refused; 11 tokens in " in said
    assert command([line("0"), line("1"), "{", line("2")]) == 0
    assert "1 line answered, 1 refused, 2 answered before; 7 tokens" in capfd.readouterr().err
    assert command([line("0")], "-q") == 0
    assert capfd.readouterr().err == ""
    assert command([line("0"), "["], "-q") == 0
    assert capfd.readouterr().err.startswith("peagle: warning: 0 lines answered, 1 refused, 1 answered before")


def test_the_command_fails_if_a_line_did(
    command: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> Any:
        raise ApiError(500, "a fault")

    with monkeypatch.context() as patch:
        patch.setitem(ENDPOINTS, COMPLETIONS, dataclasses.replace(ENDPOINTS[COMPLETIONS], start=fails))
        assert command([line("0"), "{"]) == 1
    assert "0 lines answered, 1 refused, 1 failed: run the same command again" in capfd.readouterr().err
    assert command([line("0"), "{"]) == 0


def test_the_command_fails_if_every_line_is_refused(command: Any) -> None:
    refused = ['{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}', "{"]
    assert command(refused) == 3
    assert command(refused) == 3  # a line of them is known
    assert command([*refused, line("0")]) == 0


def test_ctrl_c_ends_the_command_and_says_how_to_go_on(
    command: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [line(name) for name in BODIES]
    press_ctrl_c_at(monkeypatch, peagle.serve.batch, "_write", 2)
    assert command(lines) == 130
    assert f"of {len(lines)} lines are done; the same command resumes" in capfd.readouterr().err
    assert 2 <= len(read(tmp_path / "out.jsonl")) < len(lines)
    assert command(lines) == 0
    assert len(read(tmp_path / "out.jsonl")) == len(lines)


def test_what_cannot_be_is_refused_in_a_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("0"))
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    source, pipe = str(tmp_path / "in.jsonl"), str(tmp_path / "pipe")
    os.mkfifo(pipe)
    table = (
        ([str(tmp_path / "none"), "out"], "cannot be read"),
        ([pipe, "out"], "is no regular file"),
        ([source, source], "is the file of the requests"),
        (["/dev/null", "out"], "is no regular file"),
        ([source, str(tmp_path)], "cannot be written"),
        ([source, str(tmp_path / "no" / "out")], "cannot be written"),
        ([source, str(tmp_path / "other.jsonl")], "line 1 is no answer of a batch"),
        ([source, str(tmp_path / "out"), "--slots", "0"], "--slots is 0"),
    )
    all_refused(capfd, ["batch"], table)


def test_log_probabilities_in_a_batch_are_the_contents(
    harmony: ByteLevelTokenizer, run: Callable[..., BatchFile], tmp_path: Path
) -> None:
    """As over HTTP: without control tokens, headers and reasoning."""
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>größer 東京<|return|>"
    )
    bodies = {
        CHAT: {"messages": USER, "logprobs": True, "temperature": 0},
        RESPONSES: {"input": "hello", "include": ["message.output_text.logprobs"], "temperature": 0},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    service = says(harmony, (bodies[CHAT], answer))
    run(list(map(json.dumps, lines)), service=service)
    answers = read(tmp_path / "out.jsonl")
    service.loop.close()
    entries = answers[CHAT]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "größer 東京"
    assert answers[RESPONSES]["response"]["body"]["output"][1]["content"][0]["logprobs"] == entries
