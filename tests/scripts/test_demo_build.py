"""The demo's making: stages are resumed, and a tiny pair comes out of all of them."""

from pathlib import Path

import pytest

import peagle
from scripts.demo import build, corpus, rows


def test_a_finished_stage_is_not_repeated_and_a_failed_one_is(tmp_path: Path) -> None:
    begun = []

    def make(out: Path) -> None:
        begun.append(out)
        out.mkdir(exist_ok=True)
        if len(begun) == 1:
            raise RuntimeError("cut off")

    run = build.Build(tmp_path, 1)
    with pytest.raises(RuntimeError):
        run.stage("corpus", make)
    assert run.stage("corpus", make) == run.stage("corpus", make) == tmp_path / "corpus"
    assert len(begun) == 2


@pytest.mark.slow
def test_a_tiny_pair_is_made_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage runs, of the standard library alone; the pair is one that loads and speculates."""
    monkeypatch.setattr(corpus, "PACKAGES", ())
    monkeypatch.setattr(rows, "LONG_WIDTHS", {2048: 36, 4096: 12})
    monkeypatch.setattr(rows, "LONG_PROMPTS", 28)
    build.build(tmp_path, scale=0.003)
    for name in build.PAIR:
        pair = peagle.load(tmp_path / "pair" / "target", tmp_path / "pair" / name)
        drafted, plain = ("".join(pair.stream("def f(x):", max_new_tokens=8, num_speculative_tokens=k)) for k in (3, 0))
        assert drafted == plain
