"""Lay out README.md of a comparison, from its run.json."""

from collections.abc import Callable, Iterator

from peagle.measure.metrics import Spread
from peagle.measure.reports import Block, Table, heading
from scripts.peers.roster import OURS, VLLM
from scripts.runs import Json, cell, table, title


def page(run: Json) -> list[Block]:
    """Lay out the page of a run."""
    config, platform = run["config"], run["provenance"]["device"]["platform"]
    versions = "; ".join(dict.fromkeys(row["version"] for row in run["rows"]))
    about = (
        f"Batch 1, greedy, a prompt of {config['prompt_tokens']} random tokens and {config['new_tokens']} new ones; "
        f"{config['rounds']} rounds after a warm-up; the engines take turns in every round, one at a time. Medians "
        f"over rounds (least..greatest); ratios are taken within a round. {versions}"
    )
    blocks = title(f"Against peers on {'one GPU' if platform == 'gpu' else 'CPU'}", run, about)
    blocks += [f"Left out: {engine} ({why})." for engine, why in run["left_out"].items()]
    for checkpoint in run["checkpoints"]:
        own = [row for row in run["rows"] if row["checkpoint"] == checkpoint["name"]]
        blocks += _section(checkpoint, own, [str(width) for width in config["widths"]])
    if config.get("requests"):
        blocks.append(_about_many(run))
    if config.get("drafters"):
        blocks.append(
            f"Drafters: random weights of the public 20b drafters' geometries, K = {config['num_drafts']}. Random "
            "drafts are hardly ever accepted, so the rows tell what a step costs. Time: of "
            f"{config['new_tokens']} tokens of all requests, less that of one token, over the steps of a request."
        )
    return [
        *blocks,
        "GB/s: weights read by a pass of one row (embedding and caches not counted) over its time. Passes have random "
        "tokens of their own; each ends when the greedy token of every row is known, and is rolled back. v(T) is the "
        'time of T rows over that of one; "by bytes" is v(T) if reading weights takes all of the time, with uniform, '
        "independent routing.",
        *(
            [
                f"Differences are between logits of {config['check_tokens']} teacher-forced tokens and this project's "
                "on XLA in float32, in standard deviations of the latter."
            ]
            if config["check_tokens"]
            else []
        ),
    ]


def _section(checkpoint: Json, rows: list[Json], widths: list[str]) -> Iterator[Block]:
    several = [width for width in widths if width != "1"]
    plain, with_passes = ([row for row in rows if key in row] for key in ("decode_tok_per_s", "pass_ms"))
    engine = {"engine": cell("engine")}

    def over_peer(name: str) -> Callable[[Json], str]:
        return lambda row: "" if row["engine"] == OURS else spread_text(row[name])

    yield heading(f"{checkpoint['name']}: {_count(checkpoint['parameters'])} parameters")
    speeds = {
        "weights": cell("weights"),
        "decoding tok/s": lambda row: spread_text(row["decode_tok_per_s"]),
        "decoding, ours / peer": over_peer("ours_over_peer_decode"),
        "prefill tok/s": lambda row: spread_text(row["prefill_tok_per_s"]),
        "prefill, ours / peer": over_peer("ours_over_peer_prefill"),
        "GB/s": lambda row: f"{row['gb_per_s']['median']:.1f}" if "gb_per_s" in row else "",
    }
    yield table(plain, engine | speeds)
    for row in plain:
        if "max_difference" not in row:
            yield f"{row['engine']} computes in {row['computes']}."
    milliseconds = {f"ms, T={w}": lambda row, w=w: f"{row['pass_ms'][w]['median']:.3g}" for w in widths}
    costs = table(with_passes, engine | milliseconds | {f"v({w})": _of("v", w) for w in several})
    by_bytes = ["by bytes", *("" for _ in widths), *(f"{checkpoint['v_by_bytes'][w]:.2f}" for w in several)]
    yield Table(costs.header, [*costs.rows, by_bytes])
    peers = [row for row in with_passes if row["engine"] != OURS]
    if peers:
        yield table(peers, engine | {f"ours / peer, T={w}": _of("ours_over_peer_pass", w) for w in widths})
    yield from _together([row for row in rows if "together" in row])
    yield from _experts(checkpoint, [row for row in rows if "experts" in row])
    yield from _drafting([row for row in rows if "drafting" in row])
    if checked := [row for row in rows if "max_difference" in row]:
        yield _checks(checked)
    if others := checkpoint["others_frac"]:
        yield (
            f"Other processes took {100 * others['median']:.0f} % of the processors' time during a measurement "
            f"(median; at least {100 * others['lowest']:.0f}, at most {100 * others['highest']:.0f} %)."
        )


