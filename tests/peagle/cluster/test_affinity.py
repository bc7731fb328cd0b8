"""A conversation's turns go to the replica that has its beginning, unless that is far busier than another."""

from peagle.cluster.affinity import BLOCK, Affinity

FREE = {"a": 0, "b": 0}
TURN = tuple(range(3 * BLOCK))


def test_a_longer_prompt_is_preferred_where_its_beginning_went_last() -> None:
    affinity = Affinity[str]()
    assert affinity.prefer(TURN, FREE) is None
    affinity.note(TURN, "a")
    following = (*TURN, *range(900, 900 + 2 * BLOCK))
    assert affinity.prefer(following, FREE) == "a"
    affinity.note(following, "b")
    assert affinity.prefer((*following, 1), FREE) == "b"
    # the same tokens behind another beginning are not known
    assert affinity.prefer((7, *following), FREE) is None


def test_an_answer_is_known_where_its_prompt_went_last() -> None:
    affinity, answer = Affinity[str](), range(900, 900 + 9 * BLOCK)
    affinity.note_answer(TURN, answer)
    assert affinity.prefer((*TURN, *answer, 1), FREE) is None
    affinity.note(TURN, "a")
    affinity.note_answer(TURN, answer)
    assert affinity.prefer((*TURN, *answer, 1), FREE) == "a"


def test_half_of_a_prompt_must_be_known_and_a_replica_that_is_gone_does_not_count() -> None:
    affinity = Affinity[str]()
    affinity.note(TURN, "a")
    assert affinity.prefer((*TURN, *range(900, 900 + 3 * BLOCK)), FREE) is None
    assert affinity.prefer(TURN, {"b": 0}) is None


def test_cached_tokens_do_not_count_on_a_crowded_replica() -> None:
    affinity = Affinity[str]()
    affinity.note(TURN, "a")
    assert affinity.prefer(TURN, {"a": 5, "b": 2}) == "a"
    assert affinity.prefer(TURN, {"a": 6, "b": 2}) is None


def test_blocks_are_bounded_and_the_oldest_go_first() -> None:
    affinity = Affinity[str](most_blocks=4)
    affinity.note(TURN, "a")
    affinity.note(tuple(range(500, 500 + 3 * BLOCK)), "b")
    assert affinity.prefer(TURN, FREE) is None
    assert affinity.prefer(range(500, 500 + 3 * BLOCK), FREE) == "b"
