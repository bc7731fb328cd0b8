"""Tokens are counted in runs and in shards; what holds none is refused in a line."""

import json
from pathlib import Path

import numpy as np
import pytest

from drafter.train.shards import Document, open_folder, write_shard
from peagle.cli import main


def test_tokens_are_counted_in_runs_and_in_packed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"requests": [{"output_ids": [5, 5, 2]}, {"output_ids": [2, 5]}]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    open_folder(tmp_path / "data", {})
    write_shard(tmp_path / "data", 0, [Document(np.array([9, 2, 2, 7]), np.array([False, True, True, False]))])
    files = [tmp_path / "run.json", tmp_path / "data" / "shard_00000.safetensors"]
    out = tmp_path / "out.json"
    assert main(["frequent-tokens", *map(str, files), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == [2, 5]
    assert "2 tokens; of 7 tokens counted, the first 1 are 57.1%" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"requests": [{}]}', '{"requests": []}'])
def test_a_file_without_answers_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert main(["frequent-tokens", str(tmp_path / "bad.json"), "--out", str(tmp_path / "out.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected" in line
    assert not (tmp_path / "out.json").exists()
