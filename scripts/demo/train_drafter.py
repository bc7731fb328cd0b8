"""Train the demo's P-EAGLE drafter on what the target wrote, on a CPU.

    python -m scripts.demo.train_drafter --target DIR --data DIR --raw raw_train.npz --out DIR (--minutes M | --steps N)

The target runs inside the training step: it gives the taps and the labels. Afterwards `--out` holds run.json (the recipe),
log.jsonl, state.npz (what a later call goes on from) and drafter/, a checkpoint in the AWS/vLLM dialect. The same command
after an interruption goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.demo.train_target import restart_tuned

if __name__ == "__main__":
    restart_tuned()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from drafter.config import DrafterConfig  # noqa: E402
from drafter.load import save_drafter  # noqa: E402
from drafter.params import DrafterParams, init_params  # noqa: E402
from drafter.train.cod import Cod, sample_chains  # noqa: E402
from drafter.train.loss import chain_loss  # noqa: E402
from peagle.ops.rope import RopeConfig  # noqa: E402
from scripts.demo.checkpoint import load_tree, save_tree  # noqa: E402
from scripts.demo.dataset import TEXT, WIDTH  # noqa: E402
from scripts.demo.tokenizer import MASK  # noqa: E402
from scripts.demo.train_target import Every, log, positions_of  # noqa: E402
from target import model as target_model  # noqa: E402
from target.config import TargetConfig  # noqa: E402
from target.load import load_target  # noqa: E402
from target.params import TargetParams  # noqa: E402

TAPS = (1, 4, 7)
COD = Cod(depth=8, ratio=0.8, min_ratio=0.2)
BATCH_ROWS = 8
RAW_EVERY = 8  # one row in so many is raw text
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.006, 0.002, 0.02
WARMUP_FRAC, DECAY_FRAC = 0.02, 0.6
LOG_EVERY, SAVE_SECONDS = 20, 180.0
SEED = 0


class Batch(NamedTuple):
    """B packed rows with their chains."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    trained: jax.Array
    anchors: jax.Array
    reach: jax.Array


class State(NamedTuple):
    """Everything a step changes."""

    params: DrafterParams
    optimizer: Any


class Rows:
    """All packed rows of some files."""

    def __init__(self, paths: list[Path]) -> None:
        if not paths:
            raise SystemExit("train_drafter: no shards found; run scripts.demo.regenerate first")
        parts = [np.load(path, allow_pickle=False) for path in paths]
        self.token_ids, self.segment_ids, self.roles = (
            np.concatenate([part[name] for part in parts]) for name in ("token_ids", "segment_ids", "roles")
        )

    def at(self, place: int, seed: int) -> int:
        """The row at a place of an endless order that depends on the seed only."""
        size = len(self.roles)
        return int(np.random.default_rng((seed, place // size)).permutation(size)[place % size])


def drafter_config(target: TargetConfig, mask_token_id: int, layers: int) -> DrafterConfig:
    """The demo drafter's shape: as wide as the target."""
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp_width=2 * target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        mask_token_id=mask_token_id,
        rope=RopeConfig(target.head_dim, 10000.0),
        num_taps=len(TAPS),
        aux_layer_ids=TAPS,
        rms_norm_eps=target.rms_norm_eps,
    )


def initial_params(config: DrafterConfig, target: TargetParams) -> DrafterParams:
    """Embedding, final norm and head from the target; fc passes the last tap through; the rest random."""
    params = init_params(config, jax.random.key(SEED))
    eye = jnp.zeros((config.aux_width, config.hidden_size)).at[-config.hidden_size :].set(jnp.eye(config.hidden_size))
    return params.replace(
        embedding=jnp.array(target.embedding), norm=jnp.array(target.norm), lm_head=jnp.array(target.lm_head), fc=eye
    )


def optimizer(steps: int) -> optax.GradientTransformation:
    """Muon for the layers' matrices and fc, Adam for the rest; warm-up, plateau, linear decay to zero."""
    warmup, decay = max(1, int(steps * WARMUP_FRAC)), max(1, int(steps * DECAY_FRAC))

    def schedule(peak: float) -> optax.Schedule:
        up, flat = optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak)
        return optax.join_schedules([up, flat, optax.linear_schedule(peak, 0.0, decay)], [warmup, steps - decay])

    def by_muon(params: DrafterParams) -> DrafterParams:
        spec = optax.contrib.MuonDimensionNumbers()
        marks = jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else None, params)
        return marks.replace(embedding=None, lm_head=None)

    return optax.contrib.muon(
        schedule(MUON_RATE),
        weight_decay=WEIGHT_DECAY,
        adam_b2=0.98,
        adam_learning_rate=schedule(ADAM_RATE),
        muon_weight_dimension_numbers=by_muon,
        consistent_rms=0.2,
    )


def batch_at(step: int, written: Rows, raw: Rows, counts: tuple[int, ...]) -> Batch:
    """The batch of a step: a function of the arguments alone."""
    raws = BATCH_ROWS // RAW_EVERY
    picked = [(written, written.at(step * (BATCH_ROWS - raws) + i, SEED)) for i in range(BATCH_ROWS - raws)]
    picked += [(raw, raw.at(step * raws + i, SEED)) for i in range(raws)]
    token_ids, segment_ids, roles = (
        np.stack([getattr(rows, name)[number] for rows, number in picked]) for name in ("token_ids", "segment_ids", "roles")
    )
    trained = roles == TEXT
    rng = np.random.default_rng((SEED, 1, step))
    chains = [sample_chains(COD, trained[i], segment_ids[i], counts, rng) for i in range(BATCH_ROWS)]
    return Batch(
        token_ids.astype(np.int32),
        positions_of(segment_ids),
        segment_ids.astype(np.int32),
        trained.astype(np.float32),
        np.stack([anchors for anchors, _ in chains]),
        np.stack([reach for _, reach in chains]),
    )


