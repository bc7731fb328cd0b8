"""Narrow a drafter's head to the frequent tokens (FR-Spec, arXiv 2502.14856).

The head is most of the weights that a real model's drafter reads per step, and most tokens of a large vocabulary are
rare. A token that the drafter cannot propose costs a rejected draft, never a wrong token.

A drafter's directory may hold `frequent_tokens.json`, a list of the target's token ids, the most frequent first
(`peagle train` writes it). Without one the lowest ids count as frequent, because byte-pair encoding numbers
tokens in the order of merges, and merges frequent pairs first. Stop tokens come before them.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.ops.linear import SplitMatrix, take_outputs

FREQUENT_TOKENS = "frequent_tokens.json"


@dataclasses.dataclass(frozen=True)
class DraftVocab:
    """The target's tokens that a drafter may propose, the most frequent first, and the source of that order."""

    token_ids: tuple[int, ...]
    source: str


def choose(choice: str, directory: Path, vocab_size: int, first: Sequence[int] = ()) -> DraftVocab:
    """Choose a draft vocabulary. choice: a number of tokens, or a file that lists their ids.

    directory: the drafter's. first: tokens to put first if the directory has no list. Raises InputError for more tokens
    than the target has, and for a file that does not list ids of the target.
    """
    if not choice.lstrip("-").isdigit():
        return DraftVocab(_listed(Path(choice), vocab_size), choice)
    count = int(choice)
    check_count(count, vocab_size)
    known = directory / FREQUENT_TOKENS
    if known.is_file():
        return DraftVocab(first_of(_listed(known, vocab_size), vocab_size, count), FREQUENT_TOKENS)
    return DraftVocab(first_of(first, vocab_size, count), "the order of merges, for want of counts")


def check_count(count: int, vocab_size: int) -> None:
    """Raise InputError for an impossible size of a draft vocabulary."""
    if not 1 <= count <= vocab_size:
        raise InputError(
            f"draft-vocab is {count}; expected 1 to {vocab_size}, the tokens of the target's vocabulary", "draft_vocab"
        )


def narrow(params: DrafterParams, config: DrafterConfig, vocab: DraftVocab) -> tuple[DrafterParams, DrafterConfig]:
    """Narrow a drafter's head to the tokens of a vocabulary. Raises InputError if it can propose none of them.

    Example: a drafter whose vocabulary is the tokens 4 7 9, narrowed to 9 3 4, keeps the columns of 4 and 9, and its
    draft_to_target is [4, 9].
    """
    token_ids = (
        np.arange(config.draft_vocab_size) if params.draft_to_target is None else np.asarray(params.draft_to_target)
    )
    columns = np.flatnonzero(np.isin(token_ids, vocab.token_ids))
    if not len(columns):
        raise InputError(
            f"none of the {len(vocab.token_ids)} tokens by {vocab.source} is one the drafter can propose", "draft_vocab"
        )
    assert not isinstance(params.lm_head, SplitMatrix)  # narrowed before it is split
    narrowed = dataclasses.replace(
        params,
        lm_head=take_outputs(params.lm_head, columns),
        draft_to_target=jnp.asarray(token_ids[columns], jnp.int32),
    )
    return narrowed, dataclasses.replace(config, draft_vocab_size=len(columns))


def _listed(path: Path, vocab_size: int) -> tuple[int, ...]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the draft vocabulary {path} cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise InputError(
            f"{path} is not a draft vocabulary: expected a JSON list of token ids, each in 0..{vocab_size - 1}"
        )
    return tuple(dict.fromkeys(ids))


def first_of(preferred: Iterable[int], vocab_size: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens: the preferred ones, then all others by id."""
    return tuple(dict.fromkeys([*preferred, *range(vocab_size)]))[:count]


def by_frequency(counts: np.ndarray) -> list[int]:
    """List the tokens with a count above 0, the most frequent first, then by id. counts [V]."""
    return [int(token) for token in np.argsort(-counts, kind="stable") if counts[token] > 0]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The share of a text that a narrowed drafter can propose."""

    frac: float  # of the tokens
    acceptance_limit: float  # acceptance length if it proposes all of them right
    num_drafts: int  # K of that limit

    def describe(self) -> str:
        """Example: 83.1% of the tokens, so at most 3.42 tokens a step at K = 7."""
        return f"{self.frac:.1%} of the tokens, so at most {self.acceptance_limit:.2f} a step at K = {self.num_drafts}"


def coverage(texts: Iterable[np.ndarray], token_ids: Sequence[int] | np.ndarray, num_drafts: int) -> Coverage:
    """Measure how much of a target's texts the tokens of a draft vocabulary cover.

    A step commits the tokens up to the next one that cannot be proposed, at most num_drafts, and one token of the
    target's own. Example: for a text c c u c, c covered and u not, K = 3 takes two steps: c c u, and c.
    """
    covered = tokens = steps = 0
    for text in texts:
        known = np.isin(text, token_ids)
        covered, tokens = covered + int(known.sum()), tokens + len(text)
        others = np.append(np.flatnonzero(~known), len(text))
        position = 0
        while position < len(text):
            position = min(position + num_drafts, int(others[np.searchsorted(others, position)])) + 1
            steps += 1
    return Coverage(covered / max(tokens, 1), tokens / max(steps, 1), num_drafts)
