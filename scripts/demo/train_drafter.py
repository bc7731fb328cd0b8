"""Train the demo's P-EAGLE drafter on what the target wrote, on a CPU.

    python -m scripts.demo.train_drafter --target DIR --data DIR --dataset DIR --out DIR (--minutes M | --steps N)

The target runs inside the training step: it gives the taps and the labels. Afterwards `--out` holds run.json (the
recipe), log.jsonl, state.npz (what a later call goes on from) and drafter/, a checkpoint in the AWS/vLLM dialect. The
same command after an interruption goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.demo.tuned import BATCH_ROWS, restart_tuned

if __name__ == "__main__":
    restart_tuned()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from drafter.config import DrafterConfig
from drafter.load import save_drafter
from drafter.params import DrafterParams, init_params
from drafter.train.cod import Cod, sample_chains
from drafter.train.loss import chain_loss
from peagle.ops.rope import RopeConfig
from scripts.demo.checkpoint import load_tree, save_tree
from scripts.demo.dataset import TEXT, WIDTH
from scripts.demo.packed_attention import attend_packed
from scripts.demo.tokenizer import MASK
from scripts.demo.train_target import ROWS, Every, devices, log, positions_of, replicated
from target import model as target_model
from target.config import TargetConfig
from target.load import load_target
from target.params import TargetParams

TAPS = (1, 4, 7)
COD = Cod(depth=6, ratio=0.75, min_ratio=0.2)
MIX = {"written": 5, "chat": 2, "raw": 1}  # rows of a step: the target's own answers, the corpus' chat, raw text
assert sum(MIX.values()) == BATCH_ROWS
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.008, 0.003, 0.02
WARMUP_FRAC, DECAY_FRAC = 0.02, 0.6
LOG_EVERY, SAVE_SECONDS = 20, 180.0
ROOM_QUANTILE = 0.6
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


class Record(NamedTuple):
    """What a step saw: mean loss; by depth, how often the drafter agreed with the target, and of how many rows."""

    loss: jax.Array
    hits: jax.Array
    rows: jax.Array


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


def batch_at(step: int, sources: dict[str, Rows], counts: tuple[int, ...]) -> Batch:
    """The batch of a step: a function of the arguments alone."""
    picked = [(sources[name], sources[name].at(step * n + i, SEED)) for name, n in MIX.items() for i in range(n)]
    token_ids, segment_ids, roles = (
        np.stack([getattr(rows, name)[number] for rows, number in picked])
        for name in ("token_ids", "segment_ids", "roles")
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


@dataclass(frozen=True)
class Recipe:
    """What a step needs beside arrays."""

    config: DrafterConfig
    target_config: TargetConfig
    counts: tuple[int, ...]
    steps: int


def loss_of_row(
    params: DrafterParams, recipe: Recipe, target: TargetParams, row: Batch
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`chain_loss` of a batch, with the target's taps and labels."""
    logits, aux_hidden = target_model.forward(
        target,
        recipe.target_config,
        row.token_ids,
        row.positions,
        attend=attend_packed(recipe.target_config, row.segment_ids),
        aux_layer_ids=TAPS,
    )
    logits, aux_hidden = jax.lax.stop_gradient((logits, aux_hidden))
    return chain_loss(
        params,
        recipe.config,
        row.token_ids,
        aux_hidden,
        logits,
        row.segment_ids,
        row.positions,
        row.trained,
        row.anchors,
        row.reach,
        recipe.counts,
    )


def next_state(recipe: Recipe, state: State, target: TargetParams, batch: Batch) -> tuple[State, Record]:
    """(the next state, what the batch showed). Runs on every device, on its rows, one row after the other."""

    def add_row(sums: Any, row: tuple[jax.Array, ...]) -> tuple[Any, None]:
        one = Batch(*(part[None] for part in row))
        found = jax.value_and_grad(loss_of_row, has_aux=True)(state.params, recipe, target, one)
        return jax.tree.map(jnp.add, sums, found), None

    depths = jnp.zeros((COD.depth,))
    zeros = ((jnp.zeros(()), (depths, depths)), jax.tree.map(jnp.zeros_like, state.params))
    sums, _ = jax.lax.scan(add_row, zeros, tuple(batch))
    (loss, (hits, rows)), gradients = jax.lax.psum(sums, ROWS)
    total = jnp.maximum(jnp.sum(rows), 1.0)
    gradients = jax.tree.map(lambda gradient: gradient / total, gradients)
    updates, optimizer_state = optimizer(recipe.steps).update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state), Record(loss / total, hits, rows)


