"""The command line: what it prints where, what it leaves behind, and what it says to what cannot work."""

import ast
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peagle.cli.decoding
import peagle.cli.inspecting
import peagle.cli.processes
import peagle.loading
from peagle.cli.decoding import EXAMPLE
from peagle.cli.display import Display
from peagle.engine.request import Request
from peagle.engine.warmup import WarmUp
from peagle.engine.widths import CostTable
from peagle.ops.kernels import for_weights
from peagle.pair import Pair
from tests.support.commands import Captured, refused, run
from tests.support.pairs import MASK, SPECIALS, STOP, VOCAB_SIZE, Directories, edit_json, toy_pair
from tests.support.terminal import ROOT, TOY_PROCESS

Run = Callable[..., Captured]

# whatever was shown, it goes on when somebody looked and closed its standard input
LOOKED_AT = """
import sys
from peagle.cli.display import Display
show = Display.emitted
Display.emitted = lambda *given: (show(*given), sys.stdin.buffer.read())
"""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: Pair) -> Run:
    """Runs the command line in this process on the toy pair: (exit code, standard output, standard error)."""

    def on_the_toy(command: str, *arguments: str, pair: Pair = toy) -> Captured:
        monkeypatch.setattr(peagle.cli.processes, "load_models", lambda *_, **__: pair)
        return run(capsys, command, "--target", "toy", *arguments)

    return on_the_toy


