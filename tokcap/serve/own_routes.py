"""The routes of the proxy itself, under `/tokcap/`, so that the engine's own `/health` and `/metrics` stay reachable.

None of them shows anything of a rollout.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec

from ..asgi.interface import Scope, Send
from ..asgi.metrics import forget_dead_processes
from ..version import __version__
from .proxied import send_error
from .upstream import Upstream

__all__ = ("OwnRoutes", "metrics_text")

_PREFIX = "/tokcap"
_REACH_S = 5.0
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class OwnRoutes:
    """Answers GET and HEAD of `/tokcap/health` and `/tokcap/metrics`; everything else below `/tokcap` is 404."""

    def __init__(self, upstream: Upstream, engine: Callable[[], tuple[str, str]]) -> None:
        """engine: tells name and version of the engine, as far as they are known."""
        self._upstream = upstream
        self._engine = engine

    @staticmethod
    def takes(scope: Scope) -> bool:
        """Whether a request is for these routes."""
        path: str = scope["path"]
        return path == _PREFIX or path.startswith(_PREFIX + "/")

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Answer one HTTP request; its body is not read."""
        answers = {f"{_PREFIX}/health": self.health, f"{_PREFIX}/metrics": self.metrics}
        found = answers.get(scope["path"])
        if found is None:
            await send_error(send, 404, f"tokcap serve has no route {scope['path']!r}, only {', '.join(answers)}")
        elif scope["method"] not in ("GET", "HEAD"):
            await send_error(send, 405, "this route is only read", headers=[(b"allow", b"GET, HEAD")])
        else:
            body, kind = await found(scope)
            headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
            headers.append((b"cache-control", b"no-store"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def health(self, scope: Scope) -> tuple[bytes, str]:
        """That this process answers, and whether the engine accepts a connection within 5 s.

        Always 200, because the proxy is well even if the engine is not. Nothing is asked of the engine: whether it can
        answer says its own `/health`, through the proxy.
        """
        reachable = await self._upstream.accepts(_REACH_S)
        engine, version = self._engine()
        told = {
            "status": "ok",
            "upstream": "reachable" if reachable else "unreachable",
            "engine": engine or "unknown",
            "engine_version": version or "unknown",
            "version": __version__,
        }
        return msgspec.json.encode(told), "application/json"

    async def metrics(self, scope: Scope) -> tuple[bytes, str]:
        """The text that Prometheus reads: of this process, or summed over all workers if there are several."""
        accepted = b", ".join(value for name, value in scope["headers"] if name == b"accept")
        return await asyncio.to_thread(metrics_text, accepted.decode("latin-1"))


def metrics_text(accepted: str = "") -> tuple[bytes, str]:
    """The text and its content type. accepted: the `accept` header, which may ask for OpenMetrics.

    With `PROMETHEUS_MULTIPROC_DIR` the sum over the processes that write there; of those that died the gauges are
    left out. Empty without the library `prometheus-client`.
    """
    try:
        from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        return b"", _PLAIN
    registry, directory = REGISTRY, os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory:
        forget_dead_processes(directory)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    encode, kind = choose_encoder(accepted)
    return encode(registry), kind
