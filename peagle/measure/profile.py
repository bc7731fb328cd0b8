"""Break down the time of a step: run some steps under JAX's profiler and sum up its trace.

The trace times the operations of the compiled programs; a program's text says to which part of the step an operation
belongs (peagle.engine.step.step). Parts that run at once share the time equally. Time without operations is the
runtime's if a program is running, else the host's.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.engine import Engine
from peagle.engine.host.inspection import launching_alone, step_programs
from peagle.engine.request import Request
from peagle.engine.step.step import PARTS

BETWEEN, HOST = "between operations", "host gap"
IN_PROGRAM, OTHER_PROGRAM = "in a program", "in another program"  # of spans that belong to no part
MOST_TOKENS = 96  # that a request decodes under the profiler, because traces are large
STEPS = "jit__steps"  # prefix of the module names of peagle.engine.host.programs.steps_program
CONTAINERS = re.compile(r"^(while|call|conditional)\b")  # operations that contain others
_MODULE = re.compile(r"HloModule ([^,\s]+)")
_METADATA = re.compile(r"%?(\S+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of a step under the profiler; the parts add up to a step.

    rest: operations of no part, such as those of loops and outputs. between: no operation runs, but a program does.
    """

    directory: str
    num_steps: int
    draft_ms: float
    verify_ms: float
    accept_ms: float
    rest_ms: float
    between_ms: float
    host_ms: float

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds by the displayed name of the part."""
        return {
            "draft": self.draft_ms,
            "verify": self.verify_ms,
            "accept": self.accept_ms,
            "rest": self.rest_ms,
            BETWEEN: self.between_ms,
            HOST: self.host_ms,
        }

    @property
    def step_ms(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Span:
    """The time of an operation, in ns."""

    start: float
    end: float
    part: str  # of PARTS, "rest" or IN_PROGRAM; without meaning for other programs


def make_directory(directory: Path) -> Path:
    """Create the directory of --profile, and return it. Raises InputError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--profile {directory} cannot be created: {reason_of(error)}; expected a directory to write to"
        ) from None
    return directory


def profile(
    engine: AnyEngine,
    requests: Sequence[Request],
    directory: Path,
    part_of: dict[str, str] | None = None,
    perfetto: bool = True,
) -> Breakdown:
    """Decode a request per slot under the profiler, at most MOST_TOKENS tokens each, and break down a step.

    Writes the trace to the directory, for XProf or TensorBoard; with `perfetto` also for Perfetto, which takes twice as
    long. The engine must be warmed up; of replicas, one is profiled. part_of: the result of `operation_parts` if known,
    since computing it compiles the programs once more. Raises InputError if the profiler gives no trace or no operation
    of the steps, and the profiler's own OSError and RuntimeError.
    """
    engine = engine.one
    batch = [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, MOST_TOKENS))
        for request in requests[: engine.config.slots]
    ]
    part_of = operation_parts(engine, not batch[0].sampling.greedy) if part_of is None else part_of
    trace, num_steps = record(engine, batch, directory, perfetto)
    operations, others = _read(trace, part_of)
    if not operations or not num_steps:
        raise InputError(f"the profiler gave no operations of the steps on {jax.default_backend()}; see {directory}")
    return breakdown(str(directory), num_steps, operations, others)


def record(engine: Engine, batch: Sequence[Request], directory: Path, perfetto: bool = False) -> tuple[Path, int]:
    """Decode a batch under the profiler; return (the trace's file, the number of steps).

    On a GPU the programs launch every operation alone (`launching_alone`). Raises InputError if the profiler
    wrote no trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python takes longer than the steps
    before = _traces(directory)
    with launching_alone(engine.executor) as recompiles:
        if recompiles:  # before the trace
            list(engine.generate(batch))
        with jax.profiler.trace(str(directory), profiler_options=options, create_perfetto_trace=perfetto):
            num_steps = sum(len(chunk.steps) for index, chunk in engine.generate(batch) if index == 0)
    written = dict(_traces(directory).items() - before.items())
    if len(written) != 1:
        raise InputError(f"{directory} has {len(written)} new traces; expected one: check for another run there")
    return next(iter(written)), num_steps


def _traces(directory: Path) -> dict[Path, int]:
    """Find the traces in a directory, with the times of writing: traces of one second have the same name."""
    return {path: path.stat().st_mtime_ns for path in directory.glob("**/*.xplane.pb")}


def operation_parts(engine: AnyEngine, sampled: bool) -> dict[str, str]:
    """Map the operations of the step programs to parts of the step: {module/operation: part}."""
    part_of: dict[str, str] = {}
    with launching_alone(engine.one.executor):
        for program in step_programs(engine.one, sampled):
            part_of |= operation_parts_of(program.as_text() or "")
    return part_of


def operation_parts_of(program: str) -> dict[str, str]:
    """Do the same for a program's text."""
    module = _MODULE.match(program)
    part_of = {}
    for name, path in _METADATA.findall(program):
        part = next((part for part in reversed(path.split("/")) if part in PARTS), None)
        if part is not None and module is not None:
            part_of[f"{module[1]}/{name}"] = part
    return part_of


def _read(trace: Path, part_of: dict[str, str]) -> tuple[list[Span], list[Span]]:
    """Read (the operations of the steps, those of other programs)."""
    steps: list[Span] = []
    others: list[Span] = []
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats or event.duration_ns <= 0:
                    continue
                name, module = str(stats["hlo_op"]), str(stats.get("hlo_module", ""))
                part = IN_PROGRAM if CONTAINERS.match(name) else part_of.get(f"{module}/{name}", "rest")
                span = Span(event.start_ns, event.start_ns + event.duration_ns, part)
                (steps if module.startswith(STEPS) else others).append(span)
    return steps, others


def breakdown(directory: str, num_steps: int, steps: Iterable[Span], others: Iterable[Span]) -> Breakdown:
    """Divide the time from the steps' first operation to the last among the parts.

    Leaves out time in which only other programs ran.
    """
    edges = [(at, sign, span.part) for span in steps for at, sign in ((span.start, 1), (span.end, -1))]
    first, last = min(at for at, _, _ in edges), max(at for at, _, _ in edges)
    edges += [
        (at, sign, OTHER_PROGRAM)
        for span in others
        for at, sign in ((max(span.start, first), 1), (min(span.end, last), -1))
        if span.end > first and span.start < last
    ]
    spent: dict[str, float] = defaultdict(float)
    running: dict[str, int] = defaultdict(int)
    before = first
    for at, sign, part in sorted(edges):
        active = {name for name, count in running.items() if count}
        working = active - {IN_PROGRAM, OTHER_PROGRAM}
        for name in working:
            spent[name] += (at - before) / len(working)
        if not working and IN_PROGRAM in active:
            spent[BETWEEN] += at - before
        elif not active:
            spent[HOST] += at - before
        running[part] += sign
        before = at
    draft, verify, accept, rest, between, host = (
        spent[name] / 1e6 / num_steps for name in (*PARTS, "rest", BETWEEN, HOST)
    )
    return Breakdown(directory, num_steps, draft, verify, accept, rest, between, host)
