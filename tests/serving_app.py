"""A small ASGI application, and the program that launches it in spawned workers."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from typing import Any

from tests.memory_store import MemoryState, MemoryStore
from tokcap.config import config_from_environment, process_sink
from tokcap.installed import install_token_sink, install_token_source, installed_token_sink, installed_token_source

__all__ = ("CountingSink", "app", "launch", "report")


class CountingSink(MemoryStore):
    """Knows which process made it, and how many were made there."""

    made = 0

    def __init__(self, label: str) -> None:
        super().__init__(MemoryState())
        type(self).made += 1
        self.label, self.made_in = label, os.getpid()


def report() -> dict[str, Any]:
    """What this process sees."""
    config = config_from_environment()
    sinks = [] if config is None else [process_sink(config), process_sink(config)]
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "installed": installed_token_sink() is not None or installed_token_source() is not None,
        "sinks": [[sink.label, sink.made_in] for sink in sinks if isinstance(sink, CountingSink)],
        "made": CountingSink.made,
    }


def report_to(channel: Connection) -> None:
    """For a process that is spawned."""
    channel.send(report())


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers every request with `report()`."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(report()).encode()})


def launch(port: int) -> None:
    """Install a sink and a source in this process, then serve with two workers."""
    import uvicorn

    store = MemoryStore(MemoryState())
    install_token_sink(store)
    install_token_source(store)
    assert report()["installed"]
    uvicorn.run("tests.serving_app:app", host="127.0.0.1", port=port, workers=2, log_level="warning")
