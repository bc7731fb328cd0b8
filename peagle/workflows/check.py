"""Check this machine: its kernels compute the reference's logits, and speculation changes no token."""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle.answers.result import decode
from peagle.config import AUTO, SamplingParams
from peagle.loading.checkpoints import DEMO, HELD_OUT
from peagle.loading.load import load, with_drafter
from peagle.ops import cuda, native, tpu
from peagle.ops.cuda import graphs
from peagle.ops.kernels import describe_kernels, for_weights
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint
from target.config import TargetConfig
from target.load import load_target
from target.model import GptOss
from target.params import TargetParams

CHECKED = ("tiny", "S")  # the GPU kernels take the heads of "S", not those of "tiny"
MOST_OFF = 1e-3  # of the logits' standard deviation, in float32
# in bfloat16 about one token in eight is routed to another expert, and its logits are far off; those of the median
# token are near, unless the model is wrong
MOST_OFF_TYPICAL = 0.3
BATCH, TOKENS, WIDTH = 2, 48, 4  # tokens: twice the window of "tiny", in passes of four rows
NUM_DRAFTS, NEW_TOKENS = 5, 96


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    found: str


def check() -> Iterator[Finding]:
    """Run all checks, the quickest first."""
    yield check_kernels()
    for size in CHECKED:
        yield from check_logits(size)
    yield from check_losslessness()


def check_kernels() -> Finding:
    """Name the implementation that runs. Kernels that are there and do not run are a failure, unless a setting says so.

    A CPU without compiled kernels runs XLA's code, which is slower and right.
    """
    in_graphs = not graphs.status()[1] or graphs.chosen_by_user()
    none_here = jax.default_backend() == "cpu" and not native.compiled()
    return Finding("kernels", in_graphs and (_kernels_run() or native.wants_xla() or none_here), describe_kernels())


def check_logits(size: str) -> Iterator[Finding]:
    """Compare the logits of a random model with those of XLA on CPU in float32; nothing to compare if that runs.

    size: of random_checkpoint.SIZES.
    """
    if not _kernels_run() and jax.default_backend() == "cpu":
        return
    config = SIZES[size]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, TOKENS), np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / size
        write_random_checkpoint(directory, config)
        with jax.default_device(jax.devices("cpu")[0]):
            reference = load_target(directory, experts="packed", implementation="xla").params
            expected = _logits(reference, config, ids)
        for dtype in (jnp.float32, jnp.bfloat16):
            params = load_target(directory, dtype=dtype, experts="packed", implementation=for_weights()).params
            with jax.default_matmul_precision("highest"):  # not TF32, whose ten bits are a GPU's default
                off = (_logits(params, config, ids) - expected) / expected.std()
            largest, typical = float(np.abs(off).max()), float(np.median(np.sqrt(np.mean(off**2, axis=-1))))
            name = f"logits of {size} in {jnp.dtype(dtype).name}"
            if dtype == jnp.float32:
                yield Finding(name, largest < MOST_OFF, f"{largest:.1e} off, at most {MOST_OFF:g}")
            else:
                text = f"{typical:.2f} off for the median token, at most {MOST_OFF_TYPICAL:g}"
                yield Finding(name, typical < MOST_OFF_TYPICAL, text)


def check_losslessness() -> Iterator[Finding]:
    """Compare the demo pair's speculation with plain decoding in float32: fixed K and auto, greedy and sampled."""
    with jax.default_matmul_precision("highest"):
        demo = load(dtype="float32")
        for name, pair in (("the demo's drafter", demo), ("n-grams", with_drafter(demo, DEMO, "ngram"))):
            for temperature in (0.0, 1.0):
                yield _lossless(pair, f"{name}, temperature {temperature:g}", temperature)


def _lossless(pair: Pair, name: str, temperature: float) -> Finding:
    conversation = read_prompt_file(HELD_OUT).conversations[0]
    sampling = SamplingParams(temperature)
    request = pair.request(conversation, [], Rendering(), max_new_tokens=NEW_TOKENS, sampling=sampling)
    capacity = pair.capacity([request])
    fast, adaptive, plain = (
        decode(pair.engine(pair.engine_config(k, context=capacity)), [request], None)[0] for k in (NUM_DRAFTS, AUTO, 0)
    )
    same = fast.output_ids == adaptive.output_ids == plain.output_ids
    accepted = f"acceptance length {fast.acceptance_length:.2f}" if fast.acceptance_length else "no step"
    return Finding(
        f"speculation by {name}", same, accepted if same else f"{accepted}; other tokens than plain decoding"
    )


def _kernels_run() -> bool:
    """Test whether kernels of ours run, rather than XLA's."""
    return native.available() or cuda.available() or tpu.available()


def _logits(params: TargetParams, config: TargetConfig, ids: np.ndarray) -> np.ndarray:
    """Compute float32 logits [B, T, V] in passes of WIDTH rows."""
    target = GptOss(params, config)
    cache = target.init_cache(len(ids), ids.shape[1], WIDTH)
    extend = jax.jit(GptOss.extend)
    logits: list[jax.Array] = []
    for start in range(0, ids.shape[1], WIDTH):
        tokens = ids[:, start : start + WIDTH]
        positions = np.broadcast_to(np.arange(start, start + WIDTH, dtype=np.int32), tokens.shape)
        output, cache = extend(target, tokens, positions, cache)
        logits.append(output.logits.astype(jnp.float32))
    return np.asarray(jnp.concatenate(logits, axis=1))


def verdict(findings: Sequence[Finding]) -> tuple[bool, str]:
    """Return (whether all checks pass, a line that says so or names the failed ones)."""
    failed = [finding.name for finding in findings if not finding.ok]
    if not failed:
        return True, f"Right: all {len(findings)} checks pass."
    return False, f"Wrong: {len(failed)} of {len(findings)} checks fail: {'; '.join(failed)}."
