"""Servers in processes of their own: `peagle serve` and llama.cpp's."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from peagle.base.errors import InputError
from scripts.runs import Json, last_line

PATIENCE_S = 600.0  # for loading, compiling and warming up
END_S = 30.0
POLL_S = 0.05
REPLY_S = 10.0


@dataclass(frozen=True)
class Server:
    """A server at `url`. pid: of its process; None if another program started it."""

    url: str
    pid: int | None = None

    def memory_bytes(self) -> int | None:
        """Return the resident memory of its process; None if that is not known."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return None

    def get(self, path: str) -> bytes:
        """Read a page. Raises OSError."""
        with urllib.request.urlopen(self.url + path, timeout=REPLY_S) as reply:
            content: bytes = reply.read()
            return content

    def samples(self) -> list[Sample]:
        """Read /metrics."""
        families = text_string_to_metric_families(self.get("/metrics").decode())
        return [sample for family in families for sample in family.samples]

    def health(self) -> Json:
        """Read /health, with any status."""
        try:
            status: Json = json.loads(self.get("/health"))
        except urllib.error.HTTPError as error:
            status = json.loads(error.read())
        return status


@contextlib.contextmanager
def running(name: str, command: Sequence[str], url: str) -> Iterator[Server]:
    """Run a server until the context ends; yield it after its /health is good.

    Raises InputError with the last line of its output if it does not start.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end = time.monotonic() + PATIENCE_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise InputError(f"{name} did not come up: {last_line(log)}")
                time.sleep(POLL_S)
            yield Server(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=REPLY_S):
            return True
    except (OSError, ValueError):
        return False


def free_port() -> int:
    """Find a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def ours(*options: str) -> Iterator[Server]:
    """Run `peagle serve` with these options."""
    port = free_port()
    command = [sys.executable, "-m", "peagle", "serve", "--port", str(port), *options]
    with running("peagle serve", command, f"http://127.0.0.1:{port}") as server:
        yield server


@contextlib.contextmanager
def llama_server(binary: Path, gguf: Path, slots: int, context: int, num_threads: int) -> Iterator[Server]:
    """Run llama.cpp's server on a GGUF file, with `context` tokens in every slot."""
    port = free_port()
    command = [str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-np", str(slots)]
    command += ["-c", str(slots * context), "-t", str(num_threads), "-tb", str(num_threads), "-ngl", "0"]
    with running("llama-server", command, f"http://127.0.0.1:{port}") as server:
        yield server
