"""The whole target on the native kernels: XLA's results, and a token's bits independent of its batch."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.attention import PagedCache
from peagle.ops.expert_matmul import NativeExperts
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix
from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target.load import LoadedTarget, load_target, save_target, write_target
from target.model import GptOss
from tests.support.compiling import AS_FOR_USERS
from tests.support.paging import SMALL, of_sequences, small_pages
from tests.support.walk import walk
from tests.target.test_model import CONFIG, random_params

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not native.available(), reason=native.status()[1])]

MXFP4_CONFIG = dataclasses.replace(SIZES["tiny"], layer_types=("sliding_attention", "full_attention"), sliding_window=8)
BATCH, LENGTH = 3, 57
PROMPTS = [9, 16, 4]
AUX_LAYER_IDS = (1, 0)
extend = jax.jit(GptOss.extend, compiler_options=AS_FOR_USERS)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write checkpoints in every storage format; only MXFP4's widths are multiples of 16."""
    at: Path = tmp_path_factory.mktemp("native")
    params = random_params()
    save_target(at / "float32", params, CONFIG, dtype=np.float32, mxfp4=False)
    save_target(at / "bfloat16", params, CONFIG, dtype=ml_dtypes.bfloat16, mxfp4=False)
    write_target(at / "mxfp4", MXFP4_CONFIG, random_tensors(MXFP4_CONFIG, mxfp4=True, seed=0), mxfp4=True)
    return {name: at / name for name in ("float32", "bfloat16", "mxfp4")}


FORMS: tuple[Implementation, ...] = ("native", "xla")
STORED = {  # name: directory, experts, dtype of the experts' packed matrices
    "float32": ("float32", "auto", jnp.float32),
    "bfloat16": ("bfloat16", "auto", jnp.bfloat16),
    "mxfp4 packed": ("mxfp4", "packed", jnp.uint32),
    "mxfp4 expanded": ("mxfp4", "expanded", jnp.bfloat16),
}


def load(
    directories: dict[str, Path], name: str, form: Implementation = "native", dtype: object = jnp.float32
) -> LoadedTarget:
    directory, experts, _ = STORED[name]
    return load_target(directories[directory], dtype=dtype, experts=experts, implementation=form)


def model(loaded: LoadedTarget, retain_full_kv: bool = False) -> GptOss:
    return GptOss(loaded.params, loaded.config, AUX_LAYER_IDS, retain_full_kv)


def from_on(firsts: np.ndarray, rows: int, lengths: np.ndarray | None = None) -> jax.Array:
    """Return positions [B, rows] from each sequence's first one on; -1 from its length on, if given."""
    positions = firsts[:, None] + np.arange(rows)
    if lengths is not None:
        positions = np.where(positions < lengths[:, None], positions, -1)
    return jnp.asarray(positions, jnp.int32)


