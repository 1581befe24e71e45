"""`tokcap retire`, `reset`, `sweep`: what removes something. Each says first which directory it changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .choosing import duration
from .options import as_json, complete_rollout, directory, rollout_argument, unix_group
from .status import NO, NotThereError

if TYPE_CHECKING:
    from ..inspection import RolloutRow
    from ..store import RolloutStat

__all__ = ("reset_verb", "retire_verb", "sweep_verb")

_F = TypeVar("_F", bound=Callable[..., Any])
_SHOWN = 20


def _yes(function: _F) -> _F:
    return click.option("-y", "--yes", is_flag=True, help="Don't ask.")(function)


def _ask(question: str, yes: bool) -> None:
    """Go on only if that is what is wanted. Raises `click.Abort`, or `click.UsageError` where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say --yes: there is nobody to ask")
    click.confirm(question, abort=True, err=True)


# ---- retire


@click.command("retire")
@rollout_argument()
@click.option("--snapshot-id", metavar="ID", help="Of the snapshot that you have safely: 32 hex digits.")
@click.option("--version", "version", type=int, metavar="N", help="Of the snapshot that you have safely.")
@click.option("--current", is_flag=True, help="Whatever is published now; it is shown first.")
@_yes
@directory
@unix_group
@as_json
def retire_verb(
    rollout: str,
    snapshot_id: str | None,
    version: int | None,
    current: bool,
    yes: bool,
    directory: str | None,
    unix_group: str | None,
    as_json: bool,
) -> int:
    """Remove exactly one version of one snapshot, whose consumer has it safely. A tombstone stays.

    Exit status 1 if it was not removed, with the reason: it was said late that a call ended otherwise, so that the
    version is stale; or the rollout is open, or another one by now. 3 if it isn't there.

    \b
    Examples:
      tokcap retire task-9-3 --snapshot-id 5c6e047f8c6ea6be379c6f955dda2357 --version 1
      tokcap retire task-9-3 --current
    """
    from ..ids import check_rollout_id
    from ..inspection import open_to_look
    from ..inspection.opening import open_to_change
    from .naming import stat_of

    check_rollout_id(rollout)
    if current and (snapshot_id is not None or version is not None):
        raise click.UsageError("either --current, or --snapshot-id and --version")
    with open_to_look(directory) as looking:
        root = looking.directory
        stat = stat_of(looking, rollout)
    if current:
        if stat.state != "frozen":
            return _not_retired(rollout, "", 0, stat, as_json)
        snapshot_id, version = stat.snapshot_id, stat.version
        _show_current(stat, root)
        _ask(f"Retire version {version} of rollout {rollout} in {root}?", yes)
    elif snapshot_id is None or version is None:
        raise click.UsageError(_which(rollout, stat, directory))
    with open_to_change(root, group=unix_group) as store:
        if not store.retire_now(rollout, snapshot_id=snapshot_id, version=version):
            return _not_retired(rollout, snapshot_id, version, store.stat_now(rollout), as_json)
    _say_retired(rollout, snapshot_id, version, root, as_json)
    return 0


def _which(rollout: str, stat: RolloutStat, directory: str | None) -> str:
    """What to say to whoever didn't say which version."""
    if stat.state == "frozen":
        from shlex import quote

        where = f" --dir {quote(directory)}" if directory else ""
        return (
            "say which version you have safely; what is published now is\n"
            f"  tokcap retire {rollout} --snapshot-id {stat.snapshot_id} --version {stat.version}{where}"
        )
    return f"say which version you have safely (--snapshot-id, --version); rollout {rollout} is {_state(stat)}"


def _state(stat: RolloutStat) -> str:
    if stat.state == "retired":
        return f"retired already: version {stat.version} of {stat.snapshot_id}"
    return {
        "open": "open: nothing is published that could be retired; freeze it first",
        "absent": "absent: nothing of it is here any more",
    }.get(stat.state, stat.state)


def _show_current(stat: RolloutStat, root: str) -> None:
    from .output import amount, counted, safe, size

    sys.stderr.write(
        f"rollout {stat.rollout_id} in {safe(root)}: version {stat.version} of {stat.snapshot_id}, "
        f"{counted(len(stat.calls), 'call')}, {amount(stat.entries)} with a record, {size(stat.bytes)}"
        f"{', incomplete' if stat.incomplete else ''}{'' if stat.finished else ', not finished by its owner'}\n"
    )


def _why_not(snapshot_id: str, version: int, stat: RolloutStat) -> str:
    if stat.state not in ("frozen", "retired") or not snapshot_id:
        return f"it is {_state(stat)}"
    if snapshot_id != stat.snapshot_id:
        return (
            f"{snapshot_id} is another incarnation than this one, {stat.snapshot_id}: the rollout was reset since, or "
            "the id is of another rollout"
        )
    if stat.state == "retired":
        return f"it is {_state(stat)}"
    return (
        f"version {version} is stale: version {stat.version} is published since something was said late. Read it "
        "again: what may be trained can be other tokens"
        if version < stat.version
        else f"version {version} isn't there yet; {stat.version} is published"
    )


def _not_retired(rollout: str, snapshot_id: str, version: int, stat: RolloutStat, as_json: bool) -> int:
    from .output import print_json, safe

    why = _why_not(snapshot_id, version, stat)
    if as_json:
        print_json(
            {
                "rollout_id": rollout,
                "retired": False,
                "reason": why,
                "state": stat.state,
                "snapshot_id": stat.snapshot_id,
                "version": stat.version,
            }
        )
    else:
        sys.stderr.write(f"tokcap: rollout {rollout} was not retired: {safe(why)}\n")
    return NO


