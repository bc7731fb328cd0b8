"""Keep responses in memory, for previous_response_id, item references and GET /v1/responses/{id}."""

import collections
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.serve.errors import ApiError
from peagle.serve.request_body import count_parts

OVERHEAD = 600  # bytes of an item or a response in memory, besides its JSON and its id
POINTER = 8  # bytes
CHARACTER = 4  # bytes, the most
MOST_LISTED = 100  # items of one page, as in OpenAI's API
ITEMS_LISTED = 20  # by default
RESPONSE_OPTIONS = "raise --response-store of the server"  # a cure, where there are such options


@dataclass(eq=False, slots=True)
class StoredItem:
    """An item as JSON. A response shares it with those that go on from it. uses: by responses that are kept."""

    id: str
    data: bytes
    num_parts: int  # see `request_body.count_parts`
    uses: int = 0

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "StoredItem":
        return cls(value["id"], _json(value), count_parts(value, "input"))

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return OVERHEAD + len(self.data) + CHARACTER * len(self.id)


@dataclass(frozen=True, eq=False, slots=True)
class StoredResponse:
    """A response. reply: JSON, without its output. input: all that the model read, with earlier responses."""

    reply: bytes
    input: Sequence[StoredItem]
    output: Sequence[StoredItem]

    @property
    def conversation(self) -> Sequence[StoredItem]:
        return (*self.input, *self.output)

    @property
    def own_size(self) -> int:
        """Bytes without those of its items."""
        return OVERHEAD + len(self.reply) + POINTER * len(self.conversation)

    def as_reply(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self.reply)
        return {**reply, "output": [json.loads(item.data) for item in self.output]}

    def input_page(self, limit: str | None, order: str | None, after: str | None) -> dict[str, Any]:
        """List input items, the newest first by default. Raises ApiError for a bad value.

        after: the id of the last item of the page before. A page has more than `limit` items if its last one comes
        again later, since a page starts after the last item with an id.
        """
        if limit is not None and limit not in map(str, range(1, MOST_LISTED + 1)):
            raise ApiError.wrong("limit", limit, f"1..{MOST_LISTED}")
        if order not in (None, "asc", "desc"):
            raise ApiError.wrong("order", order, "'asc' or 'desc'")
        items = self.input if order == "asc" else self.input[::-1]
        ends = {item.id: end for end, item in enumerate(items, 1)}
        if after is not None and after not in ends:
            raise ApiError.wrong("after", after, "the id of an item of this response")
        start = 0 if after is None else ends[after]
        page = items[start : start + int(limit or ITEMS_LISTED)]
        end = ends[page[-1].id] if page else start
        shown = [json.loads(item.data) for item in items[start:end]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": end < len(items)}


class ResponseStore:
    """The responses that were used last, each for the API key that made it. Call its methods in one thread.

    most: bytes; ttl_s: seconds after its last use for which a response is kept. 0 of either: none is kept. cure: what
    keeps more, named in errors.
    """

    def __init__(
        self, most: int = 0, ttl_s: int = 0, cure: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self._ttl_s, self._clock = most, ttl_s, clock
        self.or_cure = f", or {cure}" if cure else ""
        self.size = 0  # bytes
        self._items: dict[tuple[str, str], dict[StoredItem, None]] = {}  # by (owner, id); the newest is the last
        # (response, time of its last use) by (owner, id); the one used last is the last
        self._responses: collections.OrderedDict[tuple[str, str], tuple[StoredResponse, float]]
        self._responses = collections.OrderedDict()

    @property
    def keeps(self) -> bool:
        return self.most > 0 and self._ttl_s > 0

    def keep(self, owner: str, items: Sequence[StoredItem], reply: Mapping[str, Any]) -> bool:
        """Keep a response; drop those for which there is no room. Return False if it has no room itself.

        items: its input.
        """
        output = tuple(StoredItem.of(item) for item in reply["output"])
        response = StoredResponse(_json({**reply, "output": []}), tuple(items), output)
        if response.own_size + sum(item.size for item in response.conversation) > self.most:
            return False
        self._responses[owner, reply["id"]] = response, self._clock()
        self._count(owner, response, 1)
        self._drop_old()
        return True

    def response(self, owner: str, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a response. Raises ApiError if it is not kept. field: of the body that names it."""
        self._drop_old()
        key = owner, response_id
        if key not in self._responses:
            if field is None:
                raise ApiError(404, f"the response {brief(response_id)} {self._why}")
            cure = f"send the whole conversation in input{self.or_cure}"
            message = f"{field} is {brief(response_id)}, a response that {self._why}; {cure}"
            raise ApiError(400, message, field, "previous_response_not_found")
        response, _ = self._responses[key]
        self._responses[key] = response, self._clock()
        self._responses.move_to_end(key)
        return response

    def item(self, owner: str, item_id: str, field: str) -> StoredItem:
        """Return an item of a response. Raises ApiError if it is not kept. field: of the body that names it."""
        self._drop_old()
        items = self._items.get((owner, item_id))
        if items is None:
            cure = f"send the item itself, as the response had it{self.or_cure}"
            raise ApiError(404, f"{field} is {brief(item_id)}, an item that {self._why}; {cure}", field)
        return next(reversed(items))

    def remove(self, owner: str, response_id: str) -> None:
        """Drop a response, and those of its items that no later response has. Raises ApiError if it is not kept."""
        self.response(owner, response_id)
        self._drop((owner, response_id))

    @property
    def _why(self) -> str:
        return "is not kept here, or not any more" if self.keeps else "is not kept, since no responses are kept here"

    def _drop_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._responses:
            key, (_, used_s) = next(iter(self._responses.items()))
            if self.size <= self.most and used_s > oldest:
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        response, _ = self._responses.pop(key)
        self._count(key[0], response, -1)

    def _count(self, owner: str, response: StoredResponse, change: int) -> None:
        """Count the bytes of a response, and of those of its items that no other one has. change: 1 or -1."""
        self.size += change * response.own_size
        for item in response.conversation:
            item.uses += change
            if item.uses == max(change, 0):  # its first use, or no more
                self.size += change * item.size
                self._list(owner, item, listed=change > 0)

    def _list(self, owner: str, item: StoredItem, listed: bool) -> None:
        """Let references find an item, or no more. Clients may send another item with its id."""
        same_id = self._items.setdefault((owner, item.id), {})
        if listed:
            same_id[item] = None
            return
        del same_id[item]
        if not same_id:
            del self._items[owner, item.id]


def _json(value: Any) -> bytes:
    return dumps(value, ensure_ascii=False).encode("utf-8", "replace")
