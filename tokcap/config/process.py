"""The sink and the source of this process, as its configuration and what was installed in it say.

What is built here belongs to the process: it is built once, handed out again and again, and closed by
`close_process_endpoints` when the process is done. A forked child builds its own.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..installed import installed_token_sink, installed_token_source, protocol_problem
from ..protocol import TokenSink, TokenSource
from .reading import token_id_capture_config
from .run import TokenIdCaptureConfig, logger

if TYPE_CHECKING:
    from ..store import FileStore

__all__ = ("close_process_endpoints", "process_sink", "process_source")


class _Process:
    """What this process has built and said."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.sinks: list[tuple[str, dict[str, Any], TokenSink]] = []
        self.stores: dict[str, FileStore] = {}
        self.said: set[str] = set()

    def say_once(self, message: str) -> None:
        with self.guard:
            if message not in self.said:
                self.said.add(message)
                logger.warning(message)


_process = _Process()


def _begin_anew() -> None:
    """In a forked child, where not even the lock is of use: a thread of the parent may hold it."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_begin_anew)


def _here() -> _Process:
    return _process


def process_sink(config: Any) -> TokenSink | None:
    """Where this process writes: the configured sink, else the installed one, else the file store.

    None if capture is off, or if there is none of them and `rebuild_response` is false, which is logged once. Takes
    what `token_id_capture_config` takes. Raises `ConfigError`, and what `FileStore` raises for its directory.
    """
    config = token_id_capture_config(config)
    if not config.enabled:
        return None
    if config.token_id_capture.sink is not None:
        return _configured(config)
    directory, installed = config.resolved_dir(), installed_token_sink()
    if installed is not None:
        if directory is not None:
            _here().say_once("a sink is installed in this process: nothing is written to the configured directory")
        return installed
    if directory is not None:
        return _store(str(directory), config)
    if config.token_id_capture.rebuild_response:
        raise ConfigError(
            "token_id_capture has neither a directory nor a sink, and the sink that was installed in this process is "
            "gone: install_token_sink(...) again, or set token_id_capture.dir or token_id_capture.sink"
        )
    _here().say_once("token_id_capture has neither a directory nor a sink: this process records nothing")
    return None


def process_source(config: Any) -> TokenSource | None:
    """Where this process reads finished rollouts: the installed source, else the installed sink, else the file store.

    The installed sink only if none is configured and it is a source as well; the file store only if there is no other
    sink. None if capture is off or `rebuild_response` is false. Takes what `token_id_capture_config` takes. Raises
    `ConfigError` if there is nothing to read from, and what `FileStore` raises for its directory.
    """
    config = token_id_capture_config(config)
    if not config.enabled or not config.token_id_capture.rebuild_response:
        return None
    source = installed_token_source()
    sink: Any = installed_token_sink()
    if source is not None:
        return source
    custom = config.token_id_capture.sink is not None
    if sink is not None and not custom and not protocol_problem(sink, TokenSource):
        both: TokenSource = sink
        return both
    directory = config.resolved_dir()
    # A custom sink writes elsewhere: from the directory there would come empty snapshots.
    if not custom and sink is None and directory is not None:
        return _store(str(directory), config)
    raise ConfigError(
        "token_id_capture.rebuild_response is true, but this process has nothing to read rollouts from: "
        "install_token_source(...) with the source that belongs to the sink, or set "
        "token_id_capture.rebuild_response: false if a framework reads them by itself"
    )


async def close_process_endpoints() -> None:
    """Close and forget what was built for this process; what a program has installed is its own to close.

    All are closed; the first error is raised. Afterwards `process_sink` and `process_source` build again.
    """
    here = _here()
    with here.guard:
        endpoints: list[Any] = [*(sink for _, _, sink in here.sinks), *here.stores.values()]
        here.sinks, here.stores = [], {}
    errors = []
    for endpoint in endpoints:
        try:
            await endpoint.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _configured(config: TokenIdCaptureConfig) -> TokenSink | None:
    block, here = config.token_id_capture, _here()
    with here.guard:
        for target, kwargs, sink in here.sinks:
            if target == block.sink and _equal(kwargs, block.sink_kwargs):
                return sink
        built = config.build_sink()
        if built is not None:
            here.sinks.append((str(block.sink), block.sink_kwargs, built))
        return built


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # values may be anything, also arrays
        return False


def _store(directory: str, config: TokenIdCaptureConfig) -> FileStore:
    """One for sink and source: that a put needs an intent changes nothing for a reader. The first one's bounds hold."""
    from ..store import FileStore

    directory, here = os.path.abspath(directory), _here()
    with here.guard:
        store = here.stores.get(directory)
        if store is None or store.closed:
            block = config.token_id_capture
            store = here.stores[directory] = FileStore(
                directory,
                require_intent=True,
                min_free_bytes=block.min_free_bytes,
                min_free_inodes=block.min_free_inodes,
                max_pending_bytes=block.max_pending_bytes,
            )
        return store
