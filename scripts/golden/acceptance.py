"""Record what the demo pair accepts on a fixed set, as a regression gate for changes of the engine.

    python -m scripts.golden.acceptance     # after the pair itself has changed, never to make a test pass

Afterwards tests/golden/demo_acceptance.json holds the counters. tests/peagle/loading/test_demo.py fails if
acceptance length or the rate at any position is below 95 % of them.
"""

import json
import sys
from typing import Any

import peagle
from peagle.answers.result import Counters, decode
from peagle.base.strict_json import dumps
from peagle.loading.checkpoints import HELD_OUT
from peagle.measure.metrics import pooled_counters
from peagle.measure.provenance import provenance
from peagle.pair import Pair
from scripts.runs import ROOT, first_requests

GOLDEN = ROOT / "tests" / "golden" / "demo_acceptance.json"
NUM_PROMPTS, NEW_TOKENS, NUM_DRAFTS = 24, 96, 5


def measure(pair: Pair) -> Counters:
    """Count over the first held-out prompts, greedy, chat template."""
    requests = first_requests(pair, HELD_OUT, NUM_PROMPTS, NEW_TOKENS)
    engine = pair.engine(pair.engine_config(NUM_DRAFTS, context=pair.capacity(requests)))
    counters = pooled_counters(decode(engine, requests, None))
    assert counters is not None
    return counters


def recorded() -> dict[str, Any]:
    """Read the record."""
    record: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return record


def main() -> int:
    """Run the command."""
    counters = measure(peagle.load())
    origin = provenance()
    record = {
        "what": f"{NUM_PROMPTS} held-out prompts, chat, greedy, {NEW_TOKENS} new tokens, K = {NUM_DRAFTS}",
        "recorded": {"time": origin["time"], "packages": origin["packages"], "cpu": origin["cpu"]},
        "num_steps": counters.num_steps,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "rate_per_position": list(counters.acceptance_rate_per_position),
    }
    GOLDEN.write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    print(dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
