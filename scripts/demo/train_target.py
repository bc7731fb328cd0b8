"""Train the demo target, a small GPT-OSS model, on a CPU. One call is one stage of scripts.demo.build.

    python -m scripts.demo.train_target STAGE --data DIR --out DIR [--begin RUN] [--scale .01]

--data: a folder of scripts.demo.dataset or practice. --begin: the run whose parameters it starts from. Afterwards --out
holds config.json and params.npz, state.npz (to resume from), run.json (the recipe) and log.jsonl. The same command
after an interruption goes on from the last checkpoint, step for step the same.
"""

import dataclasses
import importlib.metadata
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from peagle.ops.strict_json import dumps
from scripts.demo.tuned import BATCH_ROWS, restart_tuned

if __name__ == "__main__":
    restart_tuned()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import AutoTokenizer

from peagle.ops.files import write_whole
from scripts.demo.dataset import LOOP, PROMPT, TEXT, WIDTH
from scripts.runs import new_parser
from target import model
from target.config import TargetConfig
from target.dialects import parse_config
from target.load import save_target
from target.packed_attention import attend_packed
from target.params import TargetParams, init_params

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PROMPT_WEIGHT = 0.25
SUREST = -1e-6  # the greatest log-probability of an unwanted token that still has a finite loss
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.004, 0.002, 0.1
STEP_TOKENS = BATCH_ROWS * WIDTH
ROWS = "rows"  # the name of the axis of devices
LOG_EVERY = 10
SAVE_SECONDS, EVALUATE_SECONDS = 180.0, 480.0
EVALUATED_ROWS = 32
SEED = 0
# The residual stream starts at the size of what the layers add to it, the predictions near uniform.
EMBEDDING_SCALE, HEAD_SCALE = 0.5, 0.1
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "intermediate_size": 64,
    "vocab_size": 2048,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """The recipe of a stage: its tokens, learning rates, and kinds of rows.

    With chat_frac the rows of every step are raw and chat, in shares that follow the progress, linear between its
    points. With shares a step has one kind of rows, and each kind has its share of the steps.
    """

    tokens: int
    peak: float  # of MUON_RATE and ADAM_RATE
    warmup_frac: float
    decay_frac: float
    chat_frac: tuple[tuple[float, float], ...] = ()  # (progress, share of chat rows)
    shares: Mapping[str, int] = dataclasses.field(default_factory=dict)

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

    def __init__(self, path: Path, seed: int = SEED) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.token_ids, self.segment_ids, self.roles = arrays["token_ids"], arrays["segment_ids"], arrays["roles"]
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self.roles))
        )

    def at(self, start: int, count: int) -> np.ndarray:
        """Look up the row numbers at indices start .. start + count - 1 of the endless order."""
        size = len(self.roles)
        return np.array([self._order(i // size)[i % size] for i in range(start, start + count)], np.int64)


class Batches:
    """The batches of a stage: each a function of (stage, rows, step) alone."""

    def __init__(self, stage: Stage, rows: Mapping[str, Rows], scale: float = 1) -> None:
        self.stage, self._rows = stage, rows
        self._turns = [kind for kind in stage.kinds for _ in range(stage.shares.get(kind, 0))]
        self._counts = {kind: max(len(jax.devices()), STEP_TOKENS // rows[kind].token_ids.shape[1]) for kind in rows}
        tokens = [self._counts[kind] * rows[kind].token_ids.shape[1] for kind in self._turns] or [STEP_TOKENS]
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
            before = Counter(self.kind_at(number * len(self._turns) + i) for i in range(index))[kind]
            count = self._counts[kind]
            start = (number * self.stage.shares[kind] + before) * count
            return make_batch([(self._rows[kind], self._rows[kind].at(start, count))])
        raw, chat = (self._rows[kind] for kind in self.stage.kinds)
        chat_start, chat_end = self.chat_rows_until(step), self.chat_rows_until(step + 1)
        raw_start, raw_end = step * BATCH_ROWS - chat_start, (step + 1) * BATCH_ROWS - chat_end
        parts = [(raw, raw.at(raw_start, raw_end - raw_start)), (chat, chat.at(chat_start, chat_end - chat_start))]
        return make_batch([part for part in parts if len(part[1])])


def positions_of(segment_ids: np.ndarray) -> np.ndarray:
    """Compute positions that start at 0 in each segment."""
    index = np.arange(segment_ids.shape[1])[None, :]
    starts = np.concatenate([np.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def make_batch(parts: list[tuple[Rows, np.ndarray]], prompt_weight: float = PROMPT_WEIGHT) -> Batch:
    """Gather rows of files. A weight counts the prediction OF its token; below 0 as unwanted."""
    token_ids, segment_ids, roles = (
        np.concatenate([getattr(rows, name)[numbers] for rows, numbers in parts])
        for name in ("token_ids", "segment_ids", "roles")
    )
    weights = np.select([roles == TEXT, roles == PROMPT, roles == LOOP], [1.0, prompt_weight, -1.0], 0.0)
    positions = positions_of(segment_ids)
    weights = np.where(positions == 0, 0.0, weights).astype(np.float32)
    return Batch(token_ids.astype(np.int32), positions, segment_ids.astype(np.int32), weights)


def log_likelihoods(params: TargetParams, config: TargetConfig, batch: Batch) -> jax.Array:
    """Compute the log-probability [B, T - 1] of each row's tokens 1, 2, ... given those before."""
    attend = attend_packed(config, batch.segment_ids)
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


def devices() -> Mesh:
    """Return all devices in a row."""
    return Mesh(np.array(jax.devices()), (ROWS,))


def replicated(tree: Any) -> Any:
    """Copy the tree to every device."""
    return jax.device_put(tree, NamedSharding(devices(), PartitionSpec()))


def init_state(config: TargetConfig) -> State:
    """Make random parameters and an optimiser's first state."""
    params = init_params(config, jax.random.key(SEED), jnp.float32)
    embedding = params.embedding * (EMBEDDING_SCALE / jnp.std(params.embedding))
    params = params.replace(embedding=embedding, lm_head=params.lm_head * HEAD_SCALE)
    return State(params, optimizer().init(blocks(config, params)))


def next_state(config: TargetConfig, state: State, batch: Batch, rate: jax.Array) -> tuple[State, jax.Array]:
    """Compute (next state, loss) on a device's rows; `rate` scales both learning rates."""
    loss, gradients = loss_and_gradients(state.params, config, batch)
    params = blocks(config, state.params)
    updates, update = optimizer().update(blocks(config, gradients), state.update, params)
    params = optax.apply_updates(params, jax.tree.map(lambda change: rate * change, updates))
    return State(joined(params), update), loss


def nats_and_tokens(config: TargetConfig, params: TargetParams, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Compute (weighted sum of negative log-likelihoods, sum of weights) over all devices' rows."""
    weights = batch.weights[:, 1:]
    return jax.lax.psum((-jnp.sum(log_likelihoods(params, config, batch) * weights), jnp.sum(weights)), ROWS)


@lru_cache
def compiled_step(config: TargetConfig) -> Callable[[State, Batch, jax.Array], tuple[State, jax.Array]]:
    """Compile `next_state` over all devices; it takes the state's memory."""
    everywhere, by_rows = PartitionSpec(), PartitionSpec(ROWS)
    specs = {"in_specs": (everywhere, by_rows, everywhere), "out_specs": everywhere}
    sharded = jax.shard_map(partial(next_state, config), mesh=devices(), check_vma=False, **specs)
    return jax.jit(sharded, donate_argnums=0)


@lru_cache
def compiled_evaluation(config: TargetConfig) -> Callable[[TargetParams, Batch], tuple[jax.Array, jax.Array]]:
    """Compile `nats_and_tokens` over all devices."""
    specs = {"in_specs": (PartitionSpec(), PartitionSpec(ROWS)), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(partial(nats_and_tokens, config), mesh=devices(), check_vma=False, **specs))


def evaluate(params: TargetParams, config: TargetConfig, rows: Rows) -> float:
    """Measure nats per token on EVALUATED_ROWS held-out rows; of chat, the assistant's."""
    total = count = 0.0
    for start in range(0, min(EVALUATED_ROWS, len(rows.roles)) - BATCH_ROWS + 1, BATCH_ROWS):
        batch = make_batch([(rows, np.arange(start, start + BATCH_ROWS))], prompt_weight=0.0)
        loss, tokens = compiled_evaluation(config)(params, batch)
        total, count = total + float(loss), count + float(tokens)
    return total / count


def save_tree(path: Path, tree: Any) -> None:
    """Write the tree's leaves, named by their paths; a reader never sees a half-written file."""
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # savez names files of its own
            np.savez(file, **leaves)

    write_whole(path, write)


def load_tree(path: Path, like: Any) -> Any:
    """Read a tree of `save_tree`; exits if names, shapes or types differ from `like`."""
    leaves_like, structure = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(key): (leaf.shape, leaf.dtype) for key, leaf in leaves_like}
    with np.load(path, allow_pickle=False) as stored:
        leaves = {name: stored[name] for name in stored.files}
    shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    if wrong := sorted(name for name in shapes | expected if shapes.get(name) != expected.get(name)):
        name = wrong[0]
        raise SystemExit(f"{path}: {name} is {shapes.get(name)}, expected {expected.get(name)}; take another --out")
    return jax.tree_util.tree_unflatten(structure, [jnp.asarray(leaves[name]) for name in expected])


def read_config(folder: Path) -> TargetConfig:
    """Read the config of a run's folder."""
    return parse_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def load_run(folder: Path) -> tuple[TargetConfig, TargetParams]:
    """Read (config, float32 parameters with fused experts) of a run's folder."""
    config = read_config(folder)
    like = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))
    return config, load_tree(folder / "params.npz", like)


def export(run: Path, tokenizer: Path, out: Path) -> None:
    """Write a trained target as it ships: MXFP4 experts, the rest bfloat16, with its tokenizer."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    config, params = load_run(run)
    save_target(
        out,
        params,
        config,
        stop_token_ids=[encoder.eos_token_id, encoder.pad_token_id],
        pad_token_id=encoder.pad_token_id,
        extra_files={name: (tokenizer / name).read_bytes() for name in TOKENIZER_FILES},
    )


def restore(out: Path, config: TargetConfig, begin: Path | None) -> tuple[State, int]:
    """Read the last checkpoint, or make a state at step 0 with the parameters of `begin`."""
    if not (out / "state.npz").exists():
        state = init_state(config)
        return state if begin is None else state._replace(params=load_run(begin)[1]), 0
    like = {"state": jax.eval_shape(lambda: init_state(config)), "step": np.zeros((), np.int64)}
    with jax.enable_x64(True):
        stored = load_tree(out / "state.npz", like)
    return stored["state"], int(stored["step"])


def log(out: Path, **record: Any) -> None:
    """Append a line to log.jsonl and print it."""
    line = dumps({name: round(v, 5) if isinstance(v, float) else v for name, v in record.items()})
    with (out / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


class Clock:
    """A clock that is due once in so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def due(self) -> bool:
        """Test whether it is due; then not again for so many seconds."""
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def train(out: Path, config: TargetConfig, batches: Batches, held_out: Mapping[str, Rows], begin: Path | None) -> None:
    """Train from the last checkpoint to the last step, and write out/params.npz."""
    state, first = restore(out, config, begin)
    state, step_of, steps = replicated(state), compiled_step(config), batches.steps
    saving, evaluating = Clock(SAVE_SECONDS), Clock(EVALUATE_SECONDS)
    losses: list[jax.Array] = []
    tokens = 0
    start = mark = time.monotonic()
    for step in range(first, steps):
        batch = batches.at(step)
        state, loss = step_of(state, batch, np.float32(batches.rate_at(step)))
        losses.append(loss)
        tokens += batch.token_ids.size
        if (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
            mean, now = float(jnp.mean(jnp.stack(losses))), time.monotonic()
            left = (steps - step - 1) * (now - start) / (step + 1 - first)
            speed = tokens / (now - mark)
            log(out, step=step + 1, steps=steps, loss=mean, tok_per_s=speed, elapsed_s=now - start, left_s=left)
            losses, mark, tokens = [], now, 0
        if evaluating.due() or step + 1 == steps:
            log(out, step=step + 1, **{name: evaluate(state.params, config, rows) for name, rows in held_out.items()})
        if saving.due() or step + 1 == steps:
            save_tree(out / "state.npz", {"state": state, "step": np.int64(step + 1)})
            save_tree(out / "params.npz", state.params)


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--data", type=Path, required=True, help="a folder of rows")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run goes on")
    parser.add_argument("--begin", type=Path, help="start from this run's parameters")
    parser.add_argument("--scale", type=float, default=1, help="share of the stage's tokens (default %(default)s)")
    arguments = parser.parse_args()
    out, stage = arguments.out, STAGES[arguments.stage]
    out.mkdir(parents=True, exist_ok=True)
    if arguments.begin is None:
        (out / "config.json").write_text(dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copy(arguments.begin / "config.json", out / "config.json")
    batches = Batches(stage, {kind: Rows(arguments.data / f"{kind}.npz") for kind in stage.kinds}, arguments.scale)
    recipe = {
        "stage": arguments.stage, "steps": batches.steps, **dataclasses.asdict(stage), "muon_rate": MUON_RATE,
        "adam_rate": ADAM_RATE, "weight_decay": WEIGHT_DECAY, "seed": SEED, "devices": len(jax.devices()),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
    }  # fmt: skip
    (out / "run.json").write_text(dumps(recipe, indent=1) + "\n", encoding="utf-8")
    held_out = {path.stem: Rows(path) for path in sorted(arguments.data.glob("*_heldout*.npz"))}
    train(out, read_config(out), batches, held_out, arguments.begin)


if __name__ == "__main__":
    main()
