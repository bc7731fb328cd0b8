"""The checkpoints of a training: the newest ones and the best one, each whole or refused."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from drafter.train.folder import CHECKPOINTS, LOG
from drafter.train.step import State
from peagle.base.errors import InputError
from peagle.base.files import write_text_whole
from peagle.base.sizes import format_size
from peagle.base.strict_json import dumps

NEWEST_KEPT = 2  # besides the best one
SIZES = "sizes.json"  # sizes of a checkpoint's files


class TrainingStopped(RuntimeError):
    """Training cannot continue: the loss is not finite, or the disk is full. The message names the last good step."""


class Checkpoints:
    """The checkpoints in a training's folder, as a context. best: returns the step to keep besides the newest."""

    def __init__(self, out: Path, best: Callable[[], int | None]) -> None:
        self._folder, self._best = out / CHECKPOINTS, best
        policy = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(NEWEST_KEPT), _Keep(self._best)]
        )
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, enable_async_checkpointing=False)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options, item_handlers=handler)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def newest(self) -> int | None:
        step: int | None = self._manager.latest_step()
        return step

    @property
    def last_good(self) -> str:
        """Say where the newest checkpoint is, for a message."""
        if self.newest is None:
            return "there is no checkpoint yet"
        return f"the last good step is {self.newest}, in {self._folder}"

    def expect_best(self) -> None:
        """Raise InputError if the best step has no checkpoint; step 0 needs none."""
        best = self._best()
        if best and best not in self._manager.all_steps():
            raise InputError(
                f"{self._folder.parent}: by {LOG} step {best} is the best on held-out documents, and "
                f"{self._folder / str(best)} is missing; put it back, or take another --out"
            )

    def read(self, step: int, shapes: Any) -> State:
        """Read a step's checkpoint. Raises InputError if it does not have these shapes, or is not whole."""
        try:
            # check first: a restore that fails half way leaves reads open that raise when Python collects them
            _expect_sizes(self._folder / str(step))
            _expect_shapes(self._manager.item_metadata(step), shapes)
            return cast(State, self._manager.restore(step, args=ocp.args.StandardRestore(shapes)))
        except Exception as error:  # orbax raises a bare Exception for a truncated file
            why = str(error).partition("\n")[0]
            raise InputError(
                f"{self._folder}: cannot continue from step {step}: {why}; remove that checkpoint's folder to continue "
                "from the one before, or take another --out"
            ) from None

    def save(self, step: int, state: State) -> None:
        """Save a step, unless that is done. Raises TrainingStopped if it cannot be written."""
        if self.newest == step:
            return
        size, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self._folder).free
        if free < size:  # check first: if a disk fills up half way, orbax's threads print long errors
            raise TrainingStopped(
                f"the checkpoint of step {step} takes {format_size(size)}, the disk of {self._folder} has "
                f"{format_size(free)} left: {os.strerror(errno.ENOSPC)}; {self.last_good}"
            )
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            checkpoint = self._folder / str(step)
            write_text_whole(checkpoint / SIZES, dumps(_sizes(checkpoint)))
        except (OSError, ValueError, RuntimeError) as error:  # orbax raises its storage's errors as they are
            why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise TrainingStopped(
                f"the checkpoint of step {step} cannot be written to {self._folder}: {why}; {self.last_good}"
            ) from None


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Preserve the checkpoint of the best step so far (a preservation policy of orbax)."""

    step: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> Sequence[bool]:
        step = self.step()
        return [checkpoint.step == step for checkpoint in checkpoints]


def _expect_sizes(checkpoint: Path) -> None:
    """Raise ValueError if a file's size differs from the recorded one. Passes if no sizes were recorded."""
    if not (checkpoint / SIZES).exists():
        return
    sizes = _sizes(checkpoint)
    for name, size in json.loads((checkpoint / SIZES).read_text(encoding="utf-8")).items():
        if sizes.get(name) != size:
            raise ValueError(f"{name} has {sizes.get(name, 0)} bytes, {size} were written")


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SIZES)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _expect_shapes(kept: Any, state: Any) -> None:
    """Raise ValueError naming the first array whose name or shape differs between the two trees."""
    before, expected = _shapes_by_name(kept), _shapes_by_name(state)
    for name in sorted(before.keys() | expected.keys()):
        if before.get(name) != expected.get(name):
            raise ValueError(
                f"{name} is {before.get(name, 'not there')} in it and {expected.get(name, 'not there')} in this "
                "training"
            )


def _shapes_by_name(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}
