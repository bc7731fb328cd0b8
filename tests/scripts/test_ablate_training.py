"""What scripts.ablate_training counts, and that a run of it goes through."""

import json
from pathlib import Path

import numpy as np
import pytest

from peagle.ops.errors import InputError
from scripts import ablate_training
from scripts.ablate_training import NUM_DRAFTS, VARIANTS, chosen, interval, length, over, row, seconds_per_step
from tests.peagle.conftest import Directories, directories  # noqa: F401 (a fixture)


def line(request: int, accepted: list[int], seed: int = 0, loop_share: float = 0.0) -> ablate_training.Json:
    return {"variant": "base", "seed": seed, "request": request, "loop_share": loop_share, "num_accepted": accepted}


def test_figures_of_a_variant_are_those_of_all_its_steps() -> None:
    lines = [line(0, [7, 7, 7], loop_share=0.9), line(1, [0, 1, 0, 3]), line(0, [7, 0], seed=1), line(1, [2], seed=1)]
    assert length(lines) == 1 + 34 / 10
    records = [
        {"variant": "base", "seed": seed, "steps": 5, "seconds_per_step": 1.0 + seed, "hits_by_depth": []}
        for seed in (0, 1)
    ]
    found = row(VARIANTS[0], records, lines)
    assert found["acceptance_length_by_seed"] == [1 + 25 / 7, 1 + 9 / 3]
    assert found["acceptance_length_without_loops"] == 1 + 13 / 7
    assert found["acceptance_rate_per_position"][:4] == [0.7, 0.6, 0.5, 0.4]
    assert found["seconds_per_step"] == 1.5
    assert interval(lines) is None  # two prompts
    many = [line(n, [n % 4, 1]) for n in range(9)]
    low, high = interval(many) or (9, 0)
    assert low < length(many) < high
    assert interval([line(n, [2, 2]) for n in range(9)]) == [3.0, 3.0]
    assert length([line(0, [])]) is None  # an answer of one token
    alone = row(VARIANTS[0], records, [line(0, [])])
    assert (alone["acceptance_length"], alone["over_base"]["value"]) == (None, None)
    assert alone["acceptance_rate_per_position"] == [None] * NUM_DRAFTS
    assert ablate_training._with_interval(alone, "acceptance_length") == "-"
    assert ablate_training._signed(alone["over_base"]) == "-"
    better = over([line(n, [n % 4 + 1, 2]) for n in range(9)], many)
    assert better == {"value": pytest.approx(1.0), "interval": pytest.approx([1.0, 1.0])}, "prompt by prompt"


def test_a_step_takes_what_lies_between_the_lines_of_one_sitting(tmp_path: Path) -> None:
    """The first line holds compiling; elapsed_s begins anew where a training was taken up again."""
    elapsed = [(10, 60.0), (20, 80.0), (30, 100.0), (40, 55.0), (50, 75.0)]
    text = "".join(json.dumps({"step": step, "loss": 1.0, "elapsed_s": seconds}) + "\n" for step, seconds in elapsed)
    (tmp_path / "log.jsonl").write_text(text)
    assert seconds_per_step(tmp_path) == 2.0


def test_variants_are_asked_for_by_name() -> None:
    assert chosen(None, corpus=True) == VARIANTS
    assert [each.name for each in chosen("KL/1 layer", corpus=False)] == ["base", "1 layer", "KL"]
    with pytest.raises(InputError, match="names 'LK'; expected names of base/1 layer"):
        chosen("LK", corpus=True)
    with pytest.raises(InputError, match="needs --corpus-data"):
        chosen(None, corpus=False)


@pytest.mark.slow
def test_a_run_leaves_its_page_and_goes_on(
    directories: Directories,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peagle.cli import main

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [7 + n, 4, 90]}) + "\n" for n in range(4)))
    asked = [
        "data",
        "--target",
        str(directories.target),
        "--prompt-file",
        str(prompts),
        "--out",
        str(tmp_path / "data"),
    ]
    assert main([*asked, "-n", "20", "--quiet"]) == 0
    small = {"--layers": "1", "--depth": "3", "--rows": "2", "--width": "32", "--mlp-width": "16"}
    monkeypatch.setattr(ablate_training, "BASE", small)
    monkeypatch.setattr(ablate_training, "NEW_TOKENS", 20)
    only = "EAGLE-3, as many steps/EAGLE-3, as long"
    given = ["--work", tmp_path / "work", "--data", tmp_path / "data", "--steps", 30, "--target", directories.target]
    words = [*given, "--prompts", prompts, "--taps", "0,1,2", "--only", only]
    for out in (tmp_path / "one", tmp_path / "two"):
        monkeypatch.setattr("sys.argv", ["ablate_training", "--out", str(out), *map(str, words)])
        assert ablate_training.main() == 0
    one, two = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "two"))
    assert one["rows"] == two["rows"], "the second run finds everything done"
    assert [each["variant"] for each in one["rows"]] == ["base", *only.split("/")]
    assert all(np.isfinite(each["acceptance_length"]) for each in one["rows"])
    assert (tmp_path / "one" / "ablation.png").stat().st_size > 10_000
    assert "| EAGLE-3, as long" in (tmp_path / "one" / "README.md").read_text()
