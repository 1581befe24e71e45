"""`CaptureMiddleware`: what stands around a model server, and decides by the URL alone what is captured."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ..capture.request import requested_choices
from ..capture.shapes import decode_json
from ..config import TokenIdCaptureConfig, config_from_environment, process_sink, token_id_capture_config
from ..errors import InvalidIdError, UntranslatableError
from ..protocol import TokenSink
from .answers import CapturedAnswer
from .asks import Asked, asked_of, gives_ids
from .call import Call
from .client import Client, ClientGoneError, decoded
from .editing import with_members
from .engines import Server, server_of
from .known import idempotency_key, is_multimodal, retry_count
from .metrics import Metrics
from .observed import ObservedAnswer
from .policy import PolicyVersions
from .refusals import RefusalError, send_refusal
from .routes import CHAT_PATH, Route, Routes
from .settings import serving_settings
from .translation import Translation, translation_of
from .urls import CaptureUrl, capture_url, may_be_captured

if TYPE_CHECKING:
    from ..evaluation import CallObservation, EvaluationRecorder

__all__ = ("CaptureMiddleware",)

logger = logging.getLogger("tokcap.asgi")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


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
        self._settings = serving_settings(config, **settings)
        self._config = _capture_config(config)
        self._sink_given = None if _is_off(config) else sink
        self._routes = Routes(self._settings.routes)
        self._policy = PolicyVersions(self._settings)
        self._metrics = Metrics()
        self._servers: dict[int, Server] = {}
        self._fingerprint: Any = msgspec.UNSET
        self._of_process: tuple[int, TokenSink | None, EvaluationRecorder | None] | None = None
        self._endpoints()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and may_be_captured(scope):
            await self._prefixed(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _prefixed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            url = capture_url(scope)
        except InvalidIdError as error:
            url, problem = None, str(error)
        else:
            problem = ""
            if url is None:
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
        sink, recorder = self._endpoints()
        sink = sink if url.training else None
        server = self._server(scope.get("app"))
        route = self._routes.find(str(scope["method"]), path, server.engine)
        send = _through_prefix(url, scope, send)
        stranger = sink is None and not server.admits(_headers_of(inner))
        if not route.may_generate or (sink is None and recorder is None) or stranger:
            await self.app(inner, receive, send)
            return
        request = _Request(self, url, route, server, inner, path, receive, send)
        try:
            if sink is None:
                await request.observe(recorder)
            else:
                await request.capture(sink, recorder)
        except RefusalError as refusal:
            await send_refusal(refusal, route.dialect, send)
        except ClientGoneError:
            pass

    def _endpoints(self) -> tuple[TokenSink | None, EvaluationRecorder | None]:
        """The sink and the recorder of this process; a forked child has its own."""
        known = self._of_process
        if known is None or known[0] != os.getpid():
            sink = self._sink_given or process_sink(self._config)
            recorder = None
            if self._config.evaluation_enabled:
                from ..evaluation import EvaluationRecorder

                recorder = EvaluationRecorder(str(self._config.model_call_capture_dir))
            known = self._of_process = os.getpid(), sink, recorder
        return known[1], known[2]

    def _server(self, application: Any) -> Server:
        found = self._servers.get(id(application))
        if found is None:
            found = server_of(application, self._settings)
            if found.engine:  # else its state may not be there yet
                self._servers[id(application)] = found
        return found


class _Request:
    """One request that may generate, from its body to its answer."""

    def __init__(
        self,
        middleware: CaptureMiddleware,
        url: CaptureUrl,
        route: Route,
        server: Server,
        scope: dict[str, Any],
        path: str,
        receive: Receive,
        send: Send,
    ) -> None:
        self._middleware = middleware
        self._settings = middleware._settings
        self._url = url
        self._route = route
        self._server = server
        self._scope = scope
        self._path = path
        self._receive = receive
        self._send = send
        self._headers = _headers_of(scope)

    # ---- training capture

    async def capture(self, sink: TokenSink, recorder: EvaluationRecorder | None) -> None:
        """Intent, request, answer, record. Raises `RefusalError` before anything was handed to the application."""
        if not self._server.admits(self._headers):
            # As vLLM says it itself.
            said = {"error": "Unauthorized"} if self._server.engine == "vllm" else None
            raise RefusalError(401, "the request shows no key that this server accepts", body=said)
        client = Client(self._receive)
        limit = self._settings.max_body_bytes
        body = await client.read(self._headers, limit)
        body = decoded(body, self._header(b"content-encoding"), limit)
        request = _decoded_request(body)
        translation = self._translation(request)
        asked = self._asked(request, translation)
        call = self._call(client, sink, asked, request, translation)
        client.body = self._inner_body(body, request, asked, translation)
        observation = self._observation(recorder, call.model_call_id, request, len(body), training=True)
        answer = CapturedAnswer(
            call,
            self._send,
            choices=call.choices,
            call_id_header=self._settings.call_id_header,
            translation=translation,
            observation=observation,
            fingerprint=self._middleware._fingerprint,
        )
        # Of a path with a trailing slash servers make a redirect, which is to leave no trace: its intent waits until
        # the application asks for the body.
        late = self._path.endswith("/") and self._path != "/"
        client.listen()
        error: BaseException | None = None
        try:
            if not late:
                await call.admit()
            scope = self._inner_scope(client, translation)
            if self._server.keeps_metadata:
                call.engine_state = scope.setdefault("state", {})
            await _Exchange(call, client, answer, late).run(self._middleware.app, scope)
        except BaseException as raised:
            error = raised
            if observation is not None and isinstance(raised, RefusalError):
                observation.status(raised.status)
            raise
        finally:
            gone = client.gone
            await client.close()
            self._middleware._fingerprint = answer.fingerprint
            if observation is not None:
                await observation.end(
                    answer=answer.seen,
                    error=error or answer.error,
                    outcome=call.outcome,
                    detail=call.reason,
                    client_gone=gone,
                )

    def _translation(self, request: dict[str, Any] | None) -> Translation | None:
        if request is None or self._settings.dialects == "pass" or gives_ids(self._server, self._route.dialect):
            return None
        try:
            return translation_of(self._route.dialect, request)
        except UntranslatableError as error:
            if self._settings.untranslatable == "pass":
                return None
            raise RefusalError(
                422,
                f"this engine gives no token ids for this dialect, and the request has no faithful chat form: {error}; "
                "ask for a chat completion, or set tokcap_serving.untranslatable to pass, which loses the call",
            ) from error

    def _asked(self, request: dict[str, Any] | None, translation: Translation | None) -> Asked:
        if request is None:
            return Asked({}, [], [], set())
        if translation is not None:
            asked = asked_of(self._server, "chat", translation.chat_request)
        else:
            known = self._middleware._fingerprint is not msgspec.UNSET
            streams = True if self._path.rstrip("/").endswith("_stream") else None
            dialect = self._route.dialect
            asked = asked_of(self._server, dialect, request, streams=streams, fingerprint_known=known)
        for key, value in self._settings.sampling_overrides.items():
            asked.members[key] = value
        return asked

    def _inner_body(
        self, body: bytes, request: dict[str, Any] | None, asked: Asked, translation: Translation | None
    ) -> bytes:
        if translation is not None:
            chat = translation.chat_request
            return with_members(b"", chat, asked.members) if asked.members else with_members(b"", {}, chat)
        return body if request is None else with_members(body, request, asked.members)

    def _call(
        self,
        client: Client,
        sink: TokenSink,
        asked: Asked,
        request: dict[str, Any] | None,
        translation: Translation | None,
    ) -> Call:
        server = self._server
        extra: dict[str, Any] = {}
        if server.engine:
            extra["engine"] = {"name": server.engine, "version": server.version}
        if is_multimodal(request):
            extra["multimodal"] = True
        if translation is not None:
            extra["translated_from"] = self._route.dialect
        effective = None if request is None else {**request, **self._settings.sampling_overrides}
        return Call(
            self._url,
            self._route,
            client,
            sink,
            asked,
            self._middleware._policy.stamp(),
            self._middleware._metrics,
            {
                "request": effective,
                "path": self._path,
                "retry_count": retry_count(self._headers),
                "idempotency_key": idempotency_key(self._headers),
                "sampling": {**server.sampling_defaults, "logprobs_mode": server.logprobs_mode},
                "response_id": "" if translation is None else translation.response_id,
                "extra": extra,
            },
        )

    def _inner_scope(self, client: Client, translation: Translation | None) -> dict[str, Any]:
        """The scope of the application: the body is plain and of a known length, the answer is to be so, too."""
        dropped = (b"content-length", b"transfer-encoding", b"content-encoding", b"accept-encoding")
        headers = [header for header in self._headers if header[0] not in dropped]
        headers += [(b"content-length", str(len(client.body)).encode()), (b"accept-encoding", b"identity")]
        scope = {**self._scope, "headers": headers}
        extensions = scope.get("extensions")
        if extensions:  # what would pass by the messages of an answer
            scope["extensions"] = {key: extensions[key] for key in extensions if not key.startswith("http.response.")}
        if translation is not None:
            scope["path"] = self._url.path_root + CHAT_PATH
            scope["raw_path"] = self._url.root + CHAT_PATH.encode()
        return scope

    # ---- evaluation capture alone

    async def observe(self, recorder: EvaluationRecorder | None) -> None:
        """Nothing is changed, held or refused; what passes is summarised."""
        from uuid import uuid4

        client = Client(self._receive)
        try:
            body = await client.read(self._headers, self._settings.max_body_bytes)
            request = _decoded_request(decoded(body, self._header(b"content-encoding"), self._settings.max_body_bytes))
        except RefusalError:
            # Too large, or of an encoding that only the application knows: it is asked all the same.
            await self._middleware.app(self._scope, client.replay, self._send)
            return
        observation = self._observation(recorder, uuid4().hex, request, len(body), training=False)
        assert observation is not None
        answer = ObservedAnswer(self._send, observation, choices=requested_choices(request))
        client.listen()
        error: BaseException | None = None
        try:
            await self._middleware.app(self._scope, client.receive, answer.send)
        except BaseException as raised:
            error = raised
            raise
        finally:
            gone = client.gone
            await client.close()
            await observation.end(answer=answer.seen(), error=error or answer.error, client_gone=gone)

    def _observation(
        self,
        recorder: EvaluationRecorder | None,
        model_call_id: str,
        request: dict[str, Any] | None,
        size: int,
        *,
        training: bool,
    ) -> CallObservation | None:
        if recorder is None:
            return None
        return recorder.begin(
            self._url.rollout_id,
            model_call_id,
            method=str(self._scope["method"]),
            path=self._path,
            dialect=self._route.dialect,
            request=request,
            request_bytes=size,
            training=training,
            retry_count=retry_count(self._headers),
            engine=self._server.engine,
        )

    def _header(self, name: bytes) -> bytes:
        return next((value for key, value in self._headers if key == name), b"")


class _Exchange:
    """The application answering one captured call."""

    def __init__(self, call: Call, client: Client, answer: CapturedAnswer, late: bool) -> None:
        self._call = call
        self._client = client
        self._answer = answer
        self._late = late
        self._refusal: RefusalError | None = None

    async def run(self, app: Application, scope: dict[str, Any]) -> None:
        """Ask the application. Raises what it raises, and `RefusalError` if a late intent could not be written."""
        error: BaseException | None = None
        try:
            await app(scope, self._receive, self._reply)
        except BaseException as raised:
            error = raised
        if self._refusal is not None:
            raise self._refusal
        try:
            if isinstance(error, asyncio.CancelledError):
                with suppress(asyncio.CancelledError):  # again, by a cancel scope; the writes go on
                    await self._answer.abandon()
            else:
                await self._close(error)
        finally:
            await self._call.end(error)
        if error is not None:
            raise error

    async def _close(self, error: BaseException | None) -> None:
        if error is not None:
            await self._call.failed(error)
        await self._answer.finish()
        if error is None:
            await self._call.unanswered()
        if self._client.gone:
            await self._call.delivered("partly" if self._answer.partly_sent else "no")
        elif self._answer.ended:
            await self._call.delivered("full")

    async def _receive(self) -> dict[str, Any]:
        if self._late and not self._client.body_taken:
            try:
                await self._call.admit()
            except RefusalError as refusal:
                self._refusal = refusal
                return {"type": "http.disconnect"}
        return await self._client.receive()

    async def _reply(self, message: dict[str, Any]) -> None:
        if self._refusal is None:
            await self._answer.send(message)


def _capture_config(config: Any) -> TokenIdCaptureConfig:
    return token_id_capture_config(config_from_environment() if config is None else config)


def _is_off(config: Any) -> bool:
    """Whether a configuration that was given says that training capture is off."""
    if isinstance(config, Mapping):
        config = token_id_capture_config(config) if "token_id_capture" in config or "env" in config else None
    return isinstance(config, TokenIdCaptureConfig) and not config.enabled


def _headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(bytes(name).lower(), bytes(value)) for name, value in scope.get("headers") or ()]


def _decoded_request(body: bytes) -> dict[str, Any] | None:
    """The JSON object of a body; None for anything else, which the application will refuse in its own words."""
    try:
        request = decode_json(body)
    except ValueError:
        return None
    return request if isinstance(request, dict) else None


def _through_prefix(url: CaptureUrl, scope: Scope, send: Send) -> Send:
    """`send`, with redirects of the application leading through the prefix again."""

    async def sent(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and 300 <= message["status"] < 400:
            hosts = [bytes(value) for name, value in scope.get("headers") or () if bytes(name).lower() == b"host"]
            server = scope.get("server")
            if server:
                hosts += [f"{server[0]}:{server[1]}".encode(), str(server[0]).encode()]
            message = {
                **message,
                "headers": [
                    (name, url.location(bytes(value), hosts) if bytes(name).lower() == b"location" else value)
                    for name, value in message.get("headers") or ()
                ],
            }
        await send(message)

    return sent
