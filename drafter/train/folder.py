"""What a training's folder holds. Needs none of what training does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPE, LOG, CHECKPOINTS = "recipe.json", "log.jsonl", "checkpoints"


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The log's lines; one that was cut off by a kill is left out."""
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue
