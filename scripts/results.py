"""The folders of results/: one per run, with run.json, raw.jsonl, README.md and a picture."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.provenance import provenance


def origin(module: str) -> dict[str, Any]:
    """What goes with every number of a run of `python -m module`: its command line among it."""
    return provenance() | {"command": shlex.join(["python", "-m", module, *sys.argv[1:]])}


def write_run(out: Path, record: dict[str, Any], raw: Sequence[dict[str, Any]], page: str) -> None:
    """The new folder holds run.json, raw.jsonl (a line each) and README.md, which is shown, too."""
    out.mkdir(parents=True)
    files = {
        "run.json": json.dumps(record, indent=1) + "\n",
        "raw.jsonl": "".join(json.dumps(line) + "\n" for line in raw),
        "README.md": page,
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    print(page)
