"""results/ is light, and each page says where its figures come from: a commit, a machine, a command that exists."""

import re
import shlex
from pathlib import Path

import pytest

from scripts.runs import ROOT
from tests.test_documents import unknown_in

RESULTS = ROOT / "results"
FOLDERS = [path for path in sorted(RESULTS.iterdir()) if path.is_dir()]
MAX_BYTES = {"README.md": 24_000, "run.json": 64_000, ".svg": 60_000, ".png": 60_000}
MAX_PICTURES, MAX_TOTAL = 2, 600_000
COMMIT, MACHINE = re.compile(r"\bcommit [0-9a-f]{7,40}\b"), re.compile(r"AMD EPYC, \d+ threads|NVIDIA H\d00")
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*((?:python -m scripts\.|peagle [a-z]).*)", re.MULTILINE)


def test_results_are_light() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < MAX_TOTAL
    for folder in FOLDERS:
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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_page_names_its_commit_its_machine_and_a_command_that_exists(folder: Path) -> None:
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert COMMIT.search(page)
    assert MACHINE.search(page)
    commands = COMMAND.findall(page.replace("`", "\n"))
    assert any(unknown_in(shlex.split(command)) == [] for command in commands), commands
