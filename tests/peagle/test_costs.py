"""Costs are measured with the loop's own programs, kept for exactly what they were measured for, and used."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from peagle import costs
from peagle.config import SpeculationConfig
from peagle.generate import Engine, Request
from peagle.ngram import NGram
from peagle.policy import Costs
from tests.peagle.toys import CONFIG, tiny_target

CONFIGURATION = SpeculationConfig(2, capacity=64, adaptive=True)
REQUEST = Request(0, (1, 2, 3, 4), 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "peagle" / "costs"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def engine(target) -> Engine:
    return Engine(target, NGram(), CONFIGURATION, stop_token_ids=(3,), steps_per_dispatch=2)


@pytest.mark.usefixtures("cache")
def test_they_are_measured_once_and_kept(target) -> None:
    first = engine(target)
    first.warm_up([REQUEST])
    assert first.costs is not None
    assert first.costs_found is not None
    assert first.costs_found.startswith("measured in")
    draft, verify = np.asarray(first.costs.draft_ms), np.asarray(first.costs.verify_ms)
    assert draft.shape == verify.shape == (3,)
    assert draft[0] == 0 < verify[0]
    assert list(draft) == sorted(draft)
    assert list(verify) == sorted(verify)

    second = engine(target)
    second.warm_up([REQUEST])
    assert second.costs_found == "kept from an earlier run"
    assert second.costs is not None
    np.testing.assert_allclose(second.costs.verify_ms, verify, atol=1e-6)
    assert [e.token_ids for e in second.generate([REQUEST])]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept["identity"].update(cpu="another machine"),
        lambda kept: kept.update(draft_ms=[0, 1]),
        lambda kept: kept.update(verify_ms=[1, 2, float("nan"), 3]),
        lambda kept: kept.update(verify_ms=[0, 0, 0, 0]),
        lambda kept: kept.pop("verify_ms"),
    ],
)
def test_what_is_not_as_it_should_be_is_not_used(target, cache: Path, spoil) -> None:
    known = costs.identity(target, NGram(), CONFIGURATION, 1)
    assert costs.load(known) is None
    assert costs.save(known, Costs.even(CONFIGURATION.ladder))
    assert costs.load(known) is not None
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    spoil(kept)
    file.write_text(json.dumps(kept))
    assert costs.load(known) is None
    file.write_text("{")
    assert costs.load(known) is None


def test_another_pair_shape_or_run_has_other_costs(target) -> None:
    known = costs.identity(target, NGram(), CONFIGURATION, 1)
    assert costs.identity(tiny_target(1), NGram(), CONFIGURATION, 1) == known, "weights do not matter"
    others = [
        costs.identity(target, NGram(longest=2), CONFIGURATION, 1),
        costs.identity(target.replace(aux_layer_ids=(0,)), NGram(), CONFIGURATION, 1),
        costs.identity(target, NGram(), dataclasses.replace(CONFIGURATION, batch_size=2), 1),
        costs.identity(target, NGram(), dataclasses.replace(CONFIGURATION, num_speculative_tokens=1), 1),
        costs.identity(target, NGram(), CONFIGURATION, 4),
    ]
    assert len({json.dumps(other) for other in [known, *others]}) == 6


def test_a_cache_that_cannot_be_written_is_said(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = engine(target)
    asked.warm_up([REQUEST])
    assert asked.costs is not None
    assert asked.costs_found is not None
    assert "cannot be written" in asked.costs_found


def test_given_costs_are_taken(target, cache: Path) -> None:
    given = dataclasses.replace(engine(target), costs=Costs(jnp.zeros((3,)), jnp.ones((3,))))
    assert CONFIG.vocab_size > 0
    given.warm_up([REQUEST])
    list(given.generate([REQUEST]))
    assert given.costs_found is None
    assert not cache.exists()
