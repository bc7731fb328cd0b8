"""The demo's last stage: rows behind texts, a mixture of rows, a judge that goes on where it was cut off."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from peagle.checkpoints import DEMO, resolve
from peagle.ops.errors import InputError
from scripts.demo import judge
from scripts.demo.build import DRAFTERS
from scripts.demo.long_rows import CHARS_PER_TOKEN, LENGTHS, behind_texts, chat_rows, texts_of
from scripts.demo.longer import MINUTES, SHARES, WHOLE_MINUTES
from scripts.demo.train_longer import STEP_TOKENS, Mixture, parse_shares
from scripts.demo.train_target import Rows

SOURCE = Path(json.__file__).read_text(encoding="utf-8")
TEXTS = texts_of([{"text": SOURCE}])
TASKS = [{"prompt": f"def f{number}(x):", "reference": f"    return x + {number}\n"} for number in range(30)]


def test_every_task_stands_behind_a_text_that_leaves_room_for_it() -> None:
    width = 512
    behind = list(behind_texts(TASKS, TEXTS, width))
    assert behind == list(behind_texts(TASKS, TEXTS, width))
    sizes = [len(long["prompt"]) - len(task["prompt"]) for long, task in zip(behind, TASKS, strict=True)]
    assert all(long["prompt"].endswith("\n\n" + task["prompt"]) for long, task in zip(behind, TASKS, strict=True))
    assert all(long["reference"] == task["reference"] for long, task in zip(behind, TASKS, strict=True))
    assert max(sizes) <= LENGTHS[1] * width * CHARS_PER_TOKEN + 2
    assert len({long["prompt"][:40] for long in behind}) > 1


def test_packed_rows_hold_each_task_whole() -> None:
    encoder = AutoTokenizer.from_pretrained(resolve(DEMO, "target"), local_files_only=True)
    rows = chat_rows(encoder, behind_texts(TASKS, TEXTS, 1024), 1024)
    assert rows["token_ids"].shape[1] == 1024
    assert int(rows["segment_ids"].max(axis=1).sum()) == len(TASKS)
    text = encoder.decode(rows["token_ids"][rows["roles"] == 2].tolist())
    assert sorted(text.count(task["reference"].strip()) for task in TASKS)[0] >= 1


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    folder, rows = tmp_path_factory.mktemp("rows"), {}
    for number, (name, width) in enumerate((("short", 512), ("long", 2048))):
        shape, rng = (12, width), np.random.default_rng(number)
        arrays = {"token_ids": rng.integers(1, 99, shape).astype(np.uint16)}
        arrays |= {name: np.ones(shape, np.uint8) for name in ("segment_ids", "roles")}
        np.savez(folder / f"{name}.npz", **arrays)
        rows[name] = Rows(folder / f"{name}.npz", 0)
    return Mixture(50, rows, {"short": 3, "long": 2}, 0.3)


def test_each_round_of_steps_holds_every_kinds_share_in_another_order(mixture: Mixture) -> None:
    kinds = [mixture.kind_at(step) for step in range(mixture.steps)]
    rounds = [tuple(kinds[first : first + 5]) for first in range(0, mixture.steps, 5)]
    assert all(Counter(each) == mixture.shares for each in rounds)
    assert len(set(rounds)) > 1


def test_steps_have_as_many_tokens_and_go_through_all_rows(mixture: Mixture) -> None:
    """Of a kind each row comes once before any comes again, whatever steps of the other kind lie between."""
    for kind in mixture.shares:
        batches = [mixture.at(step) for step in range(mixture.steps) if mixture.kind_at(step) == kind]
        assert {batch.token_ids.size for batch in batches} == {STEP_TOKENS}
        count = len(batches[0].token_ids)
        seen = np.concatenate([np.asarray(batch.token_ids) for batch in batches])[: 12 // count * count]
        assert len(np.unique(seen, axis=0)) == len(seen)
    again = dataclasses.replace(mixture)
    np.testing.assert_array_equal(again.at(17).token_ids, mixture.at(17).token_ids)


def test_rates_rise_then_fall_to_zero(mixture: Mixture) -> None:
    rates = [mixture.rate_at(step) for step in range(mixture.steps)]
    top = int(np.argmax(rates))
    assert rates == sorted(rates[: top + 1]) + sorted(rates[top + 1 :], reverse=True)
    assert 0 < rates[-1] < 0.02 < max(rates) <= 0.3


def test_shares_name_rows_that_are_made_and_minutes_fit() -> None:
    made = {f"{kind}_{width}" for kind in ("chat", "raw") for width in (512, 2048, 4096)}
    for typed in SHARES.values():
        assert set(parse_shares(typed)) <= made
    assert sum(MINUTES.values()) < WHOLE_MINUTES
    with pytest.raises(SystemExit, match="expected NAME:SHARE"):
        parse_shares("chat_512=4")


def test_figures_are_measured_once(tmp_path: Path) -> None:
    kept, asked = judge.Kept(tmp_path / "figures"), list[int]()

    def measure() -> dict[str, Any]:
        asked.append(1)
        return {"nats": [1.0]}

    assert kept.get("New, 0", measure) == kept.get("New, 0", measure) == {"nats": [1.0]}
    assert asked == [1]
    assert json.loads((tmp_path / "figures" / "new_0.json").read_text()) == {"nats": [1.0]}


def test_what_is_judged_is_checked_first(tmp_path: Path) -> None:
    assert judge.parse_length("2500:24") == (2500, 24)
    for part in ("target", *DRAFTERS):
        (tmp_path / part).mkdir()
    assert judge.parse_pair(f"new:{tmp_path}:256") == judge.Judged("new", tmp_path, "256")
    (tmp_path / "drafter").rmdir()
    with pytest.raises(InputError, match="holds no drafter/"):
        judge.parse_pair(f"new:{tmp_path}:256")
    for typed in ("2500", "x:3", "10:0"):
        with pytest.raises(InputError, match="expected TOKENS:PROMPTS"):
            judge.parse_length(typed)


def test_rows_of_the_page_tell_loops_apart() -> None:
    row = {"pair": "new", "drafter": "P-EAGLE", "tokens": 2500, "prompt_tokens": [2500, 2510], "loops": [True, False]}
    cells = judge._decoded_row(row | {"accepted": [60, 10], "steps": [10, 10]})
    assert cells[:4] == ["new", "P-EAGLE", "2,505", "2"]
    assert cells[4].startswith("4.50")
    assert cells[5].startswith("2.00")
    assert cells[6] == "50%"
