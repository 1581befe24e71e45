"""The command `tokcap`. Each sub-command imports what it needs when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .errors import TokcapError
from .version import __version__

__all__ = ("main",)

_USAGE_ERROR = 2
_SERVE_NEEDS = ("uvicorn", "h11", "prometheus_client")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status. arguments: those of the process by default."""
    parser = argparse.ArgumentParser(prog="tokcap", description="Exact token ids and log-probs of RL rollouts.")
    parser.add_argument("--version", action="version", version=f"tokcap {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    _add_serve(commands)
    given = parser.parse_args(arguments)
    try:
        return _serve(given)
    except TokcapError as error:
        sys.stderr.write(f"tokcap {given.command}: {error}\n")
        return _USAGE_ERROR


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="a reverse proxy that captures, for engines that take no Python middleware",
        description=(
            "Passes every request on to an engine, and captures the model calls below /ng-rollout/<rollout id>/. The "
            "first SIGTERM or SIGINT lets open calls finish; a second one stops at once and leaves their intents."
        ),
    )
    serve.add_argument("--upstream", required=True, metavar="URL", help="the engine, as in http://127.0.0.1:30000")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=8900, help="port to listen on, 0 for a free one (%(default)s)")
    serve.add_argument("--dir", metavar="DIRECTORY", help="the store; sets TOKCAP_DIR")
    serve.add_argument("--config", metavar="FILE", help="the configuration of the run; sets TOKCAP_CONFIG")
    serve.add_argument("--workers", type=int, default=1, metavar="N", help="processes that serve (%(default)s)")
    serve.add_argument("--engine", default="", metavar="NAME", help="vllm, sglang ...; by default the engine is asked")
    serve.add_argument("--engine-version", default="", metavar="VERSION", help="of the engine, with --engine")
    serve.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that the engine expects, may be repeated: captured requests without one leave no trace; better "
        "in TOKCAP_API_KEY, which other users of the machine can't see",
    )
    serve.add_argument("--timeout", type=float, metavar="SECONDS", help="that an answer may pause (for ever)")
    serve.add_argument(
        "--client-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="that a client may take over the head and the body of its request, plus one for each KiB of the body; "
        "0: for ever (%(default)g)",
    )
    serve.add_argument(
        "--rollout-secret-file",
        metavar="FILE",
        help="secrets, one in a line, of which rollout tokens are made: captured requests need the token of their "
        "rollout; sets TOKCAP_ROLLOUT_SECRET_FILE",
    )
    serve.add_argument(
        "--graceful-timeout", type=float, metavar="SECONDS", help="that open calls may take to finish (for ever)"
    )
    serve.add_argument("--log-level", default="info", metavar="LEVEL", help="critical to debug, trace (%(default)s)")


def _serve(given: argparse.Namespace) -> int:
    lacking = _lacking()
    if lacking:
        sys.stderr.write(f'tokcap serve needs {lacking}: pip install "tokcap[serve]"\n')
        return _USAGE_ERROR
    from .serve.options import ServeOptions
    from .serve.run import serve

    paths = {
        "TOKCAP_DIR": given.dir,
        "TOKCAP_CONFIG": given.config,
        "TOKCAP_ROLLOUT_SECRET_FILE": given.rollout_secret_file,
    }
    for name, value in paths.items():
        if value is not None:
            os.environ[name] = os.path.abspath(value)
    keys = given.api_key if given.api_key is not None else os.environ.get("TOKCAP_API_KEY", "").split()
    options = ServeOptions(
        upstream=given.upstream,
        host=given.host,
        port=given.port,
        workers=given.workers,
        engine=given.engine,
        engine_version=given.engine_version,
        api_keys=tuple(keys),
        timeout_s=given.timeout,
        client_timeout_s=given.client_timeout or None,
        graceful_timeout_s=given.graceful_timeout,
        log_level=given.log_level,
    )
    return serve(options)


def _lacking() -> str:
    """The first of the libraries that isn't installed."""
    from importlib.util import find_spec

    return next((name for name in _SERVE_NEEDS if find_spec(name) is None), "")


if __name__ == "__main__":
    sys.exit(main())
