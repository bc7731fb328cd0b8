"""Settings by name, as the command line and files give them: typed values, or one line that names the field."""

import re

import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import EngineConfig, SamplingParams, configs_of
from peagle.pair import RequestOptions


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_speculative_tokens": -1}, "K is -1; expected 0 (plain decoding) to 128 drafted tokens"),
        ({"num_speculative_tokens": "5"}, "K is '5'; expected a number of drafted tokens, auto, or auto:N"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected 1 or more"),
        ({"slots": 0}, "slots is 0; expected 1"),
        ({"slots": None}, "slots is None; expected a valid integer"),
        ({"slots": 2.5}, "slots is 2.5; expected a valid integer"),
        ({"logprobs": -1}, "logprobs is -1; expected 0..20"),
        ({"logprobs": 21}, "logprobs is 21; expected 0..20"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0 tokens; expected 1 or more"),
        ({"kv_memory": 0}, "kv_memory is 0 bytes; expected more than 0"),
        ({"prefix_cache": -1}, "prefix_cache is -1 bytes; expected 0 or more"),
        ({"prefix_cache": "bogus"}, "prefix_cache is 'bogus'; expected a valid integer or one of 'on', 'off'"),
        ({"prefix_cache": True}, "prefix_cache is True; expected a valid integer or one of"),
        ({"synthetic_acceptance": 0.5}, "synthetic_acceptance is 0.5; expected a list of numbers"),
        ({"synthetic_acceptance": [0.5, "a"]}, "synthetic_acceptance is [0.5, 'a']; expected a list of numbers"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a valid number"),
        ({"logit_bias": [[5, "much"]]}, "logit_bias is [(5, 'much')]; expected a list"),
        ({"logit_bias": [[5]]}, "logit_bias is [(5,)]; expected a list"),
        ({"stop": [1]}, "stop is [1]; expected a list of texts"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected true or false"),
        ({"grammar": "[0-9]"}, "grammar is '[0-9]'; expected Grammar"),
    ],
)
def test_a_value_that_cannot_be_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        configs_of(wrong, RequestOptions, EngineConfig, SamplingParams)


def test_a_list_and_a_number_of_numpy_are_values_too() -> None:
    options = {"logit_bias": [[5, 1.0]], "temperature": np.float32(0.5), "synthetic_acceptance": [0.5, 0.25]}
    sampling, engine = configs_of({**options, "slots": np.int64(2)}, SamplingParams, EngineConfig)
    assert sampling == SamplingParams(0.5, logit_bias=((5, 1.0),))
    assert engine == EngineConfig(slots=2, synthetic_acceptance=(0.5, 0.25))
