"""`tokcap ls`: rollouts in a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from .choosing import Chosen, choosing
from .options import as_json

if TYPE_CHECKING:
    from ..inspection.row import RolloutRow

__all__ = ("ls_verb",)

_SORTS: dict[str, Callable[[RolloutRow], Any]] = {
    "name": lambda row: row.rollout_id,
    "age": lambda row: -row.changed_at,
    "calls": lambda row: -row.calls,
    "sampled": lambda row: -row.sampled,
    "trained": lambda row: -row.trained,
    "size": lambda row: -row.bytes,
}
_SHOWN = 50
"""Rollouts on a terminal, if nothing else is asked."""


@click.command("ls")
@choosing
@click.option(
    "--sort",
    type=click.Choice(list(_SORTS)),
    default="name",
    show_default=True,
    help="By what; the youngest, or the largest, first.",
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Show N of them; 0: all. [default: {_SHOWN} on a terminal, else all]",
)
@as_json
def ls_verb(chosen: Chosen, sort: str, reverse: bool, limit: int | None, as_json: bool) -> int:
    """List rollouts: state, calls, tokens, age, size, and why something is not trained.

    On a terminal a table; elsewhere tab-separated lines with plain numbers, seconds and bytes. What was found is kept
    in ~/.cache/tokcap, so that the next look reads only what has changed; nothing is written into the store.

    \b
    Examples:
      tokcap ls --dir /var/lib/tokcap
      tokcap ls 'task-9-*' --masked --sort sampled
      tokcap ls --state open --older 1h
      tokcap ls --reason ambiguous --json | jq -r .rollout_id
    """
    rows = sorted(chosen.rows(), key=_SORTS[sort], reverse=reverse)
    if not rows:
        return chosen.nothing()
    on_terminal = sys.stdout.isatty() and not as_json
    if limit is None:
        limit = _SHOWN if on_terminal else 0
    shown = rows[:limit] if limit else rows
    if as_json:
        from .output import print_json

        for row in shown:
            print_json(row)
    elif on_terminal:
        _print_table(shown, rows)
    else:
        _print_lines(shown)
    return 0


_COLUMNS = ("ROLLOUT", "STATE", "CALLS", "SAMPLED", "TRAINED", "AGE", "SIZE", "WHY")


def _print_lines(rows: Sequence[RolloutRow]) -> None:
    from .output import safe

    now = time.time()

    def age_of(row: RolloutRow) -> str:
        return f"{max(now - row.changed_at, 0):.0f}" if row.changed_at else ""

    def lines() -> Iterator[str]:
        yield "\t".join(_COLUMNS)
        for row in rows:
            metrics = row.metrics
            yield (
                f"{safe(row.rollout_id)}\t{row.state}\t{row.calls}\t{metrics.get('sampled', 0)}\t"
                f"{metrics.get('trained', 0)}\t{age_of(row)}\t{row.bytes}\t{safe(row.why)}"
            )
        yield ""

    sys.stdout.write("\n".join(lines()))


def _print_table(shown: Sequence[RolloutRow], rows: Sequence[RolloutRow]) -> None:
    from .output import age, amount, line, print_table, size

    now = time.time()
    print_table(
        [(name, "right" if name in ("CALLS", "SAMPLED", "TRAINED", "AGE", "SIZE") else "left") for name in _COLUMNS],
        (
            [
                row.rollout_id,
                row.state,
                amount(row.calls),
                amount(row.sampled),
                amount(row.trained),
                age(now - row.changed_at) if row.changed_at else "",
                size(row.bytes),
                row.why,
            ]
            for row in shown
        ),
        styles={7: "yellow"},
        optional=[_COLUMNS.index(name) for name in ("SIZE", "AGE", "CALLS", "SAMPLED")],
    )
    if len(shown) < len(rows):
        wrong = sum(bool(row.why) for row in rows)
        some = f"; of all, {amount(wrong)} with a WHY (--wrong)" if wrong < len(rows) else ""
        line(f"... and {amount(len(rows) - len(shown))} more (--limit 0){some}")
    line(_totals(rows))


def _totals(rows: Sequence[RolloutRow]) -> str:
    from collections import Counter

    from .output import amount, size

    states = Counter(row.state for row in rows)
    sampled, trained = sum(row.sampled for row in rows), sum(row.trained for row in rows)
    share = f" ({trained / sampled:.1%})" if sampled else ""
    by_state = ", ".join(f"{amount(count)} {state}" for state, count in states.most_common())
    plural = "" if len(rows) == 1 else "s"
    calls, weight = sum(row.calls for row in rows), sum(row.bytes for row in rows)
    return (
        f"{amount(len(rows))} rollout{plural} ({by_state}), {amount(calls)} calls, {amount(sampled)} ids sampled, "
        f"{amount(trained)} trained{share}, {size(weight)}"
    )
