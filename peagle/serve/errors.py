"""Errors of the HTTP interface, in OpenAI's form."""

import re
from collections.abc import Mapping
from typing import Any

from peagle.base.errors import InputError
from peagle.base.settings import brief

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that the client gets as an error object.

    param: the wrong field. retry_after_s: seconds after which the client may try again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: Exception, param: str | None = None) -> "ApiError":
        """Make the error for any exception: an ApiError as it is, an InputError a 400, others a fault of the server.

        param: the field of an InputError that names none.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InputError):
            return cls(400, str(error), error.field or param)
        return cls(500, f"the server failed at this request ({type(error).__name__}); its log has more")

    @classmethod
    def wrong(cls, name: str, value: Any, expected: str) -> "ApiError":
        return cls(400, f"{name} is {brief(value)}; expected {expected}", name)

    @classmethod
    def missing(cls, name: str) -> "ApiError":
        return cls(400, f"{name} is missing; add it", name, "missing_required_parameter")

    def renamed(self, fields: Mapping[str, str]) -> "ApiError":
        """Return the error with other names of fields, in its message and as its param. fields: old -> new."""
        longest_first = "|".join(map(re.escape, sorted(fields, key=len, reverse=True)))

        def rename(text: str) -> str:
            return re.sub(rf"(?<![\w.'\"])(?:{longest_first})(?!\w)", lambda match: fields[match[0]], text)

        param = None if self.param is None else rename(self.param)
        return ApiError(self.status, rename(self.message), param, self.code, self.retry_after_s)

    def __reduce__(self) -> tuple[Any, ...]:  # a fleet pickles it between processes
        return type(self), (self.status, self.message, self.param, self.code, self.retry_after_s)

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        retry = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        by_status = {401: {"WWW-Authenticate": "Bearer"}, 415: {"Accept-Encoding": "identity"}}
        return retry | by_status.get(self.status, {})
