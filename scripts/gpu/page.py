"""Lay out README.md of a check on a GPU, from its run.json."""

from collections.abc import Iterator, Sequence

from peagle.measure.reports import Block, Table
from scripts.runs import Json, number_text, table, title

CHECKS = {"ok", "copy_gb_per_s", "left_out", "weight_bytes"}
HIDDEN = ("section", "at")  # of a check's line
# of rows that have the first field: the columns of their table
TABLES = {
    "part": ("shape", "batch", "part", "us", "mb", "gb_per_s"),
    "over_engine": (
        *("shape", "clients", "tokens_in", "tokens_out", "tok_per_s", "engine_tok_per_s", "over_engine"),
        *("ttft_p50_s", "itl_p50_s", "itl_p99_s"),
    ),
    "kind": ("shape", "kernels", "kind", "size", "batch", "context", "ms_per_pass", "tok_per_s", "v", "peak_bytes"),
    "cycle_cost": (
        *("shape", "drafter", "draft_vocab", "temperature", "batch", "k"),
        *("step_ms", "cycle_cost", "tokens_a_step", "tok_per_s"),
    ),
    "acceptance_length": ("shape", "drafter", "k", "acceptance_length", "source", "tok_per_s", "over_plain"),
}


def page(record: Json) -> list[Block]:
    """Lay out the page of a run; a table without rows is left out."""
    platform, rate = record["provenance"]["device"]["platform"], record["config"]["synthetic_acceptance"]
    rows = [*record["rows"], *published(record["rows"], record["config"]["published"])]
    checks = [(row["section"], _result(row)) for row in rows if CHECKS & row.keys()]
    tables = [table([row for row in rows if key in row], *TABLES[key]) for key in TABLES]
    return [
        *title("On one GPU: right, and how fast" if platform == "gpu" else "A rehearsal without a GPU", record),
        f"Random weights; acceptance of speculation is synthetic, {rate}^i at draft i: it says what steps cost. Parts "
        "of a step are taken under the profiler, which launches operation by operation: with CUDA graphs less time "
        "lies between them. GB/s: what a part reads, over its time. With an acceptance length that others published: "
        "the measured steps at that length.",
        *([Table(("check", "result"), checks)] if checks else []),
        *(shown for shown in tables if shown.rows),
    ]


def published(rows: Sequence[Json], known_lengths: Sequence[Json]) -> Iterator[Json]:
    """Project the measured greedy steps of one request at acceptance lengths that others published."""
    alone = [row for row in rows if "cycle_cost" in row and row["batch"] == 1 and not row["temperature"]]
    for known in known_lengths:
        for row in alone:
            whole_head = row["draft_vocab"] == row["vocab_size"]
            if whole_head and all(row[name] == known[name] for name in ("shape", "drafter", "k")):
                length = known["acceptance_length"]
                yield known | {"tok_per_s": 1e3 * length / row["step_ms"], "over_plain": length / row["cycle_cost"]}


def _result(row: Json) -> str:
    def short(value: object) -> str:
        return number_text(value) if isinstance(value, float) else str(value).replace("\n", " ")[:160]

    return ", ".join(f"{name} {short(value)}" for name, value in row.items() if name not in HIDDEN)
