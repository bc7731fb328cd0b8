"""Cutting a model over ranks, on the host: the parts put together again are the whole, and loading reads the parts."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from peagle.base.checkpoint import Cut, read_checkpoint
from peagle.base.errors import InputError
from peagle.workflows.random_checkpoint import SIZES, geometry, random_tensors
from target.config import TargetConfig
from target.dialects import tensor_kinds
from target.load import load_target, weight_bytes, write_target
from target.shard import TENSOR_KINDS, ModelShard, Rank, TensorKind, check_ranks, lane_copies

# dimensions pairwise distinct; five blocks of expert width, which neither 2, 4 nor 8 ranks share evenly
CONFIG = geometry(
    hidden=96, layers=2, heads=(8, 2), head_dim=12, vocab=101, experts=(4, 3), expert_width=160, window=11
)
MESHES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (2, 4)]


def parts_of(config: TargetConfig, tp: int, ep: int, mxfp4: bool = True) -> list[ModelShard]:
    return [ModelShard(config, Rank(rank, tp, ep), mxfp4) for rank in range(tp * ep)]


def split(kind: TensorKind, tensor: np.ndarray, part: ModelShard) -> np.ndarray:
    """Cut a whole tensor to a rank's part."""
    if not part.has(kind):
        return np.zeros(part.shape(kind, tensor.shape), tensor.dtype)
    for axis, cut in enumerate(part.cuts(kind)):
        if cut.width is not None:
            tensor = np.take(tensor, cut.indices(tensor.shape[axis]), axis=axis)
            missing = [(0, cut.width - tensor.shape[axis] if other == axis else 0) for other in range(tensor.ndim)]
            tensor = np.pad(tensor, missing)
    return tensor


def unsplit(
    kind: TensorKind, tensors: Sequence[np.ndarray], parts: Sequence[ModelShard], shape: tuple[int, ...]
) -> np.ndarray:
    """Put all ranks' parts together."""
    whole = np.zeros(shape, tensors[0].dtype)
    for tensor, part in zip(tensors, parts, strict=True):
        if not part.has(kind):
            continue
        cuts = [*part.cuts(kind), *[Cut()] * (len(shape) - len(kind.axes))]
        indices = [cut.indices(size) for cut, size in zip(cuts, shape, strict=True)]
        whole[np.ix_(*indices)] = tensor[tuple(slice(0, len(index)) for index in indices)]
    return whole


@pytest.mark.parametrize(("tp", "ep"), MESHES)
@pytest.mark.parametrize("mxfp4", [True, False])
def test_the_parts_together_are_the_whole(mxfp4: bool, tp: int, ep: int) -> None:
    parts = parts_of(CONFIG, tp, ep, mxfp4)
    leaf_names = set()
    for name, tensor in random_tensors(CONFIG, mxfp4, 0):
        leaf, shape = tensor_kinds(CONFIG, mxfp4)[name]
        leaf_names.add(leaf.name)
        pieces = [split(leaf, tensor, part) for part in parts]
        for piece, part in zip(pieces, parts, strict=True):
            assert piece.shape == part.shape(leaf, shape)
        assert unsplit(leaf, pieces, parts, shape).tobytes() == tensor.tobytes(), name
    assert len(leaf_names) > 10


def test_qkv_side_by_side_is_cut_by_heads() -> None:
    """As openai's own files have it: each rank's queries, then its keys, then its values."""
    leaf, head_dim = TENSOR_KINDS["qkv"], CONFIG.head_dim
    heads = np.arange(8 + 2 + 2).repeat(head_dim)
    for tp, copies, expected in ((2, 1, [0, 1, 2, 3, 8, 10]), (8, 1, [0, 8, 10]), (4, 2, [0, 1, 8, 8, 10, 10])):
        parts = [ModelShard(CONFIG, Rank(rank, tp, 1, copies), True) for rank in range(tp)]
        pieces = [split(leaf, heads, part) for part in parts]
        assert pieces[0][::head_dim].tolist() == expected
        np.testing.assert_array_equal(unsplit(leaf, pieces, parts, heads.shape), heads)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    at: Path = tmp_path_factory.mktemp("shard")
    for mxfp4 in (True, False):
        write_target(at / str(mxfp4), CONFIG, random_tensors(CONFIG, mxfp4, 1), mxfp4=mxfp4)
    return {mxfp4: at / str(mxfp4) for mxfp4 in (True, False)}


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("mxfp4", [True, False])
def test_a_rank_reads_its_own_bytes_alone(directories: dict[bool, Path], mxfp4: bool, tp: int, ep: int) -> None:
    whole, leaves = read_checkpoint(directories[mxfp4]), tensor_kinds(CONFIG, mxfp4)
    for part in parts_of(CONFIG, tp, ep, mxfp4):
        checkpoint, read = read_checkpoint(directories[mxfp4]), [0]
        checkpoint.watch(lambda done, _, read=read: read.__setitem__(0, done))
        needed = 0
        for name, (leaf, shape) in leaves.items():
            expected = split(leaf, whole.take(name), part)
            if not part.has(leaf):
                continue
            cuts = part.cuts(leaf)
            np.testing.assert_array_equal(checkpoint.take(name, shape, cuts), expected, name)
            if len(shape) > 2:
                np.testing.assert_array_equal(np.stack(list(checkpoint.parts(name, shape, cuts))), expected, name)
            needed += part.read_size(leaf, shape) * expected.itemsize * (2 if len(shape) > 2 else 1)
        assert read[0] == needed


def test_a_rank_on_a_tpu_holds_its_kv_head_as_often_as_fills_the_lanes() -> None:
    """Eight heads of 64: two of a rank fill 128 lanes, and so does one that is there twice."""
    config = SIZES["120b"]
    assert [lane_copies(config, ranks, "tpu") for ranks in (1, 4, 8, 16, 64)] == [1, 1, 2, 2, 1]
    assert lane_copies(config, 8, None) == 1
    assert ModelShard(config, Rank(0, 8, 1, 2), True).config.num_kv_heads == 2


def test_bytes_are_foretold(directories: dict[bool, Path]) -> None:
    for rank in (Rank(0, 2, 1), Rank(7, 8, 1), Rank(1, 2, 2)):
        loaded = load_target(directories[True], experts="packed", implementation="xla", rank=rank)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
        assert held == weight_bytes(directories[True], experts="packed", implementation="xla", rank=rank)


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        (3, 1, "--mesh asks for tp=3, but the target has 8 heads and 2 kv heads; expected tp=1, 2, 4 or 8"),
        (16, 1, "tp=16, but the target has 8 heads"),
        (4, 4, "tp x ep=16, but the target has 8 heads"),
        (1, 3, "ep=3, but the target has 4 experts; expected ep=1, 2 or 4"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(tp: int, ep: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_ranks(CONFIG, tp, ep)
    assert caught.value.field == "mesh"
