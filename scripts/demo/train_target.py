"""Train the demo target, a small GPT-OSS model, on a CPU. One call is one stage of scripts.demo.build.

    python -m scripts.demo.train_target STAGE --data DIR --out DIR [--begin RUN] [--scale .01]

--data: a folder of scripts.demo.rows. --begin: the run whose parameters it starts from. --out gets the newest
checkpoint: after an interruption the same command goes on from it, step for step the same.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from transformers import AutoTokenizer

from drafter.train.step import ROWS, devices_for
from scripts.demo.batches import BATCH_ROWS, SEED, STAGES, Batch, Batches, Rows
from scripts.runs import new_parser
from target import model
from target.config import TargetConfig
from target.dialects import parse_config
from target.load import save_target
from target.packed_attention import attend_packed
from target.params import TargetParams, init_params

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SUREST = -1e-6  # the greatest log-probability of an unwanted token that still has a finite loss
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.004, 0.002, 0.1
LOG_EVERY = 10
SAVE_SECONDS = 180.0
# The residual stream starts at the size of what the layers add to it, the predictions near uniform.
EMBEDDING_SCALE, HEAD_SCALE = 0.5, 0.1
CONFIG = parse_config({
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
})  # fmt: skip


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


# --- a run's folder -------------------------------------------------------------------------------------------------


def checkpoints_of(out: Path) -> ocp.CheckpointManager:
    """Open the checkpoints of a run, which keeps the newest."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    folder = (out / "checkpoints").absolute()
    return ocp.CheckpointManager(folder, options=options, item_handlers=ocp.StandardCheckpointHandler())


def restored(checkpoints: ocp.CheckpointManager, state: State) -> tuple[State, int]:
    """Read (the newest state, its step); (this state, 0) if there is none."""
    state = jax.device_put(state, NamedSharding(devices_for(BATCH_ROWS), PartitionSpec()))
    if (step := checkpoints.latest_step()) is None:
        return state, 0
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return checkpoints.restore(step, args=ocp.args.StandardRestore(shapes)), step


def params_of(run: Path) -> TargetParams:
    """Read the float32 parameters, with fused experts, of a run's folder."""
    with checkpoints_of(run) as checkpoints:
        state, step = restored(checkpoints, init_state(CONFIG))
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
    everywhere, in_rows = PartitionSpec(), PartitionSpec(ROWS)
    specs = {"in_specs": (everywhere, everywhere, in_rows), "out_specs": everywhere, "check_vma": False}
    step_of = jax.shard_map(partial(next_state, CONFIG), mesh=devices_for(BATCH_ROWS), **specs)
    step_of = jax.jit(step_of, donate_argnums=0)
    with checkpoints_of(out) as checkpoints:
        state, first = restored(checkpoints, first_state)
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
                checkpoints.save(done, args=ocp.args.StandardSave(state))
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
