"""One server process of the proxy, and how it stops.

| signal | what happens |
|---|---|
| the first SIGTERM or SIGINT | no new calls; those that are open are answered and stored, and it ends with 0 |
| the graceful time is over | open calls are cancelled, and stored as aborted with the tokens seen; it ends with 0 |
| the second | it ends at once; the intents of open calls stay, and say that they happened |

At once means without cancelling anything: a cancelled call would be stored as one that the client broke off. While the
first signal has shown no effect yet, others are the same one: `timeout`, `uv run` and their like signal a process, and
then the group that it is in.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import socket
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.config

from ..asgi.capability import WithoutTokens
from ..errors import TokcapError
from .address import upstream_address
from .app import ServedApp
from .collecting import collect_rarely
from .heads import bounded_protocol
from .options import ServeOptions
from .patience import patient_protocol

__all__ = (
    "FAILED_TO_START",
    "SAME_SIGNAL_S",
    "ProxyServer",
    "announce",
    "listening_socket",
    "server_of",
)

logger = logging.getLogger("tokcap.serve")

FAILED_TO_START = 3
"""The status that uvicorn uses, too."""
SAME_SIGNAL_S = 0.1
"""How long after the first signal its effect begins."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: an evaluation starts a thousand agents in one moment."""
_KEEP_ALIVE_S = 75
"""How long a connection of a client may be idle. Longer than the usual clients keep it: one that is closed while a
request is sent on it costs a call."""


class ProxyServer(uvicorn.Server):
    """A uvicorn server that stops as this module says. alone: whether it counts signals, and the second ends it."""

    def __init__(self, config: uvicorn.Config, *, alone: bool = True) -> None:
        super().__init__(config)
        self._alone = alone
        self._stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of both signals; uvicorn's own would raise a handled one again at the end."""
        if self._stopping and self._alone:
            os.write(2, b"tokcap serve: stopped at once; calls that were open stay open\n")
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        collect_rarely()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new calls, and wait for those that are open."""
        if self._alone:
            await asyncio.sleep(SAME_SIGNAL_S)
        self._stopping = True
        await super().shutdown(sockets)


def server_of(options: ServeOptions, app: ServedApp, *, alone: bool = True) -> ProxyServer:
    """The server of one process; to be run with a listening socket."""
    config = uvicorn.Config(
        app,
        http=patient_protocol(options.client_timeout_s, bounded_protocol()),
        interface="asgi3",
        lifespan="on",
        ws="none",
        # What the engine says of itself and of the time is passed on, and who the client is must not be what it says.
        server_header=False,
        date_header=False,
        proxy_headers=False,
        access_log=options.log_level in ("debug", "trace"),
        log_level=options.log_level,
        log_config=_logging(options.log_level),
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=options.graceful_timeout_s,  # type: ignore[arg-type]  # any number of seconds
    )
    return ProxyServer(config, alone=alone)


def listening_socket(options: ServeOptions) -> socket.socket:
    """Bound to the host and port of `options`. Raises `TokcapError` with the reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # With its protocol, without which asyncio leaves it to the kernel to gather small pieces for 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise TokcapError(f"can't listen on {options.host} port {options.port}: {error.strerror or error}") from error


def announce(options: ServeOptions, listening: socket.socket) -> None:
    """Say where the proxy listens."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("tokcap serves http://%s:%d, for %s", shown, port, upstream_address(options.upstream))


def _logging(level: str) -> dict[str, Any]:
    """uvicorn's configuration, and the same for what tokcap logs."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    name = "DEBUG" if level == "trace" else level.upper()
    # What a request shows in its URL: rollout tokens, and keys in a query.
    config["filters"] = {"without_tokens": {"()": WithoutTokens, "queries": True}}
    for logger_name in ("uvicorn.access", "uvicorn.asgi"):
        config["loggers"].setdefault(logger_name, {})["filters"] = ["without_tokens"]
    config["loggers"]["tokcap"] = {"handlers": ["default"], "level": name, "propagate": False}
    return config
