"""Which rollouts are meant: globs and conditions, the same for every verb that shows rows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .options import directory, rollout_globs

if TYPE_CHECKING:
    from ..inspection.row import RolloutRow
    from ..inspection.wanted import Wanted

__all__ = ("Chosen", "choosing", "duration")

_F = TypeVar("_F", bound=Callable[..., Any])
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class _Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw]?)", value.strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write 90, 90s, 15m, 2h, 3d or 1w", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


duration = _Duration()
"""Seconds: 90, 90s, 15m, 2h, 3d, 1w."""


class _Reason(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "reason"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ..trajectory.vocabulary import REASONS

        if value not in REASONS:
            from difflib import get_close_matches

            near = get_close_matches(value, REASONS, 1)
            self.fail(f"there is no reason {value!r}; {f'did you mean {near[0]!r}?' if near else _known()}", param, ctx)
        return str(value)


def _known() -> str:
    from ..trajectory.vocabulary import REASONS

    return f"there are {', '.join(REASONS)}"


class Chosen:
    """What was asked: in which store, which rollouts, and how to look at them."""

    def __init__(
        self, directory: str | None, globs: Sequence[str], wanted: Wanted, *, quick: bool, fresh: bool
    ) -> None:
        self._directory, self._globs, self._wanted = directory, globs, wanted
        self._quick, self._fresh = quick, fresh
        self.all = not globs and wanted == type(wanted)()
        """Whether nothing was left out."""
        self.store_directory = ""

    def rows(self) -> list[RolloutRow]:
        """The rows that are meant, sorted by id; a progress bar on a terminal if it takes a while.

        Raises `NotThereError` for a name (no glob) that isn't there.
        """
        from ..inspection import open_to_look
        from ..inspection.scan import rows
        from .naming import check_named
        from .progress import progress_bar

        store = open_to_look(self._directory)
        self.store_directory = store.directory
        with progress_bar("looking at rollouts") as progress:
            found = rows(store, self._globs, whole=not self._quick, remember=not self._fresh, progress=progress)
        check_named(store, self._globs, {row.rollout_id for row in found})
        return self._wanted.of(found)

    def nothing(self) -> int:
        """Say that there was nothing; the exit status."""
        from .naming import nothing

        return nothing(self.store_directory, asked=not self.all)


def choosing(function: _F) -> _F:
    """Globs, `--dir`, the conditions, `--quick` and `--fresh`; the verb gets them as `chosen`."""

    @functools.wraps(function)
    def verb(
        *,
        globs: tuple[str, ...],
        directory: str | None,
        states: tuple[str, ...],
        wrong: bool,
        masked: bool,
        incomplete: bool,
        damaged: bool,
        reasons: tuple[str, ...],
        models: tuple[str, ...],
        groups: tuple[str, ...],
        older_s: float | None,
        newer_s: float | None,
        finished: bool | None,
        quick: bool,
        fresh: bool,
        **others: Any,
    ) -> Any:
        from ..inspection.wanted import Wanted

        wanted = Wanted(states, masked, incomplete, damaged, reasons, models, groups, older_s, newer_s, finished, wrong)
        if quick and wanted.needs_builds:
            raise click.UsageError("--quick makes no builds, which --wrong, --masked, --reason and --model need")
        return function(chosen=Chosen(directory, globs, wanted, quick=quick, fresh=fresh), **others)

    for decorate in reversed(_OPTIONS):
        verb = decorate(verb)
    return verb  # type: ignore[return-value]


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    rollout_globs,
    directory,
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice(["open", "frozen", "retired", "unreadable"]),
        help="Only these; may be repeated, as most of the following may.",
    ),
    click.option("--wrong", is_flag=True, help="Only where WHY has something to say."),
    click.option("--masked", is_flag=True, help="Only where nothing is trained."),
    click.option("--incomplete", is_flag=True, help="Only with calls that are lost, open or in conflict, or damage."),
    click.option("--damaged", is_flag=True, help="Only with damaged bytes, or unreadable."),
    click.option(
        "--reason",
        "reasons",
        multiple=True,
        type=_Reason(),
        metavar="CODE",
        help="Only where this is why something is not trained: ambiguous, aborted, unknown ...",
    ),
    click.option("--model", "models", multiple=True, metavar="GLOB", help="Only with answers of this model."),
    click.option("--group", "groups", multiple=True, metavar="GLOB", help="Only of this group."),
    click.option(
        "--older", "older_s", type=duration, metavar="AGE", help="Only if unchanged for so long: 90s, 2h, 3d."
    ),
    click.option("--newer", "newer_s", type=duration, metavar="AGE", help="Only if changed since then."),
    click.option(
        "--finished/--unfinished", "finished", default=None, help="Only those whose owner said `finish`, or did not."
    ),
    click.option("--quick", is_flag=True, help="Without builds: says nothing of tokens and reasons that isn't kept."),
    click.option("--fresh", is_flag=True, help="Read everything again, whatever is kept of earlier looks."),
)
