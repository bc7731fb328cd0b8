"""Call `peagle serve` by clients that others wrote, and write what came of it.

    python -m scripts.against_clients --out DIR

needs `pip install litellm langchain-openai 'lm-eval[api]' schemathesis guidellm` beside the test extra. It serves the
demo pair twice, with K = 3 and plainly; every client must give the same answers by both, whole and streamed.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from peagle.checkpoints import DEMO_DIRECTORY
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.strict_json import dumps
from scripts.runs import Json, Progress, add_run_options, in_one_line, new_parser, origin, where, write_run
from scripts.serving.servers import ours

MODEL, TEXT, RAW = "peagle-demo", "def mean(values):", "def clamp(value, low, high):"
NUM_QUESTIONS = 20
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {}}}


def by_openai(url: str) -> Json:
    openai = importlib.import_module("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Json = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    _same(answer, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    options: Json = {"model": MODEL, "input": TEXT, "temperature": 0, "max_output_tokens": 60}
    _same(answer, client.responses.create(**options).output_text)
    events = client.responses.create(**options, stream=True)
    _same(answer, "".join(event.delta for event in events if event.type == "response.output_text.delta"))
    return {"chat and responses, whole and streamed": answer}


def by_litellm(url: str) -> Json:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network
    litellm = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    server: Json = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    asked = {**server, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 60}
    answer = litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    _same(answer, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    _same(answer, litellm.responses(**server, input=TEXT, max_output_tokens=60).output[-1].content[0].text)
    _refused(litellm.BadRequestError, lambda: litellm.completion(**asked, tools=[TOOL]))
    return {"chat and responses; tools refused by the demo's template": answer}


def by_langchain(url: str) -> Json:
    chat, language = importlib.import_module("langchain_openai"), importlib.import_module("openai")
    server: Json = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
    found = []
    for responses in (False, True):
        model = chat.ChatOpenAI(**server, use_responses_api=responses)
        found.append(model.invoke(TEXT).text)
        _same(found[-1], "".join(chunk.text for chunk in model.stream(TEXT)))
    _same(*found)
    _refused(language.BadRequestError, lambda: chat.ChatOpenAI(**server).bind_tools([TOOL]).invoke(TEXT))
    return {"invoke, stream, responses; tools refused": found[0], "completions": chat.OpenAI(**server).invoke(RAW)}


def by_lm_eval(url: str) -> Json:
    """Choose and continue by a local task: log-probabilities of prompts, and greedy answers up to a stop string."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    lm_eval, tasks = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks")
    fields = {"base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "max_length": 1023}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in task_files(Path(folder)).items():
            (Path(folder) / name).write_text(text, "utf-8")
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={"model": MODEL, "num_concurrent": 4, **fields},
            tasks=["local_choice", "local_text"],
            task_manager=tasks.TaskManager(include_path=folder),
            log_samples=True,
            bootstrap_iters=0,
        )
    texts = [sample["resps"][0][0] for sample in results["samples"]["local_text"]]
    right = [sample["acc"] for sample in results["samples"]["local_choice"]]
    return {
        f"accuracy over {len(right)} choices": f"{sum(right) / len(right):.2f}",
        f"{len(texts)} answers": f"{len(set(texts))} different",
        "": texts,
    }


def task_files(folder: Path) -> dict[str, str]:
    """Make the files of two tasks about getters, in lm-eval's form: the name returned, by choice and by text."""
    names = [
        f"{first}{second}" for first in ("row", "user", "path", "node", "size") for second in ("", "_id", "s", "0")
    ]
    questions = [
        {"question": f"def get_{name}(self):\n    return self.", "choices": [name, "def", "import"], "answer": name}
        for name in names[:NUM_QUESTIONS]
    ]
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "num_fewshot": 0}
    common |= {"dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    choice = {"task": "local_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "{{choices.index(answer)}}", "metric_list": [{"metric": "acc"}]}
    text = {"task": "local_text", "output_type": "generate_until", "doc_to_target": "{{answer}}"}
    text |= {"metric_list": [{"metric": "exact_match"}]}
    kwargs = {"until": ["\n\n"], "max_gen_toks": 40, "temperature": 0}
    return {  # JSON is YAML
        "questions.jsonl": "".join(dumps(each) + "\n" for each in questions),
        "choice.yaml": dumps({**common, **choice}),
        "text.yaml": dumps({**common, **text, "generation_kwargs": kwargs}),
    }


