"""`tokcap serve`: the reverse proxy that captures."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from .status import USAGE

__all__ = ("serve_verb",)

_NEEDED = ("uvicorn", "h11", "prometheus_client")


@click.command("serve")
@click.option("--upstream", required=True, metavar="URL", help="The engine, as in http://127.0.0.1:30000.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8900, show_default=True, help="Port to listen on, 0 for a free one.")
@click.option("-d", "--dir", "directory", metavar="DIRECTORY", help="The store; sets TOKCAP_DIR.")
@click.option("--config", metavar="FILE", help="The configuration of the run; sets TOKCAP_CONFIG.")
@click.option("--workers", type=int, default=1, show_default=True, metavar="N", help="Processes that serve.")
@click.option("--engine", default="", metavar="NAME", help="vllm, sglang ...; by default the engine is asked.")
@click.option("--engine-version", default="", metavar="VERSION", help="Of the engine, with --engine.")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="A key that the engine expects, may be repeated: captured requests without one leave no trace. Better in "
    "TOKCAP_API_KEY, which other users of the machine can't see.",
)
@click.option("--timeout", type=float, metavar="SECONDS", help="That an answer may pause. [default: for ever]")
@click.option(
    "--client-timeout",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="That a client may take over the head and the body of its request, plus one for each KiB of the body; 0: for "
    "ever.",
)
@click.option(
    "--rollout-secret-file",
    metavar="FILE",
    help="Secrets, one in a line, of which rollout tokens are made: captured requests need the token of their rollout; "
    "sets TOKCAP_ROLLOUT_SECRET_FILE.",
)
@click.option(
    "--graceful-timeout", type=float, metavar="SECONDS", help="That open calls may take to finish. [default: for ever]"
)
@click.option("--log-level", default="info", show_default=True, metavar="LEVEL", help="critical to debug, trace.")
def serve_verb(
    upstream: str,
    host: str,
    port: int,
    directory: str | None,
    config: str | None,
    workers: int,
    engine: str,
    engine_version: str,
    api_keys: tuple[str, ...],
    timeout: float | None,
    client_timeout: float,
    rollout_secret_file: str | None,
    graceful_timeout: float | None,
    log_level: str,
) -> int:
    """Pass every request on to an engine, and capture the model calls below /ng-rollout/<rollout id>/.

    The first SIGTERM or SIGINT lets open calls finish; a second one stops at once and leaves their intents.

    \b
    Example:
      tokcap serve --upstream http://127.0.0.1:30000 --dir /var/lib/tokcap --workers 4
    """
    lacking = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), "")
    if lacking:
        sys.stderr.write(f'tokcap serve needs {lacking}: pip install "tokcap[serve]"\n')
        return USAGE
    from ..errors import TokcapError
    from ..serve.options import ServeOptions
    from ..serve.run import serve

    paths = {
        "TOKCAP_DIR": directory,
        "TOKCAP_CONFIG": config,
        "TOKCAP_ROLLOUT_SECRET_FILE": rollout_secret_file,
    }
    for name, value in paths.items():
        if value is not None:
            os.environ[name] = os.path.abspath(value)
    try:
        return serve(
            ServeOptions(
                upstream=upstream,
                host=host,
                port=port,
                workers=workers,
                engine=engine,
                engine_version=engine_version,
                api_keys=api_keys or tuple(os.environ.get("TOKCAP_API_KEY", "").split()),
                timeout_s=timeout,
                client_timeout_s=client_timeout or None,
                graceful_timeout_s=graceful_timeout,
                log_level=log_level,
            )
        )
    except TokcapError as error:
        sys.stderr.write(f"tokcap serve: {error}\n")
        return USAGE
