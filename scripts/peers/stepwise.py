"""The measurements of an engine that Python drives pass by pass."""

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class StepwiseEngine(ABC):
    """Implements decode, verify and logits by three primitives. Needs numpy only."""

    @abstractmethod
    def begin(self, prompt_ids: list[int]) -> int:
        """Fill the cache with the prompt alone; return the greedy token after it."""

    @abstractmethod
    def extend(self, token_ids: list[int]) -> list[int]:
        """Append tokens to the cache; return the greedy token after each."""

    @abstractmethod
    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens from the cache."""

    @abstractmethod
    def last_logits(self) -> np.ndarray:
        """Return float32 logits [T, vocabulary] of the last `extend`."""

    def choose(self, width: int) -> None:  # noqa: B027
        """Prepare for passes of this width; for engines with several implementations."""

    def decode(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """See worker.Engine."""
        self.choose(len(prompt_ids))
        started = time.perf_counter()
        tokens = [self.begin(prompt_ids)]
        prefilled = time.perf_counter()
        self.choose(1)
        while len(tokens) < num_tokens:
            tokens += self.extend(tokens[-1:])
        ended = time.perf_counter()
        return {"prefill_s": prefilled - started, "decode_s": ended - prefilled, "token_ids": tokens}

    def verify(self, prompt_ids: list[int], passes: list[list[int]]) -> dict[str, Any]:
        """See worker.Engine."""
        self.choose(len(prompt_ids))
        self.begin(prompt_ids)
        self.choose(len(passes[0]))
        self._pass(passes[-1])
        started = time.perf_counter()
        for token_ids in passes:
            self._pass(token_ids)
        return {"pass_s": (time.perf_counter() - started) / len(passes)}

    def logits(self, prompt_ids: list[int], passes: list[list[int]], path: str) -> dict[str, Any]:
        """See worker.Engine."""
        self.choose(len(prompt_ids))
        self.begin(prompt_ids)
        rows = []
        for token_ids in passes:
            self.choose(len(token_ids))
            self.extend(token_ids)
            rows.append(self.last_logits())
        np.save(path, np.concatenate(rows))
        return {}

    def _pass(self, token_ids: list[int]) -> None:
        self.extend(token_ids)
        self.roll_back(len(token_ids))
