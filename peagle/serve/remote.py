"""Answer the lines of a batch by a running server of OpenAI's API, over HTTP."""

import asyncio
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from peagle.serve.batch import Line
from peagle.serve.errors import ApiError
from peagle.serve.shared_state import in_daemon


@dataclass(frozen=True)
class RemoteServer:
    """A server and its first model. Sends the environment's OPENAI_API_KEY, if it is set."""

    url: str
    model: str
    failure: str | None = None

    @classmethod
    def connect(cls, url: str) -> "RemoteServer":
        """Ask the server for its model. Raises InputError if it does not answer."""
        if not url.startswith(("http://", "https://")):
            raise InputError(f"server is {url!r}; expected a URL as http://127.0.0.1:8000", "server")
        base = url.rstrip("/").removesuffix("/v1")
        try:
            return cls(base, _call(f"{base}/v1/models")["data"][0]["id"])
        except (ApiError, ValueError, LookupError, TypeError) as error:
            raise InputError(f"{url} names no model: {error}; expected a running server of OpenAI's API") from None

    async def reply(self, line: Line) -> tuple[Mapping[str, Any], str, int]:
        """See `Answerer`. Raises ApiError of status 503 if the server is busy or does not answer: try again."""
        body = {**json.loads(line.body), "model": self.model}
        reply = await asyncio.wrap_future(in_daemon(_call, self.url + line.url, body))
        return reply, str(reply.get("id")), reply.get("usage", {}).get("completion_tokens", 0)


def _call(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request and return the reply's JSON. Raises ApiError for a refusal, ValueError for no JSON."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        status = 503 if error.code == http.HTTPStatus.TOO_MANY_REQUESTS else error.code
        raise ApiError(status, f"status {error.code}: {error.read(1000).decode('utf-8', 'replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(503, f"the server does not answer ({error})") from None
