"""Train the demo target, a small GPT-OSS model, on a CPU.

    python -m scripts.demo.train_target --data DIR --out DIR (--minutes M | --tokens N)
    python -m scripts.demo.train_target --data DIR --out DIR --tokens N --practise RUN

The second goes on from the parameters of another run at a lower rate, on practice (scripts.demo.practice).

Afterwards `--out` holds config.json and params.npz (`scripts.demo.checkpoint.load_target` reads them), state.npz
(to resume from), run.json (the recipe, with the number of steps: --minutes is turned into steps once,
at the start) and log.jsonl. The same command after an interruption goes on from the last checkpoint, step for step
the same; with another --tokens or --minutes it changes the number of steps and with it the rest of the schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from peagle.ops.strict_json import dumps
from scripts.demo.tuned import BATCH_ROWS, restart_tuned

if __name__ == "__main__":
    restart_tuned()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scripts.demo import muon
from scripts.demo.checkpoint import load_target, load_tree, read_config, save_tree
from scripts.demo.dataset import LOOP, PROMPT, TEXT, WIDTH
from target import model
from target.config import TargetConfig
from target.packed_attention import attend_packed
from target.params import TargetParams, init_params

PROMPT_WEIGHT = 0.25
SUREST = -1e-6  # the log-probability from which on an unwanted token is as bad as can be
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.004, 0.002, 0.1
WARMUP_FRAC, DECAY_FRAC = 0.01, 0.6
ChatFrac = tuple[tuple[float, float], ...]  # (progress, share of chat rows), linear between
CHAT_FRAC: ChatFrac = ((0.0, 0.4), (0.25, 0.4), (0.6, 0.8), (1.0, 0.9))
ROWS = "rows"  # the name of the axis of devices
LOG_EVERY = 10
SAVE_SECONDS, EVALUATE_SECONDS = 180.0, 480.0
EVALUATED_ROWS = 32
SEED = 0
# The residual stream starts at the size of what the layers add to it, the predictions near uniform.
EMBEDDING_SCALE, HEAD_SCALE = 0.5, 0.1


class Batch(NamedTuple):
    """B packed rows."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array  # how much each token counts; below 0: as one that should not be predicted


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate and the rows of every step."""

    steps: int
    peak: float = 1.0  # of the learning rates
    chat_frac: ChatFrac = CHAT_FRAC

    def rate_at(self, step: int) -> float:
        """Compute the learning rates' share: a linear warm-up, a plateau, a linear decay to zero at the end."""
        progress = (step + 0.5) / self.steps
        return self.peak * min(1.0, progress / WARMUP_FRAC, (1.0 - progress) / DECAY_FRAC)

    def chat_rows_until(self, step: int) -> int:
        """Count the chat rows of the first `step` steps; all other rows are raw."""
        progress = (np.arange(step) + 0.5) / self.steps
        shares = np.interp(progress, *zip(*self.chat_frac, strict=True))
        return round(float(shares.sum()) * BATCH_ROWS)

    def batch_at(self, step: int, raw: "Rows", chat: "Rows") -> "Batch":
        """Make the batch of a step, a function of the arguments alone."""
        chat_start, chat_end = self.chat_rows_until(step), self.chat_rows_until(step + 1)
        raw_start, raw_end = step * BATCH_ROWS - chat_start, (step + 1) * BATCH_ROWS - chat_end
        parts = [(raw, raw.at(raw_start, raw_end - raw_start)), (chat, chat.at(chat_start, chat_end - chat_start))]
        return make_batch([part for part in parts if len(part[1])])


PRACTICE = {"peak": 0.25, "chat_frac": ((0.0, 0.9), (1.0, 0.9))}


class State(NamedTuple):
    """Everything that a step changes."""

    params: TargetParams
    momentum: dict[str, list[jax.Array]]
    adam: Any


