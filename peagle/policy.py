"""How many tokens to draft, and how many of them to verify (`-k auto`): decided step by step, on the device; or from
dispatch to dispatch by the host, where a dispatch holds many steps.

A step that drafts n tokens and verifies w <= n of them emits 1 + (accepted) tokens. It is worth its time if that, over
its cost, beats plain decoding's one token over its own. The costs are measured beforehand on this machine with this
pair (peagle.costs). Where by these not even drafts that are all right would pay, nothing is left to choose, and plain
decoding's own program runs (`can_pay`); a target so small that its weights stay in the cache is such a case. Else, what
a step will bring is estimated from what is known before its drafts are checked:

    survival[i]    a running estimate of the share of steps whose drafts 0..i are all right. It chooses n, before
                   drafting, as the choice of the highest expected rate; where none comes near plain decoding's the
                   drafter rests, for a pause that doubles each time a step that probed did not change that. One of
                   which nothing was seen yet is asked in any case.
    credit         what drafting has gained over plain decoding so far, in plain steps, and a small allowance for each
                   of those. Where it is used up the drafter rests until the allowance has made up for it, whatever
                   the estimates say: so what finding out costs is bounded, on every text. Until then estimates are not
                   taken at their word: going back and forth costs more than a few steps that do not pay.
    confidence     the drafter's own probability of each draft, corrected by a running calibration (what share of the
                   drafts of such a confidence were right). It chooses w, behind drafting: one more row is verified
                   as long as what it may bring exceeds its time at the present rate.

Where steps are so quick that a dispatch holds many, all of a dispatch share n, and w is n. Then the host chooses
(`Course`), in NumPy: the survival is learned from all steps of a dispatch together (`learn_together`), with few steps a
dispatch, each waited for, until a drafter of which nothing is known has paid. What both ways share takes arrays of the
host or of the device, and calls the functions of theirs (`_functions`).

Nothing of this can change what is emitted: w is a function of the drafter's distributions, of earlier steps and of
costs, never of a token that was drawn in this step; given w, peagle.accept is exact for every w, and 0 is plain
decoding. The rows of a batch share one program, so they share n and w.
"""

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.config import Ladder

# upper edges of the confidences that are calibrated together; the last bin holds the rest
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
BIN_CENTRES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.935, 0.985)
PRIOR_TRIALS = 8.0  # how many observed drafts the confidence itself is worth
FORGET = 0.98  # what a step leaves of the counts before it
FIRST_SURVIVAL = 0.65  # of each draft, before anything was seen
LEARN, LEARN_FROM_PROBE = 0.2, 0.35  # weight of a step in the running survival; of one after a rest
REMEMBER = 0.25  # weight of a request in what the next one begins with
NEIGHBOUR = 0.2  # how much a draft that was not tried is thought to be like the one before it
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # plain steps between probes
FEW_STEPS = 6  # of a dispatch that drafts, until one has paid: enough to tell a drafter that never hits
FOREVER = 1 << 30
MARGIN = 1.03  # how much better than plain decoding drafting must be: costs are measured on a machine that does more
PROMISE = 0.9  # of plain decoding's rate is enough while the credit lasts: estimates from a few steps are off by more
FIRST_CREDIT, MOST_CREDIT = 6.0, 100.0  # plain steps whose time may be lost; a dispatch of many steps loses 50 at once
ALLOWANCE = 0.02  # of the time of plain steps that finding out may take


# an array of the device or of the host; type checkers do not know that both have the same functions
if TYPE_CHECKING:
    Either = Any
else:
    Either = jax.Array | np.ndarray | np.generic


@flax.struct.dataclass
class Costs:
    """Milliseconds of a step, by rung (index into the ladder): those of its drafting and of all the rest. The host's
    are NumPy's: sending them to the device on their own takes longer than a step of a small model."""

    draft_ms: Either  # [C] float32; place 0 is 0: nothing is drafted
    verify_ms: Either  # [C] float32; place 0 is a plain step
    resume_ms: Either  # [] float32: what the first step after a rest costs more: the drafter catches up

    @classmethod
    def even(cls, ladder: Ladder) -> "Costs":
        """The costs of drafts that are free and of rows that cost nothing more."""
        ones = np.ones((len(ladder),), np.float32)
        return cls(0 * ones, ones, np.zeros((), np.float32))


