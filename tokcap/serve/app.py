"""The whole proxy as one ASGI application: its own routes, capture, and the engine behind."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from ..asgi import CaptureMiddleware
from ..asgi.interface import Receive, Scope, Send
from ..asgi.settings import serving_settings
from ..asgi.urls import may_be_captured
from ..config import close_process_endpoints, config_from_environment
from ..errors import ConfigError, UpstreamError
from .address import upstream_address
from .headers import framing_problem
from .options import ServeOptions, options_from_environment
from .own_routes import OwnRoutes
from .patience import PatientReceive, SlowClientError, StartedSend
from .proxied import ProxiedApp, send_error
from .upstream import Upstream, detect

__all__ = ("ServedApp", "make_app")

logger = logging.getLogger("tokcap.serve")

_LAST_WORDS_S = 30.0
"""How long a request that was cancelled may take to write how it ended."""


def make_app() -> ServedApp:
    """The application that the environment describes (see `tokcap.serve.options`); each worker process makes its own.

    Raises `ConfigError` if nothing says where to capture, and what `CaptureMiddleware` raises.
    """
    return ServedApp(options_from_environment())


class ServedApp:
    """An ASGI application. Which engine it stands before is asked when it starts, or when it is first needed."""

    def __init__(self, options: ServeOptions) -> None:
        if config_from_environment() is None:
            raise ConfigError("nothing says where to capture: set TOKCAP_DIR (--dir) or TOKCAP_CONFIG (--config)")
        given = {"engine": options.engine, "engine_version": options.engine_version, "api_keys": options.api_keys}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value}
        settings = serving_settings(**chosen)  # with what the configuration says
        self._engine = (settings.engine, settings.engine_version)
        self._engine_known = bool(settings.engine)
        self._asking: asyncio.Task[None] | None = None
        self._running = 0
        """Requests that are being answered."""
        self._upstream = Upstream(
            upstream_address(options.upstream),
            timeout_s=options.timeout_s,
            api_key=settings.api_keys[0] if settings.api_keys else "",
        )
        self._client_timeout_s = options.client_timeout_s
        self._proxied = ProxiedApp(self._upstream)
        self._own = OwnRoutes(self._upstream, lambda: self._engine)
        # Also before the engine is known: what is wrong in the configuration is to be said at once.
        self._capture = CaptureMiddleware(self._proxied, None, **chosen)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what `ProxiedApp` raises."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        self._running += 1
        try:
            if self._client_timeout_s is None or scope["type"] != "http":
                await self._answer(scope, receive, send)
            else:
                await self._in_time(scope, PatientReceive(receive, self._client_timeout_s), StartedSend(send))
        finally:
            self._running -= 1

    async def _in_time(self, scope: Scope, receive: PatientReceive, send: StartedSend) -> None:
        try:
            await self._answer(scope, receive, send)
        except SlowClientError as error:
            if not send.started:  # else the server breaks off an answer that isn't whole
                close = [(b"connection", b"close"), (b"x-should-retry", b"false")]
                await send_error(send, 408, str(error), scope.get("raw_path") or b"", close)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = _origin_form(scope)
        if scope["type"] == "http":
            if OwnRoutes.takes(scope):
                await self._own(scope, send)
                return
            problem = framing_problem(scope["headers"])
            if problem is not None:
                await send_error(send, *problem, headers=[(b"connection", b"close")])
                return
            if not self._engine_known and may_be_captured(scope):
                try:
                    await self._ask_engine()
                except UpstreamError as error:
                    logger.debug("a captured call can't be answered yet: %s", error)
                    await send_error(send, 503 if error.sent else 502, str(error), scope.get("raw_path") or b"")
                    return
        await self._capture(scope, receive, send)

    async def _ask_engine(self) -> None:
        """Find out which engine it is. Raises `UpstreamError` as long as that can't be told.

        Whoever asks meanwhile shares the answer, so that a thousand calls don't wait one after another.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._find_out())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # heard, if nobody waits
        await asyncio.shield(self._asking)

    async def _find_out(self) -> None:
        name, version = self._engine = await detect(self._upstream)
        self._engine_known = True
        if name:
            logger.info("the engine at %s is %s %s", self._upstream.address, name, version or "(version unknown)")
            self._capture.engine_is(name, version)
        else:
            logger.warning(
                "the engine at %s doesn't say what it is: it is taken for a current vLLM, unless --engine says "
                "otherwise",
                self._upstream.address,
            )

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        if not self._engine_known:
            try:
                await self._ask_engine()
            except UpstreamError as error:
                logger.warning("%s; it is asked again when the first call is to be captured", error)
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        # Servers don't wait for requests that they have cancelled; what these still have to say needs the sink.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                while self._running:
                    await asyncio.sleep(0.01)
        self._upstream.close()
        try:
            await close_process_endpoints()
        except Exception as error:
            logger.exception("the sink could not be closed")
            await send({"type": "lifespan.shutdown.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})


def _origin_form(scope: Scope) -> Scope:
    """A request that names this server in its target (RFC 9112 3.2.2) is the same as one that doesn't."""
    raw = bytes(scope.get("raw_path") or b"")
    if not raw[:8].lower().startswith((b"http://", b"https://")):
        return scope
    _, _, rest = raw.partition(b"://")
    raw = b"/" + rest.partition(b"/")[2]
    path = "/" + scope["path"].partition("://")[2].partition("/")[2]
    return {**scope, "raw_path": raw, "path": path}
