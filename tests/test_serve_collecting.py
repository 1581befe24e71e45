"""A server process seldom stops its calls to look for reference cycles, and finds those all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
import uvicorn

from tokcap.serve.server import ProxyServer


@pytest.fixture
def as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("as_before")
def test_a_server_that_has_started_looks_at_everything_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    async def startup(server: uvicorn.Server, sockets: object = None) -> None:
        started.append(sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    asyncio.run(ProxyServer(uvicorn.Config("app")).startup([]))
    assert started == [[]]
    assert gc.get_threshold() == (*before[:2], 100)
    assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
    ring = weakref.ref(Ring())
    gc.collect()
    assert ring() is None