def random_tokens(vocab: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


@pytest.mark.parametrize("name", STORED)
def test_every_matrix_is_packed_and_as_narrow_as_stored(directories: dict[str, Path], name: str) -> None:
    params = load(directories, name).params
    dense = jnp.float32 if name == "float32" else jnp.bfloat16
    assert params.implementation == "native"
    assert params.dtype == jnp.float32
    assert params.embedding.dtype == (jnp.float32 if name == "float32" else jnp.uint16)
    matrices = [params.lm_head]
    for layer in params.layers:
        matrices += [layer.attention.qkv, layer.attention.out, layer.moe.router]
        assert isinstance(layer.moe.experts, NativeExperts)
        for matrix in (layer.moe.experts.gate_up, layer.moe.experts.down):
            assert matrix.data.dtype == STORED[name][2]
    for matrix in matrices:
        assert isinstance(matrix, PackedMatrix)
        assert matrix.data.dtype == dense


def one_pass(
    directories: dict[str, Path], name: str, form: Implementation, dtype: object
) -> tuple[np.ndarray, np.ndarray]:
    """Compute logits and aux_hidden of all tokens in one pass over a cache, without a rollback."""
    loaded = load(directories, name, form, dtype)
    gpt_oss, tokens = model(loaded), random_tokens(loaded.config.vocab_size, BATCH, LENGTH)
    empty = gpt_oss.init_cache(BATCH, LENGTH, LENGTH)
    out, _ = extend(gpt_oss, jnp.asarray(tokens), from_on(np.zeros(BATCH, np.int64), LENGTH), empty)
    return np.asarray(out.logits, np.float32), np.asarray(out.aux_hidden, np.float32)


@pytest.mark.parametrize(
    ("name", "retained"),
    # caches do not depend on the weights' format
    [
        pytest.param("bfloat16", (False,), marks=pytest.mark.slow),
        ("mxfp4 packed", (False,)),
        pytest.param("mxfp4 expanded", (False,), marks=pytest.mark.slow),
        ("float32", (False, True)),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_every_pass_over_the_caches_agrees_with_xla(
    directories: dict[str, Path], name: str, retained: tuple[bool, ...]
) -> None:
    """Chunks of prompts, decoding and rolled-back verification, to 1e-4 of the logits' standard deviation.

    retained: with the pages behind a window.
    """
    exact = one_pass(directories, name, "xla", jnp.float32)
    loaded = load(directories, name)
    tokens = random_tokens(loaded.config.vocab_size, BATCH, LENGTH)

    def check(rows: np.ndarray, positions: np.ndarray, *ours: np.ndarray) -> None:
        for one, other in zip(ours, exact, strict=True):
            np.testing.assert_allclose(one, other[rows, positions], rtol=0, atol=1e-4 * other.std())

    for retain_full_kv in retained:
        assert min(walk(model(loaded, retain_full_kv), tokens, PROMPTS, check, decoded=4)) > LENGTH // 2


def test_bfloat16_is_nearer_to_float32_than_xlas(directories: dict[str, Path]) -> None:
    """It rounds less often. By the median token's error: if two experts nearly tie, either may be selected."""
    exact = one_pass(directories, "bfloat16", "xla", jnp.float32)
    ours, theirs = (one_pass(directories, "bfloat16", form, jnp.bfloat16) for form in FORMS)
    for one, other, right in zip(ours, theirs, exact, strict=True):
        near, far = (np.median(np.square(part - right).mean(axis=-1)) for part in (one, other))
        assert near < 0.8 * far
        assert near < 1e-3 * right.var()


# A token's bits are its own: a verify pass computes the bits of decoding one token at a time

WIDEST, STEPS = 16, 48  # rows of the widest pass; tokens after the prompts
Bits = tuple[np.ndarray, np.ndarray]  # of logits and aux hidden [B, T, ...]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Prompts of different lengths, and the results of decoding one token at a time."""

    model: GptOss
    tokens: np.ndarray  # [B, total]
    lengths: np.ndarray  # of the prompts
    caches: list[PagedCache]  # after the prompts and n tokens each
    bits: list[Bits]  # of token n after the prompts
    rows: tuple[int, ...]  # widths to verify

    def verify(self, start: int, rows: int, some: slice = slice(None)) -> tuple[Bits, PagedCache]:
        """Run one pass of several rows from token `start` on, for some of the sequences."""
        lengths = self.lengths[some] + start
        tokens = self.tokens[some][np.arange(len(lengths))[:, None], lengths[:, None] + np.arange(rows)]
        cache = of_sequences(self.caches[start], some)
        out, after = extend(self.model, jnp.asarray(tokens), from_on(lengths, rows), cache)
        return bits(out.logits, out.aux_hidden), after


def bits(logits: jax.Array, aux_hidden: jax.Array) -> Bits:
    unsigned = np.uint16 if logits.dtype == jnp.bfloat16 else np.uint32
    return np.ascontiguousarray(logits).view(unsigned), np.ascontiguousarray(aux_hidden).view(unsigned)


def assert_same(ours: Bits, theirs: Bits, what: str) -> None:
    for name, one, other in zip(("logits", "aux hidden"), ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other, f"{name}, {what}")


CASES = {
    # every width up to the widest in one of the cases; tests/ops/native covers all of them for each op
    "float32": ("float32", jnp.float32, (1, 2, 3, 5, 7, 9, 11, WIDEST)),
    "bfloat16 in float32": ("bfloat16", jnp.float32, (2, 8, 13)),
    "bfloat16": ("bfloat16", jnp.bfloat16, (4, 6, 12, 15)),
    "mxfp4": ("mxfp4 packed", jnp.float32, (1, 10, 14)),
}


@pytest.fixture(scope="module", params=CASES)
def decoded(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Decoded:
    name, dtype, rows = CASES[request.param]
    loaded = load(directories, name, dtype=dtype)
    gpt, lengths, total = model(loaded), np.array(PROMPTS), max(PROMPTS) + STEPS
    tokens = random_tokens(loaded.config.vocab_size, BATCH, total)
    empty = small_pages(gpt, BATCH, total, WIDEST)
    positions = from_on(np.zeros_like(lengths), WIDEST, lengths)
    _, after = extend(gpt, jnp.asarray(tokens[:, :WIDEST]), positions, empty)
    gpt_oss = Decoded(gpt, tokens, lengths, [after], [], rows)
    for step in range(STEPS):
        out, after = gpt_oss.verify(step, 1)
        gpt_oss.bits.append(out)
        gpt_oss.caches.append(after)
    return gpt_oss


def wraps(decoded: Decoded) -> list[int]:
    """Return each sequence's token after the prompt that is the first to repeat a page of its window."""
    _, windowed = decoded.caches[0].tables
    return [windowed.shape[1] * SMALL - length for length in PROMPTS]


def test_verifying_rows_is_decoding_them_one_at_a_time(decoded: Decoded) -> None:
    """Bit for bit, caches included, from the prompt's end on and where a window repeats its pages."""
    for rows in decoded.rows:
        for start in (0, *(max(0, wrap - rows // 2) for wrap in wraps(decoded))):
            ours, cache = decoded.verify(start, rows)
            alone = [np.concatenate(parts, axis=1) for parts in zip(*decoded.bits[start : start + rows], strict=True)]
            assert_same(ours, (alone[0], alone[1]), f"{rows} rows from {start}")
            for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(decoded.caches[start + rows]), strict=True):
                np.testing.assert_array_equal(one, other, f"{rows} rows from {start}")


def test_a_sequence_alone_is_the_sequence_in_a_batch(decoded: Decoded) -> None:
    for rows in (1, decoded.rows[-1]):
        start = wraps(decoded)[0] - 1
        together, _ = decoded.verify(start, rows)
        for b in range(BATCH):
            alone, _ = decoded.verify(start, rows, slice(b, b + 1))
            assert_same(alone, (together[0][b : b + 1], together[1][b : b + 1]), f"{rows} rows, sequence {b}")


def test_a_prompt_alone_is_the_prompt_in_a_batch(decoded: Decoded) -> None:
    width = max(PROMPTS)

    def run(some: slice) -> Bits:
        lengths = decoded.lengths[some]
        empty = small_pages(decoded.model, len(lengths), width + STEPS, WIDEST)
        positions = from_on(np.zeros_like(lengths), width, lengths)
        out, _ = extend(decoded.model, jnp.asarray(decoded.tokens[some, :width]), positions, empty)
        return bits(out.logits, out.aux_hidden)

    together = run(slice(None))
    for b in range(BATCH):
        assert_same(run(slice(b, b + 1)), (together[0][b : b + 1], together[1][b : b + 1]), f"sequence {b}")
