"""When does drafting in parallel beat drafting in turn? What a step costs with a P-EAGLE and with an EAGLE-3 drafter,
on targets of several sizes, measured here and by bytes for the real ones.

    python -m scripts.crossover --out RUN demo CHECKPOINT ...

For each target (demo, or a directory, as scripts/make_random_checkpoint.py makes them) drafters of each kind are made
with random weights, as wide as the target: what a step costs does not depend on what the weights say, and random drafts
are practically never accepted, so that every step verifies all of them and gives one token. Plain decoding and every
(drafter, K) run in turn, `--rounds` times; a cost is the median over the rounds of (milliseconds of a step over
milliseconds of a plain one in the same round).

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl (a line per round and shape, as soon as it is
known), README.md and crossover.png.

A large target needs few steps, and room for all drafters beside it:

    python -m scripts.crossover --out RUN --draft-vocab 32768 -k 1,2,3,5 --rounds 3 --steps 6 20b
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import peagle
from drafter.config import DrafterConfig
from drafter.load import save_drafter
from drafter.params import init_params
from peagle.api import Pair
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.loading import DEMO, resolve, with_drafter
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.rope import RopeConfig
from peagle.workflows.random_checkpoint import SIZES
from scripts.peers.cost import MXFP4_BYTES, Storage, stored_weights
from scripts.results import RawLines, in_one_line, origin, write_page
from target.config import TargetConfig
from target.load import inspect_target

Json = dict[str, Any]
BFLOAT16 = 2
PROMPT_TOKENS = 128
NARROW_VOCAB = 32768  # a reduced draft vocabulary, as drafters of large vocabularies have
PUBLISHED_RATE = 0.76  # of draft i .76^i are kept: 3.70 tokens a step at K = 7, as published for the 20b on MT-Bench


@dataclasses.dataclass(frozen=True)
class Kind:
    """A drafter's shape but for its width: that is the target's."""

    name: str
    layers: int
    parallel: bool

    def config(self, target: TargetConfig, draft_vocab: int | None = None) -> DrafterConfig:
        """As `peagle train` makes it by default."""
        taps = tuple(sorted((min(1, target.num_layers - 1), target.num_layers // 2, target.num_layers - 1)))
        return DrafterConfig(
            hidden_size=target.hidden_size,
            num_layers=self.layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            mlp_width=2 * target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab or target.vocab_size,
            mask_token_id=target.vocab_size - 1 if self.parallel else None,
            rope=RopeConfig(target.head_dim, 10000.0),
            aux_layer_ids=taps,
        )

    def draft_bytes(self, config: DrafterConfig, num_drafts: int) -> int:
        """What is read to draft, in bfloat16, each matrix once a pass: the first pass reads fc, each reads layers and
        head. The embedding, of which a row a token is read, counts nowhere."""
        shapes = jax.eval_shape(lambda key: init_params(config, key, jnp.bfloat16), jax.random.key(0))
        once = shapes.fc.size * BFLOAT16
        layers = sum(leaf.size for leaf in jax.tree.leaves(shapes.layers)) * BFLOAT16
        passes = 1 if self.parallel else num_drafts
        return once + passes * (layers + shapes.lm_head.size * BFLOAT16)


IN_TURN = Kind("EAGLE-3, 1 layer", 1, False)
KINDS = (IN_TURN, Kind("P-EAGLE, 2 layers", 2, True), Kind("P-EAGLE, 4 layers", 4, True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", help="demo, or directories of targets")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("-k", default="1,2,3,5,7", help="numbers of drafts (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of everything (default %(default)s)")
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="tokens that drafters propose (default: all)")
    parser.add_argument("--steps", type=int, default=32, help="timed steps of each, at least (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="that so many plain steps take (default %(default)s)"
    )
    arguments = parser.parse_args()
    return in_one_line("crossover", lambda: measure(arguments))


def measure(arguments: argparse.Namespace) -> int:
    """Everything is checked before anything runs."""
    expect_new(arguments.out)
    if arguments.rounds < 1 or arguments.steps < 2:
        raise InputError("--rounds must be 1 or more, --steps 2 or more")
    try:
        ks = [int(part) for part in arguments.k.split(",")]
    except ValueError:
        raise InputError(f"-k is {arguments.k!r}; expected numbers with commas between, such as 1,3,7") from None
    if min(ks) < 1:
        raise InputError(f"-k is {arguments.k!r}; expected numbers of 1 or more")
    directories = {Path(name).name: resolve(name, "target") for name in arguments.targets}
    if len(directories) < len(arguments.targets):
        raise InputError("two targets have the same name; expected directories with names of their own")
    configs = {name: inspect_target(directory).config for name, directory in directories.items()}
    smallest = min(config.vocab_size for config in configs.values())
    vocab = arguments.draft_vocab
    if vocab is not None and not 1 <= vocab <= smallest:
        raise InputError(f"--draft-vocab is {vocab}; expected 1 to {smallest}, all that a target has")
    raw = RawLines(arguments.out)
    for name, directory in directories.items():
        for line in measured(name, directory, configs[name], ks, arguments):
            raw.add(line)
    rows = [row for name, config in configs.items() for row in summary(name, config, ks, raw.lines, vocab)]
    record = {
        "schema": 1,
        "provenance": origin("scripts.crossover"),
        "config": {"targets": list(directories), "k": ks, "rounds": arguments.rounds, "draft_vocab": vocab},
        "rows": rows,
        "by_bytes": [row for name in ("20b", "120b") for row in by_bytes(name, SIZES[name], ks)],
    }
    write_page(arguments.out, record, page(record))
    draw(record, arguments.out / "crossover.png")
    return 0


def measured(
    name: str, directory: Path, config: TargetConfig, ks: Sequence[int], arguments: argparse.Namespace
) -> Iterator[Json]:
    """A line per round and shape: milliseconds of a step."""
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(0, config.vocab_size, PROMPT_TOKENS).tolist())
    engines: dict[tuple[str, int], Engine] = {}
    target = DEMO if name == DEMO else directory
    with tempfile.TemporaryDirectory() as scratch:
        drafters = {kind: Path(scratch) / str(number) for number, kind in enumerate(KINDS)}
        for kind, drafter in drafters.items():  # before the target is there: drawing them takes memory
            shape = kind.config(config, arguments.draft_vocab)
            save_drafter(drafter, init_params(shape, jax.random.key(0), jnp.bfloat16), shape)
        pair = peagle.load(target, None)
        steps = enough_steps(pair, prompt, arguments)
        request = Request(prompt, steps + 1, stop_token_ids=())
        engines["plain", 0] = engine_of(pair, 0, request)
        for kind, drafter in drafters.items():
            pair = with_drafter(pair, target, drafter)
            for k in ks:
                engines[kind.name, k] = engine_of(pair, k, request)
    for engine in engines.values():
        engine.warm_up()
    started = time.monotonic()
    for number in range(arguments.rounds):
        for (kind_name, k), engine in engines.items():
            line = {"target": name, "round": number, "drafter": kind_name, "k": k, "steps": steps}
            yield line | {"step_ms": step_ms(engine, request)}
        left = (time.monotonic() - started) / (number + 1) * (arguments.rounds - number - 1)
        print(
            f"\r{name}: round {number + 1} of {arguments.rounds}, {left:.0f} s left ",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)


def enough_steps(pair: Pair, prompt: tuple[int, ...], arguments: argparse.Namespace) -> int:
    """--steps, or more where so many plain ones would take less than --seconds."""
    request = Request(prompt, arguments.steps + 1, stop_token_ids=())
    engine = engine_of(pair, 0, request)
    engine.warm_up()
    room = pair.max_positions - len(prompt) - 2
    return min(max(arguments.steps, int(arguments.seconds * 1e3 / step_ms(engine, request))), room)


def engine_of(pair: Pair, k: int, request: Request) -> Engine:
    """Make the engine that drafts k tokens a step, with room for the request alone."""
    capacity = len(request.prompt_ids) + request.max_new_tokens
    return pair.engine(pair.engine_config(k, capacity=capacity))


def step_ms(engine: Engine, request: Request) -> float:
    """Milliseconds of a step, over those that follow prefill."""
    chunks = [chunk for _, chunk in engine.generate([request])]
    return (chunks[-1].time_s - chunks[0].time_s) / sum(len(chunk.steps) for chunk in chunks) * 1e3


def summary(
    name: str, config: TargetConfig, ks: Sequence[int], raw: Sequence[Json], draft_vocab: int | None
) -> Iterator[Json]:
    """Of each drafter and K: cost over a plain step, lowest and highest round, and what it must accept to be even."""
    found = {(line["drafter"], line["k"], line["round"]): line["step_ms"] for line in raw if line["target"] == name}
    rounds = sorted({number for _, _, number in found})
    weights = _weights(config).read(1)
    plain = [found["plain", 0, number] for number in rounds]
    for kind in KINDS:
        for k in ks:
            ratios = [found[kind.name, k, number] / plain[number] for number in rounds]
            against = [found[IN_TURN.name, k, number] / found[kind.name, k, number] for number in rounds]
            yield {
                "target": name,
                "drafter": kind.name,
                "k": k,
                "plain_ms": statistics.median(plain),
                "cost": statistics.median(ratios),
                "cost_range": [min(ratios), max(ratios)],
                "over_in_turn": statistics.median(against),
                "draft_bytes_over_plain": kind.draft_bytes(kind.config(config, draft_vocab), k) / weights,
            }


def by_bytes(name: str, config: TargetConfig, ks: Sequence[int]) -> Iterator[Json]:
    """What reading weights alone would make of it, with the whole head and with a reduced one."""
    weights = _weights(config)
    for vocab in (config.vocab_size, NARROW_VOCAB):
        for kind in KINDS:
            for k in ks:
                shape = kind.config(config, vocab)
                cost = (kind.draft_bytes(shape, k) + weights.read(k + 1)) / weights.read(1)
                yield {"target": name, "draft_vocab": vocab, "drafter": kind.name, "k": k, "cost": cost}


def _weights(config: TargetConfig) -> Any:
    return stored_weights(config, Storage(BFLOAT16, MXFP4_BYTES))


def page(record: Json) -> str:
    """README.md of the run."""
    config, source = record["config"], record["provenance"]
    ks, vocab = config["k"], config["draft_vocab"]
    proposing = "" if vocab is None else f" that propose {vocab:,} tokens"
    lines = [
        "# When does drafting in parallel pay?",
        "",
        f"`{source['command']}`",
        "",
        f"Random drafters{proposing}, greedy, batch 1, prompt {PROMPT_TOKENS}, {config['rounds']} rounds in turn; "
        f"{source['cpu']}, {source['num_threads']} threads, {source['device']['platform']}; jaxlib "
        f"{source['packages']['jaxlib']}; {source['time']}.",
        "",
        "A step that drafts K tokens costs c(K) plain steps; at acceptance length a it is worth a / c(K). An EAGLE-3 "
        "drafter runs K passes of one row for it, each reading its layer and the head; a P-EAGLE drafter one pass of "
        "up to 2K rows through more layers, which reads the head once. So P-EAGLE's gain over EAGLE-3 at equal "
        "acceptance is the ratio of their costs: above 1 it wins. Worth: what c(K) makes of plain decoding's speed "
        f"where draft i is kept in {PUBLISHED_RATE:.2f}^i of the steps, as published for the 20b: of times measured "
        "here and an acceptance that is not.",
        "",
    ]
    for target in dict.fromkeys(row["target"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["target"] == target]
        lines += [f"## {target}: a plain step takes {own[0]['plain_ms']:.2f} ms", ""]
        lines += _table(_columns(ks))
        for kind in KINDS:
            cells = {row["k"]: row for row in own if row["drafter"] == kind.name}
            costs = [f"{cells[k]['cost']:.2f} ({_range(cells[k]['cost_range'])})" for k in ks]
            gains = ["-" if kind is IN_TURN else f"{cells[k]['over_in_turn']:.2f}" for k in ks]
            worths = [f"{_worth(k, cells[k]['cost']):.2f}" for k in ks]
            lines.append(f"| {kind.name} | {' | '.join([*costs, *gains, *worths])} |")
        lines.append("")
    lines += verdict(record)
    lines += [
        "## The real targets, by bytes",
        "",
        "Derived, not measured: each weight is read once a pass, experts by independent routing, MXFP4 experts and "
        "bfloat16 beside them, drafters as wide as the target with an MLP twice as wide. It leaves out what a pass "
        "costs beside its bytes, as kernel launches on a GPU, of which EAGLE-3 has K times as many. Published gains of "
        "P-EAGLE over EAGLE-3 on 20b, each at its best K: 1.27 to 1.36 (paper, H200), 1.55 to 1.69 (vLLM, B200).",
        "",
    ]
    lines += _table(_columns(ks), "target, draft vocabulary, drafter")
    cost = {(row["target"], row["draft_vocab"], row["drafter"], row["k"]): row["cost"] for row in record["by_bytes"]}
    for target, vocab, name in dict.fromkeys(key[:3] for key in cost):
        costs = [cost[target, vocab, name, k] for k in ks]
        gains = [cost[target, vocab, IN_TURN.name, k] / cost[target, vocab, name, k] for k in ks]
        shown = ["-" if name == IN_TURN.name else f"{gain:.2f}" for gain in gains]
        worths = [f"{_worth(k, c):.2f}" for k, c in zip(ks, costs, strict=True)]
        lines.append(f"| {target}, {vocab:,}, {name} | {' | '.join([f'{c:.2f}' for c in costs] + shown + worths)} |")
    lines += ["", "![crossover](crossover.png)", ""]
    return "\n".join(lines)


def verdict(record: Json) -> list[str]:
    """Of each target, measured and by bytes: the K from which on drafting in one pass is the cheaper step."""
    costs: dict[str, dict[tuple[str, int], float]] = {}
    gains: dict[str, dict[tuple[str, int], float]] = {}
    for row in record["rows"]:
        gains.setdefault(f"{row['target']}, measured", {})[row["drafter"], row["k"]] = row["over_in_turn"]
    for row in record["by_bytes"]:
        name = f"{row['target']}, {row['draft_vocab']:,} draft tokens, by bytes"
        costs.setdefault(name, {})[row["drafter"], row["k"]] = row["cost"]
    for name, cost in costs.items():
        gains[name] = {(drafter, k): cost[IN_TURN.name, k] / value for (drafter, k), value in cost.items()}
    in_one_pass = [kind.name for kind in KINDS if kind.parallel]
    lines = ["## Drafting in one pass is the cheaper step", ""]
    lines += _table([f"{name}: from K =" for name in in_one_pass], "target")
    for target, gain in gains.items():
        first = [
            cheaper_from([(k, value) for (name, k), value in gain.items() if name == each]) for each in in_one_pass
        ]
        lines.append(f"| {target} | {' | '.join('never here' if k is None else str(k) for k in first)} |")
    return [*lines, ""]


def cheaper_from(gains: Sequence[tuple[int, float]]) -> int | None:
    """The least K from which on every gain is above 1; None where the last one is not."""
    first = None
    for k, gain in sorted(gains, reverse=True):
        if gain <= 1:
            break
        first = k
    return first


def _worth(k: int, cost: float) -> float:
    """Plain decoding's speed times this, at the published rates."""
    return sum(PUBLISHED_RATE**i for i in range(k + 1)) / cost


