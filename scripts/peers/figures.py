"""Derive medians, spreads and ratios from the raw lines of a comparison, round by round."""

from collections.abc import Iterator

from scripts.peers.measure import Measured, Settings
from scripts.peers.roster import OURS, Entry
from scripts.runs import Json, ratios, spread

Seconds = dict[tuple[str, str], list[float]]  # of each round, by engine and measurement


def rows(checkpoint: str, measured: Measured, settings: Settings) -> list[Json]:
    """Make a row per engine."""
    seconds: Seconds = {}
    for line in sorted(measured.lines, key=lambda line: line["round"]):
        for measurement, value in _seconds_of(line, settings.new_tokens - 1):
            seconds.setdefault((line["engine"], measurement), []).append(value)
    return [_row(checkpoint, entry, measured, settings, seconds) for entry in measured.entries]


def floors(measured: Measured, settings: Settings) -> Json:
    """Compute {T: v(T) by bytes} of the checkpoint as it is stored."""
    (stored,) = (entry.storage for entry in measured.entries if entry.name == OURS)
    weights = stored.weights(measured.files.config)
    return {str(width): weights.floor(width) for width in settings.widths}


def others(measured: Measured) -> Json | None:
    """Summarise the processors' time that other processes took; None if it is not known."""
    shares = [line["others_frac"] for line in measured.lines if line["others_frac"] is not None]
    return spread(shares) if shares else None


def _seconds_of(line: Json, num_steps: int) -> Iterator[tuple[str, float]]:
    """Yield the seconds of prefill, decode (a token), a width, "together N" (a step)."""
    if line["what"] == "verify":
        yield str(line["rows"]), line["pass_s"]
    elif "requests" in line:
        yield f"together {line['requests']}", line["decode_s"] / line.get("steps", num_steps)
    else:
        yield "prefill", line["prefill_s"]
        yield "decode", line["decode_s"] / num_steps


def _row(checkpoint: str, entry: Entry, measured: Measured, settings: Settings, seconds: Seconds) -> Json:
    widths = [str(width) for width in settings.widths]

    def own(measurement: str) -> list[float]:
        return seconds[entry.name, measurement]

    def rate(amount: float, measurement: str) -> Json:
        return spread([amount / s for s in own(measurement)])

    def faster(measurement: str) -> Json:
        """Divide the peer's seconds by ours: how many times faster ours is."""
        return spread(ratios(own(measurement), seconds[entry.ours, measurement]))

    def lines_of(count: int) -> list[Json]:
        return [line for line in measured.lines if (line["engine"], line.get("requests")) == (entry.name, count)]

    def together(count: int) -> Json:
        """Compute the tokens a second of so many requests in all."""
        return {"tok_per_s": rate(count, f"together {count}"), "ours_over_peer": faster(f"together {count}")}

    def drafting(count: int) -> Json:
        """Compute the milliseconds of a step of so many requests, and its tokens per request."""
        tokens = [(settings.new_tokens - 1) / line["steps"] for line in lines_of(count)]
        step = spread([1e3 * s for s in own(f"together {count}")])
        return {"step_ms": step, "tokens_a_step": spread(tokens), "ours_over_peer": faster(f"together {count}")}

    row = {"checkpoint": checkpoint, "engine": entry.name, "weights": entry.weights, **measured.described[entry.name]}
    read = entry.storage.weights(measured.files.config).read(1)
    if "decode" in entry.calls:
        row |= {
            "decode_tok_per_s": rate(1, "decode"),
            "prefill_tok_per_s": rate(settings.prompt_tokens, "prefill"),
            "ours_over_peer_decode": faster("decode"),
            "ours_over_peer_prefill": faster("prefill"),
            "bytes_per_token": read,
        }
    if "verify" in entry.calls:
        row |= {
            "pass_ms": {width: spread([1e3 * s for s in own(width)]) for width in widths},
            "v": {width: spread(ratios(own(width), own("1"))) for width in widths},
            "ours_over_peer_pass": {width: faster(width) for width in widths},
            "gb_per_s": rate(read / 1e9, "1"),
        }
    if settings.requests and "decode_many" in entry.calls:
        row["together"] = {str(count): together(count) for count in settings.requests}
    if entry.name in measured.experts:
        row["experts"] = measured.experts[entry.name]
    if "speculate" in entry.calls:
        row["drafting"] = {str(count): drafting(count) for count in settings.requests_with_drafts}
    return row | measured.checks.get(entry.name, {})