@lru_cache
def compiled_step(recipe: Recipe) -> Callable[[State, TargetParams, Batch], tuple[State, Record]]:
    """`next_state` over all devices; it takes the state's memory."""
    everywhere, by_rows = PartitionSpec(), PartitionSpec(ROWS)
    specs = {"in_specs": (everywhere, everywhere, by_rows), "out_specs": everywhere}
    sharded = jax.shard_map(partial(next_state, recipe), mesh=devices(), check_vma=False, **specs)
    return jax.jit(sharded, donate_argnums=0)


def main() -> None:
    """The command."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the target's directory with its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="what scripts.demo.regenerate wrote")
    parser.add_argument("--dataset", type=Path, required=True, help="what scripts.demo.dataset wrote")
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
    sources = {
        "written": Rows(sorted(arguments.data.glob("shard_*.npz"))),
        "chat": Rows([arguments.dataset / "chat_train.npz"]),
        "raw": Rows([arguments.dataset / "raw_train.npz"]),
    }
    # room for the chains of most chat rows; fuller rows are sampled down to it
    trained = [(sources[name].roles == TEXT).sum(axis=1) for name in ("written", "chat")]
    counts = COD.counts(int(np.quantile(np.concatenate(trained), ROOM_QUANTILE)))
    target = replicated(loaded.params)

    def fresh(steps: int) -> State:
        params = initial_params(config, loaded.params)
        return State(params, optimizer(steps).init(params))

    def seconds() -> float:
        recipe = Recipe(config, loaded.config, counts, steps=1000)
        return seconds_per_step(recipe, replicated(fresh(1000)), target, sources)

    steps = steps_of(arguments, out, seconds)
    state, first = restore(out, fresh(steps))
    state = train(out, Recipe(config, loaded.config, counts, steps), replicated(state), first, target, sources)
    shipped = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)
    save_drafter(out / "drafter", shipped, config)


def train(out: Path, recipe: Recipe, state: State, first: int, target: TargetParams, sources: dict[str, Rows]) -> State:
    """The state after the last step; out/state.npz holds it, too."""
    saving, start = Every(SAVE_SECONDS), time.monotonic()
    records: list[Record] = []
    for step in range(first, recipe.steps):
        state, record = compiled_step(recipe)(state, target, batch_at(step, sources, recipe.counts))
        records.append(record)
        last = step + 1 == recipe.steps
        if (step + 1) % LOG_EVERY == 0 or last:
            loss, hits, rows = (np.asarray(jnp.stack(values)) for values in zip(*records, strict=True))
            elapsed = time.monotonic() - start
            log(
                out,
                step=step + 1,
                steps=recipe.steps,
                loss=float(loss.mean()),
                hits_by_depth=[round(float(rate), 3) for rate in hits.sum(0) / np.maximum(rows.sum(0), 1)],
                elapsed_s=elapsed,
                left_s=(recipe.steps - step - 1) * elapsed / (step + 1 - first),
            )
            records = []
        if saving.due() or last:
            save_tree(out / "state.npz", {"state": state, "step": np.int32(step + 1)})
    return state


def steps_of(arguments: argparse.Namespace, out: Path, seconds: Any) -> int:
    """The number of steps, from the command line or the run that exists; recorded in run.json."""
    path = out / "run.json"
    if arguments.steps or arguments.minutes:
        steps = arguments.steps or max(1, int(arguments.minutes * 60 / seconds()))
        recipe = {
            "steps": steps,
            "rows_per_step": BATCH_ROWS,
            "mix": MIX,
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


def seconds_per_step(recipe: Recipe, state: State, target: TargetParams, sources: dict[str, Rows]) -> float:
    """The median time of a step on a throw-away state, compilation left out."""
    times = []
    for step in range(6):
        start = time.perf_counter()
        state, record = compiled_step(recipe)(state, target, batch_at(step, sources, recipe.counts))
        record.loss.block_until_ready()
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
