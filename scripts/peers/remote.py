"""The parent's side: an engine in a process of its own (see worker.py)."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from scripts.runs import ROOT, last_line


class Child:
    """A process that answers calls, JSON line by JSON line (worker.serve), until `close`.

    The first answer is its description. Raises InputError if it fails.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  what its libraries print; quoted if it dies
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
        )
        try:
            self.described: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call the method `do` of the served object."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        message = json.loads(line)
        if "error" in message:
            raise InputError(f"{self._name}: {message['error']}")
        answer: dict[str, Any] = message["answer"]
        return answer

    def _died(self) -> InputError:
        status = self._process.wait()
        return InputError(f"{self._name}: its process ended with status {status} ({last_line(self._log)})")


def start(name: str, python: str, kind: str, options: Mapping[str, Any]) -> Child:
    """Load a worker's engine in a process of its own. kind: a key of worker.KINDS. Raises InputError."""
    return Child(name, [python, "-m", "scripts.peers.worker", kind, dumps(dict(options))])


def cannot_run(option: str, python: str | None, module: str) -> str | None:
    """Say why the Python that an option names cannot run a peer's module; None if it can."""
    if python is None:
        return f"no {option} was given"
    if shutil.which(python) is None:
        return f"there is no such program as {option} names"
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", find], capture_output=True, check=False).returncode:
        return f"the Python that {option} names has no {module}"
    return None
