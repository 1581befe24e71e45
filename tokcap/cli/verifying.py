"""`tokcap verify`: every byte of every file, and what can safely be done about what is wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import click

from .options import as_json, directory, rollout_globs, unix_group
from .status import NO

if TYPE_CHECKING:
    from ..verification.checking import CheckProgress
    from ..verification.finding import CheckSummary, Finding
    from ..verification.repairing import Repaired

__all__ = ("verify_verb",)


@click.command("verify")
@rollout_globs
@directory
@as_json
@click.option("--quick", is_flag=True, help="Names, manifests, links and lengths; no segment is read.")
@click.option("--strict", is_flag=True, help="Warnings count as damage does: exit status 1.")
@click.option("-a", "--all", "everything", is_flag=True, help="Show also what is as crashes and copies leave it.")
@click.option("--workers", type=click.IntRange(0), default=0, metavar="N", help="Processes. [default: as it pays]")
@click.option("--repair", "repairing", is_flag=True, help="CHANGES THE STORE: see above.")
@click.option("--dry-run", is_flag=True, help="With --repair: say what would be done, and do nothing.")
@unix_group
def verify_verb(
    globs: tuple[str, ...],
    directory: str | None,
    as_json: bool,
    quick: bool,
    strict: bool,
    everything: bool,
    workers: int,
    repairing: bool,
    dry_run: bool,
    unix_group: str | None,
) -> int:
    """Check every byte of every file: checksums, records, links, manifests, names, permissions.

    Nothing is written, and a store may be in use. Exit status 0: no damage, but for what is known; 1: damage.

    --repair makes damaged manifests again, puts whole rollouts that lie elsewhere back into their places if those are
    free, moves what is in the way to quarantine/ in the store, and notes damaged bytes there as known, with a copy;
    they stay, for tokcap reads around them. It never makes anything unreadable, or a rollout look complete.

    \b
    Examples:
      tokcap verify --dir /var/lib/tokcap
      tokcap verify 'task-9-*' --json | jq 'select(.level == "damage")'
      tokcap verify --repair --dry-run
    """
    if dry_run and not repairing:
        raise click.UsageError("--dry-run goes with --repair")
    from ..inspection import store_directory
    from ..verification.checking import check
    from ..verification.finding import CheckSummary
    from .naming import nothing

    root = store_directory(directory)
    summary = CheckSummary()
    with _bar() as progress:
        findings = list(check(root, globs, quick=quick, workers=workers, summary=summary, progress=progress))
    _check_there(root, globs, findings)
    if not summary.rollouts and (not globs or not any(finding.rollout_id for finding in findings)):
        status = nothing(root, asked=bool(globs))
        if globs:
            return status
    shown = findings if everything or as_json else [f for f in findings if f.level != "info"]
    _print_findings(shown, as_json, root)
    if not repairing:
        _print_summary(summary, as_json, everything)
        return NO if summary.damage or (strict and summary.warning) else 0
    return _repair(root, globs, findings, as_json, dry_run, unix_group)


def _check_there(root: str, globs: tuple[str, ...], findings: list[Finding]) -> None:
    """Whoever names something wants it checked: raises `NotThereError` for a name (no glob) that isn't there."""
    from ..inspection import open_to_look, wanted_ids
    from .naming import is_glob, near
    from .status import NotThereError

    told = {finding.rollout_id for finding in findings}
    names = [name for name in globs if not is_glob(name) and name not in told]
    if not names:
        return
    store = open_to_look(root)
    there = wanted_ids(store, names, unlisted={})
    for name in names:
        if name not in there:
            raise NotThereError(f"there is no rollout {name} in {root}{near(name, wanted_ids(store, unlisted={}))}")