def can_pay(ladder: Ladder, costs: Costs) -> bool:
    """Whether some number of drafts would beat plain decoding (by MARGIN), were every draft right: to be asked outside
    of compiled code."""
    best = (1 + np.asarray(ladder)) / (np.asarray(costs.draft_ms) + np.asarray(costs.verify_ms))
    return bool(best[1:].max() >= MARGIN * best[0])


@flax.struct.dataclass
class Outlook:
    """What is known when a step begins, for all rows of a batch together: arrays of the device where each step chooses,
    NumPy's where the host does, which has no use for hits, trials and rate."""

    survival: Either  # [K] float32
    hits: Either  # [bins] float32
    trials: Either  # [bins] float32
    rate: Either  # [] float32: tokens per ms and row: the better of speculation's and plain decoding's
    choice: Either  # [] int32: the rung of the best number of drafts, at least 1
    resting: Either  # [] int32: plain steps that are still to come
    pause: Either  # [] int32: how long the next rest will be
    credit: Either  # [] float32: in plain steps; negative: overdrawn
    held: Either  # [] int32: -1; or the rung that is verified in any case, and nothing above changes (peagle.costs)
    costs: Costs


def begin(ladder: Ladder, costs: Costs, functions: ModuleType = jnp) -> Outlook:
    """The outlook before anything was seen: the drafter is asked, whatever is usual. The ladder ascends from 0.
    `functions`: numpy for an outlook of the host's."""
    xp = functions
    survival = xp.cumprod(xp.full((ladder[-1],), FIRST_SURVIVAL, xp.float32))
    nothing = xp.zeros((len(BIN_CENTRES),), xp.float32)
    zero = xp.zeros((), xp.int32)
    rate, credit = xp.zeros((), xp.float32), xp.full((), FIRST_CREDIT, xp.float32)
    blank = Outlook(survival, nothing, nothing, rate, zero, zero, zero + FIRST_PAUSE, credit, zero - 1, costs)
    return _look(blank, ladder, anyway=True)


def again(ladder: Ladder, first: Outlook, last: Outlook) -> Outlook:
    """The outlook a request begins with, from that of the request before it, at its beginning and at its end: what is
    usual moves a little towards what was seen, the calibration goes on, and so does a rest, if it still does not pay:
    many short answers cost no more probes than a long one. A drafter of which nothing was seen is asked."""
    xp = _functions(first)
    survival = first.survival + REMEMBER * (last.survival - first.survival)
    usual = dataclasses.replace(last, survival=survival, pause=xp.full_like(last.pause, FIRST_PAUSE))
    looked = _look(usual, ladder, anyway=xp.all(first.survival == last.survival))
    rests = (looked.resting > 0) & (last.pause > FIRST_PAUSE)
    return dataclasses.replace(
        looked,
        resting=xp.where(rests, last.resting, looked.resting),
        pause=xp.where(rests, last.pause, looked.pause),
        credit=xp.where(rests, last.credit, looked.credit),
    )


def hold(outlook: Outlook, drafted: int, verified: int, pause: int = 0) -> Outlook:
    """The outlook of steps that all draft and verify the numbers on these rungs, each with `pause` plain steps behind
    it; 0 drafted: plain steps."""
    xp = _functions(outlook)
    return dataclasses.replace(
        outlook,
        choice=xp.full((), max(drafted, 1), xp.int32),
        resting=xp.full((), 0 if drafted else FOREVER, xp.int32),
        pause=xp.full((), pause, xp.int32),
        held=xp.full((), verified, xp.int32),
    )


def drafts(outlook: Outlook | None) -> Int[Array, ""]:
    """The rung of how many tokens to draft, when the drafter does not rest."""
    return jnp.zeros((), jnp.int32) if outlook is None else outlook.choice


