"""Put instructions anywhere into a chat, though its template renders them only in the first message.

`instructions_first` disguises later instructions as messages of a user, so that the template renders them;
`as_instructions` then replaces their headers in the prompt.
"""

from collections.abc import Collection, Sequence

from peagle.text.channels import MESSAGE, START, control_ids
from peagle.text.tokenizer import Message, Tokenizer, encode_characters

INSTRUCTION_ROLES = ("system", "developer")
HEADING = "# Instructions\n\n"  # of a developer's message in the harmony format


def instructions_first(chat: Sequence[Message]) -> tuple[list[Message], set[int]]:
    """Join leading instructions to one message; turn later ones into messages of a user.

    Return (the chat, indices of these messages).
    """
    messages: list[Message] = []
    disguised: set[int] = set()
    for message in chat:
        if message["role"] not in INSTRUCTION_ROLES or not messages:
            messages.append(message)
        elif len(messages) == 1 and messages[0]["role"] in INSTRUCTION_ROLES:
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{message['content']}"}
        else:
            disguised.add(len(messages))
            messages.append({"role": "user", "content": HEADING + message["content"]})
    return messages, disguised


def as_instructions(
    tokenizer: Tokenizer, ids: Sequence[int], chat: Sequence[Message], disguised: Collection[int]
) -> tuple[int, ...] | None:
    """Replace the user's header by a developer's in the prompt of a chat, for the disguised messages.

    Returns None if some message of a user has no header of the harmony format in the prompt.
    """
    if not disguised:
        return tuple(ids)
    control = control_ids(tokenizer)
    if not {START, MESSAGE} <= control.keys():
        return None
    user, developer = (
        (control[START], *encode_characters(tokenizer, role), control[MESSAGE]) for role in ("user", "developer")
    )
    users = [index for index, message in enumerate(chat) if message["role"] == "user"]
    starts = [start for start in range(len(ids)) if tuple(ids[start : start + len(user)]) == user]
    if len(starts) != len(users):
        return None
    tokens = list(ids)
    for start, index in zip(reversed(starts), reversed(users), strict=True):
        if index in disguised:
            tokens[start : start + len(user)] = developer
    return tuple(tokens)
