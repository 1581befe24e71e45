"""`CaptureMiddleware`: what stands around a model server, and decides by the URL alone what is captured."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..capture.shapes import RecentPrompts
from ..capture.statements import written
from ..config import TokenIdCaptureConfig, config_from_environment, process_sink, token_id_capture_config
from ..errors import InvalidIdError, TokcapError
from ..protocol import TokenSink
from .capability import RolloutGuard, keep_out_of_logs, known_secrets, shown_tokens, without_tokens
from .captured import CapturedRequest, check_key
from .client import ClientGoneError
from .engines import Server, server_of
from .interface import Application, Message, Receive, Scope, Send
from .metrics import Metrics
from .observed import observe
from .policy import PolicyVersions
from .refusals import RefusalError, intent_refusal, send_refusal
from .request import Request, Serving, headers_of
from .routes import Routes
from .settings import ServingSettings, serving_settings
from .urls import CaptureUrl, capture_url, may_be_captured

if TYPE_CHECKING:
    from ..evaluation import EvaluationRecorder

__all__ = ("CaptureMiddleware",)

logger = logging.getLogger("tokcap.asgi")

_DEFAULT_PORTS = (80, 443, None)
_PATIENCE_S = 10.0
"""How long a shutdown waits for calls that are being given up, and for what is being written of them."""


class CaptureMiddleware:
    """An ASGI application around another one. Requests without the prefix pass untouched.

    app: the application. config: the capture settings of the run, as `token_id_capture_config` takes them; None: what
    `TOKCAP_CONFIG` or `TOKCAP_DIR` name. sink: where this process writes, in place of what the settings say. settings:
    those of `ServingSettings`, by name; they go before the `tokcap_serving` block.

    For vLLM: `vllm serve ... --middleware tokcap.asgi.CaptureMiddleware`, with `TOKCAP_DIR` or `TOKCAP_CONFIG` set.
    Raises `ConfigError` when it is made if capture is on and has nowhere to write, and what `FileStore` raises for its
    directory, so that a server with a wrong configuration does not start.
    """

    def __init__(self, app: Application, config: Any = None, *, sink: TokenSink | None = None, **settings: Any) -> None:
        self.app = app
        of_serving = serving_settings(config, **settings)
        prompts = RecentPrompts(of_serving.prompt_memory_bytes)
        self._serving = Serving(app, of_serving, PolicyVersions(of_serving), Metrics(), prompts)
        self._config = _capture_config(config)
        self._sink_given = None if _is_off(config) else sink
        self._routes = Routes(of_serving.routes)
        self._guard = _guard(of_serving)
        if self._guard:
            keep_out_of_logs()
        self._servers: dict[int, Server] = {}
        self._open: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()
        self._of_process: tuple[int, TokenSink | None, EvaluationRecorder | None] | None = None
        sink_of_all, recorder = self._endpoints()
        if sink_of_all is None and recorder is None:
            logger.warning("%s: calls with a capture URL are only stripped of it", self._why_nothing())
        elif self._config.observability_enabled and recorder is None:
            logger.warning("observability_enabled has no effect without model_call_capture_dir: no call is summarised")

    def _why_nothing(self) -> str:
        """Why this process captures nothing, and what to do."""
        if self._config.token_id_capture.dir and not self._config.enabled:
            return "nothing is captured, because token_id_capture.enabled is not true (token_id_capture.dir is set)"
        if self._config.observability_enabled:
            return "nothing is captured: observability_enabled needs model_call_capture_dir"
        return (
            "nothing is captured, because this process has nowhere to write: set TOKCAP_DIR or TOKCAP_CONFIG, or give "
            'CaptureMiddleware a config such as {"token_id_capture": {"enabled": True, "dir": "/var/lib/tokcap"}}'
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._after_open_calls(send))
        elif may_be_captured(scope):
            await self._prefixed(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def engine_is(self, engine: str, version: str) -> None:
        """What a proxy has found out. Holds for calls from now on; all other settings stay as they were read."""
        settings = self._serving.settings
        self._serving.settings = msgspec.structs.replace(settings, engine=engine, engine_version=version)
        self._servers.clear()

    def _after_open_calls(self, send: Send) -> Send:
        """`send` of the lifespan: a server that gives up calls when it stops closes its loop as soon as the shutdown is
        complete, and what is still being written of these calls would be cut off."""

        async def sent(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                if self._open:
                    await asyncio.wait(set(self._open), timeout=_PATIENCE_S)
                await written(_PATIENCE_S)
            await send(message)

        return sent

    async def _prefixed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            url = capture_url(scope)
        except InvalidIdError as error:
            url, problem = None, str(error)
        else:
            problem = ""
            if url is not None and not self._guard and shown_tokens(url.token, headers_of(scope)):
                # To pass it would look as if it was checked.
                problem = "the request has a rollout token, and this server knows no tokcap_serving.rollout_secret"
                url = None
                keep_out_of_logs()
            elif url is None:
                await self.app(scope, receive, send)
                return
        if scope["type"] == "websocket":
            await receive()  # the connect message
            await send({"type": "websocket.close", "code": 1008, "reason": "websockets are not captured"})
        elif url is None:
            await send_refusal(RefusalError(400, problem), "other", send)
        else:
            await self._request(url, scope, receive, send)

    async def _request(self, url: CaptureUrl, scope: Scope, receive: Receive, send: Send) -> None:
        inner = url.stripped(scope)
        path = inner["path"][len(url.path_root) :]
        server = self._server(scope.get("app"))
        route = self._routes.find(str(scope["method"]), path, server.engine)
        headers = headers_of(scope)
        if not self._guard.admits(url.rollout_id, shown_tokens(url.token, headers)):
            self._say_once("a capture URL was asked without the token of its rollout, and answered 403")
            await send_refusal(RefusalError(403, "rollout token missing or wrong"), route.dialect, send)
            return
        kept = without_tokens(headers)
        if len(kept) < len(headers):
            inner["headers"] = headers = kept
        send = _through_prefix(url, scope, send)
        if not route.may_generate:
            await self.app(inner, receive, send)
            return
        request = Request(url, route, server, inner, path, headers, receive, send)
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
        try:
            await self._generating(request)
        except ClientGoneError:
            pass
        finally:
            if task is not None:
                self._open.discard(task)

    async def _generating(self, request: Request) -> None:
        recorder: EvaluationRecorder | None = None
        try:
            sink, recorder = self._endpoints_now(request.url.rollout_id)
            if request.url.training and sink is not None:
                await CapturedRequest(request, self._serving).capture(sink, recorder)
            elif recorder is not None:
                check_key(request)
                await observe(request, self.app, recorder, self._serving.settings.max_body_bytes)
            else:
                if request.url.training:
                    self._say_once(self._why_nothing())
                await self.app(request.scope, request.receive, request.send)
        except RefusalError as refusal:
            if refusal.status == 401:
                self._say_once("a capture URL was asked without a key that this server accepts, and answered 401")
            elif refusal.status == 503:
                self._say_once("a call was answered 503 and not begun", f": {refusal.message}")
            await send_refusal(refusal, request.route.dialect, request.send)
            if not request.summarised and refusal.status != 401:  # strangers leave no trace
                await request.refused(recorder, refusal)

    def _say_once(self, message: str, detail: str = "") -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s%s; said once", message, detail)

    def _endpoints_now(self, rollout_id: str) -> tuple[TokenSink | None, EvaluationRecorder | None]:
        """Raises `RefusalError` if the store can't be opened any more."""
        try:
            return self._endpoints()
        except TokcapError as error:
            raise intent_refusal(error, rollout_id) from error

    def _endpoints(self) -> tuple[TokenSink | None, EvaluationRecorder | None]:
        """The sink and the recorder of this process; a forked child has its own."""
        known = self._of_process
        stale = known is not None and self._sink_given is None and getattr(known[1], "closed", False) is True
        if known is None or known[0] != os.getpid() or stale:
            sink = self._sink_given or process_sink(self._config)
            recorder = known[2] if known is not None and stale else None
            if recorder is None and self._config.evaluation_enabled:
                from ..evaluation import EvaluationRecorder

                recorder = EvaluationRecorder(str(self._config.model_call_capture_dir))
            known = self._of_process = os.getpid(), sink, recorder
        return known[1], known[2]

    def _server(self, application: Any) -> Server:
        found = self._servers.get(id(application))
        if found is None:
            found = server_of(application, self._serving.settings)
            if found.complete:  # else its state may not be there yet
                self._servers[id(application)] = found
        return found