@pytest.fixture
def real(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process on the models that it names."""
    return functools.partial(run, capsys)


SPECULATE = ("speculate", "--drafter", "ngram", "-k", "3", "-n", "12")


def test_text_goes_to_standard_output_and_the_summary_to_standard_error(cli: Run, toy: Pair) -> None:
    code, out, err = cli(*SPECULATE, "Hi")
    expected = toy.generate("Hi", max_new_tokens=12, num_speculative_tokens=0)
    assert code == 0
    assert out == f"{expected.text}\n"
    for part in ("speculation", "12 tokens", "tok/s", "acceptance", "K = 3", "plain", "speed-up", "the same tokens",
                 "compiled in", "peak memory"):  # fmt: skip
        assert part in err
    assert "\x1b" not in err  # no colours where no terminal is


def test_the_version_needs_no_command(real: Run) -> None:
    code, out, err = real("--version")
    assert (code, out, err) == (0, f"{importlib.metadata.version('peagle')}\n", "")
    code, out, _ = real()
    assert code == 0
    assert "Usage: peagle" in out


def test_quiet_is_the_text_alone(cli: Run) -> None:
    code, out, err = cli(*SPECULATE, "--quiet", "Hi")
    assert (code, err) == (0, "")
    assert out.endswith("\n")


def test_where_no_draft_can_pay_it_says_so(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    dear = CostTable({1: ((1, 1.0), (8, 9.0))}, {1: ((0, 0.0), (7, 1.0))})
    monkeypatch.setattr(WarmUp, "measure_costs", lambda *_: dear)
    code, _, err = cli("speculate", "--drafter", "ngram", "-k", "auto", "-n", "12", "Hi")
    assert code == 0
    assert "a step that verifies 7 drafts takes as long as 9.0 plain steps and emits at most 8 tokens" in err
    assert "no draft was verified, since none was likely enough to pay (-k K verifies K in every step) | 0 steps" in err
    assert "0 steps of K <= 7, 11 plain" in err
    assert "no speed-up, since nothing was drafted: both are plain decoding | the same tokens" in err


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--top-p", ".9", "--seed", "3"], "--top-p, --seed: no effect at temperature 0"),
        (["--top-k", "3", "--min-p", ".1"], "--top-k, --min-p: no effect at temperature 0"),
        (["--synthetic-acceptance", ".5", "--seed", "3"], None),
        (["--temperature", "1", "--top-p", ".9", "--seed", "3"], None),
        (["--presence-penalty", "1", "--reasoning-effort", "low"], None),
        (["--date", "2024-01-01"], None),
        (["--raw-prompt", "--date", "2024-01-01"], "--date: no effect, since raw prompts do not show it"),
        (["--show-drafts"], "--show-drafts has no effect: the text does not go to a terminal"),
        (["--draft-sampling"], "--draft-sampling: draft sampling has no effect: requests with a temperature always"),
    ],
)
def test_an_option_without_effect_is_named_in_a_line(cli: Run, options: list[str], warning: str | None) -> None:
    code, out, err = cli(*SPECULATE, "--quiet", "--no-baseline", *options, "Hi")
    assert code == 0
    assert out
    assert err.splitlines() == [] if warning is None else err.startswith(f"peagle: warning: {warning}")
    assert err.count("\n") == (warning is not None)


def test_stop_strings_end_every_answer_and_the_json_says_which(cli: Run, toy: Pair, tmp_path: Path) -> None:
    """A prompt file, speculation beside plain decoding, and plain decoding with scores: the same text ends them all."""
    whole = toy.generate("Hi", max_new_tokens=40, num_speculative_tokens=0).text
    assert whole is not None
    stop, prompts, out = whole[9:12], tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("Hi\nHi\n")
    options = ("--stop", stop, "--stop", "never said", "-n", "40", "--json", str(out))
    cut = whole[: whole.index(stop)]
    code, said, err = cli("speculate", "--drafter", "ngram", "-k", "3", "--prompt-file", str(prompts), *options)
    assert (code, said) == (0, f"{cut}\n{cut}\n")
    assert "2 requests (2 stop)" in err
    assert "the same tokens" in err
    for request in json.loads(out.read_text())["requests"]:
        assert (request["stop"], request["text"], request["finish_reason"]) == ([stop, "never said"], cut, "stop")
        assert request["baseline"]["output_ids"] == request["output_ids"]
    code, said, _ = cli("generate", "--logprobs", "1", *options, "Hi")
    assert (code, said) == (0, f"{cut}\n")
    (plain,) = json.loads(out.read_text())["requests"]
    assert plain["output_ids"] == request["output_ids"]
    assert [token["id"] for token in plain["logprobs"]] == plain["output_ids"]


def test_stop_strings_that_cannot_be_are_refused_before_anything_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peagle.cli.decoding, "resolve", lambda *_: Path())
    refused(cli(*SPECULATE, "--stop", "", "Hi"), "stop string 1 of 1 is empty")
    refused(cli(*SPECULATE, "--stop", "x" * 2000, "Hi"), "has 2000 characters; expected at most 1024")


def test_generate_is_plain_and_says_the_same(cli: Run) -> None:
    _, speculated, _ = cli(*SPECULATE, "Hi")
    code, out, err = cli("generate", "-n", "12", "Hi")
    assert (code, out) == (0, speculated)
    assert "acceptance" not in err


def test_json_on_standard_output_is_alone_there(cli: Run) -> None:
    code, out, _ = cli(*SPECULATE, "--json", "-", "--prompt-ids", "50,51")
    value = json.loads(out)
    assert code == 0
    assert value["schema"] == 1
    assert value["requests"][0]["prompt_ids"] == [50, 51]
    assert value["config"]["target"] == "toy"
    assert value["config"]["drafter"] == "ngram"
    assert value["config"]["num_speculative_tokens"] == 3


def test_files_are_written_whole_and_with_the_usual_permissions(cli: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a", "b"]}\n{"prompt": "c"}\n{"prompt_ids": [50]}\n')
    result, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    result.write_text("old")
    arguments = ("--prompt-file", str(prompts), "--json", str(result), "--trace", str(trace), "--slots", "2")
    code, out, err = cli(*SPECULATE, *arguments)
    assert code == 0
    value = json.loads(result.read_text())
    assert [request["turn"] for request in value["requests"]] == [0, 1, None, None]
    assert all(request["baseline"]["first_divergence"] is None for request in value["requests"])
    assert all(request["text"] in out for request in value["requests"])
    assert "4 requests" in err
    steps = [json.loads(line)["request"] for line in trace.read_text().splitlines()]
    assert sorted(steps) == steps
    assert set(steps) == {0, 1, 2, 3}
    fresh = tmp_path / "fresh"
    fresh.touch()
    assert result.stat().st_mode == fresh.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "out.json", "trace.jsonl", "fresh"}


def test_a_link_is_followed_and_a_device_is_not_replaced(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert cli(*SPECULATE, "--json", str(tmp_path / "link.json"), "--prompt-ids", "50")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["schema"] == 1
    assert cli(*SPECULATE, "--json", os.devnull, "--prompt-ids", "50")[0] == 0
    assert not Path(os.devnull).is_file()


def test_sampling_options_reach_the_engine(cli: Run) -> None:
    """They stand in the document, and speculation answers as plain decoding does."""
    sampling = {
        "min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 3,
    }  # fmt: skip
    options = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--logit-bias", "51=-100", "--logit-bias", "60=2", "--temperature", "1.5", "--seed", "3"]

    def answer(command: str, *more: str) -> tuple[dict[str, Any], list[int]]:
        code, out, err = cli(command, "-n", "40", "--json", "-", "--prompt-ids", "50", *more)
        assert code == 0, err
        return json.loads(out)["config"], json.loads(out)["requests"][0]["output_ids"]

    config, plain = answer("generate", *options)
    assert {name: config[name] for name in sampling} == sampling
    assert config["logit_bias"] == [[51, -100], [60, 2]]
    assert answer("generate")[1][0] == 51
    assert 51 not in plain
    assert answer("speculate", "--drafter", "ngram", "-k", "3", *options)[1] == plain


def test_a_grammar_binds_the_answer(cli: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["mean", 12]}')
    for option, value, kind in (("--json-schema", str(schema), "json_schema"), ("--regex", '"mean"|12', "regex")):
        texts = set()
        for command in (("generate",), ("speculate", "--drafter", "ngram", "-k", "3")):
            code, out, err = cli(*command, option, value, "-n", "20", "--json", "-", "hello")
            assert code == 0, err
            assert json.loads(out)["config"]["grammar"]["kind"] == kind
            texts.add(json.loads(out)["requests"][0]["text"])
        assert len(texts) == 1
        assert texts < {'"mean"', "12"}
    refused(cli("generate", "--regex", "(", "hello"), "unclosed group")
    refused(cli("generate", "--json-schema", str(tmp_path / "none.json"), "hello"), "cannot be read")
    refused(cli("generate", "--regex", "a", "--json-schema", str(schema), "hello"), "expected one of them")


def test_logprobs_are_in_the_json(cli: Run) -> None:
    code, out, _ = cli("generate", "-n", "4", "--logprobs", "2", "--json", "-", "--prompt-ids", "50")
    (request,) = json.loads(out)["requests"]
    assert code == 0
    assert [token["id"] for token in request["logprobs"]] == request["output_ids"]
    assert [token["top"][0][0] for token in request["logprobs"]] == request["output_ids"]
    assert all(token["top"][0][1] == token["logprob"] for token in request["logprobs"])


def test_logprobs_that_nobody_would_see_are_refused(cli: Run) -> None:
    refused(cli("generate", "-n", "4", "--logprobs", "2", "--quiet", "Hi"), "--logprobs", "--quiet", "--json")


def test_logprobs_are_shown_where_no_json_has_them(cli: Run) -> None:
    code, out, err = cli("generate", "-n", "4", "--logprobs", "2", "Hi")
    assert code == 0
    lines = err.splitlines()
    first = lines.index("log-probability, token | most likely tokens") + 1
    tokens = [line.partition(" | ")[0].split(maxsplit=1)[1].strip() for line in lines[first : first + 4]]
    assert "".join(map(ast.literal_eval, tokens)) == out.removesuffix("\n")
    assert all(line.partition(" | ")[2].count(", ") >= 1 for line in lines[first : first + 4])
    ids = cli("generate", "-n", "4", "--logprobs", "2", "--prompt-ids", "50", pair=toy_pair(None))[2]
    assert "log-probability" in ids


def test_texts_decoded_together_come_in_the_order_of_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(text=True, total=3)
    requests = [Request((1,), 1, index=index) for index in range(3)]
    for request in requests:
        display.started(request, None)
        display.emitted(request, (), f"text {request.index}")
    shown = ""
    for index, out in ((2, ""), (0, "text 0\n"), (1, "text 1\ntext 2\n")):
        display.end(requests[index])  # each comes when those before it have ended
        captured = capsys.readouterr()
        assert captured.out == out
        shown += captured.err
    assert [line.split()[2] for line in shown.splitlines()] == ["1", "2", "3"]


def test_texts_that_were_cut_off_are_shown_and_those_not_begun_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(text=True, total=5)
    requests = [Request((1,), 1, index=index) for index in range(4)]
    for request in requests:
        display.started(request, None)
    for request in requests[:3]:
        display.emitted(request, (5,), f"text {request.index}")
    display.end(requests[1])
    display.end_all()
    captured = capsys.readouterr()
    assert captured.out == "text 0\ntext 1\ntext 2\n"
    assert [line.split()[2] for line in captured.err.splitlines()] == ["1", "2", "3"]


def test_without_a_tokenizer_ids_are_printed(cli: Run) -> None:
    code, out, _ = cli(*SPECULATE, "--prompt-ids", "50", "--json", os.devnull, pair=toy_pair(None))
    assert code == 0
    assert out
    assert all(token.isdecimal() for token in out.split())


def test_a_prompt_may_come_from_standard_input(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def piped_in(data: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return cli(*SPECULATE, "--raw-prompt", "--json", "-", "-")

    piped, typed = piped_in("größer\n".encode()), cli(*SPECULATE, "--raw-prompt", "--json", "-", "größer")
    assert json.loads(piped[1])["requests"][0]["prompt_ids"] == json.loads(typed[1])["requests"][0]["prompt_ids"]
    refused(piped_in(b"\xff"), "not UTF-8")
    refused(piped_in(b"\n"), "is empty")


def test_no_prompt_runs_the_built_in_example(cli: Run) -> None:
    code, out, err = cli(*SPECULATE)
    assert code == 0
    assert out
    assert "the built-in example:" in err
    assert EXAMPLE.splitlines()[0] in err


def test_the_date_of_a_template_is_fixed_and_can_be_given(cli: Run, toy: Pair) -> None:
    def prompt(*options: str) -> str:
        value = json.loads(cli(*SPECULATE, "--json", "-", *options, "Hi")[1])
        assert toy.tokenizer is not None
        return b"".join(map(toy.tokenizer.token_bytes, value["requests"][0]["prompt_ids"])).decode()

    assert "Today: 2025-08-05" in prompt()
    told = prompt("--date", "2031-01-31", "--reasoning-effort", "low", "--system", "Be brief.")
    assert "Today: 2031-01-31 Reasoning: low" in told
    assert "Be brief." in told


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "--out", "x", "--steps", "-5"], ["--steps is -5; expected 1 or more"]),
        (["train", "--out", "x", "--layers", "0"], ["--layers is 0; expected 1 or more"]),
        (["speculate", "--dtype", "int4"], ["--dtype is 'int4'; expected", "'float32'"]),
        (["cluster", "up", "--decode", "0"], ["--decode is 0; expected 1 or more"]),
        (["cluster", "up", "--port"], ["'--port'", "(peagle cluster up --help shows"]),
        (["parity", "-k", "200"], ["-k is 200; expected 1 to 128 drafted tokens"]),
        (["bench", "-k", "0"], ["-k is 0; expected 1 to 128 drafted tokens"]),
        (["serve", "-k", "200"], ["-k is 200; expected 0 (plain decoding) to 128 drafted tokens"]),
        (["speculate", "--draft-vocab", "2049", "Hi"], ["--draft-vocab is 2049; expected 1 to 2048"]),
        (["speculate", "--aux-layer-ids", "1,2", "Hi"], ["--aux-layer-ids names 2 aux layers [1, 2]", "reads 3"]),
        (["random", "tiny", f"{__file__}/x"], [f"{__file__}/x cannot be written", "; expected a place that can be"]),
    ],
)
def test_values_are_refused_by_the_option_and_the_command_that_were_typed(
    real: Run, arguments: list[str], parts: list[str]
) -> None:
    refused(real(*arguments), *parts)


def test_a_group_of_commands_alone_shows_its_help(real: Run) -> None:
    code, out, err = real("cluster")
    assert (code, err) == (0, "")
    assert "peagle cluster" in out


def test_special_tokens_are_control_tokens_where_they_are_asked_for(cli: Run) -> None:
    def prompt(*options: str) -> list[int]:
        return json.loads(cli(*SPECULATE, "--json", "-", *options, "<|start|>a")[1])["requests"][0]["prompt_ids"]

    start = SPECIALS.index("<|start|>")
    assert start not in prompt("--raw-prompt")
    assert prompt().count(start) == 3  # the template's
    assert prompt("--raw-prompt", "--special-tokens")[0] == start
    refused(cli(*SPECULATE, "--special-tokens", "Hi"), "only in raw text")


@pytest.mark.parametrize("slots", ["1", "2"])
def test_ctrl_c_shows_what_there_is(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: str) -> None:
    shown, emitted = [], Display.emitted

    def interrupt(self: Display, *arguments: Any) -> None:
        emitted(self, *arguments)
        shown.append(arguments)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "emitted", interrupt)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [50]}\n{"prompt_ids": [51]}\n')
    files = ("--json", str(tmp_path / "out.json"), "--trace", str(tmp_path / "trace"))
    code, out, err = cli(*SPECULATE, "--prompt-file", str(prompts), "-n", "60", "--slots", slots, *files)
    assert code == 130
    assert "interrupted" in err
    assert "acceptance" in err
    value = json.loads((tmp_path / "out.json").read_text())
    first = value["requests"][0]
    assert first["finish_reason"] == "interrupted"
    assert first["text"] in out
    assert 0 < len(first["output_ids"]) < 60
    assert first["baseline"] is None
    assert value["config"]["interrupted"] is True


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-k", "0", "Hi"], ["-k is 0; expected 1 to 128 drafted tokens (peagle generate decodes plainly)"]),
        (["-k", "-3", "Hi"], ["-k is -3"]),
        (["-k", "1000", "Hi"], ["-k is 1000; expected 1 to 128 drafted tokens"]),
        (["-k", "x", "Hi"], ["-k is 'x'", "auto, or auto:N"]),
        (["-k", "auto:x", "Hi"], ["-k is 'auto:x'; expected a number of drafted tokens, auto, or auto:N for at most"]),
        (["-k", "auto:", "Hi"], ["-k is 'auto:'; expected a number"]),
        (["-k", "automatic", "Hi"], ["-k is 'automatic'; expected a number"]),
        (["-k", "auto:0", "Hi"], ["-k is 'auto:0'; expected auto:1 to auto:128, the most drafted tokens of a step"]),
        (["-k", "auto:-1", "Hi"], ["-k is 'auto:-1'; expected auto:1 to auto:128"]),
        (["-k", "auto:999", "Hi"], ["-k is 'auto:999'; expected auto:1 to auto:128"]),
        (["-n", "0", "Hi"], ["error: -n is 0"]),
        (["--slots", "0", "Hi"], ["--slots is 0", "1 or more"]),
        (["--slots", "100000000", "Hi"], ["--slots is 100000000; expected 1 to 65536"]),
        (["--slots", "2", "--batch", "2", "Hi"], ["--slots and --batch", "both given"]),
        (["--context", "1", "Hi"], ["--context is 1"]),
        (["--context", "100000", "Hi"], ["--context is 100000", "384"]),
        (["--context", "8", "Hi there"], ["8 positions", "--context"]),
        (["--temperature", "-1", "Hi"], ["--temperature is -1"]),
        (["--temperature", "nan", "Hi"], ["--temperature is nan"]),
        (["--temperature", "hot", "Hi"], ["--temperature is 'hot'", "number", "(peagle speculate --help shows"]),
        (["--top-k", "2.5", "Hi"], ["--top-k is 2.5", "integer", "(peagle speculate --help shows"]),
        (["--regex"], ["'--regex'", "(peagle speculate --help shows"]),
        (["--regex", "a((", "Hi"], ["--regex: the regular expression", "unclosed group at character 3 of a((;"]),
        (["--json-schema", "absent", "Hi"], ["--json-schema absent cannot be read: No such file or directory;"]),
        (["--top-p", "0", "Hi"], ["--top-p is 0"]),
        (["--top-k", "-1", "Hi"], ["--top-k is -1"]),
        (["--min-p", "2", "Hi"], ["--min-p is 2"]),
        (["--presence-penalty", "3", "Hi"], ["--presence-penalty is 3", "-2 to 2"]),
        (["--frequency-penalty", "-3", "Hi"], ["--frequency-penalty is -3"]),
        (["--repetition-penalty", "0", "Hi"], ["--repetition-penalty is 0"]),
        (["--logit-bias", "x=1", "Hi"], ["--logit-bias is 'x=1'", "ID=VALUE"]),
        (["--logit-bias", "5", "Hi"], ["--logit-bias is '5'", "ID=VALUE"]),
        (["--logit-bias", "100000=1", "Hi"], ["token id 100000", "vocabulary"]),
        (["--min-tokens", "-1", "Hi"], ["--min-tokens is -1"]),
        (["--prefill-chunk", "0", "Hi"], ["--prefill-chunk is 0"]),
        (["--seed", str(2**64), "Hi"], [f"--seed is {2**64}", "64 bits"]),
        (["--date", "today", "Hi"], ["--date is 'today'", "YYYY-MM-DD"]),
        (["--reasoning-effort", "huge", "Hi"], ["huge"]),
        (["--dtype", "int4", "Hi"], ["int4"]),
        (["--no-such-flag", "Hi"], ["--no-such-flag"]),
        ([""], ["the prompt is empty"]),
        (["  \n"], ["the prompt is empty"]),
        (["a\udc80"], ["not valid Unicode"]),
        (["--prompt-ids", "", "--raw-prompt"], ["--prompt-ids is empty"]),
        (["--prompt-ids", "1,x"], ["'x'"]),
        (["--prompt-ids", f"5,{VOCAB_SIZE}"], [str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"]),
        (["--prompt-ids", "-1"], ["-1", "vocabulary"]),
        (["--prompt-ids", ",".join(["5"] * 384)], ["384 tokens", "384 positions", "at most 383"]),
        (["--prompt-ids", "5", "Hi"], ["PROMPT and --prompt-ids"]),
        (["--prompt-file", "absent.jsonl"], ["absent.jsonl cannot be read"]),
        (["--prompt-ids", "5", "--system", "x"], ["--prompt-ids", "leave out --system"]),
        (["--prompt-ids", "5", "--date", "2024-01-01"], ["--prompt-ids", "leave out --date"]),
        (["--prompt-ids", "5", "--raw-prompt", "--special-tokens"], ["--prompt-ids", "leave out --special-tokens"]),
        (["--strict", "Hi"], ["--strict", "give --prompt-file"]),
        (["--reduce", "psum", "Hi"], ["--reduce psum is given without --mesh"]),
        (["--prefill", "blocked", "--prefill-chunk", "8", "Hi"], ["--prefill is blocked", "--prefill-chunk is given"]),
        (["--raw-prompt", "--system", "x", "Hi"], ["--raw-prompt"]),
        (["--json", "/", "Hi"], ["--json / cannot be written", "directory"]),
        (["--json", "no/such/folder/out.json", "Hi"], ["--json", "cannot be written"]),
        (["--json", f"{__file__}/out.json", "Hi"], ["--json", "cannot be written"]),
        (["--trace", "no/such/folder/out.json", "Hi"], ["--trace", "cannot be written"]),
        (["--trace", "-", "Hi"], ["--trace -"]),
        (["--trace", "same", "--json", "same", "Hi"], ["two files"]),
    ],
)
def test_bad_flags_and_prompts_are_refused_in_one_line(
    cli: Run, arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [] if {"--json", "--trace"} & set(arguments) else ["--json", "out.json", "--trace", "trace.jsonl"]
    refused(cli("speculate", "--drafter", "ngram", *files, *arguments), *parts)
    assert list(tmp_path.iterdir()) == []


def test_the_old_name_of_slots_works_and_is_told_once(cli: Run, real: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt_ids": [50]}\n{"prompt_ids": [51]}\n{"prompt_ids": [52]}\n')
    arguments = ("--prompt-file", str(prompts), "-n", "12", "--quiet", "--json", str(out))
    for command in (("generate",), SPECULATE):
        code, text, err = cli(*command, *arguments, "--batch", "2")
        assert (code, err) == (0, "peagle: warning: --batch is now called --slots\n")
        assert json.loads(out.read_text())["config"]["slots"] == 2
        assert cli(*command, *arguments, "--slots", "2") == (0, text, "")
    for command in ("speculate", "generate", "bench", "data"):
        shown = real(command, "--help")[1]
        assert "--slots" in shown
        assert "--batch" not in shown


def test_a_bad_line_of_a_prompt_file_is_left_out_and_told_or_refused(cli: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": }\n')
    arguments = (*SPECULATE, "--prompt-file", str(prompts), "--json")
    code, out, err = cli(*arguments, "-")
    assert (code, len(json.loads(out)["requests"])) == (0, 1)
    (row,) = json.loads(out)["skipped"]
    assert row["line"] == 2
    assert row["reason"].startswith(f"{prompts} line 2 is not valid JSON")
    line = f"1 row without a usable prompt, the first: {row['reason']}"
    assert err.splitlines()[0] == f"peagle: warning: left out of prompts: {line}"
    assert err.splitlines()[-1] == f"left out     {line}"
    code, again, err = cli(*arguments, "-", "--quiet")
    assert (code, json.loads(again)["skipped"]) == (0, [row])
    assert err == f"peagle: warning: left out of prompts: {line}\n"
    refused(cli(*arguments, str(tmp_path / "out"), "--strict"), "line 2", "not valid JSON")
    prompts.write_text(f'{{"prompt": "a"}}\n\n{{"prompt_ids": [{VOCAB_SIZE}]}}\n')
    refused(cli(*SPECULATE, "--prompt-file", str(prompts), "--json", str(tmp_path / "out")), "line 3", str(VOCAB_SIZE))
    assert not (tmp_path / "out").exists()


def test_flags_of_the_other_command_are_refused(cli: Run, real: Run) -> None:
    refused(cli("generate", "-k", "3", "Hi"), "-k")
    refused(cli("speculate", "--logprobs", "3", "Hi"), "--logprobs")
    refused(cli("generate", "--logprobs", "-1", "Hi"), "logprobs is -1; expected 0..20")
    refused(real("nonsense"), "nonsense")


Spoil = Callable[[Path], object]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def index(path: Path, shard: str) -> None:
    """Weights under another name, and an index that sends every tensor to this shard."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", framework="numpy") as weights:
        weight_map = dict.fromkeys(weights.keys(), shard)
    (path / "model.safetensors").rename(path / "a.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def configure(path: Path, **fields: Any) -> None:
    edit_json(path / "config.json", **fields)


SPOILED: list[tuple[str, Spoil, list[str]]] = [
    ("target", lambda path: (path / "config.json").unlink(), ["no config.json"]),
    ("target", lambda path: (path / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    ("target", lambda path: configure(path, model_type="llama"), ["'llama'", "gpt_oss"]),
    ("target", lambda path: cut(path / "model.safetensors"), ["model.safetensors", "truncated"]),
    ("target", lambda path: (path / "model.safetensors").write_bytes(b"no"), ["model.safetensors"]),
    ("target", lambda path: (path / "model.safetensors").unlink(), ["no weights"]),
    ("target", lambda path: index(path, "b.safetensors"), ["b.safetensors", "no such file"]),
    ("target", lambda path: index(path, "../b.safetensors"), ["../b.safetensors", "outside"]),
    ("target", lambda path: configure(path, num_hidden_layers=2, layer_types=None), ["no place for"]),
    ("target", lambda path: configure(path, num_hidden_layers=4, layer_types=None), ["missing"]),
    ("target", lambda path: configure(path, vocab_size=321), ["[320, 64]", "[321, 64]"]),
    ("target", lambda path: (path / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
    ("drafter", lambda path: (path / "config.json").unlink(), ["no config.json"]),
    ("drafter", lambda path: configure(path, ptd_token_id=None), ["mask token"]),
    ("drafter", lambda path: configure(path, ptd_token_id=VOCAB_SIZE), [str(VOCAB_SIZE)]),
    ("drafter", lambda path: configure(path, hidden_size=48), ["48"]),
    ("drafter", lambda path: configure(path, eagle_aux_hidden_state_layer_ids=[1, 2, 9]), ["9", "1..3"]),
    ("drafter", lambda path: cut(path / "model.safetensors"), ["truncated"]),
]


@pytest.mark.parametrize(("model", "spoil", "parts"), SPOILED)
def test_a_target_or_a_drafter_that_does_not_work_or_fit_is_refused_in_one_line(
    real: Run, directories: Directories, tmp_path: Path, model: str, spoil: Spoil, parts: list[str]
) -> None:
    assert json.loads((directories.drafter / "config.json").read_text())["ptd_token_id"] == MASK
    shutil.copytree(getattr(directories, model), tmp_path / model)
    spoil(tmp_path / model)
    models = {"target": directories.target, "drafter": "ngram", model: tmp_path / model}
    named = [part for name, path in models.items() for part in (f"--{name}", str(path))]
    refused(real("speculate", *named, "--json", str(tmp_path / "out"), "Hi"), *parts)
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_drafter_and_other_mixtures_are_refused(
    real: Run, directories: Directories, tmp_path: Path
) -> None:
    refused(real("speculate", "--target", str(directories.target), "Hi"), "--drafter DIR, or --drafter ngram")
    refused(real("generate", "--target", str(tmp_path / "absent"), "Hi"), "absent does not exist")
    refused(real("speculate", "--target", str(tmp_path / "absent"), "Hi"), "absent does not exist")
    refused(real("speculate", "--target", str(tmp_path), "Hi"), f"{tmp_path} has no config.json; expected")
    refused(real("speculate", "--drafter", "demo-eagle9", "Hi"), "demo-eagle9 does not exist", "demo-dflash, or ngram")
    drafter_as_target = ("--target", str(directories.drafter), "--drafter", "ngram")
    refused(real("speculate", *drafter_as_target, "Hi"), "'llama'")
    no_gpt_oss = "config.json: model_type is 'llama'; expected 'gpt_oss', since a target is a GPT-OSS model"
    refused(real("speculate", *drafter_as_target[:2], "Hi"), no_gpt_oss)  # and not that it needs another drafter
    shutil.copytree(directories.target, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    refused(real("speculate", "--target", str(tmp_path / "bare"), "--drafter", "ngram", "Hi"), "--prompt-ids")


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(
    real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """With the sum; and `info` says so, too."""
    import target.load
    from peagle.ops.checkpoint import Checkpoint

    def no_reading(*_: object) -> None:
        raise AssertionError("a weight was read")

    target_directory, drafter_directory = str(directories.target), str(directories.drafter)
    used = for_weights() if kernels == "auto" else "xla"
    needed = target.load.weight_bytes(directories.target, implementation=used)
    for module in (peagle.ops.memory, peagle.cli.inspecting):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: needed)
    assert "fits into" in real("info", target_directory)[1]
    monkeypatch.setattr(Checkpoint, "take", no_reading)
    pair = ("--target", target_directory, "--drafter", drafter_directory, "--kernels", kernels)
    refused(real("speculate", *pair, "Hi"), "out of memory", "the target", "the drafter", "together", "kB", "--experts")
    monkeypatch.setattr(peagle.cli.inspecting, "available_memory_bytes", lambda: 1000)
    assert "does not fit into the 1.0 kB" in real("info", target_directory)[1]


def test_caches_that_do_not_fit_into_memory_are_refused(
    real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_row = ("--target", str(directories.target), "--context", "384", "-n", "4", "Hi")
    assert real("generate", *one_row)[0] == 0
    read_weights = iter([1 << 40])  # there is room for those
    monkeypatch.setattr(peagle.ops.memory, "available_memory_bytes", lambda: next(read_weights, 1000))
    refused(real("generate", *one_row), "out of memory", "the keys and values of 448 positions", "--context", "1.0 kB")


def test_memory_for_keys_and_values_is_refused_in_a_line(real: Run, directories: Directories) -> None:
    one_row = ("--target", str(directories.target), "--context", "384", "-n", "4", "Hi")
    assert real("generate", *one_row, "--kv-memory", "1MB", "--slots", "4")[0] == 0
    refused(real("generate", *one_row, "--kv-memory", "none"), "--kv-memory is 'none'; expected a size", "or auto")
    short = real("generate", *one_row, "--kv-memory", "1kB")
    refused(short, "keys and values is 1.0 kB", "one request of 384 positions", "raise --kv-memory or lower --context")
    there = ("--kv-memory", "900TB")
    refused(real("generate", *one_row, *there), "keys and values may take", "are available", "a smaller --kv-memory")
    refused(real("generate", *one_row, "--prefix-cache", "900TB"), "prefix cache may take", "--prefix-cache, or off")


def test_speculation_and_plain_decoding_of_a_real_pair_agree(real: Run, directories: Directories) -> None:
    """From files to text, both commands; the second one also says how likely each token was."""
    common = ("--target", str(directories.target), "-n", "24", "--ignore-eos", "--json", "-", "hello")
    code, out, err = real("speculate", "--drafter", str(directories.drafter), "-k", "3", *common)
    assert (code, "the same tokens" in err) == (0, True)
    (fast,) = json.loads(out)["requests"]
    code, out, _ = real("generate", "--logprobs", "3", *common)
    (plain,) = json.loads(out)["requests"]
    assert code == 0
    assert fast["output_ids"] == plain["output_ids"] == fast["baseline"]["output_ids"]
    assert fast["text"] == plain["text"]
    assert [token["top"][0][0] for token in plain["logprobs"]] == plain["output_ids"]
    assert all(token["logprob"] <= 0 for token in plain["logprobs"])


def test_info_tells_what_checkpoints_are_and_whether_they_fit(real: Run, directories: Directories) -> None:
    target, drafter = str(directories.target), str(directories.drafter)
    for names in ((target, drafter), (drafter, target)):
        code, out, err = real("info", *names)
        assert (code, err) == (0, "")
        for part in ("GPT-OSS target", "P-EAGLE drafter", "MXFP4", "They fit", "layers 0, 1, 2", "stop tokens"):
            assert part in out
    assert "They fit" not in real("info", target)[1]
    assert f"{(directories.target / 'model.safetensors').stat().st_size / 1e3:.1f} kB" in real("info", target)[1]


def test_info_says_how_files_are_read_and_warns(real: Run, directories: Directories, tmp_path: Path) -> None:
    """Which aux layers and why, whether they look like the other kind, where stop tokens come from."""
    key, drafter, target = "eagle_aux_hidden_state_layer_ids", tmp_path / "drafter", tmp_path / "target"
    shutil.copytree(directories.drafter, drafter)
    edit_json(drafter / "config.json", **{key: [1, 2, 3]})
    alone, both = real("info", str(drafter))[1], real("info", str(directories.target), str(drafter))[1]
    assert f"outputs 0, 1, 2: config.json's {key} [1, 2, 3] are inputs" in alone
    assert "WARNING" in alone
    assert "WARNING" not in both  # the target has no layer 3
    told = real("info", str(directories.target), str(drafter), "--aux-layer-ids", "0,2,1")[1]
    assert "outputs 0, 2, 1, given instead of" in told
    assert "the target's layers 0, 2, 1" in told
    edit_json(drafter / "config.json", **{key: None, "eagle_config": {key: [0, 1, 2]}})
    assert f"outputs 0, 1, 2: config.json's eagle_config.{key} [0, 1, 2] are outputs" in real("info", str(drafter))[1]
    refused(real("info", str(directories.target), "--aux-layer-ids", "0,1,2"), "--aux-layer-ids is given")
    refused(real("info", str(drafter), "--aux-layer-ids", "one"), "--aux-layer-ids is 'one'")
    refused(real("speculate", "--drafter", "ngram", "--aux-layer-ids", "0,1,2", "Hi"), "no drafter with weights")
    refused(
        real("sweep", "--out", str(tmp_path / "run"), "--drafter", "ngram", "--aux-layer-ids", "0,1,2"),
        "no drafter with weights",
    )

    shutil.copytree(directories.target, target)
    assert f"{STOP}, by generation_config.json" in real("info", str(target))[1]
    (target / "generation_config.json").unlink()
    assert f"{STOP}, by config.json" in real("info", str(target))[1]
    edit_json(target / "config.json", eos_token_id=None)
    assert f"{STOP}, by tokenizer_config.json" in real("info", str(target))[1]
    (target / "tokenizer.json").unlink()
    assert "WARNING: no stop token" in real("info", str(target))[1]


def test_info_says_what_auto_drafts(real: Run, directories: Directories, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(directories.drafter, drafter)

    def line() -> str:
        said = next(line for line in real("info", str(drafter))[1].splitlines() if "drafts by auto" in line)
        return said.split("auto")[1].strip()

    assert line() == "7 at most per step, from acceptance counted while decoding; there is no speculation.json"
    (drafter / "speculation.json").write_text('{"num_speculative_tokens": 5}')
    assert line() == "5 at most per step, from acceptance counted while decoding; by speculation.json"
    (drafter / "speculation.json").write_text('{"num_speculative_tokens": "5"}')
    refused(real("info", str(drafter)), "speculation.json does not say how to draft")


def test_a_doubt_is_one_line_on_standard_error_even_if_quiet(
    real: Run, directories: Directories, tmp_path: Path
) -> None:
    shutil.copytree(directories.target, tmp_path / "target")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "target" / name).unlink(missing_ok=True)
    edit_json(tmp_path / "target" / "config.json", eos_token_id=None)
    arguments = ("generate", "--target", str(tmp_path / "target"), "--prompt-ids", "5,6", "-n", "2", "-q")
    code, _, err = real(*arguments)
    assert code == 0
    assert err.startswith("peagle: warning: ")
    assert "no stop token" in err
    assert err.count("\n") == 1


def test_info_counts_memory_by_the_shapes(real: Run, directories: Directories) -> None:
    """Parameters and cache bytes are those of the loaded model."""
    import jax

    from peagle.loading import load
    from peagle.ops.memory import tree_bytes

    pair = load(directories.target, None, kernels="xla")
    lines = dict(line.strip().split("  ", 1) for line in real("info", str(directories.target))[1].splitlines()[1:-1])
    params = pair.plain_target.params  # type: ignore[attr-defined]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert f"{count:,}," in lines["parameters"]
    assert f"expanded {4 * count / 1e3:.1f} kB float32" in lines["in memory"]
    full, sliding = (
        tree_bytes(jax.eval_shape(lambda counts=counts: pair.plain_target.init_pages(counts)))
        for counts in ((1, 0), (0, 1))
    )
    assert f"{1000 * full / 64 / 1e3:.1f} kB float32" in lines["KV cache per 1,000 tokens"]
    # a window of 24 positions and 24 rows of steps in flight are less than a page; one more at either end
    assert f"{3 * sliding / 1e3:.1f} kB float32" in lines["KV pages per slot"]
    assert f"{1000 * (full + sliding) / 64 / 1e3:.1f} kB float32" in lines["with --retain-full-kv"]
    assert "in chunks" in lines["prefill of 8,192 tokens"]


def test_info_says_what_an_engine_of_each_role_takes(
    real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of an engine of that shape, and the tokens of one that has all the memory."""
    from drafter.load import weight_bytes as drafter_weight_bytes
    from peagle.loading import load
    from peagle.ops.memory import size_in_words
    from target.load import weight_bytes

    pair = load(directories.target, directories.drafter, kernels="xla", dtype="float32")
    free = 1_000_000
    weights = weight_bytes(directories.target, dtype=np.float32, implementation=for_weights())
    weights += drafter_weight_bytes(directories.drafter, np.float32, implementation=for_weights())
    monkeypatch.setattr(peagle.cli.inspecting, "available_memory_bytes", lambda: weights + free)
    for role in ("prefill", "decode", "both"):
        typed = ("info", str(directories.target), str(directories.drafter), "--role", role, "--context", "300")
        code, out, _ = real(*typed, "--slots", "3")
        config = pair.engine_config(7, slots=3, context=300, role=role)
        memory = pair.engine(config).memory
        assert code == 0
        assert f"{memory.num_tokens:,}, in {memory.num_pages[0]} pages of 64" in out
        assert f"{size_in_words(sum(memory.num_bytes))} float32" in out
        filled = pair.engine(dataclasses.replace(config, kv_memory=free)).memory
        assert f"{filled.num_tokens:,} beside the weights, into the memory available now (float32)\n" in out
    monkeypatch.setattr(peagle.cli.inspecting, "available_memory_bytes", lambda: weights)
    assert "0 beside the weights" in (out := real(*typed)[1])
    assert "; too few for one request of 300" in out
    refused(real("info", str(directories.drafter), "--role", "decode"), "--role decode is given, but no target")


def test_info_refuses_what_is_no_pair(real: Run, directories: Directories, tmp_path: Path) -> None:
    target, drafter = str(directories.target), str(directories.drafter)
    refused(real("info", target, target), "both targets")
    refused(real("info", target, drafter, target), "3 directories")
    refused(real("info", str(tmp_path)), "no config.json")
    refused(real("info", ""), "name is empty; expected a directory")
    shutil.copytree(directories.drafter, tmp_path / "other")
    edit_json(tmp_path / "other" / "config.json", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    code, out, err = real("info", target, str(tmp_path / "other"))
    assert (code, "They fit" in out, "9 names no layer" in err) == (2, False, True)


def process(*arguments: str, code: str = TOY_PROCESS, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_profiler_that_fails_costs_no_answer(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("one is active already\nand a trace of the stack")

    monkeypatch.setattr("jax.profiler.trace", refuse)
    files = ("--profile", str(tmp_path / "p"), "--json", str(tmp_path / "json"))
    code, out, err = cli(*SPECULATE, "--prompt-ids", "50,51", *files)
    assert code == 2
    assert out
    assert err.splitlines()[-1] == f"peagle: error: --profile {tmp_path / 'p'} failed: one is active already"
    written = json.loads((tmp_path / "json").read_text())
    assert written["profile"] is None
    assert len(written["requests"][0]["output_ids"]) == 12


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from peagle.cli import main
assert main(sys.argv[1:]) == 0
heavy = {"jax", "numpy", "transformers", "flax", "safetensors", "tokenizers", "matplotlib"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for arguments, expected in ((["--help"], "speculate"), (["speculate", "--help"], "--prompt-file")):
        out, err = process(*arguments, code=code).communicate()
        assert err.decode().strip() == "[]"
        assert expected in out.decode()


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ("speculate", "--target", "toy", "--drafter", "ngram", "--prompt-ids", "50", "-n", "300", "-q")
    with process(*arguments, code=LOOKED_AT + TOY_PROCESS) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(2)
        running.stdout.close()
        running.stdin.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141


def test_synthetic_acceptance_is_marked_wherever_it_shows(cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("speculate", "--drafter", "ngram", "a", "-k", "3", "--synthetic-acceptance")
    code, _, error = cli(*arguments, "0.9", "-n", "64", "--json", str(out))
    assert code == 0
    assert "SYNTHETIC" in error
    document = json.loads(out.read_text())
    assert document["config"]["synthetic_acceptance"] == pytest.approx([0.9, 0.81, 0.729])
    assert document["requests"][0]["baseline"]["first_divergence"] is None
    assert document["summary"]["acceptance_length"] > 2  # drawn: an n-gram drafter starts slower
    refused(cli(*arguments, "much"), "expected rates")
    refused(cli(*arguments, "0.5,0.4"), "2 rates for K = 3")
