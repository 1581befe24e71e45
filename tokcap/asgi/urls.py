"""URLs that say what is captured: `/ng-rollout/<id>[~<token>][/training-token-capture]/<rest>`.

The prefix is read where the server has it undecoded (`raw_path`, after `root_path`), so that a `%2F` in an id is
seen as what it is; one level of it is taken off, and query and percent-encoding of the rest stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit, urlunsplit

from ..errors import InvalidIdError, InvalidOptionError
from ..ids import check_rollout_id
from .capability import LONGEST_TOKEN, SEPARATOR, rollout_token
from .discreet import Discreet
from .interface import Scope

__all__ = ("CaptureUrl", "capture_url", "may_be_captured", "rollout_base_url")


_PREFIX = "/ng-rollout/"
_TRAINING = "/training-token-capture"
_LONGEST_SEGMENT = 3 * (200 + 1 + LONGEST_TOKEN)
"""Bytes of an id and a token, each character at most three bytes."""
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{22,{LONGEST_TOKEN}}}")


class CaptureUrl(Discreet, frozen=True):
    """What the prefix of a URL says."""

    _hidden: ClassVar[tuple[str, ...]] = ("prefix", "token")

    rollout_id: str
    training: bool
    """Whether token ids are captured; else only what evaluation capture records."""
    root: bytes
    """What stands before the prefix: the `root_path` of a mounted application, as it was sent."""
    prefix: bytes
    """As it was sent, from `/ng-rollout` to before the rest."""
    rest: bytes
    """What the application is to see; begins with a slash."""
    path_root: str = ""
    """What of `root_path` stands in the decoded path: older servers take it off there, and leave it in `raw_path`."""
    token: bytes | None = None
    """The token of the rollout that stands behind its id; None without."""

    def stripped(self, scope: Scope) -> dict[str, Any]:
        """The scope without the prefix; the given one is left as it is."""
        path = self.path_root + unquote(self.rest.decode("latin-1"))
        return {**scope, "path": path, "raw_path": self.root + self.rest}

    def location(self, value: bytes, hosts: Iterable[bytes]) -> bytes:
        """A `Location` of the application, leading through the prefix again.

        hosts: under which names the client knows this server; what leads elsewhere, or is relative to the URL of the
        request, stays as it is.
        """
        try:
            scheme, host, path, query, fragment = urlsplit(value.decode("latin-1"))
        except ValueError:
            return value
        if (host and host.encode("latin-1") not in hosts) or not path.startswith("/"):
            return value
        root, prefix = self.root.decode("latin-1"), self.prefix.decode("latin-1")
        inner = path[len(root) :] if _below(path, root) else path
        if _below(inner, prefix):
            return value
        before = root if _below(path, root) else ""
        return urlunsplit((scheme, host, before + prefix + inner, query, fragment)).encode("latin-1")


def may_be_captured(scope: Scope) -> bool:
    """Whether the path holds the word of the prefix at all: all that other requests are asked."""
    return "ng-rollout" in scope["path"]


def capture_url(scope: Scope) -> CaptureUrl | None:
    """What the URL of an HTTP or websocket scope says of capture; None without the prefix.

    Raises `InvalidIdError` for an id that can't be one, and for a prefix that is percent-encoded.
    """
    path: str = scope["path"]
    root_path = str(scope.get("root_path") or "").rstrip("/")
    path_root = root_path if _below(path, root_path) else ""
    inner = path[len(path_root) :]
    if not inner.startswith(_PREFIX):
        return None
    raw = bytes(scope.get("raw_path") or b"").partition(b"?")[0] or quote(path, errors="surrogateescape").encode()
    root = _raw_root(raw, root_path)
    rest = raw[len(root) :]
    if not rest.startswith(_PREFIX.encode()):
        raise InvalidIdError(f"the prefix {_PREFIX} of a capture URL must not be percent-encoded")
    segment, _, after = rest[len(_PREFIX) :].partition(b"/")
    rest = b"/" + after if rest[len(_PREFIX) + len(segment) :] else b""
    if len(segment) > _LONGEST_SEGMENT:
        raise InvalidIdError(
            f"the rollout id of a capture URL takes {len(segment)} bytes, and has 200 characters at most"
        )
    name, mark, token = unquote_to_bytes(segment).partition(SEPARATOR.encode())
    rollout_id = check_rollout_id(name.decode("utf-8", "replace"))
    prefix = _PREFIX.encode() + segment
    training = _below(rest, _TRAINING.encode())
    if training:
        prefix += _TRAINING.encode()
        rest = rest[len(_TRAINING) :]
    return CaptureUrl(rollout_id, training, root, prefix, rest or b"/", path_root, token if mark else None)


def rollout_base_url(
    base: str,
    rollout_id: str,
    training: bool = True,
    *,
    openai: bool | None = None,
    token: str | None = None,
    secret: str | None = None,
) -> str:
    """The base URL for the agent of one rollout.

    base: of the server, as `http://host:8000` or, for clients of OpenAI, `http://host:8000/v1`; then, or with
    `openai=True`, the prefix goes before `/v1`, which such clients expect at the end. Clients of Anthropic want the
    root. training: whether token ids are to be captured. token: of the rollout, for servers that have a
    `rollout_secret` (see `tokcap.asgi.capability`); secret: makes it here, for who knows the secret. A URL with a token
    is as good as a key: the agent gets no other one.

    Raises `InvalidIdError`, and `InvalidOptionError` for a base that is no http URL, has a query or a fragment, or is
    the one of a rollout already, and for a token or a secret that can be none.
    """
    check_rollout_id(rollout_id)
    if token is not None and secret is not None:
        raise InvalidOptionError("both a token and a secret are given: the secret makes the token")
    if secret is not None:
        token = rollout_token(secret, rollout_id)
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidOptionError("the rollout token is none: it has 22 characters or more, of A-Z a-z 0-9 _ -")
    try:
        scheme, host, path, query, fragment = urlsplit(base)
    except ValueError:
        scheme = host = path = query = fragment = ""
    if scheme not in ("http", "https") or not host or query or fragment:
        raise InvalidOptionError(f"base is {base!r}, expected a URL such as http://host:8000 or http://host:8000/v1")
    if _PREFIX in f"{path}/":
        raise InvalidOptionError(f"base is {base!r}, the base URL of a rollout already; give that of the server")
    path = path.rstrip("/")
    versioned = path.endswith("/v1")
    root = path.removesuffix("/v1") if versioned else path
    end = "/v1" if (versioned if openai is None else openai) else ""
    segment = rollout_id if token is None else f"{rollout_id}{SEPARATOR}{token}"
    return urlunsplit((scheme, host, f"{root}{_PREFIX}{segment}{_TRAINING if training else ''}{end}", "", ""))


def _below(path: Any, root: Any) -> bool:
    """Whether a path is `root` or continues it with a slash. Both str or both bytes."""
    return bool(path.startswith(root)) and path[len(root) : len(root) + 1] in ("", "/", b"", b"/")


def _raw_root(raw: bytes, root_path: str) -> bytes:
    """The bytes at the beginning of `raw` that are the root path; it may have been sent in any encoding."""
    if not root_path:
        return b""
    segments = root_path.count("/")
    parts = raw.split(b"/", segments + 1)
    root = b"/".join(parts[: segments + 1])
    return root if unquote(root.decode("latin-1")) == root_path else b""