def width(
    outlook: Outlook | None,
    ladder: Ladder,
    drafted: int,
    confidence: Float[Array, "B K"],
    active: Bool[Array, " B"],
) -> Int[Array, ""]:
    """The rung of how many of ladder[drafted] drafts to verify: at most `drafted`, perhaps 0 unless it is a probe.

    It maximises expected tokens - rate * time, which is what maximises tokens over time in the long run.
    """
    if outlook is None:
        return jnp.full((), drafted, jnp.int32)
    gained = _up_to(ladder, _mean(_chain(chances(outlook, confidence)), active))
    value = gained - outlook.rate * outlook.costs.verify_ms
    allowed = (np.arange(len(ladder)) > 0) | ~_probes(outlook)
    best = _best(jnp.where(allowed, value, -jnp.inf), drafted + 1)[0]
    return jnp.where(outlook.held < 0, best, outlook.held)


def usual_confidence(outlook: Outlook | None, token_ids: Int[Array, "B n"]) -> Float[Array, "B n"]:
    """What stands for the confidence of a drafter that has none: how often such drafts were right of late."""
    if outlook is None:
        return jnp.zeros(token_ids.shape, jnp.float32)
    return jnp.broadcast_to(_conditional(outlook)[None, : token_ids.shape[1]], token_ids.shape)


