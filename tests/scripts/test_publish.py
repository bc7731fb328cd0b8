"""What is committed of a run: a page, its record and two pictures, all small."""

import json
import re
from pathlib import Path

import pytest

from peagle.ops.errors import InputError
from scripts import publish as module
from scripts.publish import MAX_BYTES, MAX_PICTURES, publish, rounded
from scripts.runs import ROOT

RESULTS = ROOT / "results"
MAX_TOTAL = 600_000


def test_results_are_light() -> None:
    """A folder holds its page, its record and pictures, none of them large, and nothing else."""
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


def script_run(folder: Path, **files: str) -> Path:
    """A folder as scripts write it."""
    folder.mkdir()
    record = {"schema": 1, "provenance": {"time": "t"}, "rows": [{"ratio": 1 / 3, "count": 12345678}]}
    texts = {"run.json": json.dumps(record), "raw.jsonl": "{}\n", "README.md": "# Page\n", **files}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_scripts_run_keeps_its_page_and_all_that_its_records_say(tmp_path: Path) -> None:
    run = script_run(tmp_path / "run", **{"memory.json": '{"gb": 14.0123456789}', "a.svg": "<svg/>"})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    publish(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "run.json", "a.svg"}
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == "# Page\n"
    assert json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8")) == {
        "schema": 1,
        "provenance": {"time": "t"},
        "rows": [{"ratio": 0.333333, "count": 12345678}],
        "memory": {"gb": 14.0123},
    }
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"README.md": "x" * 24_001}, r"README.md, in short, has 24001 bytes; expected 24000"),
        ({"run.json": json.dumps({"rows": list(range(20_000))})}, r"run.json, in short, has \d+ bytes"),
        ({"run.json": "{"}, "not valid JSON"),
        ({"run.json": "[]"}, "holds no object"),
        ({"other.json": "{"}, r"other.json is not valid JSON"),
        ({f"{name}.svg": "<svg/>" for name in "abc"}, "3 pictures; expected 2"),
        ({"a.svg": "x" * 60_001}, "a.svg, in short"),
    ],
)
def test_run_that_cannot_be_published_leaves_no_folder(tmp_path: Path, files: dict[str, str], says: str) -> None:
    run = script_run(tmp_path / "run", **files)
    with pytest.raises(InputError, match=says) as raised:
        publish(run, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_no_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["publish", str(tmp_path / "none"), str(tmp_path / "out")])
    assert module.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("publish: error: ")
    assert error.count("\n") == 1


def test_figures_keep_six_digits_and_counts_all() -> None:
    assert rounded({"a": [1234567, 1234567.8, 1.23456789e-7, True, None, "1.23456789"]}) == {
        "a": [1234567, 1234570.0, 1.23457e-7, True, None, "1.23456789"]
    }
