"""Format a run: as JSON (an absent value is null), as trace lines, and as a summary in a terminal."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peagle.answers.result import Result
from peagle.base import strict_json
from peagle.base.sizes import format_size
from peagle.engine.memory.kv_memory import PrefixCacheUse
from peagle.measure.metrics import figure_text, speculative_decoding_block, summarize
from peagle.pair import Pair
from peagle.text.prompt_files import Skipped, skipped_line
from peagle.workflows.run import Outcome, Run, RunConfig

SCHEMA = 1
MOST_RATES = 16  # acceptance rates in the summary; public DFlash drafters propose no more drafts
LOADED = ("dtype", "experts", "kernels", "mesh", "drafter_window")  # fields of peagle.pair.Loaded


def report(
    run: Run,
    pair: Pair,
    config: RunConfig,
    names: dict[str, str | None],
    provenance: dict[str, Any],
    peak: int | None,
    skipped: Sequence[Skipped] = (),
) -> dict[str, Any]:
    """Make the object of --json. names: command, target, drafter as typed. skipped: rows without a usable prompt."""
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "config": {**names, **_config_block(run, pair, config)},
        "skipped": [dataclasses.asdict(row) for row in skipped],
        "requests": [_request_block(outcome) for outcome in run.outcomes],
        "summary": summary_block(run, peak),
    }


def summary_block(run: Run, peak_memory_bytes: int | None) -> dict[str, Any]:
    results = [outcome.result for outcome in run.outcomes]
    baselines = [outcome.baseline for outcome in run.outcomes]
    summary = summarize(results, baselines, run.compile_s, peak_memory_bytes, run.host_gap_frac)
    if summary["speedup"] is not None and len(run.outcomes) == 1:
        middle = run.outcomes[0].median_round
        summary["tok_per_s"], summary["baseline_tok_per_s"] = middle.result.tok_per_s, middle.baseline.tok_per_s
        summary["speedup"] = middle.speedup
    return summary | {"prefix_cache": None if run.prefix_cache is None else dataclasses.asdict(run.prefix_cache)}


def trace_lines(run: Run) -> Iterator[str]:
    """Yield one JSON object per step, by request, then by step."""
    for outcome in run.outcomes:
        for number, step in enumerate(outcome.result.steps):
            line = {"request": outcome.result.request.index, "step": number, **dataclasses.asdict(step)}
            yield strict_json.dumps(line) + "\n"


def dumps(value: dict[str, Any]) -> str:
    """Return a file of JSON text, in ASCII."""
    return strict_json.dumps(value, indent=1) + "\n"


def summary_lines(run: Run, peak_memory_bytes: int | None, skipped: Sequence[Skipped] = ()) -> list[str]:
    if not run.outcomes:
        return ["interrupted before the first token"] if run.interrupted else []
    summary = summary_block(run, peak_memory_bytes)
    results = [outcome.result for outcome in run.outcomes]
    speculative = run.engine.num_drafts > 0
    lines = [("speculation" if speculative else "plain", _speed(results, summary))]
    if speculative:
        lines.append(("acceptance", _acceptance(summary, run)))
        if run.costs is not None and run.drafting_cannot_gain:
            most = run.engine.num_drafts
            plain_steps = float(run.costs.at(1, 1, most).verify[1 + most])
            cost = f"a step that verifies {most} drafts takes as long as {plain_steps:.1f} plain steps"
            emits = f"emits at most {most + 1} tokens; decoded plainly"
            lines.append(("costs", f"drafting cannot save time here: {cost} and {emits}"))
        lines.append(("speed-up", _speedup(run, summary)))
    if run.prefix_cache is not None and run.prefix_cache.num_hits:
        lines.append(("prefix cache", _prefix_cache(run.prefix_cache)))
    memory = "-" if peak_memory_bytes is None else format_size(peak_memory_bytes)
    lines.append(("process", f"compiled in {run.compile_s:.2f} s | peak memory {memory}"))
    lines += [("cut short", line) for line in run.cut_short]
    if skipped:
        lines.append(("left out", skipped_line(skipped)))
    return [f"{name:<12} {text}" for name, text in lines]


def logprob_lines(run: Run, pair: Pair) -> Iterator[str]:
    """Yield the lines of --logprobs: a token, its log-probability, and the most likely tokens with theirs."""

    def shown(token_id: int) -> str:
        if pair.tokenizer is None:
            return str(token_id)
        return repr(pair.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace"))

    for outcome in run.outcomes:
        if outcome.result.request.logprobs is None:
            continue
        if len(run.outcomes) > 1:
            yield f"request {outcome.result.request.index + 1}"
        yield "log-probability, token | most likely tokens"
        for token in outcome.result.logprobs:
            best = ", ".join(f"{shown(token_id)} {logprob:.2f}" for token_id, logprob in token.best)
            yield f"{token.logprob:8.2f}  {shown(token.token_id):<16} | {best}"


def _config_block(run: Run, pair: Pair, config: RunConfig) -> dict[str, Any]:
    return {
        "num_speculative_tokens": run.engine.num_drafts,
        "adaptive": run.engine.adaptive,
        "costs": None if run.costs is None else run.costs.to_json(),
        "max_new_tokens": config.answer.max_new_tokens,
        **dataclasses.asdict(config.sampling),
        "slots": config.engine.slots,
        "context": config.engine.context,
        "prefill_chunk": run.engine.prefill_chunk,
        "retain_full_kv": pair.retain_full_kv,
        "kv_memory_bytes": config.engine.kv_memory,
        "prefix_cache_bytes": run.engine.prefix_cache,
        "capacity": run.capacity,
        **{name: getattr(pair.loaded, name) for name in (*LOADED, "aux_layers", "draft_vocab")},
        "baseline": run.compares,
        "ignore_eos": config.answer.ignore_eos,
        "logprobs": config.answer.logprobs,
        "grammar": None if config.answer.grammar is None else dataclasses.asdict(config.answer.grammar),
        "raw_prompt": config.rendering.raw,
        **{name: getattr(config.rendering, name) for name in ("special_tokens", "system", "reasoning_effort", "date")},
        "stop_token_ids": list(pair.stop_token_ids),
        "interrupted": run.interrupted,
        "cut_short": list(run.cut_short),
        "failed": list(run.failed),
    }


def _request_block(outcome: Outcome) -> dict[str, Any]:
    result = outcome.result
    speculative = result.num_speculative_tokens > 0
    logprobs = [
        {"id": token.token_id, "logprob": token.logprob, "top": [list(pair) for pair in token.best]}
        for token in result.logprobs
    ]
    return {
        "request": result.request.index,
        "turn": outcome.turn,
        "prompt_ids": list(result.request.prompt_ids),
        "output_ids": list(result.output_ids),
        "text": result.text,
        "stop": list(result.request.stop),
        "finish_reason": result.finish_reason or "interrupted",
        "num_cached_tokens": result.num_cached_tokens,
        "ttft_s": result.ttft_s,
        "tok_per_s": result.tok_per_s,
        "tpot_s": result.tpot_s,
        "loop_share": result.loop_share,
        "speculative_decoding": speculative_decoding_block(result.counters) if speculative else None,
        "baseline": _baseline_block(outcome),
        "logprobs": None if result.request.logprobs is None else logprobs,
    }


def _baseline_block(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.baseline is None:
        return None
    divergence = outcome.first_divergence
    return {
        "output_ids": list(outcome.baseline.output_ids),
        "ttft_s": outcome.baseline.ttft_s,
        "tok_per_s": outcome.baseline.tok_per_s,
        "first_divergence": None if divergence is None else dataclasses.asdict(divergence),
        "rounds": [
            {
                "plain_first": one.plain_first,
                "tok_per_s": one.result.tok_per_s,
                "baseline_tok_per_s": one.baseline.tok_per_s,
                "speedup": one.speedup,
            }
            for one in outcome.rounds
        ],
    }


def _speed(results: list[Result], summary: Mapping[str, Any]) -> str:
    tokens = sum(len(result.output_ids) for result in results)
    ends = [result.finish_reason or "interrupted" for result in results]
    parts = [f"{tokens} tokens", f"{figure_text(summary['tok_per_s'], '.1f')} tok/s"]
    if summary["baseline_tok_per_s"] is not None:
        parts[-1] += f" (plain decoding: {summary['baseline_tok_per_s']:.1f})"
    ttft = [result.ttft_s for result in results if result.ttft_s is not None]
    parts.append(f"first token after {figure_text(statistics.median(ttft) if ttft else None, '.3f')} s")
    if len(results) > 1:
        counts = ", ".join(f"{ends.count(reason)} {reason}" for reason in dict.fromkeys(ends))
        return " | ".join([f"{len(results)} requests ({counts})", *parts])
    return " | ".join([*parts, f"finish: {ends[0]}"])


def _acceptance(summary: dict[str, Any], run: Run) -> str:
    all_rates = summary["acceptance_rate_per_position"] or []
    rates = " ".join(figure_text(rate, ".2f") for rate in all_rates[:MOST_RATES])
    if len(all_rates) > MOST_RATES:
        rates += f", and of {len(all_rates) - MOST_RATES} more in --json"
    adaptive, k = run.engine.adaptive, run.engine.num_drafts
    steps = f"{summary['num_spec_steps']} steps with drafts (K {'<=' if adaptive else '='} {k})"
    if adaptive:
        steps += f", {summary['num_plain_steps']} without"
        if not summary["num_spec_steps"]:
            why = "since none was likely enough to save time (-k K verifies K in every step)"
            return f"no draft was verified, {why} | {steps}"
    text = f"length {figure_text(summary['acceptance_length'], '.2f')} | {steps} | rate per position {rates}"
    if adaptive:
        text += f" | drafts: {summary['num_proposed_draft_tokens']} proposed, {summary['num_draft_tokens']} verified, "
        text += f"{summary['num_accepted_draft_tokens']} accepted"
        if summary["num_looked_up_draft_tokens"]:
            text += f"; {summary['num_looked_up_draft_tokens']} of the accepted were looked up in the text"
    if summary["looping_requests_frac"]:
        text += f" | {summary['looping_requests_frac']:.0%} of outputs loop"
        if summary["acceptance_length_without_loops"] is not None:
            text += f", length without them {summary['acceptance_length_without_loops']:.2f}"
    return text


def _speedup(run: Run, summary: Mapping[str, Any]) -> str:
    compared = [outcome for outcome in run.outcomes if outcome.rounds]
    if not compared:
        return "not measured" + ("" if run.compares else " (--no-baseline)")
    speedup = summary["speedup"]
    if not summary["num_spec_steps"] and summary["num_plain_steps"]:
        text = "none, since nothing was drafted: both are plain decoding"
    elif speedup is None:
        text = "-"
    else:
        text = f"{speedup_text(speedup)} ({_spread(compared)})"
    differing = [outcome for outcome in compared if outcome.first_divergence is not None]
    if not differing:
        return f"{text}, the same tokens"
    first = differing[0].first_divergence
    assert first is not None
    which = f"{len(differing)} of {len(compared)} outputs differ, the first" if len(compared) > 1 else "outputs differ"
    return f"{text}, but {which} at token {first.index}, where the two largest logits are {first.margin:.2g} apart"


def speedup_text(speedup: float) -> str:
    """Return "1.4x faster than plain decoding", or that it is as fast or slower."""
    times = f"{speedup:.1f}x"
    if times == "1.0x":
        return f"{times}: as fast as plain decoding"
    return f"{times} faster than plain decoding" if speedup > 1 else f"{times}: slower than plain decoding"


def _spread(compared: Sequence[Outcome]) -> str:
    """Say how far the speed-ups of rounds, or of several requests, lie apart."""
    speedups = [one.speedup for outcome in compared for one in outcome.rounds if one.speedup]
    where = f"over {len(compared)} requests" if len(compared) > 1 else f"in {len(speedups)} rounds"
    return f"{min(speedups):.1f} to {max(speedups):.1f} {where}" if len(speedups) > 1 else "in 1 round"


def _prefix_cache(use: PrefixCacheUse) -> str:
    return (
        f"{use.num_hits} of {use.num_requests} prompts hit: {use.num_hit_tokens:,} of {use.num_tokens:,} tokens | "
        f"{use.num_entries} pages kept, {format_size(use.num_bytes)}"
    )
