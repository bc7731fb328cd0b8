"""A directory is read whole or refused by one line; what is written comes back."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from peagle.base import checkpoint
from peagle.base.checkpoint import CONFIG, INDEX, WEIGHTS, Checkpoint, fingerprint, read_checkpoint, write_checkpoint
from peagle.base.errors import InputError
from tests.support.checkpoints import refusal

CONFIG_VALUE = {"model_type": "example", "width": 3}


def tensors() -> dict[str, np.ndarray]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "float": values,
        "brain": values.astype(ml_dtypes.bfloat16),
        "bytes": np.arange(5, dtype=np.uint8),
        "transposed": values.T,
        "scalar": np.float32(7).reshape(()),
        "empty": np.zeros((0, 2), np.float32),
    }


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "single", CONFIG_VALUE, tensors())
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "sharded", CONFIG_VALUE, tensors(), shard_bytes=60)
    return tmp_path / "sharded"


def edit_index(directory: Path, **changes: str | None) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= {name: shard for name, shard in changes.items() if shard is not None}
    for name in [name for name, shard in changes.items() if shard is None]:
        del index["weight_map"][name]
    path.write_text(json.dumps(index))


def shard_of(directory: Path, name: str) -> str:
    return json.loads((directory / INDEX).read_text())["weight_map"][name]


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_saved_tensors_are_read_back(layout: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(layout)
    assert len(list(directory.glob("*.safetensors"))) == (1 if layout == "single" else 3)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.config == CONFIG_VALUE
    assert checkpoint.names == tensors().keys()
    for name, value in tensors().items():
        assert checkpoint.has(name)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (value.shape, value.dtype)
        back = checkpoint.take(name, value.shape)
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back, value)
    checkpoint.finish()


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_prefix_that_some_names_have_is_left_out(tmp_path: Path, layout: str) -> None:
    values = {f"model.{name}" if index else name: value for index, (name, value) in enumerate(tensors().items())}
    write_checkpoint(tmp_path / "prefixed", CONFIG_VALUE, values, None if layout == "single" else 1)
    checkpoint = read_checkpoint(tmp_path / "prefixed").without_prefix("model.")
    assert checkpoint.names == tensors().keys()
    for name, value in tensors().items():
        np.testing.assert_array_equal(checkpoint.take(name, value.shape), value)
    checkpoint.finish()
    assert checkpoint.without_prefix("model.") is checkpoint
    write_checkpoint(tmp_path / "both", {}, {"model.a": np.zeros(2), "a": np.ones(2)})  # two would share a name
    assert read_checkpoint(tmp_path / "both").without_prefix("model.").names == {"model.a", "a"}


def test_unused_tensors_are_named(single: Path) -> None:
    checkpoint = read_checkpoint(single)
    for name in checkpoint.names - {"brain", "bytes"}:
        checkpoint.take(name)
    checkpoint.ignore("bytes")
    with pytest.raises(InputError, match=r"tensors that this model has no place for: brain"):
        checkpoint.finish()
    checkpoint.take("brain")
    checkpoint.finish()


@pytest.mark.parametrize(
    ("take", "says"),
    [
        (lambda opened: opened.take("float", (4, 3)), r"float has shape \[3, 4\], expected \[4, 3\]"),
        (lambda opened: next(opened.parts("brain", (4, 3))), r"brain has shape \[3, 4\], expected \[4, 3\]"),
        (lambda opened: opened.take("absent"), "tensor absent is missing"),
        (lambda opened: opened.shape("absent"), "tensor absent is missing"),
        (lambda opened: opened.dtype("absent"), "tensor absent is missing"),
        (lambda opened: next(opened.parts("absent", (4, 3))), "missing"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    single: Path, take: Callable[[Checkpoint], object], says: str
) -> None:
    opened = read_checkpoint(single)
    assert not opened.has("absent")
    with pytest.raises(InputError, match=says):
        take(opened)


def test_expectations_are_checked_before_anything_is_read(single: Path) -> None:
    checkpoint = read_checkpoint(single)
    shapes = {name: value.shape for name, value in tensors().items()}
    checkpoint.expect(shapes)
    with pytest.raises(InputError, match="missing: more"):
        checkpoint.expect({**shapes, "more": (1,)})
    with pytest.raises(InputError, match="no place for: brain"):
        checkpoint.expect({name: shape for name, shape in shapes.items() if name != "brain"})
    with pytest.raises(InputError, match=r"bytes has shape \[5\], expected \[6\]"):
        checkpoint.expect({**shapes, "bytes": (6,)})
    with pytest.raises(InputError, match="no place for"):  # expect() consumed nothing
        checkpoint.finish()


def test_a_dtype_that_numpy_lacks_is_named(single: Path) -> None:
    save_file({"small": np.zeros(4, ml_dtypes.float8_e4m3fn)}, single / WEIGHTS)
    with pytest.raises(InputError, match="small has dtype F8_E4M3"):
        read_checkpoint(single).take("small")


# What is refused


def content(name: str, value: bytes) -> Callable[[Path], object]:
    """Write a file."""
    return lambda directory: (directory / name).write_bytes(value)


def cut(name: str, kept: int) -> Callable[[Path], object]:
    """Keep the first bytes of a file."""
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:kept])


def overwrite(directory: Path) -> None:
    data = bytearray((directory / WEIGHTS).read_bytes())
    data[8:40] = b"\xff" * 32
    (directory / WEIGHTS).write_bytes(data)


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


OF_BRAIN = "model-00002-of-00003.safetensors"  # the shard that holds it


@pytest.mark.parametrize(
    ("layout", "spoil", "says"),
    [
        ("single", without(CONFIG), "has no config.json"),
        *(("single", content(CONFIG, value), "is not valid JSON") for value in (b"{", b"\xff\xfe", b"", b"[" * 10**5)),
        ("single", content(CONFIG, b"[1]"), "expected an object"),
        ("single", without(WEIGHTS), "has no weights"),
        *(("single", cut(WEIGHTS, kept), "truncated or corrupt") for kept in (0, 4, 8, 100, -1)),
        ("single", overwrite, "truncated or corrupt"),
        ("sharded", cut(OF_BRAIN, -1), f"{OF_BRAIN}.* is truncated or corrupt"),
        ("sharded", without(OF_BRAIN), f"{OF_BRAIN}.*no such file"),
        ("sharded", lambda directory: edit_index(directory, ghost=OF_BRAIN), f"(?=.*ghost).*{OF_BRAIN}"),
        ("sharded", lambda directory: edit_index(directory, brain=None), "brain"),
        *(
            ("sharded", content(INDEX, value), INDEX)
            for value in (b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"3")
        ),
    ],
)  # fmt: skip
def test_unreadable_checkpoint_is_refused_in_one_line(
    layout: str, spoil: Callable[[Path], object], says: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(layout)
    spoil(directory)
    assert re.search(says, refusal(read_checkpoint, directory))


def test_path_that_is_no_directory_is_refused_in_one_line(single: Path) -> None:
    for path, says in ((single.parent / "absent", "does not exist"), (single / WEIGHTS, "is not a directory")):
        assert says in refusal(read_checkpoint, path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_read(single: Path, name: str) -> None:
    (single / WEIGHTS).rename(single / name)
    assert re.search(f"{name}.*convert", refusal(read_checkpoint, single))


@pytest.mark.parametrize("path", ["../outside.safetensors", "sub/in.safetensors", "{absolute}", "..", ".", "", "a\0"])
def test_an_index_names_files_of_its_directory_only(sharded: Path, path: str) -> None:
    target = sharded.parent / "outside.safetensors"
    (sharded / shard_of(sharded, "brain")).rename(target)
    (sharded / "sub").mkdir()
    (sharded / "sub" / "in.safetensors").symlink_to(target)
    shard = path.format(absolute=target)
    held = [name for name in tensors() if shard_of(sharded, name) == shard_of(sharded, "brain")]
    edit_index(sharded, **dict.fromkeys(held, shard))
    message = refusal(read_checkpoint, sharded)
    assert f"names the shard {shard!r}" in message
    assert shard in ("", "..") or "expected the name of a file in its directory" in message


@pytest.mark.parametrize("files", ["single", "sharded"])
def test_links_of_the_owner_are_followed(files: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    linked, elsewhere = request.getfixturevalue(files), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in list(linked.iterdir()):
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    np.testing.assert_array_equal(read_checkpoint(linked).take("float"), tensors()["float"])
    next(elsewhere.glob("*.safetensors")).unlink()
    assert "no such file" in refusal(read_checkpoint, linked) or "has no weights" in refusal(read_checkpoint, linked)


# What is written


def test_writing_over_a_checkpoint_replaces_its_files_and_keeps_unrelated_ones(sharded: Path) -> None:
    (sharded / "generation_config.json").write_text("{}")
    (sharded / "notes.txt").write_text("mine")
    write_checkpoint(sharded, {"new": True}, {"only": np.ones(2, np.float32)}, extra_files={"card.md": b"card"})
    assert sorted(os.listdir(sharded)) == sorted([CONFIG, WEIGHTS, "card.md", "notes.txt"])
    checkpoint = read_checkpoint(sharded)
    assert checkpoint.config == {"new": True}
    assert checkpoint.names == {"only"}


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_write_leaves_the_old_checkpoint(single: Path, exists: bool) -> None:
    directory = single if exists else single.parent / "new"

    def broken():
        yield "first", np.ones(3, np.float32)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_checkpoint(directory, {}, broken(), shard_bytes=1)
    assert directory.exists() == exists
    assert sorted(os.listdir(single.parent)) == ["single"]
    assert read_checkpoint(single).config == CONFIG_VALUE
    assert sorted(os.listdir(single)) == [CONFIG, WEIGHTS]


def test_writing_to_a_file_is_refused(single: Path) -> None:
    with pytest.raises(InputError, match="is a file"):
        write_checkpoint(single / CONFIG, {}, {})


def test_tensors_are_made_one_by_one(tmp_path: Path) -> None:
    """A shard is on disk before the tensor after the next is made: never two shards in memory."""
    shards: list[int] = []

    def lazily():
        for number in range(4):
            shards.append(len([p for p in tmp_path.rglob("shard-*") if p.is_file()]))
            yield f"t{number}", np.full(4, number, np.float32)

    write_checkpoint(tmp_path / "lazy", {}, lazily(), shard_bytes=16)
    assert shards == [0, 0, 1, 2]
    assert read_checkpoint(tmp_path / "lazy").take("t3").tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("piece_bytes", [1, 17, 1 << 24])
def test_tensors_are_read_in_pieces_and_whole(single: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", piece_bytes)
    opened = read_checkpoint(single)
    calls: list[tuple[int, int]] = []
    opened.watch(lambda *numbers: calls.append(numbers))
    for name, value in tensors().items():
        taken = opened.take(name, value.shape)
        assert taken.dtype == value.dtype
        np.testing.assert_array_equal(taken, value)
    total = sum(value.nbytes for value in tensors().values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    opened.finish()


def test_checkpoints_have_different_fingerprints(single: Path, sharded: Path) -> None:
    first = fingerprint(single)
    assert first == fingerprint(single) != fingerprint(sharded)
    config = (single / CONFIG).read_text()
    (single / CONFIG).write_text(config + " ")
    assert fingerprint(single) != first
    (single / CONFIG).write_text(config)
    assert fingerprint(single) == first
    weights = bytearray((single / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (single / WEIGHTS).write_bytes(bytes(weights))
    assert fingerprint(single) != first


def test_parts_are_read_lazily(sharded: Path) -> None:
    opened = read_checkpoint(sharded)
    calls: list[int] = []
    opened.watch(lambda done, _: calls.append(done))
    parts = opened.parts("brain", (3, 4))
    assert calls == []
    for index, part in enumerate(parts):
        assert calls == [8 * (row + 1) for row in range(index + 1)]
        np.testing.assert_array_equal(part, tensors()["brain"][index])
    for name in opened.names - {"brain"}:
        opened.ignore(name)
    opened.finish()
