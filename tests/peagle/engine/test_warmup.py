"""What warm-up measures, and which costs are kept for later runs."""

import dataclasses
from pathlib import Path

import pytest

from peagle.base.processors import ThreadTimes
from peagle.drafters.ngram import NGram
from peagle.engine.auto import measure
from peagle.engine.auto.measure import store_for
from peagle.engine.host.engine import Engine
from peagle.engine.host.handoff import Fingerprints
from peagle.engine.memory.kv_memory import Sizing, page_bytes
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.collectives import Ranks
from peagle.pair import Pair
from target.model import GptOss
from tests.support.toys import check_whole, tiny_target

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(("waited_s", "agree", "kept"), [(0.2, True, True), (0.6, True, False), (0.2, False, False)])
def test_costs_that_another_program_disturbed_are_measured_again(
    toy: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waited_s: float, agree: bool, kept: bool
) -> None:
    """They differed between rounds, or threads waited for processors: times on a busy machine may agree, too."""
    file, measured, times = tmp_path / "costs.json", [], [ThreadTimes(0.0, 0.0), ThreadTimes(0.4, waited_s)]
    measure_all = measure._measure
    monkeypatch.setattr(measure, "store_for", lambda *_: file)
    monkeypatch.setattr(measure, "thread_times", lambda: times[len(measured) % 2])
    monkeypatch.setattr(measure, "_differ", lambda _: not agree)
    monkeypatch.setattr(measure, "MOST_S", 0.0)
    monkeypatch.setattr(measure, "_measure", lambda *known: (measure_all(*known), measured.append(1))[0])
    engine = toy.engine(toy.engine_config("auto:2", context=128))
    engine.warm_up()
    assert len(measured) == 1
    assert file.exists() == kept
    assert (engine.one._warm_up.stored_costs() is not None) == kept


def test_costs_of_equal_files_that_run_otherwise_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a mesh, with other kernels, or with experts in another form: all of it is in the models' structure."""
    monkeypatch.setattr(measure, "store_for", store_for)
    target, config = tiny_target(), ResolvedConfig(3, 8, 256, prefill_chunk=256, adaptive=True)
    over_two = dataclasses.replace(target, ranks=Ranks("rank", 2))

    def file(target: GptOss, lookup: NGram | None = None) -> Path | None:
        return Engine(target, NGram(), config, (), Fingerprints("a", "b"), lookup=lookup)._warm_up._store

    assert file(target) == file(tiny_target(seed=1))
    assert len({file(target), file(over_two), file(target, NGram())}) == 3


def test_costs_are_measured_at_all_numbers_of_slots_that_the_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at all eight; the pages of windows hold less than a chunk of every slot."""
    target, drafter = tiny_target(), NGram()
    config = ResolvedConfig(3, 8, 256, prefill_chunk=256, adaptive=True)
    sizing = Sizing(target.cache_groups, page_bytes(target.cache_groups, target.init_pages), config)
    config = dataclasses.replace(config, kv_memory=sizing.size(7))
    monkeypatch.setattr(measure, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(measure, "MOST_S", 0.0)
    engine = Engine(target, drafter, config)
    engine.warm_up()
    assert engine.costs is not None
    assert list(engine.costs.verify) == [1, 2, 4]
    check_whole(engine)
