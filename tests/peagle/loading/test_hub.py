"""Names of the Hugging Face Hub, against a hub on loopback: what is downloaded, what is refused, what is resumed."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from peagle.base.errors import InputError
from peagle.base.sizes import format_size
from peagle.cli import main
from peagle.loading import hub
from peagle.loading.checkpoints import resolve
from tests.support.commands import refused, run
from tests.support.pairs import Directories

REVISION = "1" * 40
NAME = "someone/some-model"
NEVER = ("README.md", "modeling_evil.py", "pytorch_model.bin", "optimizer.pt", "original/model.safetensors")


@dataclass
class FakeHub:
    """A hub with one repository. downloads: (file, first byte) of each file whose content was sent."""

    files: dict[str, bytes]
    refusal: tuple[int, str] | None = None  # status and error code of every reply
    cut_at: int | None = None  # close the connection after this byte of weights, once
    downloads: list[tuple[str, int]] = field(default_factory=list)

    def reply(self, path: str, first: int) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers for a path and the first byte of a range."""
        if self.refusal is not None or NAME not in path:
            status, code = self.refusal or (404, "RepoNotFound")
            return status, b"{}", {"X-Error-Code": code}
        if path.startswith("/api/"):
            listing = {"id": NAME, "sha": REVISION, "siblings": [{"rfilename": name} for name in self.files]}
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            return 200, json.dumps(tree if "/tree/" in path else listing).encode(), {}
        body = self.files[path.partition(f"/resolve/{REVISION}/")[2]]
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        return 206 if first else 200, body[first:], headers

    def handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
                status, body, headers = fake.reply(path, first)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if "/resolve/" in path:
                    fake.downloads.append((path.rpartition("/")[2], first))
                if path.endswith(hub.WEIGHTS) and fake.cut_at is not None:
                    body, fake.cut_at, self.close_connection = body[: fake.cut_at], None, True
                self.wfile.write(body)

            do_HEAD = do_GET

        return Handler


def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    """Point the Hub's client at this URL, with an empty cache."""
    from huggingface_hub import close_session

    for name in hub.BANS:
        monkeypatch.delenv(name, raising=False)
    constants = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": True,
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    close_session()


@pytest.fixture
def fake(directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve the tests' target, beside files that must never be downloaded."""
    fake = FakeHub({path.name: path.read_bytes() for path in directories.target.iterdir()})
    fake.files |= dict.fromkeys(NEVER, b"never")
    with ThreadingHTTPServer(("127.0.0.1", 0), fake.handler()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        use(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
        yield fake
        server.shutdown()
        thread.join()


def test_the_files_of_a_checkpoint_are_downloaded_once_and_nothing_else(
    fake: FakeHub, directories: Directories, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["download", NAME]) == 0
    err = capfd.readouterr().err
    names = {path.name for path in directories.target.iterdir()}
    size = sum(len(fake.files[name]) for name in names)
    assert f"downloading {NAME} into" in err
    assert f"{len(names)} files, {format_size(size)}" in err
    assert {name for name, _ in fake.downloads} == names
    fake.downloads.clear()
    assert main(["download", NAME]) == 0
    assert f"{NAME} is in" in capfd.readouterr().err
    assert not fake.downloads
    fake.refusal = (500, "")  # the hub is needed no more
    assert main(["info", NAME]) == 0
    assert f"{NAME}: GPT-OSS target" in capfd.readouterr().out


def test_a_disk_without_room_is_told_before_the_first_file(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["download", NAME]) == 2
    assert re.search(rf"{NAME} takes .* in .*, which has room for 1.0 kB; free some, or", capfd.readouterr().err)
    assert not fake.downloads


def test_by_other_commands_the_hub_is_not_used(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", NAME]) == 2
    assert f"peagle download {NAME} fetches it" in capfd.readouterr().err
    assert not fake.downloads


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
    fake.refusal = refusal
    assert main(["download", NAME]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_gated_weights_of_an_open_listing_are_refused_too(fake: FakeHub) -> None:
    remaining = hub.remaining(NAME)
    fake.refusal = (403, "GatedRepo")
    with pytest.raises(InputError, match="accepted its terms"):
        hub.fetch(remaining, lambda *_: None)


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
    progress: list[tuple[int, int]] = []
    remaining = hub.remaining(NAME)
    hub.fetch(remaining, lambda *numbers: progress.append(numbers))
    assert ("model.safetensors", 1000) in fake.downloads
    assert progress[-1] == (remaining.num_bytes, remaining.num_bytes)
    weights = (directories.target / "model.safetensors").read_bytes()
    assert (resolve(NAME, "target") / "model.safetensors").read_bytes() == weights


def test_after_an_interruption_whole_files_stay_and_the_rest_is_downloaded(fake: FakeHub) -> None:
    def interrupt_after_a_file(done: int, _: int) -> None:
        if done > len(next(iter(fake.files.values()))):
            raise KeyboardInterrupt

    remaining = hub.remaining(NAME)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(remaining, interrupt_after_a_file)
    with pytest.raises(InputError, match="has no complete copy"):
        resolve(NAME, "target")
    rest = hub.remaining(NAME)
    assert 0 < rest.num_files < remaining.num_files
    hub.fetch(rest, lambda *_: None)
    assert hub.remaining(NAME).num_files == 0
    assert resolve(NAME, "target").is_dir()


@pytest.mark.parametrize("absent", ["other.safetensors", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_only_files_that_are_needed_count(
    fake: FakeHub, directories: Directories, absent: str, part: Literal["target", "drafter"]
) -> None:
    """A drafter needs no tokenizer; other weights than the loader's are not needed."""
    source = directories.target if part == "target" else directories.drafter
    fake.files = {path.name: path.read_bytes() for path in [*directories.target.iterdir(), *source.iterdir()]}
    fake.files |= dict.fromkeys(("README.md", "other.safetensors"), b"never")
    hub.fetch(hub.remaining(NAME), lambda *_: None)
    snapshot = resolve(NAME, part)
    (snapshot / absent).unlink(missing_ok=True)  # README.md was never there
    if absent == "model.safetensors" or (part, absent) == ("target", "tokenizer.json"):
        with pytest.raises(InputError, match="has no complete copy"):
            resolve(NAME, part)
    else:
        assert resolve(NAME, part) == snapshot


@pytest.mark.parametrize("address", ["https://huggingface.co/a/b", "hf.co/a/b/tree/main", "hf://a/b", "http://x.org/y"])
def test_an_address_is_refused_with_the_name_in_it(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "openai/gpt-oss-20b" if "x.org" in address else "a/b"
    for command in (
        ("info", address),
        ("download", address),
        ("speculate", "-k", "0", "--target", address, "Hi"),
    ):
        refused(run(capsys, *command), f"{address} is an address; expected a directory, or OWNER/NAME: {name}")


def test_names_are_owner_and_name_that_are_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("a/b")
    for path in ("a", "./a/b", "/a/b", "a/b/c", "a/", "../b", "a/..b/c"):
        assert not hub.is_name(path), path
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not hub.is_name("a/b")
