"""Names of the Hugging Face Hub, against a hub on loopback: what is fetched, what is refused, what goes on."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import peagle.cli
from peagle import hub
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.memory import size_in_words
from tests.support.pairs import Directories

REVISION = "1" * 40
NAME = "someone/some-model"
UNWANTED = ("README.md", "modeling_evil.py", "pytorch_model.bin", "optimizer.pt", "original/model.safetensors")


@dataclass
class FakeHub:
    """Serves one repository; `asked` lists the files whose content was sent for, with the first byte of each."""

    files: dict[str, bytes]
    refusal: tuple[int, str] | None = None  # status and error code instead of any answer
    cut_at: int | None = None  # close the connection behind this byte of weights, once
    asked: list[tuple[str, int]] = field(default_factory=list)

    def info(self) -> object:
        return {"id": NAME, "sha": REVISION, "siblings": [{"rfilename": name} for name in self.files]}

    def tree(self) -> object:
        entries = self.files.items()
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in entries
        ]


def handler(of: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if of.refusal is not None or NAME not in path:
                status, code = of.refusal or (404, "RepoNotFound")
                self.send(status, b"{}", {"X-Error-Code": code})
            elif path.startswith("/api/"):
                found = of.tree() if "/tree/" in path else of.info()
                self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
            else:
                self.send_file(path.partition(f"/resolve/{REVISION}/")[2])

        def send_file(self, name: str) -> None:
            body = of.files[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            if first:
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            if self.command == "GET":
                of.asked.append((name, first))
            self.send(206 if first else 200, body[first:], headers, cut=name.endswith(hub.WEIGHTS))

        def send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if cut and of.cut_at is not None:
                body, of.cut_at, self.close_connection = body[: of.cut_at], None, True
            self.wfile.write(body)

    return Handler


@pytest.fixture
def fake(directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve the target of the tests, and what must never be fetched beside it, to an empty cache."""
    found = FakeHub({path.name: path.read_bytes() for path in directories.target.iterdir()})
    found.files |= dict.fromkeys(UNWANTED, b"never")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    use(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    """Let the Hub's client find its hub at a URL, and its cache in a folder."""
    from huggingface_hub import close_session

    for name in hub.BANS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()


def run(*arguments: str) -> int:
    return peagle.cli.main(list(arguments))


def test_what_is_needed_is_fetched_and_said_and_nothing_else(
    fake: FakeHub, directories: Directories, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("info", NAME, "--download") == 0
    out, err = capfd.readouterr()
    wanted = [path.name for path in directories.target.iterdir()]
    size = sum(len(fake.files[name]) for name in wanted)
    assert f"downloading {NAME} into" in err
    assert f"{len(wanted)} files, {size_in_words(size)}" in err
    assert f"{NAME}: GPT-OSS target" in out
    assert {name for name, _ in fake.asked} == set(wanted)
    fake.asked.clear()
    assert run("info", NAME, "--download") == 0
    assert f"{NAME} is in" in capfd.readouterr().err
    assert not fake.asked
    fake.refusal = (500, "")  # nobody is needed any more
    assert run("info", NAME) == 0


def test_without_the_option_nothing_is_asked_of_the_hub(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("info", NAME) == 2
    assert f"peagle info --download {NAME} fetches it" in capfd.readouterr().err
    assert not fake.asked


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((404, "RepoNotFound"), r"has no someone/some-model, .* \(status 404\); check the name"),
        ((401, ""), r"has no someone/some-model, .* \(status 401\); check the name, or log in"),
        ((403, "GatedRepo"), r"accounts that accepted its terms \(status 403\); accept them at .*/someone/some-model"),
        ((500, ""), r"cannot be fetched from .*500.*; check the network"),
    ],
)
def test_a_refusal_is_one_line_that_names_what_to_do(
    fake: FakeHub, refusal: tuple[int, str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import re

    fake.refusal = refusal
    assert run("info", NAME, "--download") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_gated_weights_of_an_open_listing_are_refused_too(fake: FakeHub) -> None:
    what = hub.remaining(NAME)
    fake.refusal = (403, "GatedRepo")
    with pytest.raises(InputError, match="accepted its terms"):
        hub.fetch(what, lambda *_: None)


def test_a_hub_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path, "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"cannot be fetched from http://127.0.0.1:9: Conn.*; check the network"):
        hub.remaining(NAME)


@pytest.mark.usefixtures("fake")
def test_a_ban_of_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hub.OFFLINE, "1")
    with pytest.raises(InputError, match=f"{hub.OFFLINE}=1 in the environment forbids to fetch {NAME}"):
        hub.remaining(NAME)
    monkeypatch.setenv(hub.OFFLINE, "")
    hub.stay_offline()
    assert hub.remaining(NAME).num_files > 0


def test_pickles_alone_are_no_checkpoint(fake: FakeHub) -> None:
    fake.files = {name: body for name, body in fake.files.items() if not name.endswith(hub.WEIGHTS)}
    with pytest.raises(InputError, match="no weights in safetensors"):
        hub.remaining(NAME)


def test_a_connection_that_breaks_is_continued_where_it_broke(
    fake: FakeHub, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.cut_at = 1000
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    told: list[tuple[int, int]] = []
    what = hub.remaining(NAME)
    hub.fetch(what, lambda *each: told.append(each))
    assert ("model.safetensors", 1000) in fake.asked
    assert told[-1] == (what.num_bytes, what.num_bytes)
    whole = directories.target / "model.safetensors"
    assert (hub.cached(NAME) / "model.safetensors").read_bytes() == whole.read_bytes()


def test_after_an_interruption_whole_files_stay_and_the_rest_is_fetched(fake: FakeHub) -> None:
    what = hub.remaining(NAME)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(what, interrupting(after=len(next(iter(fake.files.values())))))
    with pytest.raises(InputError, match="as a whole"):
        hub.cached(NAME)
    rest = hub.remaining(NAME)
    assert 0 < rest.num_files < what.num_files
    hub.fetch(rest, lambda *_: None)
    assert hub.remaining(NAME).num_files == 0
    assert hub.cached(NAME).is_dir()


def interrupting(after: int) -> Callable[[int, int], None]:
    """Raise as `interrupt.check` does, once so many bytes came."""

    def progress(done: int, _: int) -> None:
        if done > after:
            raise KeyboardInterrupt

    return progress


def test_names_are_owner_and_name_that_are_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("a/b")
    for path in ("a", "./a/b", "/a/b", "a/b/c", "a/", "../b", "a/..b/c"):
        assert not hub.is_name(path), path
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not hub.is_name("a/b")
    interrupt.check()
