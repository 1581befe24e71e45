"""Which header fields go on, and which concern one connection only (RFC 9110 7.6.1).

Repeated fields and their order are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..asgi.capability import TOKEN_HEADER
from ..asgi.interface import Headers
from .address import UpstreamAddress

__all__ = ("body_framing", "client_headers", "framing_problem", "upstream_headers", "wants_websocket")

_ONE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authentication-info", b"proxy-authorization", b"proxy-connection"),
    )
)
_ANSWERED_HERE = frozenset((b"host", b"content-length", b"expect", b"x-forwarded-for", TOKEN_HEADER))
"""Of a request: replaced, fulfilled by the server in front (`expect`), or nothing that the engine is to know."""
_WITHOUT_BODY = (204, 304)


def upstream_headers(scope: Mapping[str, Any], address: UpstreamAddress) -> Headers:
    """The headers of a request as the engine gets them, without those that frame its body.

    `x-forwarded-for` is continued with the client; `x-forwarded-host` and `x-forwarded-proto` keep what an earlier
    proxy said.
    """
    received: Headers = scope["headers"]
    kept = [(name, value) for name, value in _end_to_end(received) if name not in _ANSWERED_HERE]
    seen = {name for name, _ in kept}
    client = scope.get("client")
    forwarded = [value for name, value in received if name == b"x-forwarded-for"]
    if client:
        forwarded.append(client[0].encode("ascii", "replace"))
    if forwarded:
        kept.append((b"x-forwarded-for", b", ".join(forwarded)))
    host = next((value for name, value in received if name == b"host"), b"")
    if host and b"x-forwarded-host" not in seen:
        kept.append((b"x-forwarded-host", host))
    if b"x-forwarded-proto" not in seen:
        kept.append((b"x-forwarded-proto", str(scope.get("scheme", "http")).encode("ascii")))
    return [(b"host", address.authority), *kept]


def framing_problem(headers: Headers) -> tuple[int, str] | None:
    """Status and words for a request whose end may be read in two ways; None if it is clear.

    Servers let through what they understand themselves. Where two fields or two codings tell the end, the engine might
    find another one, and take what follows for a request (RFC 9112 6.1, 11.2).
    """
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    lengths = sum(name == b"content-length" for name, _ in headers)
    if lengths > 1 or (lengths and codings):
        return 400, "more than one field tells how long the body is"
    if codings and codings != [b"chunked"]:
        return 501, "of the transfer encodings only chunked is understood"
    return None


def body_framing(headers: Headers) -> Headers:
    """The field that frames the body of a request as it came, if one does."""
    if any(name == b"transfer-encoding" for name, _ in headers):
        return [(b"transfer-encoding", b"chunked")]
    return [(name, value) for name, value in headers if name == b"content-length"][-1:]


def client_headers(status: int, headers: Headers, address: UpstreamAddress) -> Headers:
    """The headers of an answer as the client gets them."""
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    kept: Headers = []
    for name, value in _end_to_end(headers):
        if name == b"location":
            kept.append((name, address.location(value)))
        elif name != b"content-length" or not (chunked or status in _WITHOUT_BODY):
            # A 304 may tell the length of the body that it doesn't have; servers would wait for it.
            kept.append((name, value))
    return kept


def wants_websocket(headers: Headers) -> bool:
    """Whether a request asks for a websocket. Offers of other protocols may be left unanswered, this one can't."""
    return any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers)


def _end_to_end(headers: Headers) -> Headers:
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _ONE_CONNECTION and name not in named]
