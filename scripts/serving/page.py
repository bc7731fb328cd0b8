"""Lay out the pages of scripts.bench_serve."""

from collections.abc import Sequence

from peagle.measure.pages import Block, Table, heading
from scripts.runs import Json, where

PLAIN, PEER = "plain", "llama.cpp"


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, source = record["config"], record["provenance"]
    title = "A soak of the server" if "soak" in record else "The server"
    what = f"Target {config['target']}, drafter {config['drafter'] or 'none'}; {where(source)}."
    head: list[Block] = [heading(title, 1), f"`{source['command']}`", what]
    if "soak" in record:
        return [*head, *soak_blocks(record["soak"])]
    single, shared = ([row for row in record["rows"] if row["single"] == kind] for kind in (True, False))
    return [*head, *(single_blocks(single) if single else []), *shared_blocks(shared), *engine_blocks(shared)]


def single_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the requests that came one at a time."""
    row = rows[0]
    text = (
        f"{row['tokens_in']} tokens in, {row['tokens_out']} out, {row['requests']} requests, one at a time. itl is the "
        "time between two arrivals of tokens, however many come together; tpot that of a token after the first. By the "
        "server's own count (/metrics; the median is interpolated in its bucket); the client's medians beside it."
    )
    header = ("", "itl p50, ms", "itl mean, ms", "tpot, ms", "client's itl p50, ms", "ttft p50, ms", "tok/s")
    header += ("over plain", "acceptance length")
    lines = [
        [
            row["arm"],
            ms(row["own_itl_p50_s"]),
            ms(row["own_itl_mean_s"]),
            "-" if row["own_tpot_s"] is None else f"{row['own_tpot_s'] * 1e3:.2f}",
            ms(row["itl_p50_s"]),
            ms(row["ttft_p50_s"]),
            number(row["tok_per_s"], ".0f"),
            number(row["over_plain"]),
            number(row["acceptance_length"]),
        ]
        for row in rows
    ]
    return [heading("One request at a time"), text, Table(header, lines)]


def shared_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the requests that came many at once."""
    row = rows[0]
    text = (
        f"{row['tokens_in']} tokens in, {row['tokens_out']} out, as many slots as clients; medians over "
        f"{row['rounds']} rounds, in which all take turns, ratios of the same round. Tokens over the time from the "
        "first request to the last token, prefill included."
    )
    peer = any(row["arm"] == PEER for row in rows)
    header = ("clients", "", "tok/s", "over plain", *(["over llama.cpp"] if peer else []), "ttft p50, ms")
    header += ("itl p50, ms", "itl p99, ms", "acceptance length", "others' share of the machine")
    lines = [
        [
            str(row["clients"]),
            row["arm"],
            number(row["tok_per_s"], ".0f"),
            number(row["over_plain"]),
            *([number(row["over_peer"])] if peer else []),
            ms(row["ttft_p50_s"]),
            ms(row["itl_p50_s"]),
            ms(row["itl_p99_s"]),
            number(row["acceptance_length"]),
            number(row["others_frac"]),
        ]
        for row in rows
    ]
    return [heading("Many at once"), text, Table(header, lines)]


def engine_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the server beside the engine alone."""
    alone = [row for row in rows if row["engine_tok_per_s"] is not None]
    if not alone:
        return []
    text = (
        "The same requests, decoded by the same engine in the client's process. Processor seconds of a round of the "
        "server's; a client and its server share the machine."
    )
    header = ("clients", "", "tok/s", "engine's tok/s", "server over engine", "ttft more, ms", "round, s")
    header += ("server's processor, s", "client's processor, s")
    lines = [
        [
            str(row["clients"]),
            row["arm"],
            number(row["tok_per_s"], ".0f"),
            number(row["engine_tok_per_s"], ".0f"),
            number(row["over_engine"], ".3f"),
            ms(row["ttft_more_s"]),
            number(row["seconds"]),
            number(row["server_cpu_s"]),
            number(row["client_cpu_s"]),
        ]
        for row in alone
    ]
    return [heading("The server over the engine alone"), text, Table(header, lines)]


def soak_blocks(found: Json) -> list[Block]:
    """Lay out a soak."""
    grown = found["memory_growth_frac"]
    lines = [
        ("answers read to their ends", str(found["answered"])),
        ("requests that their clients left", str(found["left"])),
        ("streams of which their client read nothing", str(found["unread"])),
        ("of these, ended by the server", f"{found['cut_streams']:g}"),
        ("wrong requests, refused with the right status", str(found["bad"])),
        ("refused with status 429, since the queue was full", str(found["refused"])),
        ("other failures", str(found["failed"])),
        ("wrong answers", str(found["wrong"])),
        ("replies with a status of 500 or more", f"{found['server_errors']:g}"),
        ("leaked slots", str(found["leaked_slots"])),
        ("bytes that wait for clients, at the end", f"{found['unsent_bytes']:g}"),
        ("growth of memory", "-" if grown is None else f"{100 * grown:.1f} %"),
    ]
    text = (
        f"{found['clients']} clients for {found['seconds'] / 60:g} min on {found['slots']} slots, {found['arm']}: "
        "greedy, seeded, with penalties, log-probabilities, stop strings, grammars, long prompts and K of their own, "
        "streamed and whole; 3 of 10 leave at a random moment. Every answer is compared with the one that its request "
        "got alone; one that was left, up to there. 1 of 10 requests must be refused; one more client reads nothing of "
        "its streams. Memory: the last tenth of the time over its second tenth."
    )
    return [text, Table(("", ""), lines)]
