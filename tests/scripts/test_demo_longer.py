"""The demo's last stage: rows behind texts, and a mixture of rows."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from peagle.checkpoints import DEMO, resolve
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


def test_every_round_of_steps_holds_every_kinds_share_in_another_order(mixture: Mixture) -> None:
    kinds = [mixture.kind_at(step) for step in range(mixture.steps)]
    rounds = [tuple(kinds[first : first + 5]) for first in range(0, mixture.steps, 5)]
    assert all(Counter(kinds) == mixture.shares for kinds in rounds)
    assert len(set(rounds)) > 1


def test_steps_have_as_many_tokens_and_go_through_all_rows(mixture: Mixture) -> None:
    """Of a kind each row comes once before any comes again, whatever steps of the other kind lie between."""
    for kind in mixture.shares:
        batches = [mixture.at(step) for step in range(mixture.steps) if mixture.kind_at(step) == kind]
        assert {batch.token_ids.size for batch in batches} == {STEP_TOKENS}
        count = len(batches[0].token_ids)
        rows = np.concatenate([np.asarray(batch.token_ids) for batch in batches])[: 12 // count * count]
        assert len(np.unique(rows, axis=0)) == len(rows)
    again = dataclasses.replace(mixture)
    np.testing.assert_array_equal(again.at(17).token_ids, mixture.at(17).token_ids)


def test_rates_rise_then_fall_to_zero(mixture: Mixture) -> None:
    rates = [mixture.rate_at(step) for step in range(mixture.steps)]
    top = int(np.argmax(rates))
    assert rates == sorted(rates[: top + 1]) + sorted(rates[top + 1 :], reverse=True)
    assert 0 < rates[-1] < 0.02 < max(rates) <= 0.3


def test_shares_name_rows_of_the_stage_and_minutes_fit() -> None:
    kinds = {f"{kind}_{width}" for kind in ("chat", "raw") for width in (512, 2048, 4096)}
    for typed in SHARES.values():
        assert set(parse_shares(typed)) <= kinds
    assert sum(MINUTES.values()) < WHOLE_MINUTES
    with pytest.raises(SystemExit, match="expected NAME:SHARE"):
        parse_shares("chat_512=4")
