"""What the workers of a server serve in tests: the middleware around the scripted engine, made by a factory.

Where to write stands in the environment (`TOKCAP_DIR`, and the directory of the engine), as for any spawned worker.
"""

from __future__ import annotations

from typing import Any

from tests.fake_engine import from_environment
from tests.fake_script import HEADER
from tokcap.asgi import CaptureMiddleware

__all__ = ("make",)


def make() -> Any:
    """The app: scripts of an SGLang go through a middleware that takes the engine for one."""
    engine: Any = from_environment()
    captured = {name: CaptureMiddleware(engine, engine=name) for name in ("vllm", "sglang")}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        script = dict(scope.get("headers") or ()).get(HEADER.encode(), b"")
        await captured["sglang" if b'"engine": "sglang"' in script else "vllm"](scope, receive, send)

    return app