def by_schemathesis(url: str) -> Json:
    """Send what the published schema allows, and what it does not: no reply may be the server's failure."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--seed", "0"]
    checks = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"
    run = subprocess.run([*command, "--checks", checks, "--max-examples", "60"], capture_output=True, text=True)
    found = re.search(r"(\d+) generated, \1 passed", run.stdout)
    if run.returncode or found is None:
        raise AssertionError(run.stdout[-2000:] + run.stderr[-500:])
    return {"failures of the server or of its own schema": "none"}


def by_guidellm(url: str) -> Json:
    """Sweep from one request after another to as many as the server queues, by its own count of tokens."""
    program = str(Path(sys.executable).with_name("guidellm"))
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        prompts.write_text(
            "".join(dumps({"prompt": f"def f{number}(values):"}) + "\n" for number in range(200)), "utf-8"
        )
        options = {
            "backend": f"kind=openai_http,target={url},model={MODEL},max_tokens=32,http2=false",
            "profile": "kind=sweep,sweep_size=3,max_concurrency=32",
            "constraint": "kind=max_requests,count=40",
            "data": f"kind=json_file,path={prompts}",
            "data-loader": "kind=pytorch,num_workers=1,prefetch_factor=2,samples=200",
            "tokenizer": f"kind=huggingface_auto,model={DEMO_DIRECTORY / 'target'}",
            "output": f"kind=json,path={report}",
        }
        command = [
            program,
            "run",
            "--disable-console",
            *(part for key in options for part in (f"--{key}", options[key])),
        ]
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        if run.returncode:
            raise AssertionError(run.stdout[-2000:] + run.stderr[-500:])
        benchmarks = json.loads(report.read_text("utf-8"))["benchmarks"]
    for each in benchmarks:
        if each["requests"]["errored"] or not each["requests"]["successful"]:
            raise AssertionError(f"{len(each['requests']['errored'])} requests of the sweep failed")
    return {f"a sweep of {len(benchmarks)} rates": "no request failed"}


CLIENTS: dict[str, Callable[[str], Json]] = {
    "openai": by_openai,
    "litellm": by_litellm,
    "langchain-openai": by_langchain,
    "lm-eval": by_lm_eval,
    "schemathesis": by_schemathesis,
    "guidellm": by_guidellm,
}


def _same(one: object, other: object) -> None:
    if one != other or not one:
        raise AssertionError(f"{one!r} and {other!r} should be the same")


def _refused(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError("it was not refused")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    return in_one_line("against_clients", lambda: compare(parser.parse_args(arguments)))


def compare(arguments: argparse.Namespace) -> int:
    """Check everything before anything runs, then call the servers."""
    expect_new(arguments.out)
    versions = {name: _version(name) for name in CLIENTS}
    say, found = Progress(total=2 * len(CLIENTS)), {}
    for k in (3, 0):
        with ours("-k", str(k), "--context", "1024") as server:
            for name, call in CLIENTS.items():
                say.part(f"{name}, K = {k}")
                found[name, k] = call(server.url)
    say.end()
    rows = []
    for name in CLIENTS:
        if found[name, 3] != found[name, 0]:
            raise InputError(f"{name} got other answers with K = 3 than plainly: {found[name, 3]} and {found[name, 0]}")
        rows.append({"client": name, "version": versions[name], "found": _brief(found[name, 3])})
    record = {"schema": 1, "provenance": origin("scripts.against_clients"), "config": {"model": MODEL}, "rows": rows}
    write_run(arguments.out, record, page(record))
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"{name} is not installed; see --help for what this needs") from None


def _brief(found: Json) -> str:
    """Write what a client found, without lists."""
    parts = [f"{key}: {' '.join(value.split())!r}" for key, value in found.items() if isinstance(value, str)]
    return "; ".join(part if len(part) < 120 else f"{part[:116]}..." for part in parts)


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    lines = [[row["client"], row["version"], row["found"]] for row in record["rows"]]
    return [
        heading("Clients of others", 1),
        f"`{record['provenance']['command']}`",
        "`peagle serve` of the demo pair with K = 3 and plainly: every client gave the same by both, and whole answers "
        f"equal streamed ones. {where(record['provenance'])}.",
        Table(("client", "version", "what it found"), lines),
    ]


if __name__ == "__main__":
    sys.exit(main())
