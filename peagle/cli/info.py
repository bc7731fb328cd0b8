"""`peagle info`: geometry, memory and fit of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.base.errors import InputError
from peagle.base.flag import PLAN, Flag, check_least
from peagle.cli.command import Takes
from peagle.cli.output import show_lines
from peagle.config import LoadConfig


@dataclass(frozen=True, kw_only=True)
class Info:
    """Inspect checkpoints: geometry, memory, whether they fit.

    Reads only config.json and the headers of the weights, so it is fast for a
    checkpoint of any size.

    [bold]Examples[/bold]

      the demo models               [cyan]peagle info[/cyan]
      a target or a drafter         [cyan]peagle info DIR[/cyan]
      both, and whether they fit    [cyan]peagle info TARGET DRAFTER[/cyan]
      memory on eight GPUs
        [cyan]peagle info --mesh tp=8 --slots 16 --context 8192 --device H100 DIR[/cyan]
    """

    directories: Annotated[tuple[str, ...], Flag(names=("DIR",))] = ()
    """Target, drafter, or both; demo, demo-eagle3, demo-dflash: the package's own. Default: demo demo."""
    load: Annotated[LoadConfig, Takes("aux_layer_ids")] = LoadConfig()
    mesh: Annotated[str | None, Flag(PLAN, "tp=N,ep=N,dp=N")] = None
    """Also print what each device of this mesh holds of the target. The devices need not be present."""
    slots: Annotated[int | None, Flag(PLAN, "N")] = None
    """Requests decoded at once by the engine that is planned, over all replicas. Default: one per replica."""
    context: Annotated[int, Flag(PLAN, "N")] = 4096
    """Context length in tokens, 2 or more."""
    device: Annotated[str, Flag(PLAN, "H100|H200|B200")] = "H100"
    """Device of the mesh: its memory."""

    def __post_init__(self) -> None:
        check_least(self, slots=1, context=2)

    def run(self) -> int:
        """Print a table per checkpoint, and whether a target and a drafter fit. Return the exit code."""
        from drafter.aux_layers import named_aux_layers
        from drafter.dialects import is_drafter_config
        from drafter.load import inspect_drafter, map_warning
        from peagle.base.checkpoint import CONFIG, read_json
        from peagle.loading.checkpoints import another_target, auto_drafts
        from peagle.loading.fit import aux_layers_warning, fitting_aux_layers
        from peagle.parallel.mesh import parse_mesh
        from peagle.workflows.inspection import drafter_rows, engine_rows, mesh_rows, target_rows
        from peagle.workflows.mesh_plan import memory_of
        from target.load import inspect_target

        aux_layer_ids = self.load.aux_layer_ids
        shape = None if self.mesh is None else parse_mesh(self.mesh)
        memory_of(self.device)  # refused before files are read
        slots = self.slots or (1 if shape is None else shape.dp)
        paths = _paths(self.directories)
        targets, drafters = [], []
        for name, path in paths:
            if is_drafter_config(read_json(path, CONFIG)):
                drafters.append((name, path, *inspect_drafter(path, aux_layer_ids)))
            else:
                targets.append((name, path, inspect_target(path)))
        _check_kinds(self, len(targets), len(drafters), [name for name, _ in paths])
        tables, k = {}, auto_drafts(drafters[0][1] if drafters else None)
        for _, path, files in targets:
            rows = target_rows(files, path, k)
            if shape is not None:
                rows += mesh_rows(files, shape, self.device, slots, self.context, k)
            tables[path] = "GPT-OSS target", rows
        warnings = []
        for name, path, checkpoint, config in drafters:
            tables[path] = f"{config.kind} drafter", drafter_rows(checkpoint, config, path, aux_layer_ids)
            warnings.append(map_warning(checkpoint, config))
            if not targets and aux_layer_ids is None:
                warnings.append(aux_layers_warning(named_aux_layers(checkpoint.config), name))
        for name, path in paths:
            _print_table(name, *tables[path])
        if targets and drafters:
            (target_name, target_path, target), (drafter_name, drafter_path, drafter, _) = targets[0], drafters[0]
            layers = fitting_aux_layers(target.config, drafter, target_name, drafter_name, aux_layer_ids)
            outputs = ", ".join(map(str, layers.outputs))
            show_lines([f"They fit: the drafter reads the outputs of the target's layers {outputs}."])
            warnings += [layers.warning, another_target(drafter_path, target_path)]
        if targets:
            drafting = (drafters[0][1], drafters[0][3]) if drafters else None
            rows = engine_rows(slots, self.context, targets[0][1:], drafting)
            _print_table("an engine", f"{self.context:,} positions", rows)
        show_lines([f"WARNING: {warning}" for warning in warnings if warning is not None])
        return 0


def _paths(names: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (name, directory) of the typed checkpoints, or of the demo's."""
    from drafter.dialects import is_drafter_config
    from peagle.base.checkpoint import CONFIG, read_json
    from peagle.loading.checkpoints import DEMO, or_demo, resolve

    if not names:
        return [("the demo's target", resolve(DEMO, "target")), ("the demo's drafter", resolve(DEMO, "drafter"))]
    if len(names) > 2:
        raise InputError(f"{len(names)} directories are given; expected a target, a drafter, or both")
    paths = [(name, _directory(or_demo(name))) for name in names]
    if list(names[1:]) == [DEMO] and not is_drafter_config(read_json(paths[0][1], CONFIG)):
        paths[1] = DEMO, resolve(DEMO, "drafter")
    return paths


def _directory(name: str) -> Path:
    """Return a checkpoint's directory; demo is the demo's target."""
    from peagle.loading.checkpoints import DEMO, DEMO_DRAFTERS, WEIGHTLESS, drafter_folder, resolve

    if name in WEIGHTLESS:
        raise InputError(f"{name} has no checkpoint to inspect; expected a directory or {', '.join(DEMO_DRAFTERS)}")
    if name in DEMO_DRAFTERS and name != DEMO:
        return resolve(name, "drafter")
    return drafter_folder(resolve(name, "target"))


def _check_kinds(settings: Info, num_targets: int, num_drafters: int, names: Sequence[str]) -> None:
    """Raise InputError for two checkpoints of a kind, and for options about a checkpoint that is not typed."""
    if 2 in (num_targets, num_drafters):
        kind = "targets" if num_targets else "drafters"
        raise InputError(f"{names[0]} and {names[1]} are both {kind}; expected a target and a drafter")
    if settings.load.aux_layer_ids is not None and not num_drafters:
        raise InputError("--aux-layer-ids is given, but no drafter to read them; leave it out")
    if settings.mesh is not None and not num_targets:
        raise InputError("--mesh is given, but no target to shard; name one, or leave --mesh out")


def _print_table(name: str, kind: str, rows: Sequence[tuple[str, str]]) -> None:
    show_lines([f"{name}: {kind}"], style="bold")
    show_lines([f"  {label:<29} {value}" for label, value in rows], indent=32)
    show_lines([""])
