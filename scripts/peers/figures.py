"""Derive medians, spreads and ratios from the raw lines of a comparison, round by round."""

from collections.abc import Sequence

from scripts.peers.cost import stored_weights
from scripts.peers.measure import Measured, Settings
from scripts.peers.roster import OURS, Entry, batches
from scripts.runs import Json, spread


def rows(checkpoint: str, measured: Measured, settings: Settings) -> list[Json]:
    """Make a row per engine."""
    seconds = by_round(measured.lines, settings)
    return [_row(checkpoint, entry, measured, settings, seconds) for entry in measured.entries]


def floors(measured: Measured, settings: Settings) -> Json:
    """Compute {T: v(T) by bytes} of the checkpoint as it is stored."""
    stored = next(entry.storage for entry in measured.entries if entry.name == OURS)
    weights = stored_weights(measured.files.config, stored)
    return {str(width): weights.floor(width) for width in settings.widths}


def others(measured: Measured) -> Json | None:
    """Sum up what other processes took of the processors' time; None if that is not known."""
    shares = [line["others_frac"] for line in measured.lines if line["others_frac"] is not None]
    return spread(shares) if shares else None


def by_round(lines: Sequence[Json], settings: Settings) -> dict[tuple[str, str], list[float]]:
    """Collect {(engine, measurement): seconds in each round}.

    The measurement is prefill, decode (a token), a width, or "together N" (a step of N requests).
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for line in sorted(lines, key=lambda line: line["round"]):
        engine = line["engine"]
        if line["what"] == "decode":
            seconds.setdefault((engine, "prefill"), []).append(line["prefill_s"])
            seconds.setdefault((engine, "decode"), []).append(line["decode_s"] / (settings.new_tokens - 1))
        elif line["what"] == "decode_many":
            step_s = line["decode_s"] / (settings.new_tokens - 1)
            seconds.setdefault((engine, f"together {line['requests']}"), []).append(step_s)
        else:
            seconds.setdefault((engine, str(line["rows"])), []).append(line["pass_s"])
    return seconds


def _row(
    checkpoint: str,
    entry: Entry,
    measured: Measured,
    settings: Settings,
    seconds: dict[tuple[str, str], list[float]],
) -> Json:
    widths = [str(width) for width in settings.widths]

    def own(what: str) -> list[float]:
        return seconds[entry.name, what]

    def faster(what: str) -> Json:
        """Divide the peer's seconds by ours of the same round: how many times faster ours is."""
        return spread([peer / ours for peer, ours in zip(own(what), seconds[OURS, what], strict=True)])

    def together(num_requests: int) -> Json:
        """Compute the tokens a second of so many requests in all."""
        what = f"together {num_requests}"
        ways = {line["way"] for line in measured.lines if _is_way(line, entry.name, num_requests)}
        return {
            "tok_per_s": spread([num_requests / s for s in own(what)]),
            "ours_over_peer": faster(what),
            **({"way": ", ".join(sorted(ways))} if ways else {}),
        }

    read = stored_weights(measured.files.config, entry.storage).read(1)
    return {
        "checkpoint": checkpoint,
        "engine": entry.name,
        "weights": entry.weights,
        **measured.described[entry.name],
        "decode_tok_per_s": spread([1 / s for s in own("decode")]),
        "prefill_tok_per_s": spread([settings.prompt_tokens / s for s in own("prefill")]),
        "pass_ms": {width: spread([1e3 * s for s in own(width)]) for width in widths},
        "v": {width: spread([wide / one for wide, one in zip(own(width), own("1"), strict=True)]) for width in widths},
        "ours_over_peer_decode": faster("decode"),
        "ours_over_peer_prefill": faster("prefill"),
        "ours_over_peer_pass": {width: faster(width) for width in widths},
        "bytes_per_token": read,
        "gb_per_s": spread([read / s / 1e9 for s in own("1")]),
        **({"together": {str(n): together(n) for n in settings.requests}} if _decodes_many(entry, settings) else {}),
        **measured.checks[entry.name],
    }


def _decodes_many(entry: Entry, settings: Settings) -> bool:
    return bool(settings.requests) and batches(entry.name)


def _is_way(line: Json, engine: str, num_requests: int) -> bool:
    """Whether the line names the way in which an engine decodes so many requests together."""
    return line["engine"] == engine and line.get("requests") == num_requests and "way" in line
