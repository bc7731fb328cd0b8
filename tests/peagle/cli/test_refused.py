"""What commands refuse: bad flags, prompts, models and memory are one line and exit code 2, and no file is written."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import peagle.base.memory
import peagle.workflows.inspection
import target.load
from peagle.base.checkpoint import Checkpoint
from peagle.ops.kernels import for_weights
from tests.support.commands import Captured, refused
from tests.support.pairs import VOCAB_SIZE, Directories, edit_json

Run = Callable[..., Captured]

# --- flags and prompts ------------------------------------------------------------------------------------------------

# what is typed behind `peagle speculate`, and a pattern of the line
TYPED: list[tuple[str, str]] = [
    ("-k -3 Hi", "-k is -3"),
    ("-k 1000 Hi", r"-k is 1000; expected 0 \(plain decoding\) to 128 drafted tokens"),
    ("-k x Hi", "-k is 'x'.*auto, or auto:N"),
    ("-k auto:x Hi", "-k is 'auto:x'; expected a number of drafted tokens, auto, or auto:N for at most N of them"),
    ("-k auto:0 Hi", "-k is 'auto:0'; expected auto:N, N from 1 to 128"),
    ("-n 0 Hi", "error: -n is 0"),
    ("--slots 0 Hi", "--slots is 0.*1 or more"),
    ("--slots 100000000 Hi", "--slots is 100000000; expected 1 to 65536"),
    ("--context 1 Hi", "--context is 1"),
    ("--context 100000 Hi", "--context is 100000.*384"),
    ("--context 8 'Hi there'", "8 positions.*--context"),
    ("--temperature -1 Hi", "--temperature is -1"),
    ("--temperature hot Hi", r"--temperature is 'hot'.*number.*\(peagle speculate --help shows"),
    ("--top-k 2.5 Hi", r"--top-k is 2\.5.*integer.*\(peagle speculate --help shows"),
    ("--regex a(( Hi", r"--regex: the regular expression.*unclosed group at character 3 of a\(\(;"),
    ("--json-schema absent Hi", "--json-schema absent cannot be read: No such file or directory;"),
    ("--top-p 0 Hi", "--top-p is 0"),
    ("--top-k -1 Hi", "--top-k is -1"),
    ("--min-p 2 Hi", "--min-p is 2"),
    ("--presence-penalty 3 Hi", "--presence-penalty is 3.*-2 to 2"),
    ("--frequency-penalty -3 Hi", "--frequency-penalty is -3"),
    ("--repetition-penalty 0 Hi", "--repetition-penalty is 0"),
    ("--logit-bias x=1 Hi", "--logit-bias is 'x=1'.*ID=VALUE"),
    ("--logit-bias 100000=1 Hi", "token id 100000.*vocabulary"),
    ("--min-tokens -1 Hi", "--min-tokens is -1"),
    ("--prefill-chunk 0 Hi", "--prefill-chunk is 0"),
    (f"--seed {2**64} Hi", f"--seed is {2**64}.*64 bits"),
    ("--reasoning-effort huge Hi", "huge"),
    ("''", "the prompt is empty"),
    ("a\udc80", "not valid Unicode"),
    ("--prompt-ids '' --raw-prompt", "--prompt-ids is empty"),
    ("--prompt-ids 1,x", "'x'"),
    (f"--prompt-ids 5,{VOCAB_SIZE}", f"{VOCAB_SIZE}.*0..{VOCAB_SIZE - 1}"),
    ("--prompt-ids -1", "-1.*vocabulary"),
    (f"--prompt-ids {','.join(['5'] * 384)}", "384 tokens.*384 positions.*at most 383"),
    ("--prompt-ids 5 Hi", "PROMPT and --prompt-ids"),
    ("--prompt-file absent.jsonl", r"absent\.jsonl cannot be read"),
    ("--prompt-ids 5 --system x", "--prompt-ids.*leave out --system"),
    ("--prefill-chunk some Hi", "--prefill-chunk is 'some'; expected a number of tokens, or all"),
    ("--raw-prompt --system x Hi", "--raw-prompt"),
    ("--json / Hi", "--json / cannot be written.*directory"),
    (f"--json {__file__}/out.json Hi", "--json.*cannot be written"),
    ("--trace no/such/folder/out.json Hi", "--trace.*cannot be written"),
    ("--trace - Hi", "--trace -"),
    ("--trace same --json same Hi", "two files"),
]


@pytest.mark.parametrize(("typed", "pattern"), TYPED)
def test_bad_flags_and_prompts_are_refused_in_one_line(
    cli: Run, typed: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = () if "--json" in typed or "--trace" in typed else ("--json", "out.json", "--trace", "trace.jsonl")
    result = cli("speculate", "--drafter", "ngram", *files, *shlex.split(typed))
    refused(result)
    assert re.search(pattern, result[2]), result[2]
    assert list(tmp_path.iterdir()) == []


# whole command lines, and a pattern of the line
OF_COMMANDS: list[tuple[str, str]] = [
    ("speculate -k 0 --logprobs -1 Hi", r"logprobs is -1; expected 0\.\.20"),
    ("speculate -k 0 --logprobs 2 --quiet Hi", "--logprobs.*--quiet.*--json"),
    ("speculate -k 0 --regex a --json-schema b hello", "expected one of them"),
    ("speculate -k 0 --target absent Hi", "absent does not exist"),
    ("speculate --stop= Hi", "stop string 1 of 1 is empty"),
    ("speculate --dtype int4", "--dtype is 'int4'; expected.*'float32'"),
    ("speculate --draft-vocab 2049 Hi", "--draft-vocab is 2049; expected 1 to 2048"),
    ("speculate --aux-layer-ids 1,2 Hi", r"--aux-layer-ids names 2 aux layers \[1, 2\].*reads 3"),
    ("speculate --drafter ngram --aux-layer-ids 0,1,2 Hi", "no drafter with weights"),
    ("speculate --drafter demo-eagle9 Hi", "demo-eagle9 does not exist.*demo-dflash, or ngram"),
    ("train --out x --steps -5", "--steps is -5; expected 1 or more"),
    ("cluster --decode 0", "--decode is 0; expected 1 or more"),
    ("parity -k 200", "-k is 200; expected 1 to 128 drafted tokens"),
    ("bench -k 0", "-k is 0; expected 1 to 128 drafted tokens"),
    ("serve -k 200", r"-k is 200; expected 0 \(plain decoding\) to 128 drafted tokens"),
    ("download demo", "demo is no name on the Hub; expected OWNER/NAME"),
    (f"random tiny {__file__}/x", "/x cannot be written.*; expected a place that can be"),
]


@pytest.mark.parametrize(("typed", "pattern"), OF_COMMANDS)
def test_values_are_refused_by_the_option_and_the_command_that_were_typed(
    real: Run, typed: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = real(*typed.split())
    refused(result)
    assert re.search(pattern, result[2]), result[2]


GENERATE = ("speculate", "-k", "0", "-n", "2")


def test_a_bad_line_of_a_prompt_file_is_left_out_and_told(cli: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": }\n')
    arguments = (*GENERATE, "--prompt-file", str(prompts), "--json")
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
    prompts.write_text(f'{{"prompt": "a"}}\n\n{{"prompt_ids": [{VOCAB_SIZE}]}}\n')
    refused(cli(*GENERATE, "--prompt-file", str(prompts), "--json", str(tmp_path / "out")), "line 3", str(VOCAB_SIZE))
    assert not (tmp_path / "out").exists()


# --- models -----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


# what the loaders' own tests find, from a few places (tests/target, tests/drafter, tests/peagle/base)
SPOILED: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("target", lambda path: (path / "config.json").unlink(), ["no config.json"]),
    ("target", lambda path: cut(path / "model.safetensors"), ["model.safetensors", "truncated"]),
    ("target", lambda path: (path / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
    ("drafter", lambda path: edit_json(path / "config.json", ptd_token_id=None), ["mask token"]),
    ("drafter", lambda path: edit_json(path / "config.json", hidden_size=48), ["48"]),
    ("drafter", lambda path: cut(path / "model.safetensors"), ["truncated"]),
]


@pytest.mark.parametrize(("model", "spoil", "parts"), SPOILED)
def test_a_target_or_a_drafter_that_does_not_work_or_fit_is_refused_in_one_line(
    real: Run, directories: Directories, tmp_path: Path, model: str, spoil: Callable[[Path], object], parts: list[str]
) -> None:
    shutil.copytree(getattr(directories, model), tmp_path / model)
    spoil(tmp_path / model)
    models = {"target": directories.target, "drafter": "ngram", model: tmp_path / model}
    named = [part for name, path in models.items() for part in (f"--{name}", str(path))]
    refused(real("speculate", *named, "--json", str(tmp_path / "out"), "Hi"), *parts)
    assert not (tmp_path / "out").exists()


def test_a_target_alone_and_files_that_are_no_target_are_refused(
    real: Run, directories: Directories, tmp_path: Path
) -> None:
    refused(real("speculate", "--target", str(directories.target), "Hi"), "--drafter DIR, or --drafter ngram")
    refused(real("speculate", "--target", str(tmp_path), "Hi"), f"{tmp_path} has no config.json; expected")
    drafter_as_target = ("--target", str(directories.drafter), "--drafter", "ngram")
    refused(real("speculate", *drafter_as_target, "Hi"), "'llama'")
    no_gpt_oss = "config.json: model_type is 'llama'; expected 'gpt_oss', since a target is a GPT-OSS model"
    refused(real("speculate", *drafter_as_target[:2], "Hi"), no_gpt_oss)  # and not that it needs another drafter
    shutil.copytree(directories.target, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    refused(real("speculate", "--target", str(tmp_path / "bare"), "--drafter", "ngram", "Hi"), "--prompt-ids")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_into_memory_are_refused_before_they_are_read(
    real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sum; and `info` says so, too."""

    def no_reading(*_: object) -> None:
        raise AssertionError("a weight was read")

    target_directory, drafter_directory = str(directories.target), str(directories.drafter)
    needed = target.load.weight_bytes(directories.target, implementation=for_weights())
    for module in (peagle.base.memory, peagle.workflows.inspection):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: needed)
    assert "fits into" in real("info", target_directory)[1]
    monkeypatch.setattr(Checkpoint, "take", no_reading)
    pair = ("--target", target_directory, "--drafter", drafter_directory)
    refused(real("speculate", *pair, "Hi"), "out of memory", "the target", "the drafter", "together", "kB", "--dtype")
    monkeypatch.setattr(peagle.workflows.inspection, "available_memory_bytes", lambda: 1000)
    assert "does not fit into the 1.0 kB" in real("info", target_directory)[1]


def test_caches_that_do_not_fit_into_memory_are_refused(
    real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ("speculate", "-k", "0", "--target", str(directories.target), "--context", "384", "-n", "4", "Hi")
    read_weights = iter([1 << 40])  # there is room for those
    monkeypatch.setattr(peagle.base.memory, "available_memory_bytes", lambda: next(read_weights, 1000))
    refused(real(*typed), "out of memory", "the keys and values of 448 positions", "--context", "1.0 kB")
