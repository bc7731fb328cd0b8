"""The scenario `llama`: both sides decode the same ids in turns, ratios follow from lines, bad input is one line."""

import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import peagle
from peagle.base.errors import InputError
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO, HELD_OUT, NGRAM
from scripts import bench, runs
from scripts.peers.llama import Build, with_ngrams
from scripts.runs import Progress, rotated
from scripts.scenarios import llama
from scripts.scenarios.llama import LLAMA, OURS, PLAIN, PROMPTS, SPECULATIVE, Model, Variant

pytestmark = pytest.mark.compile

DRIVER = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"answer": {{"threads": 1, "options": sys.argv[1:]}}}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"answer": json.loads(line)}}), flush=True)
"""


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build folder whose driver answers what it is asked."""
    (tmp_path / "CMakeCache.txt").write_text("LLAMA_CPP:PATH=/sources/llama.cpp\n")
    (tmp_path / "driver").write_text(DRIVER)
    (tmp_path / "driver").chmod(stat.S_IRWXU)
    return tmp_path


def test_a_driver_gets_the_ids_and_the_options(build: Path) -> None:
    found = Build.find(build)
    assert found.sources == Path("/sources/llama.cpp")
    with found.start(Path("target.gguf"), 640, 2, with_ngrams(3, 5)) as child:
        options = " ".join(child.described["options"])
        assert options.startswith("-m target.gguf -c 640 -b 640 -t 2 --spec-type ngram-simple")
        asked = llama.ask(child, [Request((1, 2), 8, stop_token_ids=(7,)), Request((3,), 8, stop_token_ids=(7,))])
    assert asked == {"do": "decode", "prompts": [[1, 2], [3]], "num_tokens": 8, "stop_token_ids": [7]}