def hf_config(hidden: int, layers: int, heads: int, kv_heads: int, experts: int, expert_width: int, vocab: int) -> dict:
    """Make the config.json of a GPT-OSS model of this size."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "intermediate_size": expert_width,
        "vocab_size": vocab,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
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


class Rows:
    """Packed rows of one file, read in an endless order that depends on the seed only."""

    def __init__(self, path: Path, seed: int) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.token_ids, self.segment_ids, self.roles = arrays["token_ids"], arrays["segment_ids"], arrays["roles"]
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self.roles))
        )

    def at(self, start: int, count: int) -> np.ndarray:
        """Look up the row numbers at places start .. start + count - 1 of the endless order."""
        size = len(self.roles)
        return np.array([self._order(i // size)[i % size] for i in range(start, start + count)], np.int64)


def positions_of(segment_ids: np.ndarray) -> np.ndarray:
    """Compute positions that start at 0 in each segment."""
    index = np.arange(segment_ids.shape[1])[None, :]
    starts = np.concatenate([np.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def make_batch(parts: list[tuple[Rows, np.ndarray]], prompt_weight: float = PROMPT_WEIGHT) -> Batch:
    """Gather rows of each file. A weight is of the prediction OF its token: how much it counts, below 0 as unwanted."""
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


def devices() -> Mesh:
    """All devices in a row."""
    return Mesh(np.array(jax.devices()), (ROWS,))


def replicated(tree: Any) -> Any:
    """The tree on every device."""
    return jax.device_put(tree, NamedSharding(devices(), PartitionSpec()))


def init_state(config: TargetConfig) -> State:
    """Fresh parameters and an optimiser that has seen nothing."""
    params = init_params(config, jax.random.key(SEED), jnp.float32)
    embedding = params.embedding * (EMBEDDING_SCALE / jnp.std(params.embedding))
    params = params.replace(embedding=embedding, lm_head=params.lm_head * HEAD_SCALE)
    momentum = jax.tree.map(jnp.zeros_like, muon.split(config, params))
    return State(params, momentum, muon.adam().init(muon.without_matrices(params)))


def next_state(config: TargetConfig, state: State, batch: Batch, rate: jax.Array) -> tuple[State, jax.Array]:
    """Compute (next state, this batch's loss) on every device, on its rows; `rate` scales both learning rates."""
    loss, gradients = loss_and_gradients(state.params, config, batch)
    directions, momentum = muon.muon_directions(muon.split(config, gradients), state.momentum)
    step = rate * MUON_RATE
    matrices = muon.split(config, state.params)
    matrices = jax.tree.map(lambda w, d: w * (1 - step * WEIGHT_DECAY) - step * d, matrices, directions)
    updates, adam = muon.adam().update(muon.without_matrices(gradients), state.adam)
    updates = jax.tree.map(lambda update: -rate * ADAM_RATE * update, updates)
    rest = optax.apply_updates(muon.without_matrices(state.params), updates)
    return State(muon.join(rest, matrices), momentum, adam), loss


def nats_and_tokens(config: TargetConfig, params: TargetParams, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Compute (weighted sum of negative log-likelihoods, sum of weights) over all devices' rows."""
    weights = batch.weights[:, 1:]
    return jax.lax.psum((-jnp.sum(log_likelihoods(params, config, batch) * weights), jnp.sum(weights)), ROWS)


@lru_cache
def compiled_step(config: TargetConfig) -> Callable[[State, Batch, jax.Array], tuple[State, jax.Array]]:
    """`next_state` over all devices; it takes the state's memory."""
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
    """Measure nats per token on the first EVALUATED_ROWS held-out rows; of chat, the assistant's tokens only."""
    total = count = 0.0
    for start in range(0, min(EVALUATED_ROWS, len(rows.roles)) - BATCH_ROWS + 1, BATCH_ROWS):
        batch = make_batch([(rows, np.arange(start, start + BATCH_ROWS))], prompt_weight=0.0)
        loss, tokens = compiled_evaluation(config)(params, batch)
        total, count = total + float(loss), count + float(tokens)
    return total / count


def seconds_per_step(config: TargetConfig, raw: Rows, chat: Rows, measured: int = 6) -> float:
    """Measure the median time of a step on a throw-away state, without compilation."""
    state, times = replicated(init_state(config)), []
    for step in range(measured + 2):
        start = time.perf_counter()
        state, loss = compiled_step(config)(state, Schedule(1000).batch_at(step, raw, chat), np.float32(1.0))
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def recipe(schedule: Schedule, practises: str | None) -> dict:
    """Collect the settings that decide the result, for run.json."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    return {
        "steps": schedule.steps,
        "tokens": schedule.steps * BATCH_ROWS * WIDTH,
        "practises": practises,
        "peak": schedule.peak,
        "batch_rows": BATCH_ROWS,
        "width": WIDTH,
        "muon_rate": MUON_RATE,
        "adam_rate": ADAM_RATE,
        "weight_decay": WEIGHT_DECAY,
        "warmup_frac": WARMUP_FRAC,
        "decay_frac": DECAY_FRAC,
        "chat_frac": schedule.chat_frac,
        "prompt_weight": PROMPT_WEIGHT,
        "embedding_scale": EMBEDDING_SCALE,
        "head_scale": HEAD_SCALE,
        "seed": SEED,
        "devices": len(jax.devices()),
        "versions": versions,
    }


def settle_config(out: Path, arguments: argparse.Namespace) -> TargetConfig:
    """Read out/config.json. A new run gets the config of the run it goes on from, or the command line's."""
    path = out / "config.json"
    if not path.exists() and arguments.practise:
        shutil.copy(arguments.practise / "config.json", path)
    elif not path.exists():
        names = ("hidden", "layers", "heads", "kv_heads", "experts", "expert_width", "vocab")
        config = hf_config(**{name: getattr(arguments, name) for name in names})
        path.write_text(dumps(config, indent=2) + "\n", encoding="utf-8")
    return read_config(out)


def settle_schedule(out: Path, config: TargetConfig, arguments: argparse.Namespace) -> Schedule:
    """Make the schedule. Its number of steps is the command line's, written to out/run.json, or read from there."""
    path = out / "run.json"
    options: dict[str, Any] = PRACTICE if arguments.practise else {}
    if arguments.minutes:
        raw, chat = (Rows(arguments.data / f"{name}.npz", SEED) for name in ("raw_train", "chat_train"))
        steps = max(1, int(arguments.minutes * 60 / seconds_per_step(config, raw, chat)))
    elif arguments.tokens:
        steps = max(1, arguments.tokens // (BATCH_ROWS * WIDTH))
    elif path.exists():
        return Schedule(json.loads(path.read_text(encoding="utf-8"))["steps"], **options)
    else:
        raise SystemExit("train_target: a new run needs --minutes or --tokens")
    schedule = Schedule(steps, **options)
    practises = arguments.practise.name if arguments.practise else None
    path.write_text(dumps(recipe(schedule, practises), indent=1) + "\n", encoding="utf-8")
    return schedule


def save(out: Path, state: State, step: int) -> None:
    """Write the checkpoint to resume from."""
    save_tree(out / "state.npz", {"state": state, "step": np.int64(step)})


def restore(out: Path, config: TargetConfig, begins_from: Path | None) -> tuple[State, int]:
    """Read the last checkpoint, or make a state at step 0, with the parameters of another run if one is given."""
    if not (out / "state.npz").exists():
        fresh = init_state(config)
        return fresh if begins_from is None else fresh._replace(params=load_target(begins_from)[1]), 0
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


@dataclasses.dataclass
class Every:
    """A clock that is due once in so many seconds."""

    seconds: float
    last: float = dataclasses.field(default_factory=time.monotonic)

    def due(self) -> bool:
        """Whether it is due; then not again for so many seconds."""
        if time.monotonic() - self.last < self.seconds:
            return False
        self.last = time.monotonic()
        return True


class Batches(Protocol):
    """What a training learns from: the batch and the learning rates' share of every step."""

    @property
    def steps(self) -> int: ...
    def rate_at(self, step: int) -> float: ...
    def at(self, step: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """The batches of a schedule, from its two kinds of rows."""

    schedule: Schedule
    raw: Rows
    chat: Rows

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def rate_at(self, step: int) -> float:
        return self.schedule.rate_at(step)

    def at(self, step: int) -> Batch:
        return self.schedule.batch_at(step, self.raw, self.chat)


def train(
    out: Path,
    config: TargetConfig,
    batches: Batches,
    held_out: Mapping[str, Rows],
    begins_from: Path | None = None,
) -> TargetParams:
    """Train from the last checkpoint to the last step; the parameters are in out/params.npz afterwards."""
    state, first = restore(out, config, begins_from)
    steps = batches.steps
    state, step_of = replicated(state), compiled_step(config)
    saving, evaluating = Every(SAVE_SECONDS), Every(EVALUATE_SECONDS)
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
            speed = tokens / (now - mark)
            left = (steps - step - 1) * (now - start) / (step + 1 - first)
            log(out, step=step + 1, steps=steps, loss=mean, tok_per_s=speed, elapsed_s=now - start, left_s=left)
            losses, mark, tokens = [], now, 0
        if evaluating.due() or step + 1 == steps:
            nats = {name: evaluate(state.params, config, rows) for name, rows in held_out.items()}
            log(out, step=step + 1, **nats)
        if saving.due() or step + 1 == steps:
            save(out, state, step + 1)
            save_tree(out / "params.npz", state.params)
    return state.params


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the target's size."""
    defaults = {"hidden": 192, "layers": 8, "heads": 3, "kv-heads": 1, "experts": 8, "expert-width": 64, "vocab": 2048}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of scripts.demo.dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run goes on")
    parser.add_argument("--minutes", type=float, help="train about as long; measured once, then fixed as steps")
    parser.add_argument("--tokens", type=int, help="train on so many tokens")
    parser.add_argument("--practise", type=Path, help="go on from this run's parameters, at a lower rate, on chat")
    add_shape_arguments(parser)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    config = settle_config(out, arguments)
    names = ("raw_train", "chat_train", "raw_heldout", "chat_heldout")
    raw, chat, *held_out = (Rows(arguments.data / f"{name}.npz", SEED) for name in names)
    batches = Scheduled(settle_schedule(out, config, arguments), raw, chat)
    train(out, config, batches, dict(zip(names[2:], held_out, strict=True)), arguments.practise)


if __name__ == "__main__":
    main()
