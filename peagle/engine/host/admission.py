"""Check requests before any work, and make their handles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.base.errors import InputError
from peagle.engine.grammar import GrammarError, Matcher
from peagle.engine.host import handoff
from peagle.engine.host.handle import Handle
from peagle.engine.host.handoff import HandOff
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig


@dataclass(frozen=True)
class Admission:
    """What an engine's requests must fit. check_hand_off: raises InputError for one that its pages cannot take."""

    config: ResolvedConfig
    vocab_size: int
    stop_token_ids: tuple[int, ...]  # of requests that set none
    check_hand_off: Callable[[HandOff], None]

    def check(self, request: Request, hand_off: HandOff | None) -> None:
        """Raise InputError for a request that this engine cannot run, or cannot continue from this hand-off."""
        if hand_off is not None:
            if self.config.prefill_only:
                raise InputError("this engine only prefills; send the hand-off to one that decodes")
            self.check_hand_off(hand_off)
            handoff.check_request(hand_off, request, self._stops_of(request), self.vocab_size)
        self.config.check(request, self.vocab_size)
        if request.grammar is not None:
            check_grammar(request, self._stops_of(request), self.vocab_size)
            if self.config.synthetic_acceptance is not None:
                raise InputError("synthetic acceptance ignores grammars; leave one of them out")
            if hand_off is not None:
                self._matcher(request, hand_off)

    def handle(self, request: Request, hand_off: HandOff | None) -> Handle:
        """Make the handle of a request. Raises InputError as `check` does."""
        self.check(request, hand_off)
        matcher = self._matcher(request, hand_off)
        handle = Handle(request, self._stops_of(request), length=len(request.prompt_ids), matcher=matcher)
        if hand_off is not None:
            handle.hand_off, handle.length = hand_off, hand_off.length
            handle.output_ids += hand_off.token_ids[len(request.prompt_ids) :]
        return handle

    def _stops_of(self, request: Request) -> tuple[int, ...]:
        return self.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids

    def _matcher(self, request: Request, hand_off: HandOff | None) -> Matcher | None:
        """Make the matcher of a request's grammar and let it read the tokens of the hand-off.

        Raises GrammarError if the grammar does not allow them.
        """
        if request.grammar is None:
            return None
        matcher = request.grammar.begin(self._stops_of(request))
        if hand_off is not None:
            matcher.read(hand_off.token_ids[len(request.prompt_ids) :])
            if failure := matcher.failure:
                raise GrammarError(f"the hand-off of {request.name} does not follow its grammar: {failure}")
        return matcher


def check_grammar(request: Request, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for a grammar without a stop token, or compiled for another vocabulary."""
    if request.grammar is None:
        return
    if not any(0 <= token < vocab_size for token in stop_token_ids):
        raise InputError(
            f"{request.name} has a grammar, but no stop token, so nothing can end its answer; leave out ignore_eos, or "
            "name stop tokens",
            "ignore_eos",
        )
    size = request.grammar.vocabulary.size
    if size != vocab_size:
        raise InputError(f"the grammar is compiled for {size} tokens; expected {vocab_size}, the target's vocabulary")