def test_ours_decodes_with_drafts_what_it_decodes_without() -> None:
    pair = peagle.load(DEMO, NGRAM)
    requests = runs.first_requests(pair, HELD_OUT, 3, 24)
    plain, drafted = (
        llama.decode(llama.engine(pair, Variant(OURS, "", kind, NGRAM, k), 512), requests)
        for kind, k in ((PLAIN, 0), (SPECULATIVE, 3))
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["passes"] == sum(len(ids) - 1 for ids in plain["token_ids"]) > drafted["passes"]


VARIANTS = [
    Variant(OURS, PLAIN, PLAIN),
    Variant(LLAMA, PLAIN, PLAIN),
    Variant(OURS, "EAGLE-3, K = 3", SPECULATIVE),
    Variant(LLAMA, "EAGLE-3, K = 3", SPECULATIVE),
    Variant(OURS, "P-EAGLE, K = 3", SPECULATIVE),
    Variant(OURS, "prompts of 4 tokens", PROMPTS),
    Variant(LLAMA, "prompts of 4 tokens", PROMPTS),
]
MODEL = Model("target", Path("gguf"), [Request((1, 2), 4)] * 2, [Request((5, 6, 7, 8), 1)] * 3, VARIANTS)


class Fake:
    """A driver; it notes what it decodes."""

    pid, described = 0, {"threads": 2}

    def __init__(self, variant: Variant) -> None:
        self.variant, self.asked = variant, []  # type: ignore[var-annotated]

    def __call__(self, requests: Sequence[Request]) -> dict[str, Any]:
        self.asked.append(requests)
        last = 4 if self.variant == VARIANTS[3] else 3  # llama.cpp's second answer parts ways if drafted
        return {"prefill_s": 0.5, "decode_s": 0.25, "passes": 3, "token_ids": [[1, 2], [1, 2, last]]}


def test_sides_decode_the_same_ids_in_turns() -> None:
    """Every variant once a round, from another one on in each."""
    decoders = {variant: Fake(variant) for variant in VARIANTS}
    of_llama = {variant: fake for variant, fake in decoders.items() if variant.side == LLAMA}
    lines = list(llama.measure(MODEL, decoders, of_llama, 2, Progress()))  # type: ignore[arg-type]
    ran = [(line["round"], line["side"], line["row"]) for line in lines]
    assert ran == [(number, v.side, v.row) for number in (0, 1, 2) for v in rotated(VARIANTS, number)]
    for variant, fake in decoders.items():
        assert fake.asked == [MODEL.prompts if variant.kind == PROMPTS else MODEL.requests] * 3
    timed = {(line["side"], line["row"]): line for line in lines}
    assert timed[LLAMA, "EAGLE-3, K = 3"]["equal"] == {OURS: 1, LLAMA: 1}
    assert timed[OURS, "EAGLE-3, K = 3"]["equal"] == {OURS: 2, LLAMA: 2}
    assert (timed[OURS, PLAIN]["tok_per_s"], timed[OURS, PLAIN]["tokens_a_pass"]) == (3 / 0.25, 1)
    assert timed[LLAMA, "prompts of 4 tokens"]["tok_per_s"] == 12 / 0.5


DRIFT = {0: 100.0, 1: 1.0, 2: 3.0, 3: 1.5}  # of the machine, by round: ratios within a round do not see it
SPEEDS = {
    (OURS, PLAIN): 120.0,
    (LLAMA, PLAIN): 60.0,
    (OURS, "EAGLE-3, K = 3"): 240.0,
    (LLAMA, "EAGLE-3, K = 3"): 30.0,
    (OURS, "P-EAGLE, K = 3"): 480.0,
    (OURS, "prompts of 4 tokens"): 120.0,
    (LLAMA, "prompts of 4 tokens"): 80.0,
}


def lines() -> Iterator[dict[str, Any]]:
    for number, drift in DRIFT.items():
        for variant in rotated(VARIANTS, number):
            line = {"model": "demo", "round": number, "side": variant.side, "row": variant.row, "kind": variant.kind}
            line |= {"tok_per_s": SPEEDS[variant.side, variant.row] / drift, "threads": 1}
            equal = 22 + number if (variant.side, variant.kind) == (LLAMA, SPECULATIVE) else 24
            line |= {"tokens_a_pass": 3.0, "equal": {variant.side: equal, OURS: 24}}
            yield {name: value for name, value in line.items() if variant.kind != PROMPTS or name not in ONLY_ANSWERS}


ONLY_ANSWERS = ("tokens_a_pass", "equal")


def test_ratios_are_taken_within_a_round() -> None:
    plain, eagle, p_eagle, prompts = llama.rows(list(lines()))
    assert plain[f"{OURS}_tok_per_s"] == {"median": 80, "lowest": 40, "highest": 120}
    for row, over in ((plain, 2), (eagle, 8), (prompts, 1.5)):
        assert row["ours_over_llama"] == pytest.approx({"median": over, "lowest": over, "highest": over})
    assert (eagle[f"{OURS}_over_plain"]["median"], eagle[f"{LLAMA}_over_plain"]["median"]) == (2, 0.5)
    assert (eagle[f"{LLAMA}_equal"], eagle[f"{OURS}_equal"], eagle[f"{LLAMA}_equal_to_ours"]) == (23, 24, 24)
    assert p_eagle["ours_over_llama"] is None
    assert f"{LLAMA}_tok_per_s" not in p_eagle


def test_the_fastest_are_compared_if_both_draft() -> None:
    assert llama.fastest([line for line in lines() if line["kind"] != SPECULATIVE]) == []
    drafted, of_all = llama.fastest(list(lines()))
    assert (drafted["ours_over_llama"]["median"], drafted[LLAMA]) == (16, "EAGLE-3, K = 3")
    assert (of_all["ours_over_llama"]["median"], of_all[OURS], of_all[LLAMA]) == (8, "P-EAGLE, K = 3", PLAIN)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["huge"], "huge is no model; expected some of demo, tiny, S"),
        (["demo", "-n", "1"], "--max-new-tokens is 1; expected 2 or more"),
        (["demo", "--num-prompts", "0"], "--num-prompts is 0; expected 1 or more"),
        (["demo"], "has no driver; expected a folder built as --help says"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    out = str(tmp_path / "run")
    assert bench.main(["llama", "--out", out, "--llama-cpp", str(tmp_path / "nothing"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_driver_that_dies_is_one_line(build: Path) -> None:
    (build / "driver").write_text(f"#!{sys.executable}\nraise SystemExit('error: no such file')\n")
    with pytest.raises(InputError, match=r"^llama\.cpp: its process ended with status 1 \(error: no such file\)$"):
        Build.find(build).start(Path("nothing.gguf"), 64, 1)
