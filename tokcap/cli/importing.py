"""`tokcap import`: rollouts of other stores and of recorded traffic into a store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .options import as_json, unix_group
from .status import NO, REFUSED

if TYPE_CHECKING:
    from ..transfer import Imported, ImportedRollout

__all__ = ("import_verb",)

_F = TypeVar("_F", bound=Callable[..., Any])


@click.group("import")
def import_verb() -> None:
    """Write rollouts of another store, or recorded HTTP traffic, into a store of tokcap.

    Repeating an import changes nothing, and completes one that was interrupted. A rollout that the store has with other
    contents is refused by name and left alone. Exit status: 4 if any was.

    \b
    Examples:
      tokcap import nemo-gym /data/ng_token_capture --dir store
      tokcap import traffic traffic/*.jsonl.gz --dir store --finish --freeze
    """


def _writing(function: _F) -> _F:
    """The options of both."""
    options = (
        click.option(
            "-d",
            "--dir",
            "directory",
            metavar="DIRECTORY",
            type=click.Path(file_okay=False),
            help="The store to write into; made if it is missing. [default: TOKCAP_DIR, or that of TOKCAP_CONFIG]",
        ),
        click.option("--finish", is_flag=True, help="Note rollouts as finished, with what the source says as meta."),
        click.option("--freeze", is_flag=True, help="Freeze what was imported."),
        unix_group,
        as_json,
    )
    for option in reversed(options):
        function = option(function)
    return function


@import_verb.command("nemo-gym")
@click.argument("source", metavar="SOURCE", type=click.Path())
@_writing
def nemo_gym_verb(
    source: str, directory: str | None, finish: bool, freeze: bool, unix_group: str | None, as_json: bool
) -> int:
    """The rollouts of a directory that NeMo Gym's token capture wrote (<id>.tokens.jsonl ...).

    What is frozen there is frozen here; what is retired there has no records and is skipped. A record that can't be
    read, expanded or verified is a lost call, with the reason. The directory is only read.

    \b
    Example:
      tokcap import nemo-gym /data/ng_token_capture --dir store
    """
    from ..inspection import store_directory
    from ..transfer import import_nemo_gym

    done = import_nemo_gym(
        source, store_directory(directory), finish=finish, freeze=freeze, group=unix_group, told=_teller(as_json)
    )
    return _end(done, as_json)


@import_verb.command("traffic")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_writing
def traffic_verb(
    files: tuple[str, ...], directory: str | None, finish: bool, freeze: bool, unix_group: str | None, as_json: bool
) -> int:
    """Recorded HTTP exchanges, one rollout a file (.jsonl or .jsonl.gz), through the same capture as live traffic.

    \b
    First line: {"rollout": ID, ...}. Then one exchange a line:
      {"seq", "path", "request", "status", "response" or "sse", "note"}

    \b
    Example:
      tokcap import traffic tests/traffic/*.jsonl.gz --dir store --finish --freeze
    """
    from ..inspection import store_directory
    from ..transfer import import_traffic

    done = import_traffic(
        files, store_directory(directory), finish=finish, freeze=freeze, group=unix_group, told=_teller(as_json)
    )
    return _end(done, as_json)


def _teller(as_json: bool) -> Callable[[ImportedRollout], None]:
    """Tells of each rollout: all of it for programs; for people, what is worth knowing."""
    import logging

    from .output import print_json, safe

    # What capture logs of a lost call is told below, with what else is known.
    logging.getLogger("tokcap.capture").addHandler(logging.NullHandler())

    def told(rollout: ImportedRollout) -> None:
        if as_json:
            print_json(rollout)
        if rollout.reason:
            sys.stderr.write(f"tokcap import: {rollout.status}: {safe(rollout.rollout_id)}: {safe(rollout.reason)}\n")
        for call, why in rollout.lost.items():
            named = f"call {call}" if call else "a call"
            sys.stderr.write(f"tokcap import: {safe(rollout.rollout_id)}: {safe(named)} is lost: {safe(why)}\n")

    return told


def _end(done: Imported, as_json: bool) -> int:
    from .output import counted, line

    if not as_json:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(done.outcomes.items()))
        line(f"{counted(done.imported, 'rollout')} imported, {done.unchanged} unchanged, {done.frozen} of them frozen")
        line(f"{counted(done.calls, 'call')} ({outcomes or 'none'}), {done.entries} entries")
        if done.refused or done.skipped:
            line(f"{len(done.refused)} refused, {len(done.skipped)} skipped: see standard error")
    if done.refused:
        return REFUSED
    return 0 if done.imported or done.unchanged else NO