def _capture_config(config: Any) -> TokenIdCaptureConfig:
    return token_id_capture_config(config_from_environment() if config is None else config)


def _guard(settings: ServingSettings) -> RolloutGuard:
    given = settings.rollout_secret or ()
    return RolloutGuard(
        known_secrets((given,) if isinstance(given, str) else given, settings.rollout_secret_file or "")
    )


def _is_off(config: Any) -> bool:
    """Whether a configuration that was given says that training capture is off."""
    if isinstance(config, Mapping):
        config = token_id_capture_config(config) if "token_id_capture" in config or "env" in config else None
    return isinstance(config, TokenIdCaptureConfig) and not config.enabled


def _through_prefix(url: CaptureUrl, scope: Scope, send: Send) -> Send:
    """`send`, with redirects of the application leading through the prefix again."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start" and 300 <= message["status"] < 400:
            hosts = [bytes(value) for name, value in scope.get("headers") or () if bytes(name).lower() == b"host"]
            server = scope.get("server")
            if server:
                hosts.append(f"{server[0]}:{server[1]}".encode())
                if server[1] in _DEFAULT_PORTS:  # else another server of this host, which is to see no token
                    hosts.append(str(server[0]).encode())
            message = {
                **message,
                "headers": [
                    (name, url.location(bytes(value), hosts) if bytes(name).lower() == b"location" else value)
                    for name, value in message.get("headers") or ()
                ],
            }
        await send(message)

    return sent