def _say_retired(rollout: str, snapshot_id: str, version: int, root: str, as_json: bool) -> None:
    from .output import line, print_json, safe

    if as_json:
        print_json({"rollout_id": rollout, "retired": True, "snapshot_id": snapshot_id, "version": version})
    else:
        line(f"retired version {version} of rollout {rollout} in {safe(root)}; a tombstone stays until it is swept")


# ---- reset


@click.command("reset")
@click.argument("rollouts", metavar="ROLLOUT...", nargs=-1, required=True, shell_complete=complete_rollout)
@_yes
@directory
@unix_group
@as_json
def reset_verb(
    rollouts: tuple[str, ...], yes: bool, directory: str | None, unix_group: str | None, as_json: bool
) -> int:
    """Forget rollouts, whatever their state: calls, tokens, snapshots and tombstones are gone.

    What calls that began before still want to say is refused. Globs need --yes.

    \b
    Examples:
      tokcap reset task-9-3
      tokcap reset 'task-9-*' --yes --dir /var/lib/tokcap
    """
    from ..inspection import open_to_look, row_of, wanted_ids
    from ..inspection.opening import open_to_change
    from .naming import is_glob, near, nothing
    from .output import counted, line, print_json, safe

    if not yes and any(map(is_glob, rollouts)):
        raise click.UsageError("a glob needs --yes; `tokcap ls GLOB` shows what it means")
    with open_to_look(directory) as looking:
        root = looking.directory
        found = {rollout: wanted_ids(looking, (rollout,)) for rollout in rollouts}
        for rollout, ids in found.items():
            if not ids and not is_glob(rollout):
                raise NotThereError(f"there is no rollout {rollout} in {root}{near(rollout, wanted_ids(looking))}")
        ids = sorted({rollout_id for ids in found.values() for rollout_id in ids})
        rows = [row_of(looking, rollout_id) for rollout_id in ids]
    if not rows:
        return nothing(root, asked=True)
    calls, tokens = sum(row.calls for row in rows), sum(row.sampled for row in rows)
    what = f"{counted(len(rows), 'rollout')} with {counted(calls, 'call')} and {counted(tokens, 'sampled token')}"
    if not as_json:
        _show(rows, root)
    _ask(f"Forget {what} in {root}?", yes)
    with open_to_change(root, group=unix_group) as store:
        store.reset_now(*ids)
    if as_json:
        for row in rows:
            print_json({"rollout_id": row.rollout_id, "was": row.state, "calls": row.calls, "sampled": row.sampled})
    else:
        line(f"forgot {what} in {safe(root)}")
    return 0


def _show(rows: list[RolloutRow], root: str) -> None:
    """On standard error, before it is done."""
    from .output import amount, counted, safe

    sys.stderr.write(f"changing {safe(root)}\n")
    for row in rows[:_SHOWN]:
        weight = f"{counted(row.calls, 'call')}, {counted(row.sampled, 'sampled token')}"
        sys.stderr.write(f"  {safe(row.rollout_id)}: {row.state}, {weight}\n")
    if len(rows) > _SHOWN:
        sys.stderr.write(f"  and {amount(len(rows) - _SHOWN)} more\n")


# ---- sweep


@click.command("sweep")
@click.option(
    "--older-than",
    "older_than_s",
    type=duration,
    default="24h",
    show_default=True,
    metavar="AGE",
    help="Of tombstones: 90s, 15m, 24h, 7d. 0: every one.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; nothing is changed.")
@directory
@unix_group
@as_json
def sweep_verb(older_than_s: float, dry_run: bool, directory: str | None, unix_group: str | None, as_json: bool) -> int:
    """Remove old tombstones and what crashes left. A store does it by itself, hourly, while somebody writes.

    Only what is retired goes; open and frozen rollouts stay, whatever their age.

    \b
    Examples:
      tokcap sweep --dry-run
      tokcap sweep --older-than 7d --dir /var/lib/tokcap
    """
    from ..inspection import open_to_look
    from ..inspection.opening import open_to_change
    from ..inspection.remains import remains
    from .output import amount, counted, line, print_json, safe, size

    with open_to_look(directory) as looking:
        root = looking.directory
        found = remains(looking, older_than_s)
    removed, freed = found.tombstones, found.bytes
    left = found.leftovers
    if not dry_run:
        if not as_json:
            sys.stderr.write(f"changing {safe(root)}\n")
        with open_to_change(root, group=unix_group) as store:
            removed = store.sweep_now(older_than_s)
            rest = remains(store, older_than_s)
        freed, left = max(0, found.bytes - rest.bytes), max(0, found.leftovers - rest.leftovers)
    if as_json:
        said = {"dry_run": dry_run, "tombstones": removed, "leftovers": left, "bytes": freed}
        print_json(said | {"unreadable": found.unreadable})
        return 0
    line(
        f"{'would remove' if dry_run else 'removed'} {counted(removed, 'tombstone')} and {amount(left)} leftovers of "
        f"crashes, {size(freed)}, in {safe(root)}"
    )
    if found.unreadable:
        line(f"{amount(found.unreadable)} rollouts can't be read and are left alone: tokcap verify says why")
    return 0
