"""Size a fleet on paper: what 1 prefill and 2 decode replicas would give, and as many replicas that do both.

    python -m scripts.simulate_fleet --measure costs.json [--target DIR --drafter DIR -k 3]
    python -m scripts.simulate_fleet --paper costs.json --size 120b --mesh tp=2 --device H100 --slots 16 -k 3
    python -m scripts.simulate_fleet costs.json --prefill 1 --decode 2 --rate 2,4,8 --ttft 1 --tpot 0.05

The first measures this machine's costs, as a JSON file that may be edited; the second computes those of a published
model on devices by their makers' figures (scripts.fleet_sim.paper). The third plays requests that arrive as a
Poisson process, or a file of them, through the engine's scheduler at these costs (scripts.fleet_sim.simulation). For
each rate, K and arrangement a table has quantiles of ttft and of itl, tokens a second, and the requests that met both
targets.
Without a trace, lines below it name the highest rate of which 90 % do, and so what disaggregation and speculation add.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from peagle.loading import load
from peagle.measure.pages import Table, markdown
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.parallel import parse_mesh
from peagle.workflows.plan import device_named
from peagle.workflows.random_checkpoint import SIZES
from scripts.fleet_sim.measured import Shape, measure_costs, on_network
from scripts.fleet_sim.paper import Replica, paper_costs
from scripts.fleet_sim.simulation import (
    Arrangement,
    Arrival,
    Costs,
    Lengths,
    Target,
    highest_rate,
    poisson,
    read_costs,
    read_trace,
    simulate,
    summary,
)
from scripts.runs import (
    Progress,
    add_drafter_option,
    add_prompt_options,
    in_one_line,
    new_parser,
    numbers,
    origin,
    prompted,
)

HEADER = (
    "requests/s", "fleet", "K", "ttft p50 ms", "p90", "p99", "itl p50 ms", "p90", "p99", "tok/s", "met both",
    "goodput/s",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("costs", type=Path, nargs="?", help="a file that --measure wrote")
    parser.add_argument("--measure", type=Path, metavar="COSTS", help="measure this machine, and write a file")
    parser.add_argument("--paper", type=Path, metavar="COSTS", help="compute a published model's, and write a file")
    parser.add_argument("--size", default="20b", choices=("20b", "120b"), help="of --paper (default %(default)s)")
    parser.add_argument("--device", default="H100", help="of --paper: H100, H200, B200 (default %(default)s)")
    parser.add_argument("--mesh", default="tp=1", help="of --paper: devices of a replica (default %(default)s)")
    parser.add_argument(
        "--kept",
        type=float,
        default=0.76,
        help="of --paper: share of steps that keep the first draft; its square, the second (default %(default)s)",
    )
    add_prompt_options(parser)
    add_drafter_option(parser)
    parser.add_argument("-k", type=int, default=None, help="drafts of a step (default: what was measured; measured: 3)")
    parser.add_argument("--slots", type=int, default=4, help="requests at once in a replica (default %(default)s)")
    parser.add_argument("--context", type=int, default=4352, help="positions of a slot (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=1, help="replicas that only prefill (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="replicas that decode (default %(default)s)")
    parser.add_argument("--rate", default="1,2,4", help="requests a second, with commas (default %(default)s)")
    parser.add_argument("--requests", type=int, default=500, help="of each rate (default %(default)s)")
    parser.add_argument("--prompt", default="128-1024", help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--output", default="32-256", help="tokens of an answer (default %(default)s)")
    parser.add_argument("--trace", type=Path, help="JSON lines of time_s, prompt_tokens, output_tokens")
    parser.add_argument("--ttft", type=float, default=1.0, help="target in seconds (default %(default)s)")
    parser.add_argument("--tpot", type=float, default=0.05, help="target in seconds (default %(default)s)")
    parser.add_argument("--network-gb-per-s", type=float, help="of hand-offs, in place of the file's")
    parser.add_argument("--network-ms", type=float, help="of one way, in place of the file's")
    parser.add_argument("--seed", type=int, default=0)
    given = sys.argv[1:] if arguments is None else arguments
    asked = parser.parse_args(given)
    return in_one_line("simulate_fleet", lambda: run(asked, given))


def run(asked: argparse.Namespace, given: Sequence[str]) -> int:
    """Do what is asked for."""
    if asked.measure:
        return measure(asked, given)
    return compute(asked, given) if asked.paper else show(asked)


def measure(asked: argparse.Namespace, given: Sequence[str]) -> int:
    """Measure this machine's costs, and write them."""
    pair = load(asked.target, asked.drafter)
    texts = [token for request in prompted(asked, pair) for token in request.prompt_ids]
    progress = Progress("measuring")
    shape = Shape(3 if asked.k is None else asked.k, asked.slots, asked.context)
    costs = measure_costs(pair, texts, shape, progress)
    progress.end()
    return write(costs, asked.measure, given)


