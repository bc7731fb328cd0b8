"""What a fleet's config refuses, and that configs of both forms are read. Without Ray."""

import math

import pytest

from peagle.base.errors import InputError
from peagle.cluster.complete import completed
from peagle.cluster.config import FleetConfig, read_fleet


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"keys": "secret"}, "keys are no list"),
        ({"keys": 5}, "keys are no list"),
        ({"hosts": "localhost"}, "hosts are no list"),
        ({"decode": 0}, "decode is 0; expected 1 or more"),
        ({"decode": True}, "decode is True; expected a valid integer"),
        ({"prefill": -1}, "prefill is -1; expected 0 or more"),
        ({"decode": 3, "max_decode": 2}, r"max_decode is 2; expected 3 or more \(decode is 3\), or 0"),
        ({"max_prefill": 2}, "prefill is 0; expected 1 or more, to scale up to 2"),
        ({"num_cpus": math.inf}, "num_cpus is inf; expected a number"),
        ({"drain": "long"}, "drain is 'long'; expected a valid number"),
        ({"speed": 1}, "speed is not an option; expected one of load, engine, "),
        ({"slots": 8}, r"slots is not an option here; expected it in engine, as in engine: {slots: ...}"),
        ({"drafter": "DIR", "decode": 2}, r"drafter is not an option here; expected it in load, as in load: {drafter:"),
        ({"load": {"targt": "DIR"}}, "load: targt is not an option; did you mean target"),
        ({"load": {"retain_full_kv": "yes"}}, "retain_full_kv is 'yes'; expected true or false"),
        ({"load": {"process": "0/2@HOST:7000"}}, "process is given, but each replica of a fleet is one process"),
        ({"load": "DIR"}, "load is 'DIR'; expected its fields"),
        ({"engine": {"slots": 0}}, "slots is 0; expected 1 or more"),
        ({"prefill_engine": {"slots": 2}}, "prefill is 0; expected 1 or more, since prefill_engine is given"),
        (
            {"prefill": 1, "prefill_engine": {"slots": 0}},
            r"prefill_engine is {'slots': 0}; slots is 0; expected 1 or more",
        ),
        ({"prefill": 1, "prefill_engine": {"context": 9}}, "prefill_engine is {'context': 9}; expected NAME=VALUE"),
        ({"prefill": 1, "prefill_engine": {"kv_memory": "x"}}, "kv_memory is 'x'; expected a size"),
        ({"prefill": 1, "prefill_engine": "slots=x"}, "slots is 'x'; expected a valid integer"),
        ({"prefill": 1, "prefill_engine": 5}, "prefill_engine is 5; expected Mapping"),
        ({"engine": {"prefix_cache": "bogus"}}, "prefix_cache is 'bogus'; expected a size, as 512MB or 2GB, or on,"),
        (
            {"engine": {"num_speculative_tokens": "much"}},
            "K is 'much'; expected a number of drafted tokens, auto, or auto:N",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(fields: dict, match: str) -> None:
    with pytest.raises(InputError, match=match) as raised:
        read_fleet(fields)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_config_shows_no_key() -> None:
    assert "secret" not in repr(FleetConfig(keys=("secret",)))
    with pytest.raises(InputError, match="keys are no list"):
        FleetConfig(keys="secret")


def test_room_is_reckoned_with_the_replicas_that_may_be() -> None:
    config = FleetConfig(prefill=1, decode=2, max_queue=5, max_decode=6)
    assert (config.most_replicas, config.most_open) == (1 + 6, 6 * 4 + 5)


def test_a_text_is_read_as_the_value_of_the_option() -> None:
    engine = read_fleet({"engine": {"kv_memory": "4GB", "prefix_cache": "512MB", "num_speculative_tokens": "5"}}).engine
    assert (engine.kv_memory, engine.prefix_cache, engine.num_speculative_tokens) == (4_000_000_000, 512_000_000, 5)


@pytest.mark.parametrize("changes", ["slots=1,kv_memory=4GB", {"slots": 1, "kv_memory": 4_000_000_000}])
def test_replicas_that_prefill_may_have_an_engine_of_their_own(changes: object) -> None:
    config = completed(read_fleet({"prefill": 1, "prefill_engine": changes, "engine": {"slots": 8, "context": 900}}))
    prefill, decode = config.engine_of(prefill_only=True), config.engine_of(prefill_only=False)
    assert (prefill.slots, prefill.kv_memory, prefill.context) == (1, 4_000_000_000, 900)
    assert (decode.slots, decode.kv_memory, decode.context) == (8, None, 900)


def test_with_sections_what_is_missing_is_decided() -> None:
    config = completed(read_fleet({"load": {"aux_layer_ids": [1, 2, 3]}, "engine": {"context": 900}, "decode": 2}))
    assert (config.load.target, config.load.drafter, config.load.aux_layer_ids) == ("demo", "demo", (1, 2, 3))
    assert (config.engine.slots, config.engine.context, config.engine.prefix_cache) == (4, 900, "on")
    assert config.engine.num_speculative_tokens == "auto"
    assert completed(config) == config
    bounded = completed(read_fleet({"engine": {"num_speculative_tokens": "auto:3"}}))
    assert bounded.engine.num_speculative_tokens == "auto:3"  # of which each replica makes at most 3 drafts a step
    plain = completed(read_fleet({"engine": {"num_speculative_tokens": 0, "prefix_cache": None}}))
    assert (plain.load.drafter, plain.engine.prefix_cache) == (None, "on")
