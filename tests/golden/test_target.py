"""The target against activations recorded from transformers (scripts/golden/target.py): no torch needed."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from target.load import load_target
from target.model import GptOss
from tests.support.walk import WIDTH, walk

DIRECTORY = Path(__file__).parent / "target"
AUX_LAYER_IDS = (2, 0, 1)


@pytest.mark.parametrize("experts", ["packed", "expanded"])
def test_logits_and_aux_hidden_are_the_recorded_ones(experts: Literal["packed", "expanded"]) -> None:
    with np.load(DIRECTORY / "expected.npz") as recorded:
        token_ids, logits, outputs = (recorded[name] for name in ("token_ids", "logits", "layer_outputs"))
    loaded = load_target(DIRECTORY, experts=experts)
    assert loaded.stop_token_ids == (46, 3)
    hidden = np.concatenate([outputs[i] for i in AUX_LAYER_IDS], axis=-1)
    written = np.zeros(token_ids.shape, bool)

    def check(rows: np.ndarray, positions: np.ndarray, ours: np.ndarray, aux: np.ndarray) -> None:
        assert np.abs(ours - logits[rows, positions]).max() <= 1e-4 * logits.std()
        assert np.abs(aux - hidden[rows, positions]).max() <= 1e-4 * hidden.std()
        written[rows, positions] = True

    walk(GptOss(loaded.params, loaded.config, AUX_LAYER_IDS), token_ids, [7, 3], check, decoded=0)
    assert written[:, 7 : -2 * WIDTH].all()


def test_the_record_is_small_and_says_what_made_it() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 200_000
    with np.load(DIRECTORY / "expected.npz") as recorded:
        assert str(recorded["recorded_with"]).startswith("transformers 5.")
