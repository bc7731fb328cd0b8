"""Lay out README.md of a check on a GPU, from its run.json."""

from typing import Any

from peagle.measure.metrics import figure_text
from peagle.measure.pages import Block, Table, heading
from scripts.runs import Json, spread_text, where


def page(record: Json) -> list[Block]:
    """Lay out the page of a run; a table without rows is left out."""
    source, rows = record["provenance"], record["rows"]
    platform, rate = source["device"]["platform"], record["config"]["synthetic_acceptance"]
    steps = [row for row in rows if "cycle_cost" in row]
    first, *others = record["config"]["drafters"]
    blocks: list[Block] = [
        heading("On one GPU: right, and how fast" if platform == "gpu" else "A rehearsal without a GPU", 1),
        f"`{source['command']}`",
        f"{where(source)}. Random weights; acceptance of speculation is synthetic, {rate}^i at draft i: it says what "
        "steps cost. Shares of a step are taken under the profiler, which launches operation by operation: with CUDA "
        "graphs less time lies between them.",
        _checks(rows),
        _parts([row for row in rows if "part" in row], _copy_bandwidth(rows)),
        _operations([row for row in rows if "operation" in row], _copy_bandwidth(rows)),
        _alone([row for row in rows if "kind" in row]),
        _steps(steps),
        *(_against([row for row in steps if row["k"]], first, other) for other in others),
        _shares([row for row in rows if isinstance(row.get("profile"), dict)]),
        _published(steps, record["config"]["published"]),
        _peers([row for row in rows if "peer" in row]),
    ]
    return [block for block in blocks if not isinstance(block, Table) or block.rows]


def _table(heads: str, rows: list[list[str]]) -> Table:
    """Make a table; heads with | between."""
    return Table(heads.split(" | "), rows)


def _checks(rows: list[Json]) -> Table:
    shown = [row for row in rows if {"ok", "copy_gb_per_s", "left_out", "weight_bytes"} & row.keys()]
    return _table(
        "check | result",
        [
            [row["section"], ", ".join(f"{k} {short(v)}" for k, v in row.items() if k not in ("section", "said", "at"))]
            for row in shown
        ],
    )


def _copy_bandwidth(rows: list[Json]) -> float | None:
    return next((row["copy_gb_per_s"] for row in rows if "copy_gb_per_s" in row), None)


def _parts(rows: list[Json], copy: float | None) -> Table:
    """List the parts of plain steps, and what they read at the pace of a copy."""
    return _table(
        "shape | requests | part of a plain step | ms | MB | of the copy bandwidth",
        [
            [
                row["shape"],
                str(row["batch"]),
                row["part"],
                f"{row['us'] / 1e3:.3f}",
                f"{row['mb']:.4g}" if row["mb"] else "-",
                figure_text(1e3 * row["mb"] / row["us"] / copy if copy and row["mb"] and row["us"] else None, ".0%"),
            ]
            for row in rows
        ],
    )


def _operations(rows: list[Json], copy: float | None) -> Table:
    return _table(
        "shape | operation | rows | MB | us | GB/s | of the copy bandwidth",
        [
            [
                row["shape"],
                row["operation"],
                str(row["rows"]),
                f"{row['mb']:.3g}",
                f"{row['us']:.4g} ({row['us_lowest']:.4g}..{row['us_highest']:.4g})",
                figure_text(row["gb_per_s"], ".4g"),
                figure_text(None if copy is None or row["gb_per_s"] is None else row["gb_per_s"] / copy, ".0%"),
            ]
            for row in rows
        ],
    )


def _alone(rows: list[Json]) -> Table:
    return _table(
        "shape | kernels | test | batch | context | ms a pass | tok/s | v(T) | peak GB so far",
        [
            [
                row["shape"],
                row["kernels"],
                f"{row['kind']} {row['size']}",
                str(row["batch"]),
                str(row["context"]),
                spread_text(row["ms_per_pass"], ".4g"),
                spread_text(row["tok_per_s"], ".4g"),
                figure_text(row["v"], ".2f"),
                figure_text(None if row["peak_bytes"] is None else row["peak_bytes"] / 1e9, ".2f"),
            ]
            for row in rows
        ],
    )


def _steps(rows: list[Json]) -> Table:
    """List steps; of each drafter, head and batch the fastest K is marked."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[_arm(row)] = max(best.get(_arm(row), 0.0), row["tok_per_s"])
    return _table(
        "shape | drafter | head | batch | K | ms a step | c(K) | tokens a step (synthetic) | tok/s",
        [
            [
                row["shape"],
                row["drafter"],
                str(row["draft_vocab"]),
                str(row["batch"]),
                str(row["k"]),
                f"{row['step_ms']:.3f}",
                f"{row['cycle_cost']:.2f}",
                f"{row['tokens_a_step']:.2f}",
                short(row["tok_per_s"]) + (" (best)" if row["tok_per_s"] == best[_arm(row)] else ""),
            ]
            for row in rows
        ],
    )


def _against(rows: list[Json], first: str, other: str) -> Table:
    """Compare two drafters: at equal acceptance a step's time decides."""
    step_ms = {
        (row["shape"], row["draft_vocab"], row["batch"], row["k"], row["drafter"]): row["step_ms"] for row in rows
    }
    places = dict.fromkeys(key[:4] for key in step_ms)
    return _table(
        f"shape | head | batch | K | a step of {other} over one of {first}",
        [
            [*map(str, place), f"{step_ms[*place, other] / step_ms[*place, first]:.2f}"]
            for place in places
            if (*place, other) in step_ms and (*place, first) in step_ms
        ],
    )


def _arm(row: Json) -> tuple[Any, ...]:
    return row["shape"], row["drafter"], row["draft_vocab"], row["batch"]


def _shares(rows: list[Json]) -> Table:
    parts = ("draft_ms", "verify_ms", "accept_ms", "rest_ms", "between_ms", "host_ms")
    heads = "shape | drafter | K | draft ms | verify ms | accept ms | rest ms | between operations ms | host gap ms"
    return _table(
        heads,
        [
            [row["shape"], row["drafter"], str(row["k"]), *(f"{row['profile'][part]:.4f}" for part in parts)]
            for row in rows
        ],
    )


def _published(rows: list[Json], published: list[Json]) -> Table:
    """Derive what the measured steps would give at acceptance lengths that others published."""
    full = [row for row in rows if row["draft_vocab"] == row["vocab_size"] and row["batch"] == 1]
    same = ("shape", "drafter", "k")
    return _table(
        "shape | drafter | K | published acceptance length | of | tok/s at it | of plain decoding",
        [
            [
                row["shape"],
                row["drafter"],
                str(row["k"]),
                f"{known['acceptance_length']:.2f}",
                known["source"],
                short(1e3 * known["acceptance_length"] / row["step_ms"]),
                f"{known['acceptance_length'] / row['cycle_cost']:.2f}",
            ]
            for known in published
            for row in full
            if all(row[name] == known[name] for name in same)
        ],
    )


def _peers(rows: list[Json]) -> Table:
    return _table(
        "checkpoint | engine | computes | decoding tok/s | ours / peer | v(4) | largest difference of logits",
        [
            [
                row["checkpoint"],
                row["engine"],
                row["computes"],
                f"{row['decode_tok_per_s']['median']:.4g}",
                f"{row['ours_over_peer_decode']['median']:.2f}",
                f"{row['v']['4']['median']:.2f}",
                f"{row['max_difference']:.2g}",
            ]
            for row in rows
        ],
    )


def short(value: Any) -> str:
    """Shorten a value for a cell."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:160]
