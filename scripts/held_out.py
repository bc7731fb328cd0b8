"""The requests of scripts that decode a pair's prompts: their options, and what they mean."""

import argparse
from pathlib import Path
from typing import Any

from peagle.api import Pair
from peagle.engine.request import Request
from peagle.loading import DEMO, HELD_OUT
from peagle.ops.errors import InputError
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering


def add_options(parser: argparse.ArgumentParser) -> None:
    """The pair, its prompts and how long their answers may be."""
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--drafter", default=DEMO, help="a drafter's directory (default: the demo's)")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines (default: the demo's held-out ones)")
    parser.add_argument("--num-prompts", type=int, default=60, help="how many of them (default %(default)s)")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256, help="per prompt (default %(default)s)")


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError for options that no pair can serve."""
    if arguments.num_prompts < 1:
        raise InputError("--num-prompts must be 1 or more")


def asked_for(arguments: argparse.Namespace, pair: Pair) -> list[Request]:
    """The requests that the options ask for."""
    return first_requests(pair, arguments.prompts, arguments.num_prompts, arguments.max_new_tokens)


def first_requests(pair: Pair, prompts: Path, num_prompts: int, max_new_tokens: int) -> list[Request]:
    """The first turns of a file's first prompts, in the chat template."""
    return [
        pair.request(each, [], Rendering(), max_new_tokens=max_new_tokens, index=index)
        for index, each in enumerate(read_prompt_file(prompts, strict=True).conversations[:num_prompts])
    ]


def described(arguments: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """The options as run.json keeps them."""
    named = {"target": arguments.target, "drafter": arguments.drafter, "prompts": arguments.prompts.name}
    return named | {"num_prompts": num_prompts, "max_new_tokens": arguments.max_new_tokens}
