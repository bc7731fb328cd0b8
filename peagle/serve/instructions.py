"""Instructions anywhere in a chat, for templates that render only the first message's."""

from collections.abc import Collection, Sequence

from peagle.text.channels import MESSAGE, START, control_ids
from peagle.text.tokenizer import Message, Tokenizer, encode_characters

INSTRUCTING = ("system", "developer")
HEADING = "# Instructions\n\n"  # of a developer's message in the harmony format


def instructions_first(chat: Sequence[Message]) -> tuple[list[Message], set[int]]:
    """Join the leading instructions to one message; turn later ones into a user's messages.

    Return the chat, and the places of these user's messages, for `as_instructions`.
    """
    messages: list[Message] = []
    places: set[int] = set()
    for message in chat:
        if message["role"] not in INSTRUCTING or not messages:
            messages.append(message)
        elif len(messages) == 1 and messages[0]["role"] in INSTRUCTING:
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{message['content']}"}
        else:
            places.add(len(messages))
            messages.append({"role": "user", "content": HEADING + message["content"]})
    return messages, places


def as_instructions(
    tokenizer: Tokenizer, ids: Sequence[int], chat: Sequence[Message], places: Collection[int]
) -> tuple[int, ...] | None:
    """Replace a user's header by a developer's in the prompt, for the messages at these places of the chat.

    None if the prompt does not have each user's message under its own header of the harmony format.
    """
    if not places:
        return tuple(ids)
    control = control_ids(tokenizer)
    if not {START, MESSAGE} <= control.keys():
        return None
    user, developer = (
        (control[START], *encode_characters(tokenizer, role), control[MESSAGE]) for role in ("user", "developer")
    )
    users = [place for place, message in enumerate(chat) if message["role"] == "user"]
    starts = [number for number in range(len(ids)) if tuple(ids[number : number + len(user)]) == user]
    if len(starts) != len(users):
        return None
    tokens = list(ids)
    for start, place in zip(reversed(starts), reversed(users), strict=True):
        if place in places:
            tokens[start : start + len(user)] = developer
    return tuple(tokens)
