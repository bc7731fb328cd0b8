"""The demo's corpus, tokenizer, rows: held-out text stays out, every text survives, rows say what they hold."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafter.train.shards import Document
from scripts.demo import corpus, rows, tokenizer
from scripts.demo.corpus import SourceFile
from scripts.demo.rows import GOOD, LOOP, LOOPING, OTHER, PADDING, PROMPT, pack
from scripts.demo.target import TOKENIZER_FILES
from scripts.demo.tokenizer import RETURN, SPECIAL_TOKENS

FUNCTION = '''
def {name}(first, second=None):
    """Add {name} to what is there.

    A second paragraph that no prompt holds.
    """
    total = first + {number}
    return total
'''


def module(name: str, names: list[str], origin: str = "stdlib") -> SourceFile:
    """A file with a function of each name, whose bodies differ by the name."""
    functions = [FUNCTION.format(name=function, number=sum(map(ord, function))) for function in names]
    return SourceFile(origin, name, f"{origin}/{name}.py", "".join(functions))


# four modules, two of them held out; a package holds copies of every module's first function
SOURCES = [module(name, [f"{name}_{i}" for i in range(5)]) for name in ("ant", "bee", "cow", "dog")]
SOURCES.append(module("package", ["ant_0", "bee_0", "cow_0", "dog_0", "own"], origin="package"))


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A tokenizer trained on a little Python, saved and loaded again without the network."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.wrap(tokenizer.train_bpe(iter([FUNCTION, Path(corpus.__file__).read_text()]), 600)).save_pretrained(path)
    assert {file.name for file in path.iterdir()} >= {*TOKENIZER_FILES}
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def test_held_out_text_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of a held-out module is in the training files, no body of one among the examples, in any order."""
    monkeypatch.setattr(corpus, "NUM_HELD_OUT", 2)
    modules, raw, chat = corpus.split(SOURCES)
    keys = {
        name: {corpus.function_key(node) for source in sources for node in corpus.functions_of(source.text)}
        for name, sources in raw.items()
    }
    assert len(modules) == 2
    assert not keys["raw_train"] & keys["raw_heldout"]
    assert not {source.module for source in raw["raw_train"]} & set(modules)
    assert "def own(" in raw["raw_train"][-1].text
    bodies = {name: {function.body_key for function in functions} for name, functions in chat.items()}
    assert bodies["chat_heldout"]
    assert not bodies["chat_heldout"] & bodies["chat_train"]
    assert {function.module for function in chat["heldout_prompts"]} == set(modules)
    assert corpus.choose_held_out(SOURCES[::-1]) == modules


@pytest.mark.parametrize("body", ["pass", "raise NotImplementedError", "...", "return 1", "\n".join(["x = 1"] * 40)])
def test_trivial_and_long_bodies_are_left_out(body: str) -> None:
    text = "def f(x):\n" + textwrap.indent(body, "    ") + "\n"
    assert not list(corpus.chat_functions(SourceFile("stdlib", "m", "m.py", text)))


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(saved_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert saved_tokenizer.decode(saved_tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_have_their_roles_and_fixed_ids(saved_tokenizer: PreTrainedTokenizerFast) -> None:
    assert saved_tokenizer.convert_tokens_to_ids(list(tokenizer.SPECIAL_TOKENS)) == list(range(8))
    roles = (saved_tokenizer.bos_token_id, saved_tokenizer.pad_token_id, saved_tokenizer.eos_token_id)
    assert (*roles, saved_tokenizer.mask_token_id) == (0, 1, 2, 7)
    assert saved_tokenizer("import os")["input_ids"][0] == 0, "raw text starts as in training"


def test_prompt_and_answer_are_the_whole_conversation(saved_tokenizer: PreTrainedTokenizerFast) -> None:
    ((ids, roles),) = rows.chat_documents(saved_tokenizer, [{"prompt": "def f():", "reference": "return 1"}], 512)
    messages = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": "return 1"}]
    assert saved_tokenizer.decode(ids).endswith(saved_tokenizer.apply_chat_template(messages, tokenize=False))
    answer = [token for token, role in zip(ids, roles, strict=True) if role == rows.TEXT]
    assert saved_tokenizer.decode(answer) == "return 1<|return|>"


def test_packed_rows_hold_every_document_once() -> None:
    documents = [([n] * size, [rows.TEXT] * size) for n, size in enumerate((400, 300, 100, 200, 512, 7), start=1)]
    arrays = pack(documents, 512)
    assert sorted(np.unique(arrays["token_ids"][arrays["roles"] > 0], return_counts=True)[1]) == [
        *(7, 100, 200, 300, 400, 512),
    ]
    for ids, segments in zip(arrays["token_ids"], arrays["segment_ids"], strict=True):
        for segment in set(segments[segments > 0]):
            assert len(set(ids[segments == segment])) == 1
    assert not arrays["token_ids"][arrays["segment_ids"] == 0].any()


END = SPECIAL_TOKENS.index(RETURN)
ROUND = [20, 21, 22, 23, 24]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([*range(20, 60), END], GOOD),
        ([*range(20, 60)], OTHER),  # cut off, but not in a loop
        ([*ROUND * 8, END], OTHER),  # repeats, but knows an end: so do some functions
        (ROUND * 8, LOOPING),
        ([], OTHER),
    ],
)
def test_an_answer_is_good_looping_or_neither(answer: list[int], kind: str) -> None:
    assert rows.kind_of(answer) == kind


def test_practice_repeats_what_loops() -> None:
    token_ids = np.array([1, 9, 9, 40, 41, *ROUND * 4], np.int32)
    trained = np.arange(len(token_ids)) >= 3
    kind, (ids, roles) = rows.lesson(Document(token_ids, trained))
    assert kind == LOOPING
    assert ids == token_ids.tolist()
    # the first round is new, and the three tokens after it: only the fourth completes a run that was there
    assert roles == [PROMPT] * 3 + [PADDING] * (2 + 5 + 3) + [LOOP] * 12
