"""What a training's folder holds. Needs none of what training does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.ops.files import write_text_whole
from peagle.ops.strict_json import dumps

RECIPE, LOG, CHECKPOINTS = "recipe.json", "log.jsonl", "checkpoints"
SIZES = "sizes.json"  # of a checkpoint's files


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The log's lines; one that was cut off by a kill is left out."""
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue


def steps_done(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name) for path in (out / CHECKPOINTS).glob("*") if path.name.isdecimal()), default=0)


def keep_sizes(checkpoint: Path) -> None:
    """`expect_sizes` knows from here on how long the folder's files are."""
    write_text_whole(checkpoint / SIZES, dumps(_sizes(checkpoint)))


def expect_sizes(checkpoint: Path) -> None:
    """Raises ValueError where a file is not as long as it was written. Where nobody kept that, anything goes."""
    if not (checkpoint / SIZES).exists():
        return
    found = _sizes(checkpoint)
    for name, size in json.loads((checkpoint / SIZES).read_text(encoding="utf-8")).items():
        if found.get(name) != size:
            raise ValueError(f"{name} has {found.get(name, 0)} bytes, {size} were written")


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SIZES)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
