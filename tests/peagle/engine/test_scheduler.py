"""The scheduler alone: first come, first served, without starvation, whatever costs and removals."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.host.scheduler import (
    KEPT_SPEED,
    LONGEST_DISPATCH_S,
    MOST_BETWEEN_MASKED,
    WAITING_SHARE,
    Chunk,
    DispatchTimes,
    Scheduler,
    Steps,
)

ARRIVALS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12)  # prompt, steps needed
COSTS = st.builds(DispatchTimes, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))


class Simulation:
    """Requests of (prompt length, steps until they end), and the dispatches they get."""

    def __init__(self, slots: int, chunk: int, most: int) -> None:
        self.scheduler: Scheduler[int] = Scheduler(slots, [(1, chunk + 1), (4, 3)], most)
        self.left: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.computed: dict[int, int] = {}  # tokens of each prompt that were computed
        self.sent: list[Chunk[int] | Steps] = []
        self.admitted: list[int] = []
        self.constrained: set[int] = set()

    def add(self, key: int, prompt: int, steps: int, constrained: bool = False) -> None:
        self.scheduler.add(key, prompt, constrained)
        self.constrained |= {key} if constrained else set()
        self.prompts[key], self.left[key], self.computed[key] = prompt, steps, 0

    def turn(self, costs: DispatchTimes) -> bool:
        """Run one dispatch; return False if there is none."""
        action = self.scheduler.next(costs)
        if action is None:
            return False
        self.sent.append(action)
        if isinstance(action, Chunk):
            assert len(action.pieces) <= action.shape[0]
            for piece in action.pieces:
                assert piece.begin == self.computed[piece.key]
                assert 1 <= piece.count <= action.shape[1] - (piece.begin > 0)  # the last cached token comes first
                self.computed[piece.key] += piece.count
                assert piece.last == (self.computed[piece.key] == self.prompts[piece.key])
                if piece.last:
                    assert piece.key in dict(map(reversed, self.scheduler.decoding))
                    self.admitted.append(piece.key)
        else:
            assert 1 <= action.count <= self.scheduler.steps_per_dispatch
            held = [key for _, key in self.scheduler.decoding]
            assert not action.masked or (action.count == 1 and self.constrained.intersection(held))
            going = [key for key in held if action.masked or key not in self.constrained]
            assert going, "a dispatch that moves nobody"
            for key in going:
                self.left[key] -= action.count
                if self.left[key] <= 0:
                    self.scheduler.remove(key)
        held = [*(key for _, key in self.scheduler.decoding), *self.scheduler.prefilling]
        assert len(held) == len(set(held)) == self.scheduler.num_active + len(self.scheduler.prefilling)
        return True


@given(ARRIVALS, st.integers(1, 4), st.integers(1, 9), st.integers(1, 8), st.lists(COSTS, min_size=1), st.randoms())
def test_everybody_is_served_in_the_order_of_arrival(arrivals, slots, chunk, most, costs, random) -> None:
    simulation = Simulation(slots, chunk, most)
    coming = list(enumerate(arrivals))
    for _ in range(2000):
        if coming and random.random() < 0.5:
            key, (prompt, steps) = coming.pop(0)
            simulation.add(key, prompt, steps, random.random() < 0.3)
        if not simulation.turn(random.choice(costs)) and not coming:
            break
    # short prompts share the pass of the first, so they may pass a long one before them
    assert sorted(simulation.admitted) == list(range(len(arrivals)))
    first: dict[int, int] = {}
    for number, action in enumerate(simulation.sent):
        for piece in action.pieces if isinstance(action, Chunk) else ():
            first.setdefault(piece.key, number)
    assert slots > 1 or list(first) == sorted(first)
    assert simulation.scheduler.num_active == simulation.scheduler.num_waiting == 0


@given(st.integers(1, 8), COSTS)
def test_chunks_and_steps_alternate_so_that_neither_starves(most, costs) -> None:
    simulation = Simulation(slots=2, chunk=4, most=most)
    simulation.add(0, 1, 10_000)
    while simulation.admitted != [0]:
        simulation.turn(costs)
    simulation.sent.clear()
    simulation.add(1, 40, 5)
    for _ in range(19):
        simulation.turn(costs)
    kinds = [type(action) for action in simulation.sent]
    assert all(kinds[i] != kinds[i + 1] for i in range(len(kinds) - 1)), kinds
    assert kinds.count(Chunk) >= 9


def test_short_prompts_share_a_pass_and_long_ones_do_not() -> None:
    scheduler = Scheduler[str](8, [(1, 64), (4, 16), (8, 8)], steps_per_dispatch=4)
    for key, length in (("a", 8), ("b", 16), ("c", 5), ("long", 40), ("d", 7), ("e", 8), ("f", 3)):
        scheduler.add(key, length)
    chunks = [action for _ in range(9) if isinstance(action := scheduler.next(DispatchTimes()), Chunk)]
    passes = [("".join(piece.key[0] for piece in chunk.pieces), chunk.shape) for chunk in chunks]
    assert passes == [("abc", (4, 16)), ("l", (1, 64)), ("def", (4, 16))]


def test_a_request_without_memory_waits_and_keeps_its_place() -> None:
    scheduler = Scheduler[str](2, [(1, 8)], steps_per_dispatch=4)
    scheduler.add("big", 8)
    scheduler.add("small", 2)
    assert scheduler.next(DispatchTimes(), lambda _: None) is None
    assert scheduler.num_waiting == 2
    scheduler.add("again", 3, first=True)
    keys = [
        action.pieces[0].key
        for _ in range(9)
        if isinstance(action := scheduler.next(DispatchTimes(), lambda _: 0), Chunk)
    ]
    assert keys == ["again", "big"]


def test_steps_between_chunks_take_their_share_of_a_chunks_time() -> None:
    simulation = Simulation(slots=2, chunk=4, most=16)
    simulation.add(0, 1, 10_000)
    while simulation.admitted != [0]:
        simulation.turn(DispatchTimes())
    simulation.add(1, 40, 5)
    for chunk_ms, expected in ((0.8, 4), (0.01, 1), (1000.0, 16)):
        while not isinstance(action := simulation.scheduler.next(DispatchTimes(chunk_ms / 1e3, 1e-4)), Steps):
            pass
        assert action.count == expected


def test_a_dispatch_of_many_rows_takes_no_longer_than_one_of_few() -> None:
    scheduler: Scheduler[str] = Scheduler(1, [(1, 8)], steps_per_dispatch=24)
    scheduler.add("a", 3)
    assert isinstance(scheduler.next(DispatchTimes()), Chunk)
    for step_s, expected in ((1e-4, 24), (LONGEST_DISPATCH_S / 7, 7), (1.0, 1)):
        assert scheduler.next(DispatchTimes(1.0, step_s)) == Steps(expected)
    scheduler.add("b", 3)
    assert scheduler.next(DispatchTimes(1.0, LONGEST_DISPATCH_S / 7)) == Steps(24 // WAITING_SHARE)


@pytest.mark.parametrize(("steps_per_dispatch", "waiting"), [(1, 3), (24, 0), (24, 3)])
@pytest.mark.parametrize(("step_s", "masked_s"), [(1e-4, 4.9e-4), (8e-3, 9e-3), (1e-2, 3e-2), (5e-3, 2e-2)])
def test_requests_beside_a_grammar_keep_their_speed(step_s, masked_s, waiting, steps_per_dispatch) -> None:
    """Whatever limits a dispatch, and whoever waits. Split steps are of all slots, whole ones of the others."""
    costs = DispatchTimes(1.0, step_s, masked_s)
    scheduler: Scheduler[str] = Scheduler(2, [(1, 8)], steps_per_dispatch)
    for key in ("free", "bound"):
        scheduler.add(key, 3, constrained=key == "bound")
        while not isinstance(scheduler.next(costs), Chunk):
            pass
    for index in range(waiting):
        scheduler.add(f"waiting {index}", 3)
    sent = [action for _ in range(4000) if isinstance(action := scheduler.next(costs), Steps)]
    seconds = sum(masked_s if action.masked else action.count * step_s for action in sent)
    assert sum(action.count for action in sent) * step_s / seconds >= 0.98 * KEPT_SPEED
    assert sum(action.masked for action in sent) >= len(sent) / (MOST_BETWEEN_MASKED + 1)
    assert any(not action.masked for action in sent)  # now and then a whole step is timed again
    scheduler.remove("free")
    if not waiting:
        assert [scheduler.next(costs) for _ in range(40)] == [Steps(1, masked=True)] * 40


def test_a_masked_step_that_takes_very_long_still_comes() -> None:
    scheduler: Scheduler[str] = Scheduler(2, [(1, 8)], steps_per_dispatch=24)
    for key in ("free", "bound"):
        scheduler.add(key, 3, constrained=key == "bound")
        while not isinstance(scheduler.next(DispatchTimes()), Chunk):
            pass
    sent = [action for _ in range(200) if isinstance(action := scheduler.next(DispatchTimes(1.0, 1e-4, 1.0)), Steps)]
    between = [
        sum(steps.count for steps in run)
        for masked, run in itertools.groupby(sent, lambda steps: steps.masked)
        if not masked
    ]
    assert max(between) == MOST_BETWEEN_MASKED


@given(ARRIVALS, st.integers(1, 3), st.randoms())
def test_whoever_leaves_leaves_nothing_behind(arrivals, slots, random) -> None:
    simulation = Simulation(slots, chunk=5, most=4)
    for key, (prompt, steps) in enumerate(arrivals):
        simulation.add(key, prompt, steps)
    gone = set()
    for _ in range(2000):
        if not simulation.turn(DispatchTimes(1.0, 1.0)):
            break
        candidates = [key for key in range(len(arrivals)) if key not in gone]
        if candidates and random.random() < 0.25:
            key = random.choice(candidates)
            simulation.scheduler.remove(key)
            simulation.scheduler.remove(key)  # twice does nothing
            gone.add(key)
    assert simulation.scheduler.num_active == simulation.scheduler.num_waiting == 0
    assert set(simulation.admitted) | gone == set(range(len(arrivals)))
