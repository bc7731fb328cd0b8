"""`peagle cluster`: what is refused before anything is started, and what a fleet is told."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.cli.cluster import Cluster, served
from peagle.cli.command import build_command
from peagle.cluster.config import FleetConfig, read_fleet
from tests.support.commands import all_refused
from tests.support.pairs import Directories

OWN = {
    "served_model_name", "prefill_engine", "prefill", "decode", "max_prefill", "max_decode",
    "max_queue", "response_store", "drain", "num_cpus", "num_gpus", "hosts",
}  # fmt: skip


def fleet(**typed: Any) -> FleetConfig:
    """Return the config that replicas get, of options by their names."""
    return served(build_command(Cluster, typed))


def test_replicas_are_told_absolute_paths_and_to_draft_by_auto(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directories.target.parent)
    config = fleet(target="target", drafter="drafter", prefill=1, decode=2, context=90)
    assert (config.load.target, config.load.drafter) == (str(directories.target), str(directories.drafter))
    assert (config.prefill, config.decode, config.engine.context, config.served_model_name) == (1, 2, 90, "target")
    assert config.engine.num_speculative_tokens == "auto"
    assert fleet().hosts == ["127.0.0.1"]  # no keys: pages of other names are kept out
    assert fleet(host="0.0.0.0").hosts is None
    demo = fleet(num_speculative_tokens="0")
    assert (demo.load.target, demo.load.drafter, demo.engine.num_speculative_tokens) == ("demo", None, 0)
    assert [fleet(prefix_cache=typed).engine.prefix_cache for typed in ("on", "off", "1MB")] == ["on", "off", 1_000_000]


def test_replicas_are_told_where_a_repository_lies_and_clients_its_name(cached_target: Path) -> None:
    config = fleet(target="openai/gpt-oss-20b", drafter="ngram")
    assert (config.load.target, config.load.drafter, config.served_model_name) == (
        str(cached_target), "ngram", "gpt-oss-20b"
    )  # fmt: skip


def test_impossible_fleet_is_refused_before_it_starts(
    directories: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", str(directories.target))
    table = (
        (("--target", str(tmp_path / "none"), "--drafter", "ngram"), "does not exist"),
        ((*target, "--drafter", "demo"), "needs its own drafter"),
        (("--context", "1"), "--context is 1"),
        (("--context", "99999999"), "--context is 99999999"),
        (("-k", "-1"), "-k is -1; expected 0"),
        (("-k", "much"), "-k is 'much'; expected a number of drafted tokens, auto, or auto:N"),
        (("--kv-memory", "none"), "--kv-memory is 'none'"),
        (("--prefix-cache", "much"), "--prefix-cache is 'much'"),
        (("--mesh", "dp=2"), "--mesh is 'dp=2', but the replicas of a cluster are --decode N; leave dp out"),
        (("--decode", "2", "--max-decode", "1"), "--max-decode is 1; expected 2 or more"),
        (("--max-prefill", "2"), "--prefill is 0; expected 1 or more, to scale up to 2"),
        (
            ("--prefill", "1", "--prefill-engine", "slots"),
            "--prefill-engine is {'slots': ''}; slots is ''; expected a valid integer",
        ),
        (
            ("--prefill", "1", "--prefill-engine", "slots=0"),
            "--prefill-engine is {'slots': 0}; slots is 0; expected 1 or more",
        ),
        (
            ("--prefill", "1", "--prefill-engine", "k=0"),
            "--prefill-engine is {'k': 0}; expected NAME=VALUE,... with names of slots, ",
        ),
        (("--decode", "0"), "--decode is 0; expected 1 or more"),
        (("--num-cpus", "nan"), "--num-cpus is nan; expected a number of 0 or more"),
        (("--port", "0"), "--port is 0; expected a port of 1 to 65535"),
        (("--port", "65536"), "--port is 65536; expected a port of 1 to 65535"),
    )
    all_refused(capsys, ("cluster", "--write-config", str(tmp_path / "fleet.json")), table)
    assert not (tmp_path / "fleet.json").exists()


def test_a_config_for_serve_deploy_is_read_back_and_holds_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    settings = build_command(Cluster, {
        "prefill": 1, "prefill_engine": "prefill_chunk=all", "decode": 3, "port": 8123, "kv_memory": "2GB",
        "write_config": str(file),
    })  # fmt: skip
    assert settings.run() == 0
    config = json.loads(file.read_text("utf-8"))
    (application,) = config["applications"]
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert set(application["args"]) == {"load", "engine", *OWN}
    assert application["args"]["engine"]["kv_memory"] == 2_000_000_000
    assert read_fleet(application["args"]) == replace(served(settings), hosts=("127.0.0.1",))
    keys = tmp_path / "keys"
    keys.write_text("a key\n")
    keys.chmod(0o600)
    with pytest.raises(InputError, match="keys of --api-key-file"):
        replace(settings, api_key_file=keys).run()
    with pytest.raises(InputError, match="cannot be written"):
        replace(settings, write_config=str(tmp_path / "none" / "fleet.json")).run()


def test_without_fastapi_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from peagle.cli import main; sys.exit(main(['cluster']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "a cluster needs fastapi, which is not installed; in the checkout of peagle: pip install '.[cluster]'"
    assert (ended.returncode, ended.stderr) == (2, f"peagle: error: {said}\n")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_one_line_says_what_to_install() -> None:
    with pytest.raises(
        InputError, match=r"a cluster needs ray, which is not installed; .*: pip install '\.\[cluster\]'"
    ):
        Cluster().run()
