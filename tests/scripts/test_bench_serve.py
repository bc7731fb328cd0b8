"""The server's benchmark: what a client sees and what the server counts; a soak that finds what is planted."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.engine.host.engine import Engine
from peagle.text.tokenizer import load_tokenizer
from scripts.scenarios import soak
from scripts.scenarios.serve import PEER, by_engine, rounds, row_of
from scripts.serving import client, servers
from scripts.serving.client import Reply
from scripts.serving.models import PLAIN, Load
from scripts.serving.servers import Server
from tests.support.harmony import says
from tests.support.pairs import write_tokenizer
from tests.support.running import running

LOAD = Load(2, 4, 6, 9, 2)
PROMPTS = [[40 + place, 50, 51, 52, 53, 54] for place in range(4)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Engine]]:
    """A server whose answers have no end of their own; with its engine."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    body = {"messages": [{"role": "user", "content": ""}]}
    service = says(tokenizer, (body, "ab cd\n\nef " * 60), max_queue=2, hosts=())
    with running(service) as server:
        yield Server(server.url), service.loop.engine  # type: ignore[misc]
    service.loop.close()  # type: ignore[attr-defined]


def test_rounds_have_the_clients_figures_the_servers_own_and_the_engines(server: tuple[Server, Engine]) -> None:
    running_server, engine = server
    load = Load(2, 4, 6, 9, 2, engine_alone=True)
    lines = list(rounds(load, PROMPTS, {PLAIN: running_server}, {PLAIN: engine}))
    assert [(line["round"], line["place"]) for line in lines] == [
        (1, "engine"), (1, "server"), (2, "server"), (2, "engine")
    ]  # fmt: skip
    assert all(line["requests"] == 4 and line["tok_per_s"] == pytest.approx(36 / line["seconds"]) for line in lines)
    row = row_of(lines, load, PLAIN)
    by_round = {(line["round"], line["place"]): line["tok_per_s"] for line in lines}
    ratios = [by_round[number, "server"] / by_round[number, "engine"] for number in (1, 2)]
    assert row["over_engine"]["median"] == pytest.approx(sum(ratios) / 2)
    assert row["acceptance_length"]["median"] >= 1


def test_the_engine_alone_decodes_as_clients_ask(server: tuple[Server, Engine]) -> None:
    _, engine = server
    replies = by_engine(engine, [tuple(prompt) for prompt in PROMPTS], LOAD)
    assert [reply.num_tokens for reply in replies] == [9] * 4
    first, second, *later = sorted(reply.started_s for reply in replies)
    ends = sorted(reply.times_s[-1] for reply in replies)
    assert first <= second <= ends[0] <= later[0]
    assert all(reply.num_emitted == reply.num_tokens - 1 > reply.num_steps for reply in replies)


def test_refused_or_cut_answer_is_reported_in_one_line(server: tuple[Server, Engine]) -> None:
    running_server, _ = server
    with pytest.raises(InputError, match="max_tokens is 0"):
        client.together(running_server.url, [{"prompt": [40], "max_tokens": 0}], 1)
    stopped = {"prompt": [40, 41, 42], "max_tokens": 300, "temperature": 0, "stop": ["e"]}
    with pytest.raises(InputError, match="tokens; expected 300"):
        client.together(running_server.url, [stopped], 1)


def soaked(server: Server, clients: int = 6) -> dict[str, Any]:
    bodies = soak.mixed_bodies([[40 + place % 9, *range(60, 60 + place)] for place in range(8)], 16)
    return soak.soak(server, bodies, clients=clients, seconds=1.0, slots=2, longest=100, turns=12)


@pytest.mark.parametrize(("clients", "some"), [(6, ("answered", "left", "bad")), (0, ("unread",))])
def test_a_soak_of_a_server_that_is_right_finds_nothing(
    server: tuple[Server, Engine], clients: int, some: tuple[str, ...]
) -> None:
    """One client more reads nothing."""
    counts = soaked(server[0], clients)
    assert all(counts[name] > 0 for name in some), counts
    names = ("wrong", "failed", "leaked_slots", "server_errors", "unsent_bytes")
    assert [counts[name] for name in names] == [0] * 5, counts


def test_a_soak_finds_wrong_answers_and_leaked_slots(
    server: tuple[Server, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = soak.whole
    monkeypatch.setattr(soak, "whole", lambda url, body: right(url, body) + "!")
    monkeypatch.setattr(soak, "FREE_S", 0.0)
    monkeypatch.setattr(Server, "health", lambda _: {"requests_running": 1, "requests_waiting": 2})
    counts = soaked(server[0])
    assert counts["leaked_slots"] == 3
    assert counts["wrong"] > 0
    assert "expected" in counts["first_wrong"][0]


def test_growth_is_of_the_last_tenth_over_the_second() -> None:
    assert soak.growth([10, 10, 100, 100, *[100] * 14, 103, 103]) == pytest.approx(0.03)
    assert soak.growth([1] * 19) is None


def test_a_server_that_does_not_come_up_says_why_in_a_line() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(InputError, match="it did not come up: no such model"),
        servers.running("it", command, "http://[::1]:9"),
    ):
        pass


def test_figures_of_a_round_and_ratios_of_the_same_round() -> None:
    line = client.figures([Reply(0.0, (1.0, 2.0, 4.0), 9, "", 3, 7), Reply(0.5, (1.0, 3.0), 9)])
    assert (line["tok_per_s"], line["itl_p50_s"]) == (4.5, 2.0)
    assert line["acceptance_length"] == pytest.approx(7 / 3)
    load, raw = Load(8, 16, 128, 128, 2, engine_alone=True), []
    for number, drift in ((1, 1.0), (2, 3.0)):
        for variant, factor in ((PLAIN, 1.0), ("K = 3", 2.0), (PEER, 0.5)):
            for place, faster in (("server", 1.0), ("engine", 1.25)):
                of = {**vars(load), "round": number, "variant": variant, "place": place}
                raw.append({**of, **line, "tok_per_s": 100 * factor * faster / drift})
    row = row_of(raw, load, "K = 3")
    ratios = [row[name]["median"] for name in ("over_plain", "over_peer", "over_engine")]
    assert ratios == pytest.approx([2.0, 4.0, 0.8])
