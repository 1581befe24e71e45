"""`tokcap serve`: one process, or a supervisor of several."""

from __future__ import annotations

import os
import resource

from .app import make_app
from .options import ServeOptions
from .server import FAILED_TO_START, announce, listening_socket, server_of
from .workers import supervise

__all__ = ("serve",)

_OPEN_FILES = 65536
"""That a process may have, as far as the system lets it."""


def serve(options: ServeOptions) -> int:
    """Serve until a signal; returns the exit status. Raises `TokcapError` for what keeps it from starting.

    Sets the environment variables of `options`.
    """
    os.environ.update(options.environment())
    _allow_open_files()
    if options.workers > 1:
        return supervise(options)
    app = make_app()
    with listening_socket(options) as listening:
        server = server_of(options, app)
        announce(options, listening)
        server.run([listening])
    return 0 if server.started else FAILED_TO_START


def _allow_open_files() -> None:
    """Every call takes two connections, and the usual limit of 1,024 open files ends at 500 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
