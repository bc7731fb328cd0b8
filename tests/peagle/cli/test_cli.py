"""The command line: what it prints where, and what it leaves behind."""

import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.display import Display
from peagle.engine.request import Request
from peagle.pair import Pair
from peagle.text.tokenizer import Tokenizer, detokenize
from tests.support.commands import Captured, last_of_each, refused
from tests.support.pairs import SPECIALS, Directories, toy_pair
from tests.support.terminal import ROOT, TOY_PROCESS

pytestmark = pytest.mark.compile

Run = Callable[..., Captured]

# whatever was shown, it goes on when somebody looked and closed its standard input
LOOKED_AT = """
import sys
from peagle.cli.display import Display
show = Display.emitted
Display.emitted = lambda *arguments: (show(*arguments), sys.stdin.buffer.read())
"""


def answered(cli: Run, *typed: str) -> dict[str, Any]:
    """Run a command; return its JSON object, which is alone on standard output."""
    code, out, err = cli(*typed, "--json", "-")
    assert code == 0, err
    assert "no effect" not in err
    return json.loads(out)


SPECULATE = ("speculate", "--drafter", "ngram", "-k", "3", "-n", "12")


def test_text_goes_to_standard_output_and_the_summary_to_standard_error(cli: Run, toy: Pair) -> None:
    code, out, err = cli(*SPECULATE, "Hi")
    expected = toy.generate("Hi", max_new_tokens=12, num_speculative_tokens=0)
    assert code == 0
    assert out == f"{expected.text}\n"
    for part in ("12 tokens", "tok/s", "plain decoding: ", "acceptance", "K = 3", "speed-up", "the same tokens"):
        assert part in err
    assert "\x1b" not in err  # no colours where no terminal is


def test_the_version_needs_no_command(real: Run) -> None:
    assert real("--version") == (0, f"{importlib.metadata.version('peagle')}\n", "")
    assert real()[1].startswith("Usage: peagle")


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--top-p", ".9", "--seed", "3"], "--top-p, --seed: no effect at temperature 0"),
        (["--top-k", "3", "--min-p", ".1"], "--top-k, --min-p: no effect at temperature 0"),
        (["--presence-penalty", "1", "--reasoning-effort", "low"], None),
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
    code, said, _ = cli("speculate", "-k", "0", "--logprobs", "1", *options, "Hi")
    assert (code, said) == (0, f"{cut}\n")
    (plain,) = json.loads(out.read_text())["requests"]
    assert plain["output_ids"] == request["output_ids"]
    assert [token["id"] for token in plain["logprobs"]] == plain["output_ids"]


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
    files = ("--json", str(tmp_path / "link.json"), "--trace", os.devnull)
    assert cli(*SPECULATE, *files, "--prompt-ids", "50")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["schema"] == 1
    assert not Path(os.devnull).is_file()


def test_sampling_options_reach_the_engine(cli: Run) -> None:
    """They stand in the document, and speculation answers as plain decoding does."""
    sampling = {
        "min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 3,
    }  # fmt: skip
    options = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--logit-bias", "51=-100", "--logit-bias", "60=2", "--temperature", "1.5", "--seed", "3"]

    def answer(*typed: str) -> tuple[dict[str, Any], list[int]]:
        value = answered(cli, *typed, "-n", "40", "--prompt-ids", "50")
        return value["config"], value["requests"][0]["output_ids"]

    config, plain = answer("speculate", "-k", "0", *options)
    assert {name: config[name] for name in sampling} == sampling
    assert config["logit_bias"] == [[51, -100], [60, 2]]
    assert answer("speculate", "-k", "0")[1][0] == 51
    assert 51 not in plain
    assert answer("speculate", "--drafter", "ngram", "-k", "3", *options)[1] == plain