def _checks(rows: list[Json]) -> Table:
    """List the differences of logits."""
    columns = {
        "engine": cell("engine"),
        "greatest difference": cell("max_difference", ".2g"),
        "root mean square": cell("rms_difference", ".2g"),
        "same greedy token": lambda row: f"{100 * row['top_1_agreement']:.0f} %",
        "computes": _computes,
    }
    return table(rows, columns)


def _together(rows: list[Json]) -> Iterator[Block]:
    """Lay out the table of requests decoded together; nothing if there were none."""
    if not rows:
        return
    (ours,) = (row for row in rows if row["engine"] == OURS)
    peers = [row for row in rows if row is not ours]
    header = ["requests", "ours tok/s"]
    for row in peers:
        header += [f"{row['engine']} tok/s", f"ours / {row['engine']}"]
    lines = []
    for number, own in ours["together"].items():
        figures = [row["together"][number][name] for row in peers for name in ("tok_per_s", "ours_over_peer")]
        lines.append([number, *map(spread_text, [own["tok_per_s"], *figures])])
    yield Table(header, lines)


def _experts(checkpoint: Json, rows: list[Json]) -> Iterator[Block]:
    """Lay out how many experts the requests use; nothing if no engine said so."""
    if not rows:
        return
    counts = list(rows[0]["experts"])
    total = checkpoint["geometry"]["num_experts"]
    header = [f"experts that a layer reads, of {total}", *(f"requests: {count}" for count in counts)]
    yield Table(header, [[row["engine"], *(f"{row['experts'][count]:.1f}" for count in counts)] for row in rows])


def _drafting(rows: list[Json]) -> Iterator[Block]:
    """Lay out the table of steps with a drafter of random weights; nothing if there were none."""
    if not rows:
        return
    lines = [{"engine": row["engine"], "requests": n, **own} for row in rows for n, own in row["drafting"].items()]
    columns = {
        "engine, drafter": cell("engine"),
        "requests": cell("requests"),
        "ms a step": lambda line: spread_text(line["step_ms"]),
        "tokens a step": lambda line: spread_text(line["tokens_a_step"]),
        "step, ours / peer": lambda line: (
            "" if line["engine"].startswith(f"{OURS}, ") else spread_text(line["ours_over_peer"])
        ),
    }
    yield table(lines, columns)


def _about_many(run: Json) -> str:
    """Explain the rows of many requests."""
    text = (
        "Requests: so many are decoded together, plainly, each with a prompt of its own. The time is that of "
        f"{run['config']['new_tokens'] - 1} steps of all, after the last prefill; tok/s are of all requests. Ours has "
        "a slot for each. It decodes the first requests while it prefills the last: their contexts are longer by then."
    )
    if any(row["engine"] == VLLM for row in run["rows"]):
        text += " vLLM's time is that of all tokens of all requests, less that of one token each."
    if alone := list(dict.fromkeys(row["engine"] for row in run["rows"] if not {"together", "drafting"} & row.keys())):
        text += f" Not in these rows, since it decodes one request at a time here: {', '.join(alone)}."
    return text


def _computes(row: Json) -> str:
    """Name the arithmetic; of transformers, also the implementation of experts at each width."""
    best = row.get("best", {})
    chosen = ", ".join(f"T={width}: {name}" for width, name in sorted(best.items(), key=lambda item: int(item[0])))
    return "; ".join(filter(None, [row["computes"], chosen]))


def _of(name: str, width: str) -> Callable[[Json], str]:
    return lambda row: spread_text(row[name][width])


def spread_text(figure: Json) -> str:
    """Format a spread with three digits, or all before the point."""
    return Spread(**figure).text(
        lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
