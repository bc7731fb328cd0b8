"""`peagle chat`: a conversation in a terminal, or from a pipe with one message per line.

A turn is a run (peagle.workflows.run) of one conversation, whose history holds the turns before.
"""

import dataclasses
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.cli.command import Takes
from peagle.cli.flags import QUIET
from peagle.cli.output import say
from peagle.config import AnswerConfig, EngineConfig, LoadConfig, SamplingParams
from peagle.text.channels import final_message
from peagle.text.prompts import Conversation, Rendering, from_text
from peagle.text.tokenizer import Message

if TYPE_CHECKING:  # they import JAX
    from peagle.cli.display import Display
    from peagle.pair import Pair
    from peagle.workflows.run import Run, RunConfig

BAD_INPUT = 2  # exit code
LOADED = Takes("target", "drafter", "query_blocks", "ffn_blocks", "dtype", "mesh")
PROMPT = "> "
RESET, EXIT = "/reset", "/exit"
_COMMAND = re.compile(r"/[a-z]+")
WELCOME = f"{RESET} starts a new conversation, {EXIT} quits, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Chat in the terminal with speculative decoding.

    Each line of input is a message. /reset starts a new conversation; /exit or
    the end of input quits. Ctrl-C stops an answer, and at the prompt it quits.

    [bold]Examples[/bold]

      your checkpoints    [cyan]peagle chat --target DIR --drafter DIR[/cyan]
      without a drafter   [cyan]peagle chat --target DIR --drafter ngram[/cyan]
      from a pipe         [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR[/cyan]
    """

    rendering: Annotated[Rendering, Takes("system", "reasoning_effort")] = Rendering()
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    engine: Annotated[EngineConfig, Takes("num_speculative_tokens", "context", "prefill_chunk")] = EngineConfig(
        prefix_cache="on"
    )
    sampling: Annotated[SamplingParams, Takes("temperature", "top_p", "seed")] = SamplingParams()
    answer: Annotated[AnswerConfig, Takes("max_new_tokens")] = AnswerConfig(max_new_tokens=1024)
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        """Run a chat and return the exit code. Only answers go to standard output.

        Raises InputError for bad options before it reads a message, and KeyboardInterrupt after Ctrl-C at the prompt.
        """
        from peagle.cli.display import Display
        from peagle.cli.models import chosen_context, chosen_models, load_pair, unused_rendering, unused_sampling
        from peagle.pair import RequestOptions
        from peagle.parallel.mesh import refuse_replicas
        from peagle.workflows.run import RunConfig

        if sys.stdin is None:
            raise InputError("standard input is closed; expected a terminal, or one message per line")
        refuse_replicas(self.load.mesh, "peagle chat runs one conversation")
        target, drafter = chosen_models(self.load, self.engine.num_speculative_tokens)
        config = RunConfig(  # refuses invalid options, so it comes before loading
            answer=RequestOptions(**vars(self.answer)),
            sampling=self.sampling,
            baseline=False,
            engine=self.engine,
            rendering=self.rendering,
        )
        display = Display(text=True, quiet=self.quiet, streaming=True)
        pair = load_pair(target, drafter, self.load, display)
        display.set_tokenizer(pair.tokenizer)
        _check_template(pair, config.rendering, target)
        display.warn([*unused_sampling(self.sampling), *unused_rendering(config.rendering, pair.tokenizer, target)])
        context = chosen_context(pair, self.engine)
        config = dataclasses.replace(config, engine=dataclasses.replace(self.engine, context=context))
        _check_context(pair, config)
        if sys.stdin.isatty():
            display.note(WELCOME)
        return ChatLoop(pair, config, display).run()


class ChatLoop:
    """Read messages and answer them, one conversation at a time."""

    def __init__(self, pair: "Pair", config: "RunConfig", display: "Display") -> None:
        self._pair, self._config, self._display = pair, config, display
        self._history: list[Message] = []
        self._num_answers = 0  # of all conversations

    def run(self) -> int:
        """Answer each line of standard input, until its end or /exit. Return the exit code.

        A line without an answer is reported on standard error and left out of the conversation. If no line of a pipe
        could be answered, the code is that of bad input.
        """
        num_refused = 0
        while True:
            try:
                message = _read_message()
                if message is None or message.strip() == EXIT:
                    return BAD_INPUT if num_refused and not self._num_answers and not sys.stdin.isatty() else 0
                if message.strip() == RESET:
                    self._history = []
                    self._display.note("new conversation")
                elif _COMMAND.fullmatch(message.strip()):
                    raise InputError(f"{message.strip()} is not a command; expected {RESET} or {EXIT}")
                elif message.strip():
                    self._answer(message)
            except InputError as error:
                num_refused += 1
                say("error", str(error))

    def _answer(self, message: str) -> None:
        """Stream the answer to a message, and add both to the history. After Ctrl-C, add what was generated."""
        from peagle.workflows.run import run

        conversation = Conversation("the conversation", turns=(message,), history=tuple(self._history))
        self._check_length(conversation)
        try:
            done = run(self._pair, [conversation], self._config, self._display.observer)
        finally:
            self._display.end_all()
        interrupt.forget()
        if not done.outcomes:
            self._display.note("interrupted before the first token; the message is left out")
            return
        self._num_answers += 1
        answer = final_message(done.outcomes[0].result.text or "")
        self._history += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        self._display.note(summary_line(done))

    def _check_length(self, conversation: Conversation) -> None:
        room = self._pair.room(self._config.engine.context)
        count = len(conversation.encode((), self._pair.tokenizer, self._config.rendering))
        if count < room:
            return
        too_long = f"has {count} tokens, but the context holds {room} positions"
        if self._history:
            raise InputError(f"the conversation with this message {too_long}; {RESET} starts a new one")
        raise InputError(f"the message {too_long}; shorten it, or start again with a larger --context")


def summary_line(done: "Run") -> str:
    from peagle.measure.metrics import figure_text
    from peagle.workflows.run_report import summary_block

    summary, result = summary_block(done, None), done.outcomes[0].result
    parts = [f"{len(result.output_ids)} tokens", f"{figure_text(summary['tok_per_s'], '.1f')} tok/s"]
    if result.num_cached_tokens:
        parts.append(f"{result.num_cached_tokens} of {len(result.request.prompt_ids)} prompt tokens cached")
    if summary["num_plain_steps"] and not summary["num_spec_steps"]:
        parts.append("nothing drafted, since it saves no time here (-k K drafts anyway)")
    elif done.engine.num_speculative_tokens:
        parts.append(f"acceptance length {figure_text(summary['acceptance_length'], '.2f')}")
    return " | ".join([*parts, f"finish: {result.finish_reason or 'interrupted'}"])


def _check_template(pair: "Pair", rendering: Rendering, target: str) -> None:
    if pair.tokenizer is None:
        raise InputError(f"{target} has no tokenizer.json, so it cannot chat; add the file")
    try:
        from_text("Hi").encode((), pair.tokenizer, rendering)
    except InputError as error:  # which names an option of peagle speculate
        raise InputError(f"{error} to peagle speculate: without a template {target} cannot chat") from None


def _check_context(pair: "Pair", config: "RunConfig") -> None:
    """Raise InputError for a context in which no message can be answered."""
    room, least = pair.room(config.engine.context), len(from_text("a").encode((), pair.tokenizer, config.rendering))
    if room <= least:
        raise InputError(
            f"context is {room}; expected {least + 1} or more: in the chat template the shortest message takes {least} "
            "tokens, and the answer one",
            "context",
        )


def _read_message() -> str | None:
    """Read the next line of standard input; None at its end."""
    if sys.stdin.isatty():
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    with interrupt.waiting():
        line = sys.stdin.buffer.readline()
    if not line:
        if sys.stdin.isatty():  # so that the shell's prompt begins a line
            sys.stderr.write("\n")
        return None
    try:
        message = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise InputError("the message is not UTF-8 text; expected UTF-8") from None
    return message
