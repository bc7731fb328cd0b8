"""Who may use the server: API keys, hosts and sites."""

import contextlib
import hmac
import ipaddress
import urllib.parse
from collections.abc import Callable, Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from peagle.base.settings import brief
from peagle.serve.errors import ApiError
from peagle.serve.transport import REQUEST_ID

ANY_ORIGIN = "*"


def check_key(request: Request, keys: Sequence[str]) -> str:
    """Return the key that is the bearer token; an empty text if no key is required. Raises ApiError for another one.

    The time depends on no character of the token.
    """
    if not keys:
        return ""
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    token = credentials.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
    matches = [key for key in keys if hmac.compare_digest(token, key.encode("utf-8"))]
    if not matches:
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY"
        raise ApiError(401, message, None, "invalid_api_key")
    return matches[0]


def check_origin(request: Request, allowed: Sequence[str], refused: Callable[[str], None]) -> None:
    """Raise ApiError for a request that a browser sends for a page of another site. refused: called with the site."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    own = request.headers.get("sec-fetch-site") == "same-origin"  # a proxy may have changed the host
    if origin is None or origin in allowed or ANY_ORIGIN in allowed:
        return
    if origin.partition("://")[2] != host and not own:
        refused(origin)
        raise ApiError(403, f"pages of {brief(origin)} may not use this server; open the page that it serves at /")


def check_host(request: Request, hosts: Sequence[str] | None) -> None:
    """Raise ApiError for a request to a host that is neither loopback nor one of these; None: allow any host.

    Prevents DNS rebinding: if a site's name resolves to the visitor's machine, its pages have the server's own origin.
    """
    if hosts is None:
        return
    host = request.headers.get("host", "")
    with contextlib.suppress(ValueError):  # malformed: compare it as it is
        host = urllib.parse.urlsplit(f"//{host}").hostname or ""
    host = host.rstrip(".")
    if host in ("localhost", *hosts) or is_loopback(host):
        return
    message = f"the host is {brief(host)}; expected localhost: a server without keys answers to no other name"
    raise ApiError(403, f"{message}; start it with --api-key-file, or name this site with --allow-origin")


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


class Sites(CORSMiddleware):
    """Let pages of these sites use the routes from any network. refused: called with another site at its preflight."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], refused: Callable[[str], None]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", REQUEST_ID],
        )
        self.allow_private_network = True  # an option of newer versions only
        self._refused = refused

    def preflight_response(self, request_headers: Headers) -> Response:
        response, origin = super().preflight_response(request_headers), request_headers["origin"]
        if not self.is_allowed_origin(origin):
            self._refused(origin)
        elif "access-control-request-private-network" in request_headers:
            response.headers["access-control-allow-private-network"] = "true"
        return response
