"""What is asked for, frozen and checked at construction."""

import dataclasses
import itertools

from peagle.ops.errors import InputError

GREEDY_BELOW = 1e-5  # the temperature; above it, logits that differ in float32's last place at 10 differ by 0.1
HOTTEST = 1e30  # the temperature: float32 holds it and its reciprocal, by which XLA multiplies


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How logits become a token. A temperature below GREEDY_BELOW is greedy; top_k 0 and top_p 1 are off. The seed is
    the request's.

    Order: temperature, then top-k, then top-p, on the target's side, before anything is compared with a draft.
    With draft_sampling the drafts are drawn from the drafter's distribution (same temperature, no truncation); without,
    they are its most likely tokens, a one-hot q.

    synthetic_acceptance replaces the judgement of drafts by a draw, to time what models of random weights cost: draft i
    is kept with this unconditional rate, whatever the target says. What comes out then means nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_sampling: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise InputError(
                f"temperature is {self.temperature}; expected a number between 0 (greedy) and {HOTTEST:g} (all alike)"
            )
        if self.top_k < 0:
            raise InputError(f"top-k is {self.top_k}; expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p is {self.top_p}; expected a number above 0 and at most 1 (off)")
        if self.draft_sampling and self.greedy:
            raise InputError(
                f"draft sampling needs a temperature of {GREEDY_BELOW:g} or more, below which decoding is greedy; give "
                "--temperature or leave it out"
            )
        rates = (1.0, *(self.synthetic_acceptance or ()))
        if any(not 0 <= after <= before for before, after in itertools.pairwise(rates)):
            raise InputError(
                f"synthetic acceptance is {list(rates[1:])}; expected rates between 0 and 1 that never rise: each is "
                "of all steps, not of those that accepted the draft before"
            )
        if self.synthetic_acceptance is not None and self.draft_sampling:
            raise InputError("synthetic acceptance takes no account of the drafts; leave out --draft-sampling")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


Ladder = tuple[int, ...]  # the numbers of drafts a step may choose from, ascending
MAX_NUM_DRAFTS = 128  # a pass over more rows is a prefill: no acceptance pays for it
SHARED_ROWS = 8  # caches have room for a multiple of so many rows of a pass
RUNGS = (0, 1, 2, 3, 5)  # of which each is a program of its own; the last rung is K itself


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """The shape of a run: K drafted tokens a step (0: plain decoding), rows decoded together, room for positions.

    adaptive: each step drafts and verifies as many tokens as pay, K at most (peagle.policy).
    `capacity` is how many positions a row's caches hold: prompt and output; what a step writes beyond them is added by
    the engine.
    """

    num_speculative_tokens: int
    batch_size: int = 1
    capacity: int = 512
    sampling: SamplingConfig = SamplingConfig()
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise InputError(
                f"K is {self.num_speculative_tokens}; expected 1 or more drafted tokens (0: plain decoding)"
            )
        if self.num_speculative_tokens > MAX_NUM_DRAFTS:
            raise InputError(f"K is {self.num_speculative_tokens}; expected at most {MAX_NUM_DRAFTS} drafted tokens")
        if self.adaptive and self.num_speculative_tokens < 1:
            raise InputError("K = 0 leaves nothing to choose from; expected 1 or more, the most tokens to draft a step")
        if self.batch_size < 1:
            raise InputError(f"batch is {self.batch_size}; expected 1 or more")
        rates = self.sampling.synthetic_acceptance
        if rates is not None and len(rates) < self.num_speculative_tokens:
            raise InputError(
                f"synthetic acceptance has {len(rates)} rates for K = {self.num_speculative_tokens}; expected one "
                "for each draft"
            )
        if self.capacity < 2:
            raise InputError(
                f"context is {self.capacity} positions; expected room for a prompt token and an output token"
            )

    @property
    def plain(self) -> "SpeculationConfig":
        """The same run decoded plainly: no drafts, so nothing to sample them from, and nothing to choose."""
        sampling = dataclasses.replace(self.sampling, draft_sampling=False, synthetic_acceptance=None)
        return dataclasses.replace(self, num_speculative_tokens=0, adaptive=False, sampling=sampling)

    @property
    def ladder(self) -> Ladder:
        """The numbers of drafts of a step."""
        k = self.num_speculative_tokens
        return (*(rung for rung in RUNGS if rung < k), k) if self.adaptive else (k,)

    @property
    def draft_places(self) -> int:
        """The drafts that caches have room for: K or a few more, the same for neighbouring K, so that these share the
        program of prefill, which takes the longest of all to compile. Plain decoding has its own: none."""
        k = self.num_speculative_tokens
        return -(-(k + 1) // SHARED_ROWS) * SHARED_ROWS - 1 if k else 0