def compute(asked: argparse.Namespace, given: Sequence[str]) -> int:
    """Compute the costs of a published model, and write them."""
    replica = Replica(SIZES[asked.size], parse_mesh(asked.mesh), device_named(asked.device))
    costs = paper_costs(replica, asked.slots, [3 if asked.k is None else asked.k], asked.kept)
    return write(costs, asked.paper, given)


def write(costs: Costs, path: Path, given: Sequence[str]) -> int:
    """Write a file that `show` reads."""
    found = costs.to_json() | {"provenance": origin("scripts.simulate_fleet", given)}
    path.write_text(dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def show(asked: argparse.Namespace) -> int:
    """Simulate, and print the tables."""
    if asked.costs is None:
        raise InputError("no costs are given; expected a file that --measure writes")
    costs, target, lengths = read_costs(asked.costs), Target(asked.ttft, asked.tpot), lengths_of(asked)
    if asked.network_gb_per_s is not None or asked.network_ms is not None:
        speed = costs.network_bytes_per_s if asked.network_gb_per_s is None else asked.network_gb_per_s * 1e9
        costs = on_network(costs, speed, costs.network_s if asked.network_ms is None else asked.network_ms / 1e3)
    fleets = arrangements(asked, costs)
    if asked.trace is not None:
        print(markdown([table(costs, {"trace": read_trace(asked.trace)}, fleets, target, asked.seed)]))
        return 0
    rates = [rate_of(typed) for typed in asked.rate.split(",")]
    traces = {f"{rate:g}": poisson(rate, asked.requests, lengths, asked.seed) for rate in rates}
    print(markdown([table(costs, traces, fleets, target, asked.seed), *limits(costs, fleets, lengths, target, asked)]))
    return 0


def lengths_of(asked: argparse.Namespace) -> Lengths:
    """Read the ranges of lengths."""
    found = []
    for option, typed in (("--prompt", asked.prompt), ("--output", asked.output)):
        least, *most = typed.split("-", 1)
        found.append((numbers(option, least)[0], numbers(option, most[0] if most else least)[0]))
    return Lengths(*found)


def rate_of(typed: str) -> float:
    """Read a rate."""
    try:
        return float(typed)
    except ValueError:
        raise InputError(f"--rate is {typed!r}; expected numbers with commas between, such as 0.5,1,2") from None


def arrangements(asked: argparse.Namespace, costs: Costs) -> list[Arrangement]:
    """Return the fleet that is asked for and as many replicas of both, plainly and with each K."""
    ks = [asked.k] if asked.k is not None else sorted(costs.step_s)
    for k in ks:
        costs.check_k(k)
    shapes = [(0, asked.prefill + asked.decode), *([(asked.prefill, asked.decode)] if asked.prefill else [])]
    return [Arrangement(*shape, asked.slots, k) for k in ks for shape in shapes]


def table(
    costs: Costs, traces: dict[str, list[Arrival]], fleets: Sequence[Arrangement], target: Target, seed: int
) -> Table:
    """Simulate every fleet on every trace."""
    rows = []
    for name, trace in traces.items():
        for fleet in fleets:
            found = summary(simulate(costs, trace, fleet, seed), target)
            figures = [f"{found[f'{of}_{q}_s'] * 1e3:.1f}" for of in ("ttft", "itl") for q in ("p50", "p90", "p99")]
            counted = f"{found['tok_per_s']:.0f}", f"{found['met_frac']:.0%}", f"{found['goodput_per_s']:.2f}"
            rows.append((name, str(fleet), str(fleet.num_speculative_tokens), *figures, *counted))
    return Table(HEADER, rows)


def limits(
    costs: Costs, fleets: Sequence[Arrangement], lengths: Lengths, target: Target, asked: argparse.Namespace
) -> list[str | Table]:
    """Find the highest rate of each fleet."""
    found = [highest_rate(costs, fleet, lengths, target, asked.requests, asked.seed) for fleet in fleets]
    base = found[0]
    rows = [
        (str(fleet), str(fleet.num_speculative_tokens), f"{rate:.2f}", f"{rate / base:.2f}" if base else "-")
        for fleet, rate in zip(fleets, found, strict=True)
    ]
    wanted = f"ttft of at most {target.ttft_s:g} s and tpot of at most {target.tpot_s * 1e3:g} ms"
    return [
        f"The highest rate of which 90 % get a {wanted}:",
        Table(("fleet", "K", "requests/s", "over the first"), rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