@partial(jax.jit, static_argnames=("config", "target_config", "counts", "steps"), donate_argnames="state")
def train_step(
    state: State,
    batch: Batch,
    target: TargetParams,
    *,
    config: DrafterConfig,
    target_config: TargetConfig,
    counts: tuple[int, ...],
    steps: int,
) -> tuple[State, jax.Array, jax.Array, jax.Array]:
    """(the next state, this batch's loss, hits and rows by depth)."""
    logits, aux_hidden = target_model.forward(
        target, target_config, batch.token_ids, batch.positions, segment_ids=batch.segment_ids, aux_layer_ids=TAPS
    )

    def loss_of(params: DrafterParams) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return chain_loss(
            params,
            config,
            batch.token_ids,
            aux_hidden,
            logits,
            batch.segment_ids,
            batch.positions,
            batch.trained,
            batch.anchors,
            batch.reach,
            counts,
        )

    (loss, (hits, rows)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, optimizer_state = optimizer(steps).update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state), loss, hits, rows


def main() -> None:
    """The command."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the target's directory with its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="what scripts.demo.regenerate wrote")
    parser.add_argument("--raw", type=Path, required=True, help="raw_train.npz of scripts.demo.dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run goes on")
    parser.add_argument("--layers", type=int, default=2, help="of the drafter (default 2)")
    parser.add_argument("--minutes", type=float, help="train about as long; measured once, then fixed as steps")
    parser.add_argument("--steps", type=int, help="train so many steps")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(arguments.target, local_files_only=True)
    loaded = load_target(arguments.target, dtype=np.dtype("float32"))
    config = drafter_config(loaded.config, tokenizer.convert_tokens_to_ids(MASK), arguments.layers)
    written, raw = Rows(sorted(arguments.data.glob("shard_*.npz"))), Rows([arguments.raw])
    # the most anchors any written row has; raw rows have more and are sampled down to it
    counts = COD.counts(int((written.roles == TEXT).sum(axis=1).max()))
    run = partial(train_step, target=loaded.params, config=config, target_config=loaded.config, counts=counts)

    def fresh(steps: int) -> State:
        params = initial_params(config, loaded.params)
        return State(params, optimizer(steps).init(params))

    steps = steps_of(arguments, out, lambda: seconds_per_step(partial(run, steps=1000), fresh(1000), written, raw, counts))
    state, first = restore(out, fresh(steps))
    saving, start = Every(SAVE_SECONDS), time.monotonic()
    records: list[tuple[jax.Array, jax.Array, jax.Array]] = []
    for step in range(first, steps):
        state, *record = run(state, batch_at(step, written, raw, counts), steps=steps)
        records.append(tuple(record))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
            loss, hits, rows = (np.asarray(jnp.stack(values)) for values in zip(*records, strict=True))
            by_depth = (hits.sum(0) / np.maximum(rows.sum(0), 1)).round(3).tolist()
            elapsed = time.monotonic() - start
            left = (steps - step - 1) * elapsed / (step + 1 - first)
            log(out, step=step + 1, steps=steps, loss=float(loss.mean()), hits_by_depth=by_depth, elapsed_s=elapsed, left_s=left)
            records = []
        if saving.due() or step + 1 == steps:
            save_tree(out / "state.npz", {"state": state, "step": np.int32(step + 1)})
            save_drafter(out / "drafter", state.params, config)


def steps_of(arguments: argparse.Namespace, out: Path, seconds: Any) -> int:
    """The number of steps, from the command line or the run that exists; recorded in run.json."""
    path = out / "run.json"
    if arguments.steps or arguments.minutes:
        steps = arguments.steps or max(1, int(arguments.minutes * 60 / seconds()))
        recipe = {
            "steps": steps,
            "rows_per_step": BATCH_ROWS,
            "width": WIDTH,
            "layers": arguments.layers,
            "cod": COD.__dict__,
            "taps": TAPS,
            "muon_rate": MUON_RATE,
            "adam_rate": ADAM_RATE,
            "weight_decay": WEIGHT_DECAY,
            "seed": SEED,
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
        }
        path.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    elif not path.exists():
        raise SystemExit("train_drafter: a new run needs --minutes or --steps")
    return json.loads(path.read_text(encoding="utf-8"))["steps"]


def seconds_per_step(run: Any, state: State, written: Rows, raw: Rows, counts: tuple[int, ...]) -> float:
    """The median time of a step on a throw-away state, compilation left out."""
    times = []
    for step in range(6):
        start = time.perf_counter()
        state, loss, *_ = run(state, batch_at(step, written, raw, counts))
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def restore(out: Path, state: State) -> tuple[State, int]:
    """(state, step) of the last checkpoint, or the given state and 0."""
    path = out / "state.npz"
    if not path.exists():
        return state, 0
    stored = load_tree(path, {"state": state, "step": np.int32(0)})
    return stored["state"], int(stored["step"])


if __name__ == "__main__":
    main()
