"""The verbs, and the way to them: each is loaded when it is called, so that `--help` is there at once."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import islice

import click

from ..errors import ConfigError, InvalidIdError, InvalidOptionError, StoreNotFoundError, TokcapError
from ..version import __version__
from .status import INTERRUPTED, NOT_THERE, REFUSED, USAGE, NotThereError

__all__ = ("VERBS", "run", "tokcap")

_LOOKED_AT = 1000

_SECTIONS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Look (nothing is written)",
        (
            ("ls", "listing", "rollouts: state, calls, tokens, age, size, why something is not trained"),
            ("show", "showing", "one rollout: its calls as a tree, what became of each, and why"),
            ("calls", "calling", "the calls of rollouts as a table"),
            ("cat", "catting", "one call: ids, log-probs, text"),
            ("diff", "diffing", "the first token in which two rollouts or calls differ"),
            ("drift", "drifting", "where prompts part from what was sampled, and how"),
            ("stats", "summing", "tokens, delivered fraction, mask reasons, policy versions, log-probs, sizes"),
            ("top", "watching", "a live store, refreshed"),
            ("tail", "watching", "calls of a live store as they are recorded"),
            ("du", "summing", "what rollouts weigh on the disk"),
            ("report", "reporting", "one HTML page about a rollout or a store"),
        ),
    ),
    (
        "Check and move",
        (
            ("verify", "verifying", "every byte of every file; --repair moves aside what is damaged"),
            ("export", "exporting", "to JSONL, npz, parquet or safetensors"),
            ("import", "importing", "NeMo Gym's JSONL directories, or recorded HTTP traffic"),
        ),
    ),
    (
        "Change a store",
        (
            ("retire", "changing", "remove exactly one version of one snapshot; a tombstone stays"),
            ("reset", "changing", "forget rollouts, whatever their state"),
            ("sweep", "changing", "remove old tombstones and what crashes left"),
        ),
    ),
    (
        "Capture",
        (("serve", "serving", "a reverse proxy that captures, for engines that take no Python middleware"),),
    ),
    (
        "Shell",
        (("completion", "completion", "the script that completes verbs, options and rollout ids in your shell"),),
    ),
)

VERBS = tuple((verb, home) for _, verbs in _SECTIONS for verb, home, _ in verbs)
"""Every verb, and the module of this package that has it."""

_HOMES = dict(VERBS)


class _OutputClosedError(Exception):
    """Whoever read the output has seen enough. Of an EPIPE click itself makes a failure."""


class _Verbs(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            raise _OutputClosedError from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            verb = next((word for word in given if word in _HOMES), "VERB")
            raise click.UsageError(
                f"{error.format_message()} Options stand behind the verb: tokcap {verb} {error.option_name} ...", ctx
            ) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = _HOMES.get(cmd_name)
        if home is None:
            return None
        module = import_module(f".{home}", __package__)
        found: click.Command = getattr(module, f"{cmd_name}_verb")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _HOMES and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], _HOMES, 1)
            ctx.fail(f"there is no verb {args[0]!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in _SECTIONS:
            with formatter.section(title):
                formatter.write_dl([(verb, help) for verb, _, help in verbs])


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Each verb has --help with examples. The store is named by --dir, TOKCAP_DIR, or the file of TOKCAP_CONFIG. "
    "Exit status: 0 yes, 1 no, 2 wrong usage, 3 not there, 4 refused.",
)
@click.version_option(__version__, prog_name="tokcap", message="%(prog)s %(version)s")
def tokcap() -> None:
    """Exact token ids and log-probs of RL rollouts: look at what was captured, what is masked and why."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; its exit status."""
    _prepare_streams()
    try:
        status = tokcap.main(args=list(arguments), prog_name="tokcap", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("\n")
        return INTERRUPTED
    except StoreNotFoundError as error:
        return _said(error, NOT_THERE, _store_near(error.filename))
    except NotThereError as error:
        return _said(error, NOT_THERE)
    except (ConfigError, InvalidIdError, InvalidOptionError) as error:
        return _said(error, USAGE)
    except TokcapError as error:
        return _said(error, REFUSED)
    except ModuleNotFoundError as error:  # other extras bring the parser without it
        if (error.name or "").partition(".")[0] != "rich":
            raise
        sys.stderr.write('tokcap: this needs the library rich: pip install "tokcap[cli]"\n')
        return USAGE
    except (OSError, _OutputClosedError) as error:
        if isinstance(error, OSError) and error.errno != errno.EPIPE:
            return _said(error, REFUSED)
        # What is still buffered would raise once more at the end.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _prepare_streams() -> None:
    """Let every text be written: escaped where the encoding lacks a character, nowhere if the stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _said(error: Exception, status: int, hint: str = "") -> int:
    from .output import safe

    text = str(error)
    if isinstance(error, OSError):  # its number tells people nothing
        text = text.removeprefix(f"[Errno {error.errno}] ")
    sys.stderr.write(f"tokcap: {safe(text)}{safe(hint)}\n")
    return status


def _store_near(path: object) -> str:
    """Where a store is, if there is one right above or below a directory that is none; else nothing."""
    if not isinstance(path, str):
        return ""
    near = [os.path.dirname(path)]
    with contextlib.suppress(OSError), os.scandir(path) as found:
        near += [entry.path for entry in islice(found, _LOOKED_AT)]
    for place in near:
        if os.path.isfile(os.path.join(place, "FORMAT")) and os.path.isdir(os.path.join(place, "rollouts")):
            return f"; there is one in {place}"
    return ""
