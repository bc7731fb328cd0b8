"""Train the demo target, a small GPT-OSS model, on a CPU. One call is one stage of scripts.demo.build.

    python -m scripts.demo.target STAGE --data DIR --out DIR [--begin RUN] [--scale .01]

--data: a folder of scripts.demo.rows. --begin: the run whose parameters it starts from. --out gets the newest
checkpoint: after an interruption the same command goes on from it, step for step the same.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from transformers import AutoTokenizer

from drafter.train.step import ROWS, devices_for
from peagle.base.files import write_whole
from peagle.workflows.random_checkpoint import geometry
from scripts.demo.rows import ARRAYS, LOOP, PROMPT, TEXT, WIDTH
from scripts.demo.tokenizer import VOCAB_SIZE
from scripts.runs import new_parser
from target import model
from target.config import TargetConfig
from target.load import save_target
from target.packed_attention import attend_packed
from target.params import TargetParams, init_params

BATCH_ROWS = 8  # of a step, of WIDTH tokens
STEP_TOKENS = BATCH_ROWS * WIDTH
PROMPT_WEIGHT = 0.25
SEED = 0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NEWEST = "newest.npz"  # a run's checkpoint
SUREST = -1e-6  # the greatest log-probability of an unwanted token that still has a finite loss
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.004, 0.002, 0.1
LOG_EVERY = 10
SAVE_SECONDS = 180.0
# The residual stream starts at the size of what the layers add to it, the predictions near uniform.
EMBEDDING_SCALE, HEAD_SCALE = 0.5, 0.1
CONFIG = geometry(
    hidden=192, layers=8, heads=(3, 1), head_dim=64, vocab=VOCAB_SIZE, experts=(8, 4), expert_width=64, window=128
)


# --- batches --------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """The recipe of a stage: its tokens, learning rates, and kinds of rows.

    With chat_frac the rows of every step are raw and chat, in shares that follow the progress, linear between its
    points. With shares a step has one kind of rows, and each kind has its share of the steps.
    """

    tokens: int
    peak: float  # of MUON_RATE and ADAM_RATE
    warmup_frac: float
    decay_frac: float
    chat_frac: tuple[tuple[float, float], ...] = ()  # (progress, share of chat rows)
    shares: Mapping[str, int] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(self.shares)) or (f"raw_{WIDTH}", f"chat_{WIDTH}")

    def rate_at(self, progress: float) -> float:
        """Compute the share of the learning rates: linear warm-up, plateau, linear decay to zero."""
        return self.peak * min(1.0, progress / self.warmup_frac, (1.0 - progress) / self.decay_frac)


STAGES = {
    "begun": Stage(10_000_000, 1.0, 0.01, 0.6, chat_frac=((0.0, 0.4), (0.25, 0.4), (0.6, 0.8), (1.0, 0.9))),
    "practised": Stage(1_228_800, 0.25, 0.01, 0.6, chat_frac=((0.0, 0.9), (1.0, 0.9))),
    "long_begun": Stage(
        11_000_000, 0.3, 0.03, 0.97,
        shares={"chat_512": 4, "raw_512": 2, "chat_2048": 6, "raw_2048": 3, "chat_4096": 2, "raw_4096": 1},
    ),
    "long_practised": Stage(
        1_140_000, 0.12, 0.03, 0.97,
        shares={"chat_512": 4, "raw_512": 1, "chat_2048": 5, "raw_2048": 1, "chat_4096": 2},
    ),
}  # fmt: skip


class Batch(NamedTuple):
    """B packed rows."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array  # how much each token counts; below 0: as one that should not be predicted


class Rows:
    """Packed rows of one file, read in an endless order that depends on the seed only."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = [arrays[name] for name in ARRAYS]
        self.width, size = self.arrays[0].shape[1], len(self.arrays[0])
        order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng((SEED, epoch)).permutation(size))
        self._at = lambda index: order(index // size)[index % size]

    def numbers(self, start: int, count: int) -> np.ndarray:
        """Look up the row numbers at indices start .. start + count - 1 of the endless order."""
        return np.array([self._at(index) for index in range(start, start + count)], np.int64)

    def take(self, start: int, count: int) -> list[np.ndarray]:
        """Gather these rows' ARRAYS."""
        return [values[self.numbers(start, count)] for values in self.arrays]