def _repair(
    root: str, globs: tuple[str, ...], findings: list[Finding], as_json: bool, dry_run: bool, group: str | None
) -> int:
    from ..verification.checking import check, is_meant
    from ..verification.finding import CheckSummary
    from ..verification.repairing import repair
    from .output import line, print_json, safe

    if not as_json:
        line(f"{'would change' if dry_run else 'changing'} {safe(root)}")
    meant = [f for f in findings if f.kind == "marker" or is_meant(f.rollout_id, globs)]
    for repaired in repair(root, meant, dry_run=dry_run, group=group):
        if as_json:
            print_json({"repaired": repaired, "dry_run": dry_run})
        else:
            _print_repaired(repaired, dry_run)
    if dry_run:
        return NO if any(finding.level == "damage" for finding in findings) else 0
    summary = CheckSummary()
    again = list(check(root, globs, summary=summary))
    if not as_json:
        line("checked again:")
    _print_findings([f for f in again if f.level != "info"], as_json, root)
    _print_summary(summary, as_json, False)
    return NO if summary.damage else 0


def _print_repaired(repaired: Repaired, dry_run: bool) -> None:
    from .output import line, safe

    line(f"{safe(repaired.rollout_id) or 'the store'}:")
    for what in repaired.done:
        line(f"  {'would have ' if dry_run else ''}{safe(what)}")
    for what in repaired.left:
        line(f"  left to you: {safe(what)}")
    if repaired.quarantine and repaired.done:
        line(f"  see {safe(repaired.quarantine)}/note.json")


_BAR_AFTER_S = 0.5
_COLUMNS: list[Any] = [
    (name, "left") for name in ("LEVEL", "KIND", "ROLLOUT", "FILE", "FROM", "TO", "WHAT", "LOST", "DO")
]
_STYLES = {"damage": "bold red", "warning": "yellow", "known": "cyan", "info": "dim"}


def _print_findings(findings: Iterable[Finding], as_json: bool, root: str) -> None:
    from .output import console, print_json, print_table, safe

    found = list(findings)
    if as_json:
        for finding in found:
            print_json(finding)
        return
    if not found:
        return
    if not sys.stdout.isatty():
        print_table(_COLUMNS, (_cells(finding, root) for finding in found))
        return
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    for finding in found:
        level, _, rollout, file, start, end, what, lost, advice = map(safe, _cells(finding, root))
        where = f" bytes {start}..{end}" if finding.end else ""
        out.print(Text.assemble((level, _STYLES[level]), f"  {rollout + '  ' if rollout else ''}{file}{where}"))
        told = [what, f"lost: {lost}" if lost else "", f"do: {advice}" if advice and level != "known" else ""]
        for part in filter(None, told):
            out.print(Padding(Text(part), (0, 0, 0, 4)))


def _cells(finding: Finding, root: str) -> list[str]:
    file = finding.path.removeprefix(root + "/")
    place = (str(finding.offset), str(finding.end)) if finding.end else ("", "")
    return [
        finding.level,
        finding.kind,
        finding.rollout_id,
        file,
        *place,
        finding.what,
        finding.lost,
        finding.advice,
    ]


def _print_summary(summary: CheckSummary, as_json: bool, everything: bool) -> None:
    from .output import amount, counted, line, print_json, size

    if as_json:
        print_json({"summary": summary})
        return
    speed = summary.bytes / max(summary.seconds, 1e-6)
    line(
        f"{counted(summary.rollouts, 'rollout')}, {counted(summary.files, 'file')}, {size(summary.bytes)}, "
        f"{counted(summary.frames, 'frame')} checked in {summary.seconds:.1f} s ({size(int(speed))}/s)"
    )
    said = [f"{amount(summary.damage)} damage", counted(summary.warning, "warning")]
    if summary.known:
        said.append(f"{amount(summary.known)} known")
    if summary.info:
        said.append(f"{amount(summary.info)} for information" + ("" if everything else " (--all shows them)"))
    line(", ".join(said))


@contextlib.contextmanager
def _bar() -> Generator[CheckProgress | None, None, None]:
    """A progress bar where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from .output import console, size

    columns = (TextColumn("checking"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    task = bar.add_task("", said="")

    def progress(done: int, total: int, summary: CheckSummary) -> None:
        if summary.seconds < _BAR_AFTER_S:
            return
        if not bar.live.is_started:
            bar.start()
        speed = size(int(summary.bytes / max(summary.seconds, 1e-6)))
        said = f"{done:,} of {total:,} rollouts, {speed}/s, {summary.damage:,} damage"
        bar.update(task, completed=done, total=total, said=said)

    try:
        yield progress
    finally:
        bar.stop()
