"""The README shows what the runs say."""

import json
from pathlib import Path

import pytest

from peagle.ops.errors import InputError
from scripts.readme_tables import KINDS, MARKED, PAGES, ROOT, rendered


def test_the_pages_tables_are_those_of_their_runs() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {found["kind"] for page in pages for found in MARKED.finditer(page)} == set(KINDS)
    assert [rendered(page) for page in pages] == pages, "run python -m scripts.readme_tables"


def test_every_run_is_in_the_list() -> None:
    """One folder, one line."""
    folders = [path for path in (ROOT / "results").iterdir() if path.is_dir()]
    assert folders
    listed = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({folder.name}/README.md)" in listed for folder in folders)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "lowest": median - 0.5, "highest": median + 0.5}


def test_a_table_of_peers(tmp_path: Path) -> None:
    """Of a peer's forms the fastest counts, and a peer that was left out is a dash."""
    ours = {"checkpoint": "S", "engine": "peagle", "decode_tok_per_s": spread(1424.6), "v": {"4": spread(1.55)}}
    forms = {"transformers-fp32": 18.4, "transformers-bf16": 25.0}
    peers = [{"checkpoint": "S", "engine": name, "ours_over_peer_decode": spread(x)} for name, x in forms.items()]
    checkpoints = [{"name": "S", "parameters": 11104704}]
    run = {"config": {"widths": [1, 4]}, "checkpoints": checkpoints, "rows": [ours, *peers]}
    (tmp_path / "results/run").mkdir(parents=True)
    (tmp_path / "results/run/run.json").write_text(json.dumps(run))
    text = "before\n<!-- peers results/run -->\nstale\n<!-- end of peers -->\nbehind\n"
    made = rendered(text, tmp_path)
    assert made.splitlines()[2] == (
        "| model | plain decoding | over llama.cpp | over transformers | cost of verifying 4 rows |"
    )
    assert made.splitlines()[4] == "| S, 11 M parameters | 1425 tok/s | - | 18 (18..19) | 1.55 |"
    assert made.splitlines()[-1] == "behind"
    assert rendered(made, tmp_path) == made


def test_a_table_of_speedups_has_a_column_for_each_drafter(tmp_path: Path) -> None:
    """Of the first setting alone; what was not run is a dash."""

    def row(k: int, drafter: str, gained: float, raw: bool = False) -> dict[str, object]:
        setting = {"prompts": "demo", "raw": raw, "temperature": 0.0}
        figures = {name: {"value": gained, "low": None, "high": None} for name in ("speedup", "acceptance_length")}
        counted = {"num_plain_steps": 0, "num_spec_steps": 7, "num_slower": 1}
        return {**setting, "k": k, "label": f"{k}, {drafter}" if k else "0", **figures, **counted}

    rows = [
        row(0, "", 1),
        row(3, "demo", 1.5),
        row(3, "ngram", 1.25),
        row(5, "demo", 1.75),
        row(3, "demo", 9, raw=True),
    ]
    (tmp_path / "results/run").mkdir(parents=True)
    (tmp_path / "results/run/run.json").write_text(json.dumps({"rows": rows}))
    lines = rendered("<!-- speedup results/run -->\n<!-- end of speedup -->\n", tmp_path).splitlines()
    assert lines[1].startswith("| K | demo: ")
    assert "| ngram: " in lines[1]
    assert "| 3 | 1.50, 1 | 1.50 | 1.25, 1 | 1.25 |" in lines
    assert "| 5 | 1.75, 1 | 1.75 | - | - |" in lines
    assert "9.00" not in "".join(lines)


@pytest.mark.parametrize(("kind", "says"), [("peers", "cannot be read"), ("sales", "a table of kind 'sales'")])
def test_what_cannot_be_made_is_one_line(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        rendered(f"<!-- {kind} results/none -->\n<!-- end of {kind} -->", tmp_path)
