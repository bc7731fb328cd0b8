"""The self-checks: what is right passes, what is wrong is found, and the verdict says which."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from peagle.cli import main
from peagle.ops import native
from peagle.ops.native.build import library
from peagle.pair import Pair
from peagle.workflows import check as module
from peagle.workflows.check import Finding, check_kernels, check_logits, check_losslessness

pytestmark = pytest.mark.compile


def test_the_kernels_that_run_are_named() -> None:
    finding = check_kernels()
    assert finding.ok == (native.available() or not native.compiled())
    assert finding.found == native.status()[1]


@pytest.mark.parametrize("broken", [False, True], ids=["absent", "broken"])
def test_kernels_that_are_absent_are_said_and_ones_that_do_not_load_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bool
) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setenv(native.DIRECTORY, str(tmp_path))
    if broken:
        library("portable", tmp_path).write_text("no library")
    native.status.cache_clear()
    try:
        finding = check_kernels()
    finally:
        monkeypatch.undo()
        native.status.cache_clear()
    assert finding.ok != broken
    assert ("do not load" if broken else "XLA: the native kernels were not compiled") in finding.found


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the tiny model to two of its layers, which compile in a quarter of the time."""
    tiny = module.SIZES["tiny"]
    monkeypatch.setitem(module.SIZES, "tiny", dataclasses.replace(tiny, layer_types=tiny.layer_types[:2]))


@pytest.mark.usefixtures("shallow")
@pytest.mark.skipif(not native.available(), reason=native.status()[1])
def test_kernels_agree_with_the_reference() -> None:
    findings = list(check_logits("tiny"))
    assert [finding.name for finding in findings] == ["logits of tiny in float32", "logits of tiny in bfloat16"]
    assert all(finding.ok for finding in findings), findings


@pytest.mark.usefixtures("shallow")
@pytest.mark.skipif(not native.available(), reason=native.status()[1])
def test_wrong_logits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is a little off: in every precision, since it is systematic."""
    load = module.load_target

    def wrong(*arguments: Any, implementation: str | None = None, **options: Any) -> Any:
        loaded = load(*arguments, implementation=implementation, **options)
        if implementation != "native":
            return loaded
        return dataclasses.replace(loaded, params=loaded.params.replace(norm=loaded.params.norm * 1.5))

    monkeypatch.setattr(module, "load_target", wrong)
    assert [finding.ok for finding in check_logits("tiny")] == [False, False]


def test_speculation_that_changes_a_token_is_found(toy: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair passes, but for the one check in which speculation changes its last token."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 2 = 3"}')
    for name, value in (
        ("HELD_OUT", tmp_path / "prompts.jsonl"),
        ("load", lambda **_: toy),
        ("with_drafter", lambda pair, *_: pair),
    ):
        monkeypatch.setattr(module, name, value)
    decode, calls = module.decode, itertools.count()

    def wrong_at_first(engine: Any, *arguments: Any) -> Any:
        (result,) = decode(engine, *arguments)
        if next(calls):
            return [result]
        return [dataclasses.replace(result, output_ids=(*result.output_ids[:-1], 0))]

    monkeypatch.setattr(module, "decode", wrong_at_first)
    findings = list(check_losslessness())
    assert [finding.ok for finding in findings] == [False, True, True, True], findings
    assert "other tokens than plain decoding" in findings[0].found


def test_the_command_ends_with_a_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = Finding("kernels", True, "native"), Finding("logits of S", False, "0.1 off")
    monkeypatch.setattr("peagle.workflows.check.check", lambda: iter([right]))
    assert main(["check"]) == 0
    assert "Right: all 1 checks pass." in capsys.readouterr().out
    monkeypatch.setattr("peagle.workflows.check.check", lambda: iter([right, wrong]))
    assert main(["check"]) == 1
    assert "Wrong: 1 of 2 checks fail: logits of S." in capsys.readouterr().out
