"""Where the engine is: what is asked of it there, and which of its redirects lead to it again."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from ..errors import InvalidOptionError

__all__ = ("UpstreamAddress", "upstream_address")

_PORTS = {"http": 80, "https": 443}
_ABSOLUTE = re.compile(rb"(?:([a-z][a-z0-9+.-]*):)?//([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)


class UpstreamAddress(msgspec.Struct, frozen=True):
    """A server and a path on it, under which everything lies that it is asked."""

    scheme: str
    """`http` or `https`."""
    host: str
    """As a connection needs it: without the brackets of an IPv6 address."""
    port: int
    base: bytes = b""
    """The path, without a slash at its end: empty for the root."""

    @property
    def authority(self) -> bytes:
        """The value of the `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority.decode()}{self.base.decode('ascii')}"

    def target(self, raw_path: bytes, query: bytes) -> bytes:
        """The request target for a path and a query, both byte for byte as they came."""
        target = raw_path if raw_path == b"*" else self.base + raw_path
        return target + b"?" + query if query else target

    def location(self, value: bytes) -> bytes:
        """A `Location` of the engine as its client is to see it: one that leads to the engine becomes relative.

        So the client stays on the proxy, whatever name it knows it by. Any other is returned as it is.
        """
        match = _ABSOLUTE.fullmatch(value)
        if match is None:
            return self._without_base(value) if value.startswith(b"/") else value
        scheme, authority, rest = match.groups()
        if not self._is_here((scheme or b"").decode("ascii").lower(), authority.decode("latin-1").lower()):
            return value
        return self._without_base(rest if rest.startswith(b"/") else b"/" + rest)

    def _is_here(self, scheme: str, authority: str) -> bool:
        if scheme and scheme not in _PORTS:
            return False
        try:
            found = urlsplit(f"//{authority}")
            host, port = found.hostname, found.port
        except ValueError:
            return False
        # Its scheme doesn't matter: an engine that trusts x-forwarded-proto names itself with that of the client.
        return host == self.host and (port == self.port or (port is None and self.port in _PORTS.values()))

    def _without_base(self, path: bytes) -> bytes:
        if self.base and path.startswith(self.base) and path[len(self.base) : len(self.base) + 1] in (b"", b"/", b"?"):
            path = path[len(self.base) :]
            path = path if path.startswith(b"/") else b"/" + path
        # What begins with two slashes is no path but names a host (RFC 3986 4.2); browsers read a backslash as a slash.
        return b"/." + path if path[1:2] in (b"/", b"\\") else path


def upstream_address(url: str) -> UpstreamAddress:
    """What `--upstream` says. Raises `InvalidOptionError` for anything but an http or https URL of a server.

    Credentials, a query or a fragment in it are refused: they would be lost.
    """
    try:
        found = urlsplit(url)
        host, port = found.hostname or "", found.port
        host.encode("ascii")
    except ValueError:
        found, host, port = urlsplit(""), "", None
    if found.scheme not in _PORTS or not host or port == 0:
        raise InvalidOptionError(f"the upstream is {_shown(url)}, expected a URL such as http://127.0.0.1:8000")
    if found.username is not None or found.password is not None:
        raise InvalidOptionError(
            "the URL of the upstream holds credentials, which are not passed on: clients send their own, in a header"
        )
    if found.query or found.fragment or re.search(r"[^!-~]|[\\\"<>^`{|}]", found.path):
        raise InvalidOptionError(
            f"the upstream is {_shown(url)}, expected a URL without query and fragment, its path percent-encoded"
        )
    return UpstreamAddress(found.scheme, host, port or _PORTS[found.scheme], found.path.rstrip("/").encode("ascii"))


def _shown(url: str) -> str:
    return "a URL with credentials" if "@" in url else repr(url)