def _columns(ks: Sequence[int]) -> list[str]:
    return [f"{what}{k}{end}" for what, end in (("c(", ")"), ("gain at ", ""), ("worth at ", "")) for k in ks]


def _table(columns: Sequence[str], first: str = "drafter") -> list[str]:
    return [f"| {first} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f}..{ends[1]:.2f}"


def draw(record: Json, path: Path) -> None:
    """c(K) of each drafter, a panel per target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    targets = list(dict.fromkeys(row["target"] for row in record["rows"]))
    derived = [(name, vocab) for name in ("20b", "120b") for vocab in (SIZES[name].vocab_size, NARROW_VOCAB)]
    panels = len(targets) + len(derived)
    across = min(4, panels)
    down = -(-panels // across)
    figure, axes = plt.subplots(down, across, figsize=(3.6 * across, 3.2 * down), layout="constrained", squeeze=False)
    flat = iter(axes.flat)
    for target in targets:
        axis = next(flat)
        for kind in KINDS:
            own = [row for row in record["rows"] if row["target"] == target and row["drafter"] == kind.name]
            middle = np.array([row["cost"] for row in own])
            ends = np.array([row["cost_range"] for row in own]).T
            axis.errorbar(
                [row["k"] for row in own], middle, [middle - ends[0], ends[1] - middle],
                label=kind.name, marker="o", markersize=4, capsize=2,
            )  # fmt: skip
        axis.set(title=f"{target}, measured")
    for target, vocab in derived:
        axis = next(flat)
        for kind in KINDS:
            own = [
                row
                for row in record["by_bytes"]
                if (row["target"], row["draft_vocab"], row["drafter"]) == (target, vocab, kind.name)
            ]
            axis.plot([row["k"] for row in own], [row["cost"] for row in own], label=kind.name, marker=".")
        axis.set(title=f"{target}, {vocab:,} draft tokens, by bytes")
    for axis in flat:
        axis.axis("off")
    for axis in axes.flat[:panels]:
        axis.set(xlabel="K", ylabel="plain steps that a step costs", ylim=(0, None))
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
