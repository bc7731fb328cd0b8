"""Lay out README.md of a check on a GPU, from its run.json."""

from collections.abc import Callable
from typing import Any

from peagle.measure.metrics import figure_text
from peagle.measure.reports import Block, Table, heading
from scripts.runs import Json, cell, spread_text, table, where

STEP = ("draft_ms", "verify_ms", "accept_ms", "rest_ms", "between_ms", "host_ms")


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
        _parts(rows),
        _served([row for row in rows if "over_engine" in row]),
        _passes([row for row in rows if "kind" in row]),
        _steps(steps),
        *(_against([row for row in steps if row["k"] and not row["temperature"]], first, other) for other in others),
        _profiles([row for row in rows if isinstance(row.get("profile"), dict)]),
        _published(steps, record["config"]["published"]),
        _peers([row for row in rows if "peer" in row]),
    ]
    return [block for block in blocks if not isinstance(block, Table) or block.rows]


def _spread(name: str) -> Callable[[Json], str]:
    return lambda row: spread_text(row[name], ".4g")


def _checks(rows: list[Json]) -> Table:
    def result(row: Json) -> str:
        return ", ".join(f"{k} {short(v)}" for k, v in row.items() if k not in ("section", "said", "at"))

    checks = [row for row in rows if {"ok", "copy_gb_per_s", "left_out", "weight_bytes"} & row.keys()]
    return table(checks, {"check": cell("section"), "result": result})


def _parts(rows: list[Json]) -> Table:
    """List the parts of plain steps, and what they read at the pace of a copy."""
    copy = next((row["copy_gb_per_s"] for row in rows if "copy_gb_per_s" in row), None)

    def share(row: Json) -> str:
        known = copy and row["mb"] and row["us"]
        return figure_text(1e3 * row["mb"] / row["us"] / copy if known else None, ".0%")

    columns = {
        "shape": cell("shape"),
        "requests": cell("batch"),
        "part of a plain step": cell("part"),
        "ms": cell("us", ".3f", 1e-3),
        "MB": lambda row: f"{row['mb']:.4g}" if row["mb"] else "-",
        "of the copy bandwidth": share,
    }
    return table([row for row in rows if "part" in row], columns)


def _served(rows: list[Json]) -> Table:
    columns = {
        "shape": cell("shape"),
        "clients": cell("clients"),
        "tokens in, out": lambda row: f"{row['tokens_in']}, {row['tokens_out']}",
        "server's tok/s": cell("tok_per_s", ".0f"),
        "engine's tok/s": cell("engine_tok_per_s", ".0f"),
        "server over engine": cell("over_engine", ".3f"),
        "ttft p50, ms": cell("ttft_p50_s", ".1f", 1e3),
        "itl p50, ms": cell("itl_p50_s", ".2f", 1e3),
        "itl p99, ms": cell("itl_p99_s", ".2f", 1e3),
    }
    return table(rows, columns)


def _passes(rows: list[Json]) -> Table:
    columns = {
        "shape": cell("shape"),
        "kernels": cell("kernels"),
        "test": lambda row: f"{row['kind']} {row['size']}",
        "batch": cell("batch"),
        "context": cell("context"),
        "ms a pass": _spread("ms_per_pass"),
        "tok/s": _spread("tok_per_s"),
        "v(T)": cell("v", ".2f"),
        "peak GB so far": cell("peak_bytes", ".2f", 1e-9),
    }
    return table(rows, columns)


def _steps(rows: list[Json]) -> Table:
    """List steps; of each drafter, head and batch the fastest K is marked."""

    def variant(row: Json) -> tuple[Any, ...]:
        return row["shape"], row["drafter"], row["draft_vocab"], row["temperature"], row["batch"]

    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[variant(row)] = max(best.get(variant(row), 0.0), row["tok_per_s"])
    columns = {
        "shape": cell("shape"),
        "drafter": cell("drafter"),
        "head": cell("draft_vocab"),
        "temperature": cell("temperature", "g"),
        "batch": cell("batch"),
        "K": cell("k"),
        "ms a step": cell("step_ms", ".3f"),
        "c(K)": cell("cycle_cost", ".2f"),
        "tokens a step (synthetic)": cell("tokens_a_step", ".2f"),
        "tok/s": lambda row: short(row["tok_per_s"]) + " (best)" * (row["tok_per_s"] == best[variant(row)]),
    }
    return table(rows, columns)


def _against(rows: list[Json], first: str, other: str) -> Table:
    """Compare two drafters: at equal acceptance a step's time decides."""
    step_ms = {
        (row["shape"], row["draft_vocab"], row["batch"], row["k"], row["drafter"]): row["step_ms"] for row in rows
    }
    lines = [
        [*map(str, step), f"{step_ms[*step, other] / step_ms[*step, first]:.2f}"]
        for step in dict.fromkeys(key[:4] for key in step_ms)
        if (*step, other) in step_ms and (*step, first) in step_ms
    ]
    return Table(("shape", "head", "batch", "K", f"a step of {other} over one of {first}"), lines)


def _profiles(rows: list[Json]) -> Table:
    parts = ("draft ms", "verify ms", "accept ms", "rest ms", "between operations ms", "host gap ms")
    lines = [
        [row["shape"], row["drafter"], str(row["k"]), *(f"{row['profile'][part]:.4f}" for part in STEP)] for row in rows
    ]
    return Table(("shape", "drafter", "K", *parts), lines)


def _published(rows: list[Json], published: list[Json]) -> Table:
    """Project the measured steps at acceptance lengths that others published."""
    full = [
        row for row in rows if row["draft_vocab"] == row["vocab_size"] and row["batch"] == 1 and not row["temperature"]
    ]
    projected = [
        {**row, **known, "tok_per_s": 1e3 * known["acceptance_length"] / row["step_ms"]}
        for known in published
        for row in full
        if all(row[name] == known[name] for name in ("shape", "drafter", "k"))
    ]
    columns = {
        "shape": cell("shape"),
        "drafter": cell("drafter"),
        "K": cell("k"),
        "published acceptance length": cell("acceptance_length", ".2f"),
        "of": cell("source"),
        "tok/s at it": lambda row: short(row["tok_per_s"]),
        "of plain decoding": lambda row: f"{row['acceptance_length'] / row['cycle_cost']:.2f}",
    }
    return table(projected, columns)


def _peers(rows: list[Json]) -> Table:
    columns = {
        "checkpoint": cell("checkpoint"),
        "engine": cell("engine"),
        "computes": cell("computes"),
        "decoding tok/s": lambda row: f"{row['decode_tok_per_s']['median']:.4g}",
        "ours / peer": lambda row: f"{row['ours_over_peer_decode']['median']:.2f}",
        "v(4)": lambda row: f"{row['v']['4']['median']:.2f}",
        "largest difference of logits": cell("max_difference", ".2g"),
    }
    return table(rows, columns)


def short(value: Any) -> str:
    """Shorten a value for a cell."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:160]
