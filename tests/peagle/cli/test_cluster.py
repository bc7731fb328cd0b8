"""`cluster up`: what is refused before anything is started, and what a fleet is told."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.cli.cluster import fleet_arguments, up_command
from peagle.cli.settings.cluster import ClusterUpSettings
from peagle.ops.errors import InputError
from tests.peagle.conftest import Directories


def test_replicas_are_told_absolute_paths_and_a_number_of_drafts(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directories.target.parent)
    found = fleet_arguments(ClusterUpSettings(target="target", drafter="drafter", prefill=1, decode=2, context=90))
    assert (found["target"], found["drafter"]) == (str(directories.target), str(directories.drafter))
    assert (found["prefill"], found["decode"], found["context"], found["name"]) == (1, 2, 90, "target")
    assert found["num_speculative_tokens"] == 3
    scaled = fleet_arguments(ClusterUpSettings(max_decode=3, busy=2, scale_up=4.0, scale_down=8.0))
    assert [scaled[name] for name in ("max_decode", "busy", "scale_up_s", "scale_down_s")] == [3, 2, 4, 8]
    assert found["hosts"] == ["127.0.0.1"]  # no keys: pages of other names are kept out
    assert fleet_arguments(ClusterUpSettings(host="0.0.0.0"))["hosts"] is None
    demo = fleet_arguments(ClusterUpSettings(num_speculative_tokens=0))
    assert (demo["target"], demo["drafter"], demo["num_speculative_tokens"]) == ("demo", None, 0)


def test_replicas_are_told_where_a_repository_lies_and_clients_its_name(cached_target: Path) -> None:
    found = fleet_arguments(ClusterUpSettings(target="openai/gpt-oss-20b", drafter="ngram"))
    assert (found["target"], found["drafter"], found["name"]) == (str(cached_target), "ngram", "gpt-oss-20b")


def test_what_cannot_be_served_is_refused_before_anything_starts(directories: Directories, tmp_path: Path) -> None:
    for settings, match in (
        (ClusterUpSettings(target=str(tmp_path / "none"), drafter="ngram"), "does not exist"),
        (ClusterUpSettings(target=str(directories.target), drafter="demo"), "needs its own drafter"),
        (ClusterUpSettings(context=1), "context is 1"),
        (ClusterUpSettings(num_speculative_tokens=-1), "K is -1; expected 0"),
        (ClusterUpSettings(kv_memory="none"), "--kv-memory is 'none'"),
        (ClusterUpSettings(prefix_cache="much"), "--prefix-cache is 'much'"),
    ):
        with pytest.raises(InputError, match=match):
            fleet_arguments(settings)


def test_a_config_for_serve_deploy_holds_the_options_and_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    settings = ClusterUpSettings(decode=3, port=8123, kv_memory="2GB", write_config=str(file))
    assert up_command(settings) == 0
    config = json.loads(file.read_text("utf-8"))
    (application,) = config["applications"]
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert application["args"] == {**fleet_arguments(settings), "keys": []}
    assert application["args"]["kv_memory_bytes"] == 2_000_000_000
    assert application["args"]["prefix_cache_bytes"] == "on"
    keys = tmp_path / "keys"
    keys.write_text("a key\n")
    keys.chmod(0o600)
    with pytest.raises(InputError, match="keys of --api-key-file"):
        up_command(replace(settings, api_key_file=keys))
    with pytest.raises(InputError, match="cannot be written"):
        up_command(replace(settings, write_config=str(tmp_path / "none" / "fleet.json")))


def test_without_fastapi_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from peagle.cli import main; sys.exit(main(['cluster', 'up']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "a cluster needs fastapi, which is not installed; pip install 'peagle[cluster]'"
    assert (ended.returncode, ended.stderr) == (2, f"peagle: error: {said}\n")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_one_line_says_what_to_install() -> None:
    with pytest.raises(
        InputError, match=r"a cluster needs ray, which is not installed; pip install 'peagle\[cluster\]'"
    ):
        up_command(ClusterUpSettings())
