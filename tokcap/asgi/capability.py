"""Rollout tokens: who may write to a rollout, where its id alone is not to be enough.

Ids are no secrets: they are counted, logged, and told to every tenant. With a `rollout_secret` a server takes a call on
a capture URL only with the token of that rollout, which nobody can make without the secret:

    token = base64url(HMAC-SHA256(secret, rollout id)[:24])       32 characters, 192 bits

The agent shows it in its base URL, `/ng-rollout/<id>~<token>/...`, which every client carries, or in the header
`x-tokcap-rollout-token`, which stands in no access log. `~` can't be in an id, and no client encodes it (RFC 3986 2.3;
`%7E` is understood). A wrong one and none are answered alike, 403, before anything is read or written; neither form
reaches the application. A token is good for its rollout id as long as the secret is: make another secret for another
run, and accept both for as long as agents of the old one are at work.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence

from ..errors import ConfigError, InvalidOptionError
from ..ids import check_rollout_id
from .interface import Headers

__all__ = (
    "LONGEST_TOKEN",
    "SEPARATOR",
    "TOKEN_HEADER",
    "RolloutGuard",
    "WithoutTokens",
    "keep_out_of_logs",
    "known_secrets",
    "redacted",
    "rollout_token",
    "shown_tokens",
    "without_tokens",
)

logger = logging.getLogger("tokcap.asgi")

TOKEN_HEADER = b"x-tokcap-rollout-token"
SEPARATOR = "~"
"""Between the id and the token in a URL."""
LONGEST_TOKEN = 64
"""Characters; those made here have 32."""
_BYTES = 24
_LEAST_SECRET = 16
_LARGEST_FILE = 64 * 1024
_IN_PATH = re.compile(r"(ng-rollout(?:/|%2[Ff])[^/?\s'\"]*?(?:~|%7[Ee]))[^/?\s'\"]*")
_QUERY = re.compile(r"('query_string': b(?P<mark>['\"]))(?:(?!(?P=mark)).)+")
_ACCESS_LOGS = ("uvicorn.access", "uvicorn.asgi", "hypercorn.access", "gunicorn.access")


def rollout_token(secret: str, rollout_id: str) -> str:
    """The token of one rollout. Raises `InvalidIdError`, and `InvalidOptionError` for what can be no secret."""
    problem = _problem(secret)
    if problem:
        raise InvalidOptionError(f"the rollout secret {problem}")
    return _token(secret.encode(), check_rollout_id(rollout_id)).decode("ascii")


class RolloutGuard:
    """Tells whether a request may write to a rollout. secrets: all that are accepted; without any, everybody may."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = tuple(secret.encode() for secret in secrets)

    def __bool__(self) -> bool:
        return bool(self._secrets)

    def admits(self, rollout_id: str, shown: Sequence[bytes]) -> bool:
        """Whether tokens are shown, and each of them is that of this rollout. Compared in constant time."""
        if not self._secrets:
            return True
        expected = [_token(secret, rollout_id) for secret in self._secrets]
        right = bool(shown)
        for token in shown:
            found = False
            for each in expected:
                found |= hmac.compare_digest(each, token)
            right &= found
        return right


def shown_tokens(in_url: bytes | None, headers: Headers) -> list[bytes]:
    """The tokens of a request. in_url: the one in its URL; None without."""
    shown = [value.strip() for name, value in headers if name == TOKEN_HEADER]
    return shown if in_url is None else [in_url, *shown]


def without_tokens(headers: Headers) -> Headers:
    """The headers as an application may see them."""
    return [(name, value) for name, value in headers if name != TOKEN_HEADER]


def known_secrets(given: Iterable[str], path: str) -> tuple[str, ...]:
    """The secrets that are accepted: those given, then those of a file, one in a line. path: of the file; or empty.

    Raises `ConfigError`, which never shows one, for a file that can't be read or holds none, and for a secret that can
    be none.
    """
    secrets = [*given, *(_secrets_in(path) if path else ())]
    for secret in secrets:
        problem = _problem(secret)
        if problem:
            raise ConfigError(
                f"a rollout secret {problem}; `openssl rand -hex 32` makes one, and in TOKCAP_ROLLOUT_SECRET spaces "
                "separate several"
            )
    return tuple(secrets)


def _problem(secret: object) -> str:
    """Why this can be no secret; empty if it can."""
    if not isinstance(secret, str):
        return f"is of type {type(secret).__name__}, expected text"
    try:
        length = len(secret.encode())
    except UnicodeEncodeError:
        # Bytes of a variable that are no UTF-8. To write `?` for them would make a secret that can be guessed.
        return "is no text in UTF-8"
    if length < _LEAST_SECRET:
        return f"is shorter than {_LEAST_SECRET} bytes"
    if secret != secret.strip():
        # A file that was read whole ends in a line break, which is no part of what the server takes from it.
        return "begins or ends with white space"
    return ""


def _secrets_in(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            secrets = [line.strip() for line in file.read(_LARGEST_FILE).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"tokcap_serving.rollout_secret_file {path!r} can't be read: {why}") from None
    if not secrets:
        raise ConfigError(f"tokcap_serving.rollout_secret_file {path!r} holds no secret, expected one in each line")
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
        logger.warning("%r holds the rollout secret and is open to everybody: chmod 0600", path)
    return secrets


def _token(secret: bytes, rollout_id: str) -> bytes:
    digest = hmac.new(secret, rollout_id.encode("ascii"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest[:_BYTES])


# ---- logs


def redacted(text: str) -> str:
    """The text with `***` for every token in a capture URL."""
    return _IN_PATH.sub(r"\1***", text) if "ng-rollout" in text else text


class WithoutTokens(logging.Filter):
    """Takes rollout tokens out of what a server logs of its requests. queries: whether their queries go, too."""

    def __init__(self, *, queries: bool = False) -> None:
        super().__init__()
        self._queries = queries

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True: the record is changed, not dropped."""
        if isinstance(record.args, tuple) and record.name.endswith("access"):
            # uvicorn's formatter takes its arguments apart.
            record.args = tuple(self._kept(each) if isinstance(each, str) else each for each in record.args)
        else:  # also what another filter has put together already
            text = redacted(record.getMessage())
            record.msg, record.args = _QUERY.sub(r"\1...", text) if self._queries else text, ()
        return True

    def _kept(self, text: str) -> str:
        if self._queries and text.startswith("/"):
            path, mark, _ = text.partition("?")
            text = f"{path}?..." if mark else path
        return redacted(text)


def keep_out_of_logs() -> None:
    """From now on the access logs of the usual servers in this process show no rollout tokens."""
    for name in _ACCESS_LOGS:
        found = logging.getLogger(name)
        if not any(isinstance(each, WithoutTokens) for each in found.filters):
            found.addFilter(WithoutTokens())