def test_a_grammar_binds_the_answer(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["mean", 12]}', "utf-8-sig")
    plain = ("speculate", "-k", "0", "--regex", '"mean"|12')
    drafted = ("speculate", "--drafter", "ngram", "-k", "3", "--json-schema", str(tmp_path / "schema.json"))
    for command, kind in ((plain, "regex"), (drafted, "json_schema")):
        value = answered(cli, *command, "-n", "20", "hello")
        assert value["config"]["grammar"]["kind"] == kind
        assert value["requests"][0]["text"] in ('"mean"', "12")


def test_texts_decoded_together_come_in_the_order_of_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Each when those before it have ended; of those that were cut off, the begun ones are shown."""
    display = Display(text=True, total=5)
    requests = [Request((1,), 1, index=index) for index in range(5)]
    for request in requests:
        display.started(request, None)
    for request in requests[:4]:
        display.emitted(request, (5,), f"text {request.index}")
    for index, out in ((2, ""), (0, "text 0\n"), (1, "text 1\ntext 2\n")):
        display.end(index)
        assert capsys.readouterr().out == out
    display.end_all()
    assert capsys.readouterr().out == "text 3\n"


def test_without_a_tokenizer_ids_are_printed(cli: Run) -> None:
    code, out, _ = cli(*SPECULATE, "--prompt-ids", "50", "--json", os.devnull, pair=toy_pair(None))
    assert code == 0
    assert out
    assert all(token.isdecimal() for token in out.split())


def prompt_of(cli: Run, *typed: str) -> list[int]:
    return answered(cli, *SPECULATE, *typed)["requests"][0]["prompt_ids"]


def test_a_prompt_may_come_from_standard_input(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    for encoding in ("utf-8", "utf-8-sig"):
        pipe("größer\n".encode(encoding))
        assert prompt_of(cli, "--raw-prompt", "-") == prompt_of(cli, "--raw-prompt", "größer")
    for data, part in ((b"\xff", "not UTF-8"), (b"\n", "is empty")):
        pipe(data)
        refused(cli(*SPECULATE, "-"), part)


def test_options_of_a_chat_template_reach_the_prompt(cli: Run, tokenizer: Tokenizer) -> None:
    """The date is fixed, so that a prompt is the same tomorrow; a spelled control token is text."""
    told = detokenize(tokenizer, prompt_of(cli, "--reasoning-effort", "low", "--system", "Be brief.", "Hi"))
    assert "Today: 2025-08-05 Reasoning: low" in told
    assert "Be brief." in told
    start = SPECIALS.index("<|start|>")
    assert start not in prompt_of(cli, "--raw-prompt", "<|start|>a")
    assert prompt_of(cli, "<|start|>a").count(start) == 3  # the template's


def test_ctrl_c_shows_what_there_is(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    line = last_of_each([*SPECULATE, "-n", "60", "--prompt-file", str(prompts), "--slots", "2", *files])
    code, out, err = cli(*line)
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


def test_speculation_and_plain_decoding_of_a_real_pair_agree(real: Run, directories: Directories) -> None:
    """From files to text, both commands; the second one also says how likely each token was."""
    common = ("--target", str(directories.target), "-n", "24", "--min-tokens", "24", "hello")
    (fast,) = answered(real, "speculate", "--drafter", str(directories.drafter), "-k", "3", *common)["requests"]
    (plain,) = answered(real, "speculate", "-k", "0", "--logprobs", "3", *common)["requests"]
    assert fast["output_ids"] == plain["output_ids"] == fast["baseline"]["output_ids"]
    assert fast["text"] == plain["text"]
    assert [token["id"] for token in plain["logprobs"]] == plain["output_ids"]
    assert all(token["logprob"] <= token["top"][0][1] <= 0 for token in plain["logprobs"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ("speculate", "-k", "0", "--target", "toy", "--prompt-ids", "50", "-n", "300", "-q")
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", LOOKED_AT + TOY_PROCESS, *arguments]
    with subprocess.Popen(command, cwd=ROOT, **pipes) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(2)
        running.stdout.close()
        running.stdin.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141
