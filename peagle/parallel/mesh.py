"""A target over several devices: a mesh, and `Sharded`, which satisfies peagle.protocols.Target.

Each rank holds a smaller model, its part (target.shard), and its own kv heads of every cache. One `shard_map` wraps the
target's pass. Everything else runs on every rank alike, the drafter included, except the drafter's head, which is
sharded by vocabulary.

    tokens, positions     the same on every rank
      embed ..              |  |  |  |
      attention, its heads  |  |  |  |     each its own weights and caches
      reduce               -+--+--+--+-    two sums a layer, in rank order
      experts, their part   |  |  |  |
      reduce               -+--+--+--+-
      head, its tokens      |  |  |  |
      gather               -+--+--+--+-    once
    logits                the same on every rank

dp is the number of such meshes, each with a copy of the target and its own engine (peagle.engine.devices.replicas).
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from peagle.base.errors import InputError
from peagle.ops.attention import CacheGroup, PagedCache, Pages, own_cache
from peagle.ops.messages import VerifyOutput
from peagle.protocols import Target

AXIS = "rank"
OF_PARTS = PartitionSpec(AXIS)  # rank r's part is [r]
OF_PAGES = PartitionSpec(None, None, AXIS)  # [P, S, G H]: by kv head
SAME = PartitionSpec()
OF_CACHE = PagedCache(OF_PAGES, SAME)  # type: ignore[arg-type]  # a prefix of the tree
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Numbers of devices. Heads, vocabulary and caches are sharded over all tp x ep ranks of a replica."""

    tp: int = 1  # ranks that share the width of an expert
    ep: int = 1  # groups of ranks that share the experts
    dp: int = 1  # replicas that share the slots

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return self.tp * self.ep

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.dp * self.ranks

    def __str__(self) -> str:
        return f"dp={self.dp}," * (self.dp > 1) + f"tp={self.tp},ep={self.ep}"


def parse_mesh(text: str) -> MeshShape:
    """Read a mesh such as "tp=2" or "dp=2,tp=2,ep=4". Raises InputError for anything else."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.strip().partition("=")
        if name not in ("tp", "ep", "dp") or name in sizes or not re.fullmatch("0*[1-9][0-9]{0,5}", size, re.ASCII):
            raise InputError(
                f"the mesh is {text!r}; expected tp=N, ep=N or dp=N, or several as dp=N,tp=N, of 1 or more devices",
                "mesh",
            )
        sizes[name] = int(size)
    return MeshShape(**sizes)


def refuse_replicas(mesh: str | None, why: str) -> None:
    """Raise InputError for a mesh with dp. why: the reason, within the message."""
    if mesh is not None and parse_mesh(mesh).dp > 1:
        raise InputError(f"the mesh is {mesh!r}, but {why}; leave dp out", "mesh")


def make_meshes(shape: MeshShape) -> list[Mesh]:
    """Make each replica's mesh from the first devices; every process contributes equally many.

    Raises InputError for too few devices, and for replicas over several processes.
    """
    devices, processes = jax.devices(), jax.process_count()
    if shape.dp > 1 and processes > 1:
        raise InputError(
            f"the mesh {shape} has dp, but {processes} processes run one copy of the target together; leave dp out"
        )
    if shape.ranks % processes:
        raise InputError(
            f"the mesh {shape} has {shape.ranks} devices; expected a multiple of the {processes} processes, which have "
            "as many of them each"
        )
    if processes > 1:
        devices = [
            device
            for process in range(processes)
            for device in [device for device in devices if device.process_index == process][: shape.ranks // processes]
        ]
    if (needed := shape.devices) > len(devices):
        kind = devices[0].platform
        more = f"; JAX_NUM_CPU_DEVICES={needed} in the environment makes more of one CPU" if kind == "cpu" else ""
        raise InputError(f"the mesh {shape} needs {needed} devices, and there are {len(devices)} ({kind}){more}")
    return [Mesh(replica, (AXIS,)) for replica in np.array(devices[:needed]).reshape(shape.dp, shape.ranks)]


@flax.struct.dataclass
class Sharded:
    """A target whose parts lie on the devices of a mesh. Every leaf of `parts` is [rank, *its local shape].

    kv_copies: of a kv head, side by side (peagle.protocols.OverDevices). own_copies: those that one rank holds.
    """

    parts: Target
    mesh: Mesh = flax.struct.field(pytree_node=False)
    kv_copies: int = flax.struct.field(pytree_node=False, default=1)
    own_copies: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def kv_parts(self) -> int:
        return self.ranks * self.own_copies

    @property
    def local_ranks(self) -> int:
        """Number of ranks in this process."""
        return len(self.mesh.local_devices)

    @property
    def vocab_size(self) -> int:
        return self.parts.vocab_size

    @property
    def max_positions(self) -> int:
        return self.parts.max_positions

    def on(self, mesh: Mesh) -> "Sharded":
        """Copy the target to the devices of another mesh of equal size."""
        return Sharded(jax.device_put(self.parts, NamedSharding(mesh, OF_PARTS)), mesh, self.kv_copies, self.own_copies)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.parts.cache_groups

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make empty pools with all ranks' kv heads side by side; a kv head of several ranks is there for each."""
        sharding = NamedSharding(self.mesh, OF_PAGES)

        def over_ranks(pages: Pages) -> Pages:
            count, size, width = pages.key.shape
            empty = jnp.zeros((count, size, width * self.ranks), pages.key.dtype)
            return Pages(*(jax.lax.with_sharding_constraint(empty, sharding) for _ in range(2)))

        return tuple(map(over_ranks, jax.eval_shape(lambda: self.parts.init_pages(num_pages))))

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        return own_cache(self.cache_groups, self.init_pages, batch, capacity, widest_write)

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: PagedCache,
        logit_rows: Int[Array, "B L"] | None = None,
        writes: Bool[Array, "B T"] | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        """See `Target.extend`. Every rank computes all rows."""

        def of_rank(parts: Target, *operands: Any) -> tuple[VerifyOutput, PagedCache]:
            return _own(parts).extend(*operands)

        # check_vma off: it cannot see that sums in rank order are the same everywhere
        run = jax.shard_map(
            of_rank,
            mesh=self.mesh,
            in_specs=(OF_PARTS, SAME, SAME, OF_CACHE, SAME, SAME),
            out_specs=(SAME, OF_CACHE),
            check_vma=False,
        )
        result: tuple[VerifyOutput, PagedCache] = run(self.parts, token_ids, positions, cache, logit_rows, writes)
        return result

    def first_not_finite(self, token_ids: Sequence[int]) -> str | None:
        """See `peagle.protocols.Explains`; the parts must be of a model that has it."""

        def run(of_model: Callable[..., jax.Array], values: np.ndarray) -> jax.Array:
            def of_rank(parts: Target, values: jax.Array) -> jax.Array:
                return of_model(_own(parts), values)

            on_ranks = jax.shard_map(
                of_rank, mesh=self.mesh, in_specs=(OF_PARTS, SAME), out_specs=SAME, check_vma=False
            )
            outputs: jax.Array = jax.jit(on_ranks)(self.parts, values)
            return outputs

        named: str | None = self.parts.first_not_finite(token_ids, run)  # type: ignore[attr-defined]
        return named


