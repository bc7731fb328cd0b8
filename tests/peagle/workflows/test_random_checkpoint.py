"""Random checkpoints: equal seeds give equal bytes, and the model stays finite."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.cli import main
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint
from target.load import load_target
from target.model import forward
from tests.support.checkpoints import contents


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["random", "tiny", str(tmp_path / name)]) == 0
    write_random_checkpoint(tmp_path / "three", SIZES["tiny"], seed=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    (_, first), (_, other) = (contents(tmp_path / name) for name in ("one", "three"))
    assert not [name for name, value in first.items() if np.array_equal(value, other[name])], "every tensor is drawn"
    quantised = [name for name, value in first.items() if value.dtype == np.uint8]
    assert quantised == [name for name in first if name.endswith(("_blocks", "_scales"))]
    assert {value.dtype for name, value in first.items() if name not in quantised} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("options", [[], ["--unquantized"]])
def test_a_checkpoint_is_a_model_whose_logits_are_finite(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow = dataclasses.replace(SIZES["tiny"], layer_types=SIZES["tiny"].layer_types[:2])  # compiles sooner
    monkeypatch.setitem(SIZES, "tiny", shallow)
    assert main(["random", "tiny", str(tmp_path / "tiny"), *options]) == 0
    loaded = load_target(tmp_path / "tiny")
    assert loaded.mxfp4 == (not options)
    assert loaded.stop_token_ids == (loaded.config.vocab_size - 1,)
    ids = jnp.arange(24, dtype=jnp.int32)[None]
    logits, _ = jax.jit(lambda params: forward(params, loaded.config, ids, ids))(loaded.params)
    assert bool(jnp.isfinite(logits).all())
    assert 0.3 < float(logits.std()) < 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["7b", "{}/new"], "SIZE is '7b'; expected one of tiny, S, M, L, 20b, 120b"),
        (["tiny", "{}"], "expected a new folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["random", *(word.format(tmp_path) for word in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "new").exists()
