"""Training capture of one request: intent, engine, record, answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..errors import UntranslatableError
from ..protocol import TokenSink
from .answers import CapturedAnswer
from .asks import Asked, asked_of, gives_ids
from .call import Call
from .client import Client, decoded
from .editing import with_members
from .exchange import Exchange
from .known import idempotency_key, is_multimodal, retry_count
from .outlet import Outlet
from .refusals import RefusalError
from .request import Request, Serving, decoded_request
from .routes import CHAT_PATH
from .translation import Translation, translation_of
from .view import View

if TYPE_CHECKING:
    from ..evaluation import EvaluationRecorder

__all__ = ("CapturedRequest", "check_key")


class CapturedRequest:
    """One request whose answer is captured."""

    def __init__(self, request: Request, serving: Serving) -> None:
        self._request = request
        self._serving = serving
        self._settings = serving.settings

    async def capture(self, sink: TokenSink, recorder: EvaluationRecorder | None) -> None:
        """Intent, request, answer, record. Raises `RefusalError` before anything was handed to the application."""
        check_key(self._request)
        client = Client(self._request.receive)
        limit = self._settings.max_body_bytes
        body = await client.read(self._request.headers, limit)
        body = decoded(body, self._request.header(b"content-encoding"), limit)
        request = decoded_request(body)
        translation = self._translation(request)
        asked = self._asked(request, translation)
        call = self._call(client, sink, asked, request, translation)
        observation = self._request.observed_by(recorder, call.model_call_id, request, len(body), training=True)
        model = _model_of(request)
        view = View(asked, translation, self._serving.fingerprint_of(model), call.model_call_id)
        call_id = call.model_call_id if self._settings.call_id_header else ""
        outlet = Outlet(client, self._request.send, call_id, observation)
        answer = CapturedAnswer(call, outlet, view, choices=call.choices)
        client.body = self._inner_body(body, request, asked, translation)
        exchange = Exchange(call, client, outlet, answer, late=self._is_late)
        error: object = None
        try:
            await self._exchange(exchange, call, client, translation)
        except BaseException as raised:
            error = raised
            if observation is not None and isinstance(raised, RefusalError):
                observation.status(raised.status)
                error = raised.shaped(self._request.route.dialect)
            raise
        finally:
            gone = client.gone
            client.close()
            self._serving.learn_fingerprint(model, view.told_fingerprint)

            async def summarise() -> None:
                if exchange.ending is not None:
                    await asyncio.wait({exchange.ending})
                if observation is not None:
                    reason = error or answer.error
                    await observation.end(
                        answer=answer.seen, error=reason, outcome=call.outcome, detail=call.reason, client_gone=gone
                    )

            if exchange.ending is None or exchange.ending.done():
                await summarise()
            elif observation is not None:
                # Cancelled again and again: the summary waits for the outcome, and nobody for the summary.
                self._serving.in_background(summarise())

    @property
    def _is_late(self) -> bool:
        """Whether the intent waits until the application asks for the body: of a path with a trailing slash servers
        make a redirect, which is to leave no trace."""
        return self._request.path.endswith("/") and self._request.path != "/"

    async def _exchange(self, exchange: Exchange, call: Call, client: Client, translation: Translation | None) -> None:
        scope = self._inner_scope(client, translation)
        if self._request.server.keeps_metadata and self._request.route.listed:
            call.engine_state = scope.setdefault("state", {})
        client.listen()
        if not self._is_late:
            await call.admit()
        await exchange.run(self._serving.app, scope)

    def _translation(self, request: dict[str, Any] | None) -> Translation | None:
        if request is None or self._settings.dialects == "pass" or gives_ids(self._request.route.dialect):
            return None
        try:
            return translation_of(self._request.route.dialect, request, self._request.scope.get("app"))
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
            asked = asked_of(self._request.server, "chat", translation.chat_request)
        else:
            streams = True if self._request.path.rstrip("/").endswith("_stream") else None
            dialect = self._request.route.dialect
            asked = asked_of(self._request.server, dialect, request, streams=streams)
        if self._settings.sampling_overrides:
            asked.members.update(self._pinned({**request, **asked.members}))
        return asked

    def _pinned(self, request: dict[str, Any]) -> dict[str, Any]:
        """The members that make a request sample as `sampling_overrides` say."""
        overrides = self._settings.sampling_overrides
        within = {"vllm-generate": "sampling_params", "native-generate": "sampling_params"}.get(
            self._request.route.dialect, ""
        )
        if within and self._request.server.engine == "tgi":
            within = "parameters"
        if not within:
            return dict(overrides)
        given = request.get(within)
        if isinstance(given, list):  # one for each prompt
            return {within: [{**each, **overrides} if isinstance(each, dict) else overrides for each in given]}
        return {within: {**given, **overrides} if isinstance(given, dict) else dict(overrides)}

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
        server = self._request.server
        extra: dict[str, Any] = {}
        if server.engine:
            extra["engine"] = {"name": server.engine, "version": server.version}
        if is_multimodal(request):
            extra["multimodal"] = True
        if translation is not None:
            extra["translated_from"] = self._request.route.dialect
        effective = None if request is None else {**request, **self._pinned(request)}
        return Call(
            self._request.url,
            self._request.route,
            client,
            sink,
            asked,
            self._serving.policy.stamp(),
            self._serving.metrics,
            self._serving.prompts.of(self._request.url.rollout_id),
            {
                "request": effective,
                "path": self._request.path,
                "retry_count": retry_count(self._request.headers),
                "idempotency_key": idempotency_key(self._request.headers),
                "sampling": {**server.sampling_defaults, "logprobs_mode": server.logprobs_mode},
                "response_id": "" if translation is None else translation.response_id,
                "extra": extra,
            },
        )

    def _inner_scope(self, client: Client, translation: Translation | None) -> dict[str, Any]:
        """The scope of the application: the body is plain and of a known length, the answer is to be so, too."""
        dropped = (b"content-length", b"transfer-encoding", b"content-encoding", b"accept-encoding")
        headers = [header for header in self._request.headers if header[0] not in dropped]
        headers += [(b"content-length", str(len(client.body)).encode()), (b"accept-encoding", b"identity")]
        scope = {**self._request.scope, "headers": headers}
        extensions = scope.get("extensions")
        if extensions:  # what would pass by the messages of an answer
            scope["extensions"] = {key: extensions[key] for key in extensions if not key.startswith("http.response.")}
        if translation is not None:
            scope["path"] = self._request.url.path_root + CHAT_PATH
            scope["raw_path"] = self._request.url.root + CHAT_PATH.encode()
        return scope


def check_key(request: Request) -> None:
    """Raises `RefusalError` if keys are known and the request shows none of them."""
    if not request.server.admits(request.headers):
        # As vLLM says it itself.
        said = {"error": "Unauthorized"} if request.server.engine == "vllm" else None
        raise RefusalError(401, "the request shows no key of tokcap_serving.api_keys", body=said)


def _model_of(request: dict[str, Any] | None) -> str:
    model = None if request is None else request.get("model")
    return model if isinstance(model, str) else ""
