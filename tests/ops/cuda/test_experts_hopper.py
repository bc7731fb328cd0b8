"""The kernels of experts on Hopper GPUs (experts_hopper.cu): their layout of weights; their own source on a CPU.

The tests' driver runs it. scripts/gpu_check and the kernels' own check cover what needs the GPU: its tensor cores,
copies and barriers, and speed."""

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.ops import cuda
from peagle.ops.cuda import calls, graphs, nvrtc
from peagle.ops.cuda.pack import UNIT_WORDS, UNITS_A_GROUP, pack
from peagle.ops.cuda.self_test import random_halves
from peagle.ops.expert_matmul import PackedExperts, TiledExperts, expert_block, tiled_experts
from peagle.ops.expert_matmul.cuda import tiled as compute_tiled
from peagle.ops.mxfp4 import dequantize
from peagle.ops.norm import Norm
from tests.ops.experts import Expert, mixture

pytestmark = pytest.mark.compile

WIDTH, EXPERTS, TOP_K, EPSILON, LIMIT = calls.TILED_WIDTH, 8, calls.TILED_TOP_K, 1e-5, 0.9


def bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def test_the_layout_is_the_one_that_the_kernels_read() -> None:
    """As experts_hopper.cu says: every code and scale, from its place in the words, gives MXFP4's value exactly."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 384, 192 // 32, 16), np.uint8)
    scales = rng.integers(0, 129, blocks.shape[:-1], np.uint8)
    words = np.asarray(pack(jnp.asarray(blocks), jnp.asarray(scales)))
    assert words.shape == (2, 2, 3, UNITS_A_GROUP, UNIT_WORDS)
    assert words.nbytes == blocks.nbytes + scales.nbytes
    decoded, mask = np.zeros((2, 384, 192)), 0x81C081C0
    for expert, group, chunk, unit in np.ndindex(words.shape[:-1]):
        of_unit = words[expert, group, chunk, unit].tolist()
        for thread, step in np.ndindex(128, 4):
            warp, g, q = thread // 32, thread % 32 // 4, thread % 4
            word, exponents = of_unit[4 * thread + step], of_unit[512 + 8 * warp + g]
            turned = (word << 6 | word >> 26) & 0xFFFFFFFF
            values = word & mask, word << 3 & mask, turned & mask, (turned & 0x1B001B) * 0x1084 & mask
            for i, half in np.ndindex(4, 2):
                exponent = exponents >> 16 * (step // 2) + 8 * (i % 2) & 0xFF
                output = 192 * group + 64 * unit + 16 * warp + 2 * g + i % 2
                column = 64 * chunk + 16 * step + 2 * q + half + 8 * (i // 2)
                # codes are 2^-126 too small, and a scale + 126 is a bfloat16's exponent
                decoded[expert, output, column] = bfloat16(values[i] >> 16 * half & 0xFFFF) * bfloat16(exponent << 7)
    np.testing.assert_array_equal(decoded, dequantize(blocks, scales).astype(np.float64))


def random_experts(seed: int) -> PackedExperts:
    rng = np.random.default_rng(seed)

    def matrix(outputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, WIDTH // 32, 16), np.uint8)
        scales = rng.integers(117, 121, blocks.shape[:-1], np.uint8)
        bias = rng.standard_normal((EXPERTS, outputs), np.float32).astype(jnp.bfloat16)
        return jnp.asarray(blocks), jnp.asarray(scales), jnp.asarray(bias)

    return PackedExperts(*matrix(2 * WIDTH), *matrix(WIDTH))


@functools.cache
def packed_experts() -> PackedExperts:
    return random_experts(0)


@pytest.fixture
def packed() -> PackedExperts:
    return packed_experts()


@functools.cache
def laid_out() -> TiledExperts:
    """Lay the experts out once; `hopper` must be open."""
    experts = tiled_experts(packed_experts(), EXPERTS, TOP_K)
    assert isinstance(experts, TiledExperts)
    return experts


@pytest.fixture
def tiled(hopper: None) -> TiledExperts:  # noqa: ARG001
    return laid_out()


class Block:
    """The second half of a layer: its inputs and its definition in float64."""

    def __init__(self, packed: PackedExperts, rows: int, active: int, favoured: int = 0) -> None:
        """active: rows that are; favoured: so many experts are all that is selected."""
        rng = np.random.default_rng(rows)

        def halves(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

        self.x, self.norms, self.router = halves(rows, WIDTH), halves(2, WIDTH), halves(WIDTH, EXPERTS)
        self.bias = (np.where(np.arange(EXPERTS) < favoured, 1000.0, 0.0) + halves(EXPERTS)).astype(jnp.bfloat16)
        self.positions = np.full((rows,), -1, np.int32)
        self.positions[rng.choice(rows, active, replace=False)] = np.arange(active)
        self._packed = packed

    def of(self, experts: TiledExperts, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute the first `count` rows in the kernels."""
        norm, next_norm = (Norm(jnp.asarray(weight), EPSILON) for weight in self.norms)
        operands = jnp.asarray(self.x[:count]), norm, jnp.asarray(self.router), jnp.asarray(self.bias), experts
        y, normalised = expert_block(*operands, TOP_K, LIMIT, jnp.asarray(self.positions[:count]), next_norm=next_norm)
        assert normalised is not None
        return np.asarray(y, np.float64), np.asarray(normalised, np.float64)

    def part_of(self, experts: TiledExperts, count: int, first: int, last: int) -> np.ndarray:
        """Compute some experts' part of the sum of the first `count` rows in the kernels."""
        here = jax.tree.map(lambda leaf: leaf[first:last], experts)
        routing = Norm(jnp.asarray(self.norms[0]), EPSILON), jnp.asarray(self.router), jnp.asarray(self.bias)
        positions, number = jnp.asarray(self.positions[:count]), jnp.int32(first)
        y, _ = compute_tiled(jnp.asarray(self.x[:count]), *routing, here, LIMIT, positions, first=number)
        assert y.dtype == jnp.float32
        return np.asarray(y)

    def by_definition(self, row: int) -> np.ndarray:
        x = self.x[row].astype(np.float64)
        if self.positions[row] < 0:
            return x
        normalised = x / np.sqrt(np.mean(x * x) + EPSILON) * self.norms[0].astype(np.float64)
        logits = normalised @ self.router.astype(np.float64) + self.bias.astype(np.float64)
        rounded = normalised.astype(jnp.bfloat16).astype(np.float64)

        def expert(number: int) -> Expert:
            p = jax.tree.map(lambda leaf: np.asarray(leaf[number]), self._packed)
            gate_up, down = dequantize(p.gate_up_blocks, p.gate_up_scales), dequantize(p.down_blocks, p.down_scales)
            return gate_up, p.gate_up_bias.astype(np.float64), down, p.down_bias.astype(np.float64)

        return x + mixture(rounded[None], logits[None], TOP_K, LIMIT, expert, jnp.bfloat16)[0]