def _own(parts: Tree) -> Tree:
    """Return this rank's part, inside the `shard_map`."""
    part: Tree = jax.tree.map(lambda leaf: leaf[0], parts)
    return part


def shard(load: Callable[[int, Callable[[], None]], Tree], mesh: Mesh) -> Tree:
    """Load every rank's part onto its device, several at once, and put them side by side (`Sharded.parts`).

    load(rank, go_on) makes the part's arrays on JAX's default device. Each process loads its own ranks, in as many
    threads as it has processors. The parts' trees differ only in values. Memory is that of the parts, plus the
    temporary memory of `load` in each thread.

    If one rank fails, or Ctrl-C is pressed, the others end, too: `load` must call go_on() often, which then raises the
    same error.
    """
    failures: list[BaseException] = []
    local_ranks = [(rank, device) for rank, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]

    def go_on() -> None:
        if failures:
            raise failures[0]

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failures.append(error)
            raise

    def on_device(place: tuple[int, jax.Device]) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
        rank, device = place
        with failing(), jax.default_device(device):
            return jax.tree.flatten(load(rank, go_on))

    with concurrent.futures.ThreadPoolExecutor(min(len(local_ranks), os.cpu_count() or 1)) as threads, failing():
        loaded, trees = zip(*threads.map(on_device, local_ranks), strict=True)
    placed, tree = NamedSharding(mesh, OF_PARTS), trees[0]
    together = []
    for index in range(len(loaded[0])):
        rows = []
        for (_, device), leaves in zip(local_ranks, loaded, strict=True):
            rows.append(_as_row(leaves[index], device))
            leaves[index] = None
        together.append(jax.make_array_from_single_device_arrays((mesh.size, *rows[0].shape[1:]), placed, rows))
    result: Tree = jax.tree.unflatten(tree, together)
    return result


def _as_row(leaf: jax.Array, device: jax.Device) -> jax.Array:
    """Prepend an axis of one to a rank's array, on its device; on CPU without a copy.

    Compiles nothing, because a compilation would take over 100 MB of memory on top of all parts.
    """
    if device.platform == "cpu":
        return jax.device_put(np.asarray(leaf)[None], device, may_alias=True)
    return jax.device_put(leaf, device)[None]


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """Copy every array to all devices of the mesh, except arrays that are sharded over it."""
    everywhere, cut = NamedSharding(mesh, SAME), NamedSharding(mesh, OF_PARTS)

    def copy(leaf: jax.Array) -> jax.Array:
        if leaf.sharding == cut:
            return leaf
        copies = [jax.device_put(leaf, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, copies)

    copied: Tree = jax.tree.map(copy, tree)
    return copied