class Batches:
    """The batches of a stage: each a function of (stage, rows, step) alone."""

    def __init__(self, stage: Stage, rows: Mapping[str, Rows], scale: float = 1) -> None:
        self.stage, self._rows = stage, rows
        self._turns = [kind for kind in stage.kinds for _ in range(stage.shares.get(kind, 0))]
        self._counts = {kind: max(len(jax.devices()), STEP_TOKENS // own.width) for kind, own in rows.items()}
        tokens = [self._counts[kind] * rows[kind].width for kind in self._turns] or [STEP_TOKENS]
        self.steps = max(1, int(scale * stage.tokens * len(tokens) / sum(tokens)))

    def rate_at(self, step: int) -> float:
        """Return the share of the learning rates."""
        return self.stage.rate_at((step + 0.5) / self.steps)

    def kind_at(self, step: int) -> str:
        """Return the kind of rows of a step, in an order that depends on the seed."""
        number, index = divmod(step, len(self._turns))
        return self._turns[np.random.default_rng((SEED, number)).permutation(len(self._turns))[index]]

    def chat_rows_until(self, step: int) -> int:
        """Count the chat rows of the first steps; all other rows are raw."""
        progress = (np.arange(step) + 0.5) / self.steps
        shares = np.interp(progress, *zip(*self.stage.chat_frac, strict=True))
        return round(float(shares.sum()) * BATCH_ROWS)

    def at(self, step: int) -> Batch:
        """Make the batch of a step."""
        if self._turns:
            kind, (number, index) = self.kind_at(step), divmod(step, len(self._turns))
            before = Counter(self.kind_at(step - index + i) for i in range(index))[kind]
            count = self._counts[kind]
            return make_batch(self._rows[kind].take((number * self.stage.shares[kind] + before) * count, count))
        raw, chat = (self._rows[kind] for kind in self.stage.kinds)
        start, end = self.chat_rows_until(step), self.chat_rows_until(step + 1)
        num_raw = BATCH_ROWS - (end - start)
        parts = raw.take(step * BATCH_ROWS - start, num_raw), chat.take(start, end - start)
        return make_batch([np.concatenate(both) for both in zip(*parts, strict=True)])


def positions_of(segment_ids: np.ndarray) -> np.ndarray:
    """Compute positions that start at 0 in each segment."""
    index = np.arange(segment_ids.shape[1])[None, :]
    starts = np.concatenate([np.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def make_batch(arrays: list[np.ndarray]) -> Batch:
    """Make a batch of rows' ARRAYS. A weight counts the prediction OF its token; below 0 as unwanted."""
    token_ids, segment_ids, roles = arrays
    weights = np.select([roles == TEXT, roles == PROMPT, roles == LOOP], [1.0, PROMPT_WEIGHT, -1.0], 0.0)
    positions = positions_of(segment_ids)
    weights = np.where(positions == 0, 0.0, weights).astype(np.float32)
    return Batch(token_ids.astype(np.int32), positions, segment_ids.astype(np.int32), weights)


# --- a step ---------------------------------------------------------------------------------------------------------


def log_likelihoods(params: TargetParams, config: TargetConfig, batch: Batch) -> jax.Array:
    """Compute the log-probability [B, T - 1] of each row's tokens 1, 2, ... given those before."""
    attend = attend_packed(params, config, batch.segment_ids)
    logits = model.forward(params, config, batch.token_ids, batch.positions, attend=attend)[0][:, :-1]
    chosen = jnp.take_along_axis(logits, batch.token_ids[:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def loss_and_gradients(params: TargetParams, config: TargetConfig, batch: Batch) -> tuple[jax.Array, TargetParams]:
    """Compute (loss, gradients): the weighted mean of -log p over the batch of all devices.

    Tokens of negative weight count with -log(1 - p): the unlikelihood of Welleck et al., arXiv 1908.04319. One row
    after the other, so that the values kept for a row's backward pass stay in the CPU's cache.
    """
    total = jax.lax.psum(jnp.sum(jnp.abs(batch.weights[:, 1:])), ROWS)

    def loss_of_row(params: TargetParams, row: Batch) -> jax.Array:
        likelihoods, weights = log_likelihoods(params, config, row), row.weights[:, 1:]
        unwanted = jnp.log1p(-jnp.exp(jnp.minimum(likelihoods, SUREST)))
        return -jnp.sum(jnp.abs(weights) * jnp.where(weights < 0, unwanted, likelihoods)) / total

    def add_row(sums: Any, row: tuple[jax.Array, ...]) -> tuple[Any, None]:
        one = Batch(*(part[None] for part in row))
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of_row)(params, one)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    sums, _ = jax.lax.scan(add_row, zeros, tuple(batch))
    return jax.lax.psum(sums, ROWS)


def blocks(config: TargetConfig, params: TargetParams) -> TargetParams:
    """Cut the matrices into stacks [blocks, inputs, outputs], a block per head or expert.

    Muon orthogonalises matrices that act on their own; the parameters hold them side by side.
    """
    c = config

    def columns(matrix: jax.Array, count: int) -> jax.Array:
        return matrix.reshape(matrix.shape[0], count, -1).swapaxes(0, 1)

    return _with_matrices(
        params,
        lambda qkv: columns(qkv, c.num_heads + 2 * c.num_kv_heads),
        lambda out: out.reshape(c.num_heads, c.head_dim, -1),
        lambda gate_up: columns(gate_up, 2 * c.num_experts),
        lambda down: down.reshape(c.num_experts, c.expert_width, -1),
    )


def joined(params: TargetParams) -> TargetParams:
    """Undo `blocks`."""

    def side_by_side(stack: jax.Array) -> jax.Array:
        return stack.swapaxes(0, 1).reshape(stack.shape[1], -1)

    def stacked(stack: jax.Array) -> jax.Array:
        return stack.reshape(-1, stack.shape[2])

    return _with_matrices(params, side_by_side, stacked, side_by_side, stacked)


def _with_matrices(params: TargetParams, *changes: Callable[[jax.Array], jax.Array]) -> TargetParams:
    """Change qkv, out, gate_up and down of every layer."""
    qkv, out, gate_up, down = changes
    layers = []
    for layer in params.layers:
        attention, experts = layer.attention, layer.moe.experts
        experts = experts.replace(gate_up=gate_up(experts.gate_up), down=down(experts.down))
        attention = attention.replace(qkv=qkv(attention.qkv), out=out(attention.out))
        layers.append(layer.replace(attention=attention, moe=layer.moe.replace(experts=experts)))
    return params.replace(layers=tuple(layers))


def optimizer() -> optax.GradientTransformation:
    """Make the update rule of `blocks`: Muon for stacks, else Adam, as in `peagle train`."""
    spec = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return optax.contrib.muon(
        MUON_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_b2=0.98,
        adam_learning_rate=ADAM_RATE,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda x: spec if x.ndim == 3 else None, params),
        consistent_rms=0.2,
    )


class State(NamedTuple):
    """Everything that a step changes."""

    params: TargetParams
    update: Any  # the optimiser's


def init_state(config: TargetConfig) -> State:
    """Make random parameters and an optimiser's first state."""
    params = init_params(config, jax.random.key(SEED), jnp.float32)
    embedding = params.embedding * (EMBEDDING_SCALE / jnp.std(params.embedding))
    params = params.replace(embedding=embedding, lm_head=params.lm_head * HEAD_SCALE)
    return State(params, optimizer().init(blocks(config, params)))


def next_state(config: TargetConfig, state: State, rate: jax.Array, batch: Batch) -> tuple[State, jax.Array]:
    """Compute (next state, loss) on a device's rows; `rate` scales both learning rates."""
    loss, gradients = loss_and_gradients(state.params, config, batch)
    params = blocks(config, state.params)
    updates, update = optimizer().update(blocks(config, gradients), state.update, params)
    params = optax.apply_updates(params, jax.tree.map(lambda change: rate * change, updates))
    return State(joined(params), update), loss


# --- a run ----------------------------------------------------------------------------------------------------------


def save(out: Path, state: State, step: int) -> None:
    """Replace a run's checkpoint."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, *jax.tree.leaves(state), step=step)

    write_whole(out / NEWEST, write)


def restored(out: Path, state: State) -> tuple[State, int]:
    """Read (a run's state, its step); (this state, 0) if there is none."""
    if not (out / NEWEST).exists():
        return state, 0
    leaves, structure = jax.tree.flatten(state)
    with np.load(out / NEWEST, allow_pickle=False) as arrays:
        leaves = [arrays[f"arr_{number}"] for number in range(len(leaves))]
        return jax.tree.unflatten(structure, leaves), int(arrays["step"])


def params_of(run: Path) -> TargetParams:
    """Read the float32 parameters, with fused experts, of a run's folder."""
    state, step = restored(run, init_state(CONFIG))
    if not step:
        raise SystemExit(f"{run} has no checkpoint; expected the folder of a training")
    return state.params


def export(run: Path, tokenizer: Path, out: Path) -> None:
    """Write a trained target as it ships: MXFP4 experts, the rest bfloat16, with its tokenizer."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    save_target(
        out,
        params_of(run),
        CONFIG,
        stop_token_ids=[encoder.eos_token_id, encoder.pad_token_id],
        pad_token_id=encoder.pad_token_id,
        extra_files={name: (tokenizer / name).read_bytes() for name in TOKENIZER_FILES},
    )


def train(out: Path, batches: Batches, begin: Path | None) -> None:
    """Train from the last checkpoint to the last step; say every LOG_EVERY steps how it goes."""
    first_state = init_state(CONFIG)
    if begin is not None:
        first_state = first_state._replace(params=params_of(begin))
    mesh, everywhere, in_rows = devices_for(BATCH_ROWS), PartitionSpec(), PartitionSpec(ROWS)
    specs = {"in_specs": (everywhere, everywhere, in_rows), "out_specs": everywhere, "check_vma": False}
    step_of = jax.jit(jax.shard_map(partial(next_state, CONFIG), mesh=mesh, **specs), donate_argnums=0)
    state, first = restored(out, first_state)
    state = jax.device_put(state, NamedSharding(mesh, everywhere))
    losses: list[jax.Array] = []
    start = saved = time.monotonic()
    for step in range(first, batches.steps):
        state, loss = step_of(state, np.float32(batches.rate_at(step)), batches.at(step))
        losses.append(loss)
        done, now = step + 1, time.monotonic()
        if done % LOG_EVERY == 0 or done == batches.steps:
            left_s = (batches.steps - done) * (now - start) / (done - first)
            mean = float(jnp.mean(jnp.stack(losses)))
            print(f"step {done} of {batches.steps}: loss {mean:.4f}, {left_s:.0f} s left", flush=True)
            losses = []
        if now - saved > SAVE_SECONDS or done == batches.steps:
            save(out, state, done)
            saved = now


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--data", type=Path, required=True, help="a folder of rows")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run goes on")
    parser.add_argument("--begin", type=Path, help="start from this run's parameters")
    parser.add_argument("--scale", type=float, default=1, help="share of the stage's tokens (default %(default)s)")
    arguments = parser.parse_args()
    stage = STAGES[arguments.stage]
    rows = {kind: Rows(arguments.data / f"{kind}.npz") for kind in stage.kinds}
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments.out, Batches(stage, rows, arguments.scale), arguments.begin)


if __name__ == "__main__":
    main()