def expect_definition(block: Block, output: np.ndarray, normalised: np.ndarray, rows: Iterable[int]) -> None:
    for row in rows:
        expected = block.by_definition(row)
        # the result is bfloat16, and a hidden value may round the other way
        np.testing.assert_allclose(output[row], expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max())
    scaled = output / np.sqrt(np.mean(output * output, axis=1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(normalised, scaled * block.norms[1].astype(np.float64), rtol=2**-7, atol=1e-6)


def test_the_definition(packed: PackedExperts, tiled: TiledExperts) -> None:
    """Of many rows, sorted by one block; a row's bits do not depend on the others, and NaN stays in its row."""
    block = Block(packed, 70, 5, 4)
    first, second, *_ = np.flatnonzero(block.positions >= 0).tolist()
    output, normalised = block.of(tiled, 70)
    expect_definition(block, output, normalised, (first, np.flatnonzero(block.positions < 0)[0]))
    for part in (block.x, block.positions):
        part[[0, first]], part[[1, second]] = part[[first, 0]], part[[second, 1]]
    output[[0, first]], output[[1, second]] = output[[first, 0]], output[[second, 1]]
    alone, of_next = block.of(tiled, 1)
    np.testing.assert_array_equal(alone[0], output[0])
    expect_definition(block, alone, of_next, ())
    block.x[1, 7] = np.nan
    for count in (2, 20):  # the kernel of one row's experts, and that of up to 48 rows an expert
        some, _ = block.of(tiled, count)
        assert np.isnan(some[1]).all()
        np.testing.assert_array_equal(np.delete(some, 1, axis=0), np.delete(output[:count], 1, axis=0))


def test_parts_of_the_experts_add_up_to_all(packed: PackedExperts, tiled: TiledExperts) -> None:
    """As over devices, with the many rows of one way of routing and the few of the other; bits are a row's own."""
    block, parts = Block(packed, 70, 5), ((0, 3), (3, EXPERTS))
    whole, _ = block.of(tiled, 70)
    many = [block.part_of(tiled, 70, *part) for part in parts]
    np.testing.assert_allclose(block.x.astype(np.float32) + sum(many), whole, rtol=2**-8, atol=1e-6)
    assert all(np.any(part) and not np.any(part[block.positions < 0]) for part in many)
    first = np.flatnonzero(block.positions >= 0)[0]
    for own in (block.x, block.positions):
        own[0] = own[first]
    for part, of_many in zip(parts, many, strict=True):
        np.testing.assert_array_equal(block.part_of(tiled, 1, *part)[0], of_many[first])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "active", "favoured"),
    [
        (20, 18, 0),
        (66, 60, 0),
        (200, 150, 4),  # several tiles an expert
    ],
)
def test_many_active_rows(packed: PackedExperts, tiled: TiledExperts, rows: int, active: int, favoured: int) -> None:
    block = Block(packed, rows, active, favoured)
    expect_definition(block, *block.of(tiled, rows), np.flatnonzero(block.positions >= 0)[:: active // 3].tolist())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "changed",
    [
        lambda e: e.replace(gate_up_scales=e.gate_up_scales.at[0, 0, 0].set(129)),
        lambda e: e.replace(gate_up_bias=e.gate_up_bias.astype(jnp.float32)),
        lambda e: jax.tree.map(lambda leaf: leaf[:7], e),
        lambda e: e.replace(down_bias=e.down_bias[:, :64]),
    ],
    ids=["a scale without room", "float32", "seven experts", "another width"],
)
def test_other_experts_stay_as_they_are(packed: PackedExperts, changed: Callable[[Any], PackedExperts]) -> None:
    experts = changed(packed)
    assert tiled_experts(experts, experts.num_experts, TOP_K) is experts


@pytest.mark.usefixtures("hopper")
def test_a_part_of_the_experts_is_laid_out_or_refused(packed: PackedExperts) -> None:
    """All ranks need one layout, so one cannot leave its experts as they are."""
    part = jax.tree.map(lambda leaf: leaf[:3], packed)
    assert isinstance(tiled_experts(part, EXPERTS, TOP_K), TiledExperts)
    part = part.replace(down_scales=part.down_scales.at[0, 0, 0].set(129))
    with pytest.raises(InputError, match=r"scale of 129; expected up to 128 .* set PEAGLE_KERNELS=xla"):
        tiled_experts(part, EXPERTS, TOP_K)


def test_without_a_hopper_gpu_experts_stay_as_they_are(packed: PackedExperts) -> None:
    assert tiled_experts(packed, EXPERTS, TOP_K) is packed


def test_xla_does_not_take_the_layout(packed: PackedExperts, tiled: TiledExperts) -> None:
    block = Block(packed, 1, 1)
    operands = jnp.asarray(block.x), Norm(jnp.asarray(block.norms[0]), EPSILON), jnp.asarray(block.router)
    with pytest.raises(InputError, match="laid out for the CUDA kernels; load them for 'xla'"):
        expert_block(*operands, jnp.asarray(block.bias), tiled, TOP_K, LIMIT, implementation="xla")


@pytest.mark.usefixtures("hopper")
def test_shapes_that_do_not_fit_are_refused(packed: PackedExperts, tiled: TiledExperts) -> None:
    block = Block(packed, 1, 1)
    cut = tiled.replace(gate_up=tiled.gate_up[:, :, 1:], down=tiled.down[:, :, 1:])  # type: ignore[attr-defined]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gate_up \[8, 30, 44, 3, 544\] is not U32"):
        block.of(cut, 1)


@pytest.mark.usefixtures("hopper")
def test_graphs_are_tried_with_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    operands = graphs._operands()
    x = jnp.asarray(random_halves(np.random.default_rng(0), graphs.ROWS, WIDTH))
    program, turns = jax.jit(graphs._program), np.int32(2)
    assert "peagle_cuda_expert_block" in program.lower(x, operands, turns).as_text()
    result = np.asarray(program(x, operands, turns), np.float32)
    without = np.asarray(program(x, {"matrix": operands["matrix"]}, turns), np.float32)
    assert np.isfinite(result).all()
    assert not np.array_equal(result, without)


@pytest.mark.slow
def test_the_assembler_keeps_products_asynchronous_and_operands_in_registers() -> None:
    """C7512 would say that it runs one product after the other, spills that it moves operands to memory."""
    library, program = nvrtc.library(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), nvrtc.sources(nvrtc.HOPPER), b"kernels", 0, None, None)
    options = [*nvrtc.OPTIONS, f"--gpu-architecture={nvrtc.HOPPER}".encode(), b"--ptxas-options=-v"]
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = nvrtc.text_of(library, program, "ProgramLog").decode(errors="replace")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert code == 0, log[:2000]
    assert "C75" not in log
    kernels = [part for part in log.split("Compiling entry function")[1:] if "peagle_tiles" in part]
    assert len(kernels) == 8
    assert all("0 bytes spill stores, 0 bytes spill loads" in kernel for kernel in kernels)
