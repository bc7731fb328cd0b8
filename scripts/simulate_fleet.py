"""Size a fleet on paper: compare prefill and decode replicas with as many replicas that do both.

    python -m scripts.simulate_fleet --measure costs.json [--target DIR --drafter DIR -k 3]
    python -m scripts.simulate_fleet costs.json --prefill 1 --decode 2 --rate 2,4,8 --ttft 1 --tpot 0.05

The first measures this machine's costs, as a JSON file that may be edited. The second serves requests of a Poisson
process, or of a file, by the engine's scheduler at these costs (scripts.fleet_sim.simulation). For each rate, K and
fleet a table has quantiles of ttft and of itl, tokens a second, and the requests that met both targets. Without a trace
a second table has the highest rate at which 90 % meet them: the gain of disaggregation and speculation.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from peagle.checkpoints import DEMO
from peagle.loading import load
from peagle.measure.reports import Table, markdown
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from scripts import runs
from scripts.fleet_sim.costs import Costs, read_costs, refused_in_words
from scripts.fleet_sim.measured import measure_costs
from scripts.fleet_sim.simulation import (
    Arrangement,
    Arrival,
    Lengths,
    Target,
    highest_rate,
    poisson,
    read_trace,
    simulate,
    summary,
)
from scripts.runs import Progress

HEADER = (
    "requests/s", "fleet", "K", "ttft p50 ms", "p90", "p99", "itl p50 ms", "p90", "p99", "tok/s", "met both",
    "goodput/s",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = runs.new_parser(__doc__)
    parser.add_argument("costs", type=Path, nargs="?", help="a file that --measure wrote")
    parser.add_argument("--measure", type=Path, metavar="COSTS", help="measure this machine, and write a file")
    runs.add_prompt_options(parser)
    parser.add_argument("--drafter", default=DEMO, help="a drafter's directory (default: the demo's)")
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
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    return runs.in_one_line("simulate_fleet", lambda: measure(options, typed) if options.measure else show(options))


def measure(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Measure this machine's costs into the file that `show` reads."""
    pair, progress = load(options.target, options.drafter), Progress("measuring")
    texts = [token for request in runs.prompted(options, pair) for token in request.prompt_ids]
    k = 3 if options.k is None else options.k
    costs = measure_costs(pair, texts, k, options.slots, options.context, progress)
    progress.end()
    record = costs.model_dump() | {"provenance": runs.origin("scripts.simulate_fleet", typed)}
    options.measure.write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def show(options: argparse.Namespace) -> int:
    """Simulate, and print the tables."""
    if options.costs is None:
        raise InputError("no costs are given; expected a file that --measure writes")
    costs = read_costs(options.costs)
    with refused_in_words("the options", "what --help says"):
        network = {
            "network_bytes_per_s": options.network_gb_per_s and options.network_gb_per_s * 1e9,
            "network_s": options.network_ms and options.network_ms / 1e3,
        }
        costs = Costs(**{**dict(costs), **{name: value for name, value in network.items() if value is not None}})
        target, lengths = Target(ttft_s=options.ttft, tpot_s=options.tpot), lengths_of(options)
        fleets = arrangements(options, costs)
    if options.trace is not None:
        print(markdown([table(costs, {"trace": read_trace(options.trace)}, fleets, target, options.seed)]))
        return 0
    rates = [rate_of(typed) for typed in options.rate.split(",")]
    traces = {f"{rate:g}": poisson(rate, options.requests, lengths, options.seed) for rate in rates}
    print(
        markdown([table(costs, traces, fleets, target, options.seed), *limits(costs, fleets, lengths, target, options)])
    )
    return 0


def lengths_of(options: argparse.Namespace) -> Lengths:
    """Read the ranges of lengths."""
    ranges = {}
    for name, typed in (("prompt", options.prompt), ("output", options.output)):
        least, *most = typed.split("-", 1)
        ranges[name] = [runs.numbers(f"--{name}", bound)[0] for bound in (least, most[0] if most else least)]
    return Lengths(**ranges)


def rate_of(typed: str) -> float:
    """Read a rate."""
    try:
        return float(typed)
    except ValueError:
        raise InputError(f"--rate is {typed!r}; expected numbers with commas between, such as 0.5,1,2") from None


def arrangements(options: argparse.Namespace, costs: Costs) -> list[Arrangement]:
    """Return the fleet of the options and as many replicas of both, plainly and with every K."""
    ks = [options.k] if options.k is not None else sorted(costs.step_s)
    for k in ks:
        costs.check_k(k)
    of_both = {"prefill": 0, "decode": options.prefill + options.decode}
    shapes = [of_both, {"prefill": options.prefill, "decode": options.decode}][: 2 if options.prefill else 1]
    return [Arrangement(**shape, slots=options.slots, num_speculative_tokens=k) for k in ks for shape in shapes]


def table(
    costs: Costs, traces: dict[str, list[Arrival]], fleets: Sequence[Arrangement], target: Target, seed: int
) -> Table:
    """Simulate every fleet on every trace."""
    rows = []
    for name, trace in traces.items():
        for fleet in fleets:
            served = summary(simulate(costs, trace, fleet, seed), target)
            figures = [f"{served[f'{of}_{q}_s'] * 1e3:.1f}" for of in ("ttft", "itl") for q in ("p50", "p90", "p99")]
            counted = f"{served['tok_per_s']:.0f}", f"{served['met_frac']:.0%}", f"{served['goodput_per_s']:.2f}"
            rows.append((name, str(fleet), str(fleet.num_speculative_tokens), *figures, *counted))
    return Table(HEADER, rows)


def limits(
    costs: Costs, fleets: Sequence[Arrangement], lengths: Lengths, target: Target, options: argparse.Namespace
) -> list[str | Table]:
    """Find the highest rate of each fleet."""
    highest = [highest_rate(costs, fleet, lengths, target, options.requests, options.seed) for fleet in fleets]
    base = highest[0]
    rows = [
        (str(fleet), str(fleet.num_speculative_tokens), f"{rate:.2f}", f"{rate / base:.2f}" if base else "-")
        for fleet, rate in zip(fleets, highest, strict=True)
    ]
    targets = f"ttft of at most {target.ttft_s:g} s and tpot of at most {target.tpot_s * 1e3:g} ms"
    return [
        f"The highest rate of which 90 % get a {targets}:",
        Table(("fleet", "K", "requests/s", "over the first"), rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
