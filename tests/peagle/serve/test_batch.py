"""Files of requests: every line is answered once, whatever else the file holds and wherever a run was stopped."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.serve
from peagle.base.errors import InputError
from peagle.base.files import locked
from peagle.cli import main
from peagle.serve.app import ENDPOINTS
from peagle.serve.batch import BatchFile, EngineAnswerer, check_files
from peagle.serve.bodies import CompletionBody
from peagle.serve.errors import ApiError
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer
from tests.support.commands import all_refused
from tests.support.harmony import USER
from tests.support.pairs import press_ctrl_c_at, toy_pair
from tests.support.servers import CHAT, COMPLETIONS, RESPONSES, answer, client_of

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


def statuses(out: Path) -> dict[str, int]:
    return {name: answer["response"]["status_code"] for name, answer in read(out).items()}


@pytest.fixture
def run(make: Callable[..., SharedState], tmp_path: Path) -> Callable[..., BatchFile]:
    """Answer lines with one server; `stop_at`: end early after so many looks."""
    service: SharedState | None = None

    def running(lines: list[str], stop_at: int | None = None, by: SharedState | None = None) -> BatchFile:
        nonlocal service
        if by is None:
            by = service = service or make()
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        looks = iter(range(10**9))
        batch = BatchFile(EngineAnswerer(by), tmp_path / "in.jsonl", tmp_path / "out.jsonl", 3)
        asyncio.run(batch.run(lambda: stop_at is not None and next(looks) >= stop_at, lambda _: None))
        assert by.loop.num_open == 0 or stop_at is not None
        return batch

    return running


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# --- answers ----------------------------------------------------------------------------------------------------------


def test_each_line_has_the_servers_answer(run: Any, out: Path) -> None:
    batch = run([line(name) for name in BODIES])
    answers, client = read(out), client_of(batch.answerer.shared)
    assert answers.keys() == BODIES.keys()
    assert (batch.counts.answered, batch.counts.refused, batch.counts.done) == (len(BODIES), 0, batch.counts.total)
    for name, (url, body) in BODIES.items():
        response = answers[name]["response"]
        assert (answers[name]["error"], response["status_code"]) == (None, 200)
        assert response["request_id"] == response["body"]["id"]
        assert stable(response["body"]) == stable(answer(client, url, body))
    assert answers["response"]["response"]["body"]["output"][-1]["content"][0]["text"]


# a line, its custom_id, the status of its reply if it is a request, a part of the message
BAD: list[tuple[str, str | None, int | None, str]] = [
    ("{", None, None, "line 1 is not valid JSON"),
    ("[1]", None, None, "line 2 is [1]; expected an object"),
    (line("chat", custom_id=7), None, None, "the custom_id of line 3 is 7"),
    (line("chat", custom_id=""), None, None, "the custom_id of line 4 is ''"),
    (line("chat", custom_id="a", method="GET"), "a", None, "the method of line 5 is 'GET'; expected 'POST'"),
    (line("chat", custom_id="b", url="/v1/embeddings"), "b", None, "the url of line 6 is '/v1/embeddings'; expected"),
    (line("chat", custom_id="c", url=["/v1"]), "c", None, "the url of line 7"),
    (line("chat", custom_id="d", body=[]), "d", None, "the body of line 8 is []"),
    (line("chat", custom_id="e", body={"messages": []}), "e", 400, "messages is empty"),
    (line("chat", custom_id="f", body={"messages": USER, "stream": True}), "f", 400, "stream is set"),
    (line("chat", custom_id="g", body={"messages": USER, "model": "gpt-4"}), "g", 404, "'gpt-4' is not served"),
    (line("chat", custom_id="h", body={"messages": USER, "temperature": -1}), "h", 400, "temperature is -1"),
]


def test_a_line_that_is_none_gets_an_error_and_the_others_answers(run: Any, out: Path) -> None:
    batch = run([*(text for text, _, _, _ in BAD), "", line("0")])
    assert (batch.counts.answered, batch.counts.refused, batch.counts.total) == (1, len(BAD), len(BAD) + 1)
    answers = [json.loads(text) for text in out.read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers if answer["custom_id"] == "0"] == [200]
    for _, custom_id, status, part in BAD:
        (answer,) = (answer for answer in answers if part in json.dumps(answer, ensure_ascii=False))
        assert answer["custom_id"] == custom_id
        if status is None:
            assert (answer["response"], answer["error"]["code"]) == (None, "invalid_line")
        else:
            assert (answer["error"], answer["response"]["status_code"]) == (None, status)
            assert part in answer["response"]["body"]["error"]["message"]


def test_a_repeated_custom_id_is_an_error(run: Any, out: Path) -> None:
    for _ in range(2):  # a second run changes nothing
        run([line("0"), line("0"), line("1")])
        answers = [json.loads(text) for text in out.read_text().splitlines()]
        assert len(answers) == 3
        (error,) = (answer["error"] for answer in answers if answer["error"])
        assert error["message"] == "the custom_id '0' of line 2 is also that of an earlier line"


def test_many_lines_are_under_way_at_once_but_not_all(make: Any, run: Any) -> None:
    service = make()
    submit, open_requests = service.loop.submit, list[int]()

    def submitted(requests: Any) -> Any:
        call = submit(requests)
        open_requests.append(service.loop.num_open)
        return call

    service.loop.submit = submitted
    run([line(str(number)) for number in range(6)], by=service)
    assert max(open_requests) == 3


# --- runs that end early ----------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_and_answers_nothing_twice(run: Any, make: Any, out: Path) -> None:
    lines = [line(name) for name in BODIES]
    run(lines)
    expected = {name: stable(answer["response"]["body"]) for name, answer in read(out).items()}
    out.unlink()
    stops = 0
    for stop_at in (1, 4, 6, 9, None):
        batch = run(lines, stop_at)
        stops += batch.counts.done < batch.counts.total
        assert batch.counts.known <= len(BODIES)
    assert stops >= 2
    assert len(out.read_text("utf-8").splitlines()) == len(BODIES)
    assert {name: stable(answer["response"]["body"]) for name, answer in read(out).items()} == expected
    unused = make()
    run(lines, by=unused)
    assert not unused.loop.engine.executor.started, "nothing was asked again"


def failing(prompts: dict[int, Exception]) -> Any:
    """Make the endpoint of completions fail at these prompts."""
    endpoint = ENDPOINTS[COMPLETIONS]

    async def start(service: SharedState, body: CompletionBody, owner: str) -> Any:
        (token,) = body.prompt
        if token in prompts:
            raise prompts[token]  # type: ignore[index]
        return await endpoint.start(service, body, owner)

    return dataclasses.replace(endpoint, start=start)


def test_a_line_that_the_server_fails_at_is_asked_again_and_costs_no_other(
    run: Any, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line(str(number)) for number in range(4)]
    with monkeypatch.context() as patch:
        faults = {51: ZeroDivisionError("a fault"), 52: ApiError(503, "the queue is full"), 53: RecursionError("deep")}
        patch.setitem(ENDPOINTS, COMPLETIONS, failing(faults))
        counts = run(lines).counts
    assert (counts.answered, counts.failed, counts.done, counts.total) == (1, 3, 4, 4)
    assert statuses(out) == {"0": 200, "1": 500, "2": 503, "3": 500}
    assert "ZeroDivisionError" in read(out)["1"]["response"]["body"]["error"]["message"]
    assert "a fault" in caplog.text
    assert "deep" in caplog.text
    counts = run(lines).counts
    assert (counts.answered, counts.known, counts.failed) == (3, 1, 0)
    assert statuses(out) == dict.fromkeys("0123", 200)
    assert len(out.read_text().splitlines()) == 4


def test_a_byte_order_mark_is_no_part_of_the_first_line(run: Any, out: Path) -> None:
    run([f"\ufeff{line('0')}", line("1")])
    assert statuses(out) == {"0": 200, "1": 200}


def test_an_output_that_was_cut_off_anywhere_goes_on(run: Any, tmp_path: Path, out: Path) -> None:
    lines = [line("0"), line("1")]
    run(lines)
    whole = out.read_bytes()
    end, first = len(whole), whole.index(b"\n")
    at_the_end = (end - less for less in (1, 2, 20, 200))
    in_the_first = (first + more for more in (9, 1, 0, -1, -19, -199))
    for cut in (*at_the_end, *in_the_first, 30, 5, 1, 0):
        out.write_bytes(whole[:cut])
        check_files(tmp_path / "in.jsonl", out, "toy")
        assert out.read_bytes() == whole[:cut]
        counts = run(lines).counts
        assert (counts.done, counts.known) == (2, whole[:cut].count(b"\n"))
        assert statuses(out) == {"0": 200, "1": 200}


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_answer_to_another_request_is_not_taken_for_this_ones(run: Any, make: Any, out: Path) -> None:
    run([line("0"), line("1")])
    before = out.read_bytes()
    with pytest.raises(InputError, match="another request with the custom_id '1' of line 2"):
        run([line("0"), line("1", body={"prompt": [60], "max_tokens": 3})])
    other = make()
    other.model = "other"
    with pytest.raises(InputError, match="answers of the model 'toy', but this one is 'other'"):
        run([line("0"), line("1")], by=other)
    assert out.read_bytes() == before


def test_two_runs_do_not_write_one_output(run: Any, out: Path) -> None:
    with locked(out), pytest.raises(InputError, match="is being written by another run"):
        run([line("0")])
    assert not out.exists()
    assert run([line("0")]).counts.answered == 1


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tmp_path: Path) -> Any:
    pair = toy_pair(tokenizer)
    monkeypatch.setattr("peagle.cli.models.load_pair", lambda *_: pair)
    monkeypatch.setattr(peagle.cli.serve, "_warm_up", lambda *_: None)  # takes longer than all the answers
    source = tmp_path / "in.jsonl"

    def start(lines: list[str], *options: str) -> int:
        source.write_text("\n".join(lines) + "\n")
        fixed = ["-k", "3", "--slots", "2", "--context", "128"]
        return main(["batch", str(source), str(tmp_path / "out.jsonl"), *fixed, *options])

    return start


def test_the_command_answers_and_says_how_much(command: Any, capfd: pytest.CaptureFixture[str], out: Path) -> None:
    assert command([line("0"), line("1"), "{"]) == 0
    said = capfd.readouterr().err
    assert "answering as peagle-demo with K = 3: 2 slots with a context of 128" in said
    assert "2 lines answered, 1 refused; 11 tokens in " in said
    assert command([line("0"), line("1"), "{", line("2")]) == 0
    assert "1 line answered, 1 refused, 2 answered before; 7 tokens" in capfd.readouterr().err
    assert command([line("0"), "["], "-q") == 0
    assert capfd.readouterr().err.startswith("peagle: warning: 0 lines answered, 1 refused, 1 answered before")
    named = line("3", body={"prompt": [50], "max_tokens": 2, "model": "mine"})  # as files for other servers do
    out.unlink()
    assert command([named], "--served-model-name", "mine") == 0
    assert "answering as mine" in capfd.readouterr().err


def test_the_command_fails_if_a_line_did_or_every_line_is_refused(
    command: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(ENDPOINTS, COMPLETIONS, failing({50: ApiError(500, "a fault")}))
        assert command([line("0"), "{"]) == 1
    assert "0 lines answered, 1 refused, 1 failed: run the same command again" in capfd.readouterr().err
    assert command([line("0"), "{"]) == 0
    refused = ['{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}', "{"]
    assert command(refused) == 3
    assert command(refused) == 3  # a line of them is known


def test_the_engine_is_no_larger_than_what_is_left(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert command([line("0")]) == 0
    assert "K = 3: 1 slot with a context of 128" in capfd.readouterr().err
    assert command([line("0")]) == 0
    said = capfd.readouterr().err
    assert said.startswith("nothing is left")
    assert "slot" not in said


def test_ctrl_c_ends_the_command_and_says_how_to_go_on(
    command: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    lines = [line(name) for name in BODIES]
    press_ctrl_c_at(monkeypatch, peagle.serve.batch, "_write", 2)
    assert command(lines) == 130
    assert f"of {len(lines)} lines are done; the same command resumes" in capfd.readouterr().err
    assert 2 <= len(read(out)) < len(lines)
    assert command(lines) == 0
    assert len(read(out)) == len(lines)


def test_impossible_batch_is_refused_in_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("0"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    source, pipe = str(tmp_path / "in.jsonl"), str(tmp_path / "pipe")
    os.mkfifo(pipe)
    table = (
        ([str(tmp_path / "none"), "out"], "cannot be read"),
        ([pipe, "out"], "is no regular file"),
        ([source, source], "is the file of the requests"),
        ([str(tmp_path / "empty.jsonl"), "out"], "is empty; expected a request as JSON on each line"),
        ([source, str(tmp_path)], "cannot be written"),
        ([source, str(tmp_path / "no" / "out")], "cannot be written"),
        ([source, str(tmp_path / "other.jsonl")], "line 1 is no answer of a batch"),
        ([source, str(tmp_path / "out"), "--slots", "0"], "--slots is 0"),
    )
    all_refused(capfd, ["batch"], table)
