"""A shard is whole or absent, unaltered, and matches its folder."""

import json
import os
import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from drafter.train.row_batches import DocumentSource, Row, pack
from drafter.train.shards import (
    Document,
    expect_folder,
    open_folder,
    read_shard,
    read_shards,
    shard_path,
    write_shard,
)
from peagle.base.errors import InputError
from peagle.base.files import write_whole


def documents(seed: int, count: int = 5, taught: bool = False) -> list[Document]:
    rng = np.random.default_rng(seed)
    drawn = []
    for size in rng.integers(3, 9, count):
        teacher = {}
        if taught:
            teacher["aux_hidden"] = rng.normal(0, 1, (size, 6)).astype(ml_dtypes.bfloat16)
            teacher["top_ids"] = rng.integers(0, 9, (size, 2)).astype(np.int32)
            teacher["top_logits"] = rng.normal(0, 1, (size, 2)).astype(np.float32)
            teacher["log_total"] = rng.normal(0, 1, (size,)).astype(np.float32)
        drawn.append(Document(rng.integers(0, 50, size).astype(np.int32), rng.random(size) < 0.5, teacher))
    return drawn


@pytest.mark.parametrize("taught", [False, True])
def test_a_written_shard_is_read_back(tmp_path: Path, taught: bool) -> None:
    folder = tmp_path / "data"
    open_folder(folder, {"target": "x"})
    written = [*documents(0, taught=taught), *documents(1, taught=taught)]
    write_shard(folder, 0, written[:5])
    write_shard(folder, 1, written[5:])
    read = read_shards(folder)
    assert len(read) == 10
    for one, other in zip(written, read, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.trained, other.trained)
        assert sorted(one.teacher) == sorted(other.teacher)
        for name in one.teacher:
            assert one.teacher[name].dtype == other.teacher[name].dtype
            np.testing.assert_array_equal(one.teacher[name], other.teacher[name])


def test_a_cut_and_an_altered_shard_are_named(tmp_path: Path) -> None:
    open_folder(tmp_path / "data", {})
    path = shard_path(tmp_path / "data", 0)
    write_shard(tmp_path / "data", 0, documents(0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(InputError, match=r"shard_00000\.safetensors is not a whole shard"):
        read_shard(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"shard_00000\.safetensors is corrupt"):
        read_shard(path)


def test_a_shard_that_cannot_be_written_is_absent(tmp_path: Path) -> None:
    open_folder(tmp_path / "data", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(tmp_path / "data", 0, documents(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path / "data")) == ["manifest.json"]


def test_an_unfinished_folder_is_refused(tmp_path: Path) -> None:
    open_folder(tmp_path / "data", {"num_prompts": 5, "shard_prompts": 2})
    write_shard(tmp_path / "data", 0, documents(0))
    with pytest.raises(InputError, match="holds 1 of 3 shards; run peagle data to its end"):
        read_shards(tmp_path / "data")


def test_the_remains_of_a_killed_write_do_not_count_as_files(tmp_path: Path) -> None:
    names: list[str] = []
    write_whole(tmp_path / "any", lambda temporary: names.append(temporary.name))
    (tmp_path / "any").rename(tmp_path / names[0])
    expect_folder(tmp_path, {"seed": 1})


def test_a_folder_continues_with_the_same_settings_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    open_folder(folder, {"seed": 3, "target": "x"})
    open_folder(folder, {"seed": 1, "target": "x"})  # no shard was made with the others
    write_shard(folder, 0, documents(0))
    open_folder(folder, {"seed": 1, "target": "y"})
    with pytest.raises(InputError, match=r"was made with --seed 1 \(now 2\); expected the same"):
        open_folder(folder, {"seed": 2, "target": "x"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds files, but no manifest\.json"):
        open_folder(tmp_path / "other", {})


def test_other_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_shards(tmp_path)
    open_folder(tmp_path / "data", {})
    with pytest.raises(InputError, match="holds no shards"):
        read_shards(tmp_path / "data")
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({"schema": 9}))
    with pytest.raises(InputError, match="schema 9; this version reads 2"):
        read_shards(tmp_path / "data")


def test_rows_hold_whole_documents_and_every_one_of_them() -> None:
    texts = documents(3, count=40)
    rows = pack(texts, 16)
    assert all(sum(len(document.token_ids) for document in row.documents) <= 16 for row in rows)
    assert sorted(id(document) for row in rows for document in row.documents) == sorted(map(id, texts))
    with pytest.raises(InputError, match="longer than the 6 tokens of a row"):
        pack(texts, 6)


def test_each_document_of_a_row_is_a_segment() -> None:
    first, second = documents(4, count=2, taught=True)
    arrays = Row((first, second)).arrays(20)
    a, b = len(first.token_ids), len(second.token_ids)
    assert arrays["segment_ids"].tolist() == [1] * a + [2] * b + [0] * (20 - a - b)
    assert arrays["positions"].tolist() == [*range(a), *range(b), *[0] * (20 - a - b)]
    np.testing.assert_array_equal(arrays["token_ids"][a : a + b], second.token_ids)
    np.testing.assert_array_equal(arrays["trained"][:a], first.trained)
    assert arrays["aux_hidden"].shape == (20, 6)
    np.testing.assert_array_equal(arrays["top_ids"][a : a + b], second.teacher["top_ids"])


def test_every_row_comes_once_before_any_comes_twice() -> None:
    rows = [Row((document,)) for document in documents(5, count=7)]
    source = DocumentSource(rows, 1)
    first, second = ([id(source.at(number, 0)) for number in range(start, start + 7)] for start in (0, 7))
    assert sorted(first) == sorted(second) == sorted(map(id, rows))
    assert first != second
    assert first == [id(source.at(number, 0)) for number in range(7)]