def chances(outlook: Outlook, confidence: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """The chance that a draft of this confidence is right, those before it being right.

    Its bin says how far off such confidences were; inside a bin they still tell drafts apart.
    """
    centres = jnp.asarray(BIN_CENTRES, jnp.float32)
    shift = (PRIOR_TRIALS * centres + outlook.hits) / (PRIOR_TRIALS + outlook.trials) - centres
    return jnp.clip(confidence + jnp.sum(jnp.where(_in_bin(confidence), shift[None, None, :], 0.0), axis=-1), 0.0, 1.0)


def resting(outlook: Outlook | None) -> Bool[Array, ""]:
    """Whether the next step is a plain one."""
    assert outlook is not None
    return jnp.asarray(outlook.resting > 0)


def rested(outlook: Outlook) -> Outlook:
    """The outlook after a plain step."""
    return dataclasses.replace(outlook, resting=outlook.resting - 1)


def learn(
    outlook: Outlook,
    ladder: Ladder,
    drafted: Int[Array, ""],
    verified: Int[Array, ""],
    confidence: Float[Array, "B K"],
    num_accepted: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> Outlook:
    """The outlook after a step that drafted ladder[drafted] tokens and verified ladder[verified] of them."""
    index = jnp.arange(ladder[-1], dtype=jnp.int32)[None, :]
    sizes = jnp.asarray(ladder, jnp.int32)
    accepted = num_accepted[:, None]
    was_right = index < accepted
    tried = index < sizes[verified]

    seen = tried & (index <= accepted) & active[:, None]  # with all drafts before it right
    counted = _in_bin(confidence) & seen[:, :, None]
    trials = FORGET * outlook.trials + jnp.sum(counted, axis=(0, 1), dtype=jnp.float32)
    hits = FORGET * outlook.hits + jnp.sum(counted & was_right[:, :, None], axis=(0, 1), dtype=jnp.float32)

    # what was drafted and not tried is as likely as its confidence
    untried = jnp.where(index < sizes[drafted], chances(outlook, confidence), _guessed(outlook)[None, :])
    survived = _mean(_chain(jnp.where(tried, was_right.astype(jnp.float32), untried)), active)
    emitted = 1 + _mean(accepted.astype(jnp.float32), active)[0]
    took = outlook.costs.draft_ms[drafted] + outlook.costs.verify_ms[verified]
    return _taught(dataclasses.replace(outlook, hits=hits, trials=trials), ladder, survived, emitted, took)


def learn_together(outlook: Outlook, ladder: Ladder, rung: int, num_accepted: np.ndarray) -> Outlook:
    """The host's outlook after steps that each drafted and verified ladder[rung] tokens; num_accepted [steps, B] is -1
    in rows that were done before, and a step of which all were did not run."""
    active = num_accepted >= 0
    num_steps = np.sum(np.any(active, axis=1), dtype=np.float32)
    if num_steps == 0:
        return outlook
    index = np.arange(ladder[-1])
    drafted = index < ladder[rung]
    right = _mean((index[None, :] < num_accepted.reshape(-1, 1)).astype(np.float32), active.reshape(-1))
    beyond = _chain(np.where(drafted, 1.0, _guessed(outlook)).astype(np.float32)[None, :])[0]
    survived = np.where(drafted, right, right[ladder[rung] - 1]) * beyond
    took = outlook.costs.draft_ms[rung] + outlook.costs.verify_ms[rung]
    return _taught(outlook, ladder, survived, 1 + np.sum(right), took, num_steps)


def _taught(
    outlook: Outlook,
    ladder: Ladder,
    survived: Float[Either, " K"],
    emitted: Float[Either, ""],
    took: Float[Either, ""],
    num_steps: Float[Either, ""] | float = 1.0,
) -> Outlook:
    """The outlook after steps whose first i drafts were right in survived[i] of the cases, which emitted so many tokens
    and took so many ms each."""
    xp = _functions(outlook)
    learn, from_probe = xp.float32(LEARN), xp.float32(LEARN_FROM_PROBE)
    weight = 1 - (1 - xp.where(_probes(outlook), from_probe, learn)) ** num_steps
    survival = outlook.survival + weight * (survived - outlook.survival)
    plain_ms = outlook.costs.verify_ms[0]
    gave = emitted * plain_ms / MARGIN
    gained = num_steps * (gave - took) - xp.where(_probes(outlook), outlook.costs.resume_ms, 0.0)
    credit = xp.minimum(outlook.credit + gained / plain_ms, MOST_CREDIT)
    # hits come in runs: where drafting paid, the drafter does not rest, whatever is usual
    return _look(dataclasses.replace(outlook, survival=survival, credit=credit), ladder, anyway=gave > took)


class Course:
    """Which rung a dispatch runs, where all its steps share one, by the newest the host knows: what it learned of the
    dispatches before the one in flight. `new`: nothing was seen of this drafter yet, so that few steps at a time are to
    tell, and are waited for, until some have paid."""

    def __init__(self, ladder: Ladder, outlook: Outlook, new: bool = False) -> None:
        self._ladder, self._new = ladder, new
        self._go_by(outlook)

    @property
    def outlook(self) -> Outlook:
        """What is known by now; a rest that has begun is as long as it still lasts."""
        return dataclasses.replace(self._outlook, resting=np.asarray(self._resting, np.int32))

    def learn(self, rung: int, num_accepted: np.ndarray) -> None:
        """A dispatch on this rung, which drafts, has ended: see `learn_together`."""
        self._go_by(learn_together(self._outlook, self._ladder, rung, num_accepted))
        self._new = self._new and self._probes

    def _go_by(self, outlook: Outlook) -> None:
        self._outlook, self._asked = outlook, False
        self._resting, self._rung = int(outlook.resting), int(outlook.choice)
        self._probes = bool(_probes(outlook))

    @property
    def waits(self) -> bool:
        """Whether the next dispatch is chosen only when the last has ended: plain steps in the meantime, and drafting
        again behind them, would take longer than the host does."""
        return self._asked and self._new

    def choose(self, most_steps: int) -> tuple[int, int]:
        """(the rung of the next dispatch, how many steps it has). One that is to find out is waited for before there
        is another that drafts."""
        if self._resting > 0 or self._asked:
            self._resting = max(self._resting - most_steps, 0)
            return 0, most_steps
        num_steps = min(FEW_STEPS, most_steps) if self._new else most_steps
        self._asked = self._new or self._probes
        return self._rung, num_steps


class Turns:
    """A course on which dispatches of these rungs follow each other, whatever is learned."""

    waits = False

    def __init__(self, rungs: Iterator[int]) -> None:
        self._rungs = rungs

    def learn(self, rung: int, num_accepted: np.ndarray) -> None:
        """A dispatch has ended."""

    def choose(self, most_steps: int) -> tuple[int, int]:
        """(the rung of the next dispatch, how many steps it has)."""
        return next(self._rungs), most_steps


def _look(outlook: Outlook, ladder: Ladder, anyway: Bool[Either, ""] | bool) -> Outlook:
    """The same with the decisions that follow from its estimates; `anyway`: but for a rest."""
    xp = _functions(outlook)
    rates = (1 + _up_to(ladder, outlook.survival)) / (outlook.costs.draft_ms + outlook.costs.verify_ms)
    choice, rate = _best(rates[1:], len(ladder) - 1)
    pays = anyway | ((rate >= PROMISE * rates[0]) & (outlook.credit >= 0))
    overdrawn = xp.ceil(xp.maximum(-outlook.credit, 0.0) / ALLOWANCE).astype(xp.int32)
    free = outlook.held < 0
    resting = xp.where(free, xp.where(pays, 0, xp.maximum(outlook.pause, overdrawn)), outlook.pause)
    return dataclasses.replace(
        outlook,
        rate=xp.maximum(rate, rates[0]),
        choice=xp.where(free, choice + 1, outlook.choice),
        resting=resting,
        credit=outlook.credit + ALLOWANCE * resting.astype(xp.float32),  # what the rest will have brought by its end
        pause=xp.where(free, xp.where(pays, FIRST_PAUSE, xp.minimum(2 * outlook.pause, LONGEST_PAUSE)), outlook.pause),
    )


def _probes(outlook: Outlook) -> Bool[Either, ""]:
    """Whether a step that drafts does so to find out, after a rest. What it does not verify it does not find out."""
    return outlook.pause > FIRST_PAUSE


def _guessed(outlook: Outlook) -> Float[Either, " K"]:
    """The chances of drafts that were not made, those before them being right: much as they were before."""
    conditional = _conditional(outlook)
    neighbour = _functions(outlook).concatenate([conditional[:1], conditional[:-1]])
    return conditional + NEIGHBOUR * (neighbour - conditional)


def _conditional(outlook: Outlook) -> Float[Either, " K"]:
    """The estimated share of right drafts among those whose predecessors are right."""
    xp = _functions(outlook)
    before = xp.concatenate([xp.ones((1,), xp.float32), outlook.survival[:-1]])
    return outlook.survival / xp.maximum(before, 1e-6)


def _functions(of: Any) -> ModuleType:
    """jax.numpy for arrays of the device, or an outlook of such; numpy for the host's."""
    values = of.survival if isinstance(of, Outlook) else of
    functions: ModuleType = values.__array_namespace__()
    return functions


# Running products and sums are written as reductions over a few dozen numbers: XLA's own running operations, and its
# argmax, cost more than a layer of a small target.


def _chain(chance: Float[Either, "B K"]) -> Float[Either, "B K"]:
    """The chance that a draft and all before it are right."""
    xp, before = _functions(chance), np.tri(chance.shape[1], dtype=bool)[None]
    return xp.prod(xp.where(before, chance[:, None, :], 1.0), axis=-1)


def _up_to(ladder: Ladder, share: Float[Either, " K"]) -> Float[Either, " C"]:
    """Per rung, the sum of the first ladder[rung] places."""
    xp, within = _functions(share), np.arange(ladder[-1])[None, :] < np.asarray(ladder)[:, None]
    return xp.sum(xp.where(within, share[None, :], 0.0), axis=-1)


def _mean(values: Float[Either, "B N"], active: Bool[Either, " B"]) -> Float[Either, " N"]:
    """The mean over active rows; zeros where there are none."""
    xp = _functions(values)
    mask = active.astype(xp.float32)
    return xp.sum(values * mask[:, None], axis=0) / xp.maximum(xp.sum(mask), 1.0)


def _best(value: Float[Either, " C"], among: int) -> tuple[Int[Either, ""], Float[Either, ""]]:
    """(the index of the highest value among the first, the first such; the value)."""
    xp = _functions(value)
    highest = xp.max(value[:among])
    return xp.min(xp.where(value[:among] == highest, xp.arange(among, dtype=xp.int32), among - 1)), highest


def _in_bin(confidence: Float[Array, "B K"]) -> Bool[Array, "B K bins"]:
    edges = jnp.asarray((-jnp.inf, *BIN_EDGES, jnp.inf), jnp.float32)[None, None, :]
    return (confidence[:, :, None] > edges[:, :, :-1]) & (confidence[:, :, None] <= edges[:, :, 1:])
