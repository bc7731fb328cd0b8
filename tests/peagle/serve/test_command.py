"""`peagle serve`: what it prints, how it ends, and what it refuses before anything slow."""

import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.cli.serve import allowed_hosts, check_allowed_origin
from peagle.engine.host.executor import Executor
from peagle.serve.server import Server, ServerOptions, listen, on_loopback
from peagle.text.tokenizer import Tokenizer
from tests.support.commands import all_refused
from tests.support.pairs import toy_pair

Use = Callable[[str], None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[..., int]:
    """Run the command over the toy pair; call `use` with its URL in a thread, then send a signal."""
    pair, server = toy_pair(tokenizer), Server
    monkeypatch.setattr("peagle.cli.models.load_pair", lambda *_: pair)

    def start(use: Use, *options: str, number: int = signal.SIGTERM) -> int:
        def used(url: str) -> None:
            try:
                use(url)
            finally:
                os.kill(os.getpid(), number)

        def watched(app: Any, loop: Any, options: ServerOptions) -> Any:
            def told(url: str) -> None:
                options.ready(url)
                threading.Thread(target=used, args=(url,)).start()

            return server(app, loop, dataclasses.replace(options, ready=told))

        monkeypatch.setattr("peagle.serve.server.Server", watched)
        return main(["serve", "--port", "0", "--prefix-cache", "1MB", *options])

    return start


def test_it_says_what_it_serves_answers_and_ends_well(
    started: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    replies: list[httpx.Response] = []

    def use(url: str) -> None:
        replies.append(httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 5}, timeout=60))
        replies.append(httpx.post(f"{url}/v1/responses", json={"input": "ab", "max_output_tokens": 1}, timeout=60))

    options = ("-k", "3", "--context", "128", "--slots", "2")
    assert started(use, *options) == 0
    assert replies[0].json()["usage"]["completion_tokens"] == 5
    assert replies[0].json()["model"] == "peagle-demo"
    assert replies[1].json()["store"] is True
    said = capfd.readouterr().err
    assert "serving peagle-demo with K = 3: 2 slots with a context of 128" in said
    assert "memory besides the weights: " in said
    assert "ready: http://127.0.0.1:" in said
    assert '"completion_tokens": 5' in said


def test_its_options_reach_the_server(started: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("two\n\none\n", "utf-8-sig")
    replies: list[httpx.Response] = []

    def use(url: str) -> None:
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer two"}, timeout=60) as client:
            replies.append(httpx.get(f"{url}/v1/models"))
            replies.append(client.get("/v1/models"))
            replies.append(client.post("/v1/completions", json={"prompt": "ab", "n": 4}))
            replies.append(client.post("/v1/responses", json={"input": "ab", "max_output_tokens": 1}))
            replies.append(client.post("/v1/responses", json={"input": "ab", "store": True}))
            replies.append(client.get("/v1/models", headers={"Origin": "https://b.example"}))

    options = ["--api-key-file", str(tmp_path / "keys"), "--served-model-name", "mine"]
    options += ["--response-store", "0", "--allow-origin", "https://a.example", "--allow-origin", "https://b.example"]
    assert (
        started(
            use, "-k", "0", "--slots", "1", "--max-queue", "2", "--context", "128", *options, "-q", number=signal.SIGINT
        )
        == 0
    )
    assert [reply.status_code for reply in replies] == [401, 200, 400, 200, 400, 200]
    assert replies[5].headers["access-control-allow-origin"] == "https://b.example"
    assert replies[3].json()["store"] is False
    assert "raise --response-store" in replies[4].json()["error"]["message"]
    assert replies[1].json()["data"][0]["id"] == "mine"
    assert replies[1].json()["data"][0]["max_model_len"] == 128
    assert "at most 3" in replies[2].json()["error"]["message"]


def test_on_loopback_a_site_that_leads_here_is_kept_out(
    started: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []

    def use(url: str) -> None:
        for name in ("evil.example", "localhost", "127.1"):
            statuses.append(httpx.get(f"{url}/v1/models", headers={"Host": name}).status_code)

    assert started(use, "-k", "0", "--slots", "1", "--context", "128", "--host", "127.1") == 0
    assert statuses == [403, 200, 200]
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.255.255.254", "127.1", "2130706433")),
        *((host, True) for host in ("::1", "[::1]", "0:0:0:0:0:0:0:1", "[0:0:0:0:0:0:0:1]", "::ffff:127.0.0.1")),
        *((host, False) for host in ("0.0.0.0", "::", "", "128.0.0.1", "::2", "::ffff:1.2.3.4", "nowhere.invalid")),
    ],
)
def test_a_host_is_loopback_by_its_address_not_by_its_spelling(host: str, loopback: bool) -> None:
    assert on_loopback(host) is loopback


def test_a_name_is_loopback_if_this_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By /etc/hosts: ip6-localhost, and a machine's own name."""
    known = {"ip6-localhost": (socket.AF_INET6, ("::1", 0, 0, 0)), "mine": (socket.AF_INET, ("127.0.1.1", 0))}

    def resolved(name: str, *_: object, **__: object) -> list[Any]:
        family, address = known[name]
        return [(family, socket.SOCK_STREAM, 6, "", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for name in known:
        assert on_loopback(name)
        assert allowed_hosts(name, ()) == [name]  # its clients ask for it by this name
        assert allowed_hosts(name, ("key",)) is None


SENT = ("*", "https://example.org", "http://127.0.0.1:3000", "http://[::1]:8080", "http://a-b.example:443", "app://x_y")
NOT_SENT = (
    *("https://example.org/path", "https://*.example.org", "https://Example.org", "https://example.org:443"),
    *("http://example.org:80", "http://me@example.org", "http://example.org:080"),
)


def test_sites_are_as_a_browser_sends_them() -> None:
    for origin in SENT:
        check_allowed_origin(origin)
    for origin in NOT_SENT:
        with pytest.raises(InputError, match="expected a site"):
            check_allowed_origin(origin)


def test_after_the_engine_failed_the_command_ends_with_code_1(
    started: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    def use(url: str) -> None:
        monkeypatch.setattr(Executor, "prefill", broken)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "ab"}, timeout=60).status_code == 503

    assert started(use, "-k", "0", "--slots", "1", "--context", "128") == 1
    assert "peagle: error: the engine failed: the device is gone" in capfd.readouterr().err


def test_impossible_server_is_refused_in_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with listen("127.0.0.1", 0) as taken:  # by a server that loads its model
        table = (
            (["--port", str(taken.getsockname()[1])], "Address already in use"),
            (["--port", "70000"], "cannot be listened on"),
            (["--host", "nowhere.invalid"], "cannot be listened on"),
            (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
            (["--api-key-file", str(tmp_path / "empty")], "is empty"),
            (["--slots", "0"], "--slots is 0"),
            (["--max-queue", "-1"], "--max-queue is -1"),
            (["-k", "many"], "-k is 'many'"),
            (["--target", str(tmp_path / "none")], "none"),
        )
        all_refused(capfd, ["serve"], table)
