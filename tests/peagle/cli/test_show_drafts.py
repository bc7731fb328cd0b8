"""Where accepted drafts are: each token's text has the place of its draft, and together they are the text."""

import itertools

import pytest

from peagle.answers.result import follow, submit
from peagle.pair import Pair
from peagle.text.prompts import Rendering, from_text

NEW, K = 40, 3


@pytest.mark.parametrize("stop", [(), ("34",)])
def test_parts_are_the_text_with_the_places_of_the_drafts(toy: Pair, stop: tuple[str, ...]) -> None:
    engine = toy.engine(toy.engine_config(K, context=128))
    request = toy.request(from_text("solo"), [], Rendering(), max_new_tokens=NEW, stop=stop)
    stream = submit(engine, [request], toy.tokenizer, by_token=True)
    pieces = [piece for _, piece in follow(engine, stream)]
    (assembler,) = stream.values()
    result = assembler.result()
    parts = [part for piece in pieces for part in piece.parts]
    assert "".join(text for text, _ in parts) == "".join(piece.text for piece in pieces) == result.text
    # the first token is prefill's; then each step's drafts, and the target's own token
    origins = [0, *itertools.chain.from_iterable([*range(1, step.num_accepted + 1), 0] for step in result.steps)]
    assert [origin for _, origin in parts][: len(result.output_ids) - 1] == origins[: len(result.output_ids) - 1]
    assert any(origins)
