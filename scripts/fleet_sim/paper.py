"""Costs of a replica on paper, for `scripts.fleet_sim.simulation`: a published model on devices that nobody here has.

A pass takes what reading its weights takes, or its arithmetic if that is longer, and its collectives. Devices reach a
share of their makers' figures; both shares are assumed. Drafts are those of a drafter in the public one's geometry.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from drafter.params import init_params
from peagle.ops.errors import InputError
from peagle.parallel import MeshShape
from peagle.workflows.plan import BFLOAT16, Device, pass_s, rank_bytes
from peagle.workflows.random_checkpoint import PARALLEL
from scripts.fleet_sim.simulation import Costs, Curve
from target.config import FULL, TargetConfig

PROMPTS = (128, 512, 2048, 8192, 32768)
CHUNK = 2048  # rows of a prefill's pass: beyond it reading the weights no longer counts
MXFP4_BYTES = 17 / 32  # of a parameter: a block of 32 codes of four bits, and its scale
STAGING_BYTES_PER_S = 25e9  # between a device's memory and the host's, over PCI Express 4: packing, and loading
NETWORK_BYTES_PER_S, NETWORK_S = 12.5e9, 1e-4  # 100 Gbit/s


@dataclasses.dataclass(frozen=True)
class Reached:
    """Shares of a device's figures that programs reach.

    memory: vLLM decodes the 20b on an H100 at 305 tok/s, .34 of what reading its weights allows. arithmetic: assumed.
    """

    memory: float = 0.34
    arithmetic: float = 0.4

    def __post_init__(self) -> None:
        if not (0 < self.memory <= 1 and 0 < self.arithmetic <= 1):
            raise InputError(f"shares of {self.memory} and {self.arithmetic} are reached; expected above 0, at most 1")


@dataclasses.dataclass(frozen=True)
class Replica:
    """A target in MXFP4 over a mesh of devices."""

    config: TargetConfig
    mesh: MeshShape
    device: Device
    reached: Reached = Reached()

    def pass_s(self, rows: int, positions: int = 0, heads: int | None = None) -> float:
        """Return the seconds of a pass. positions: each row's keys in full layers; heads: rows whose logits count."""
        reading, collectives = pass_s(self.config, True, self.mesh, self.device, rows)
        flop = 2 * rows * (self.row_weights + positions * self._flop_per_position)
        flop += 2 * (rows if heads is None else heads) * self.head_weights
        speed = self.reached.arithmetic * self.device.flop_per_s * self.mesh.ranks
        return max(reading / self.reached.memory, flop / speed) + collectives

    @property
    def row_weights(self) -> float:
        """Weights that a row is multiplied with, the head's left out."""
        kinds = rank_bytes(self.config, True, MeshShape())[0].kinds
        experts = kinds["experts"] / MXFP4_BYTES * self.config.top_k / self.config.num_experts
        return (kinds["attention"] + kinds["routers and norms"]) / BFLOAT16.itemsize + experts

    @property
    def head_weights(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    @property
    def full_layers(self) -> int:
        return sum(kind == FULL for kind in self.config.layer_types)

    @property
    def _flop_per_position(self) -> int:
        """Products of a row with a position's keys and values, halved: they are counted as weights are."""
        return 2 * self.full_layers * self.config.num_heads * self.config.head_dim

    @property
    def position_s(self) -> float:
        """Seconds of reading a position's keys and values in the full layers."""
        heads = max(1, self.config.num_kv_heads // self.mesh.ranks)
        size = 2 * self.full_layers * heads * self.config.head_dim * BFLOAT16.itemsize
        return size / (self.reached.memory * self.device.bytes_per_s)

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of prefilling a prompt in chunks."""
        begins = range(0, tokens, CHUNK)
        return sum(
            self.pass_s(min(CHUNK, tokens - begin), begin + min(CHUNK, tokens - begin) // 2, heads=1)
            for begin in begins
        )

    def draft_s(self) -> float:
        """Return the seconds of drafting: the drafter, a copy on every device, is read once."""
        shape = jax.eval_shape(lambda: init_params(PARALLEL.config(self.config), jax.random.key(0), BFLOAT16))
        leaves = jax.tree.leaves(shape.replace(embedding=None))
        read = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        return read / (self.reached.memory * self.device.bytes_per_s)


def paper_costs(replica: Replica, slots: int, ks: Sequence[int], kept: float) -> Costs:
    """Compute the costs of a replica with steps of each K; draft i is kept in kept^i of the steps.

    Raises InputError for numbers that cannot be.
    """
    if slots < 1 or min(ks) < 0 or not 0 <= kept < 1:
        raise InputError(
            f"{slots} slots, K of {list(ks)} and a share of {kept} are given; expected 1 or more, 0 or more, and 0 to 1"
        )
    rows = sorted({1 << power for power in range(10) if 1 << power < slots} | {slots})

    def steps(k: int) -> Curve:
        drafting = replica.draft_s() if k else 0.0
        return Curve(tuple((float(active), replica.pass_s(active * (k + 1)) + drafting) for active in rows))

    messages = Curve(tuple((float(tokens), float(_message_bytes(replica.config, tokens))) for tokens in PROMPTS))
    staging = Curve(tuple((tokens, size / STAGING_BYTES_PER_S) for tokens, size in messages.points))
    return Costs(
        prompt_s=Curve(tuple((float(tokens), replica.prompt_s(tokens)) for tokens in PROMPTS)),
        step_s={k: steps(k) for k in sorted({0, *ks})},
        message_bytes=messages,
        pack_s=staging,
        load_s=staging,
        network_bytes_per_s=NETWORK_BYTES_PER_S,
        network_s=NETWORK_S,
        position_s=replica.position_s,
        acceptance={k: tuple(kept ** (place + 1) for place in range(k)) for k in ks if k},
        chunk=CHUNK,
    )


def _message_bytes(config: TargetConfig, tokens: int) -> int:
    """Count the bytes of a hand-off: all rows of full layers, those of the window of the others."""
    rows = sum(min(tokens, config.window(layer) or tokens) for layer in range(config.num_layers))
    return 2 * rows * config.num_kv_heads * config.head_dim * BFLOAT16.itemsize
