"""results/ is light: of a run it has the page, the record and at most two pictures."""

import re
from pathlib import Path

from scripts.runs import ROOT

RESULTS = ROOT / "results"
MAX_BYTES = {"README.md": 24_000, "run.json": 64_000, ".svg": 60_000, ".png": 60_000}
MAX_PICTURES, MAX_TOTAL = 2, 600_000


def test_results_are_light() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < MAX_TOTAL
    for folder in (path for path in RESULTS.iterdir() if path.is_dir()):
        names = {path.name for path in folder.iterdir()}
        pictures = names - {"README.md", "run.json"}
        assert len(names - pictures) == 2
        assert len(pictures) <= MAX_PICTURES
        for name in names:
            most = MAX_BYTES.get(name) or MAX_BYTES[Path(name).suffix]
            assert (folder / name).stat().st_size <= most, folder / name
        page, record = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "run.json"))
        assert not re.search(r"--out\W+/", page + record), "a place on one machine"
        assert all(f"]({name})" in page for name in pictures)
