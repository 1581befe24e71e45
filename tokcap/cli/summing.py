"""`tokcap stats` and `tokcap du`: many rollouts added up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import click

from .choosing import Chosen, choosing, duration
from .options import as_json, directory
from .progress import progress_bar

if TYPE_CHECKING:
    from ..inspection.statistics import By, Statistics

__all__ = ("du_verb", "stats_verb")

_LARGEST = 20
_REMARK = 16
"""Columns for the rest of a line, if the terminal is too narrow for more."""
_BAR = 30
"""Columns of the longest bar of the histogram."""

Line = tuple[str, str, str]
"""What, how many or how much, and a share or a remark."""


@click.command("stats")
@choosing
@click.option(
    "--by", type=click.Choice(["group", "model", "state"]), help="One line for each instead, by what it has in common."
)
@as_json
def stats_verb(chosen: Chosen, by: str | None, as_json: bool) -> int:
    """Add up rollouts: tokens, what is trained and why the rest isn't, drift, log-probs, sizes.

    \b
    sampled ids        trained, and every category of what isn't, by name; they add up exactly
    drifted turns      of all recorded answers but for the first of each rollout
    write amplification
                       bytes on disk per byte that the tokens need: 4 for each distinct id, 8 for each log-prob
    replay factor      how often a trainer reads an id; 1.0 if nothing splits

    \b
    Examples:
      tokcap stats --dir /var/lib/tokcap
      tokcap stats 'task-9-*' --newer 6h
      tokcap stats --by group --json | jq 'select(.delivered_fraction < 0.8)'
    """
    rows = chosen.rows()
    if not rows:
        return chosen.nothing()
    from ..inspection.statistics import statistics, statistics_by
    from .output import print_json

    if by is not None:
        parts = statistics_by(rows, cast("By", by))
        if as_json:
            import msgspec

            for name, found in parts.items():
                print_json({by: name, **msgspec.structs.asdict(found)})
        else:
            _print_parts(by, parts)
        return 0
    found = statistics(rows)
    if as_json:
        print_json(found)
    else:
        _print_statistics(found)
    return 0


def _print_parts(by: str, parts: dict[str, Statistics]) -> None:
    from .output import amount_cell, print_table, size_cell

    names = (by.upper(), "ROLLOUTS", "MASKED", "CALLS", "SAMPLED", "TRAINED", "DELIVERED", "DRIFTED", "SIZE")
    print_table(
        [(name, "right" if place else "left") for place, name in enumerate(names)],
        (
            [
                name or "(none)",
                amount_cell(found.rollouts),
                amount_cell(found.masked),
                amount_cell(found.calls),
                amount_cell(found.sampled),
                amount_cell(found.categories.get("trained", 0)),
                _percent(found.delivered_fraction),
                _percent(found.drift_rate),
                size_cell(found.bytes),
            ]
            for name, found in parts.items()
        ),
        optional=[names.index(name) for name in ("SIZE", "CALLS", "ROLLOUTS", "DRIFTED", "SAMPLED")],
    )


def _print_statistics(found: Statistics) -> None:
    """Sections of three columns on a terminal; elsewhere lines `section.what`, value, share."""
    from ..inspection.words import ADVICE

    on_terminal = sys.stdout.isatty()
    for title, lines in _sections(found):
        if lines:
            _print_section(title, lines, on_terminal)
    _print_section("log-probs (natural log)", list(_histogram(found, bars=on_terminal)), on_terminal)
    from .output import console, line

    if not on_terminal:
        for hint in found.hints:
            line(f"hint\t{hint}\t")
        return
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    for reason in found.reasons:
        if reason in ADVICE:
            out.print(Text(f"{reason}: {ADVICE[reason].what}", style="yellow"))
            out.print(Padding(Text(f"{ADVICE[reason].then}."), (0, 0, 0, 2)))
    for hint in found.hints:
        out.print(Text(f"! {hint}", style="bold yellow"))


def _print_section(title: str, lines: Sequence[Line], on_terminal: bool) -> None:
    from .output import console, line, safe

    if not on_terminal:
        section = title.partition(" (")[0].replace(" ", "_")
        for what, value, remark in lines:
            line(f"{section}.{safe(what).replace(' ', '_')}\t{safe(value)}\t{safe(remark)}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold")
    rows = [[Text(safe(cell)) for cell in cells] for cells in lines]
    names, values = (max(least, *(cells[at].cell_len for cells in rows)) for at, least in enumerate((22, 12)))
    table.add_column(min_width=names, no_wrap=True)
    table.add_column(justify="right", min_width=values, no_wrap=True)
    table.add_column(overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    out = console()
    out.width = max(out.width, names + values + _REMARK)  # rather wider than the terminal than a number in pieces
    out.print(table)
    console().print()


def _sections(found: Statistics) -> Iterable[tuple[str, list[Line]]]:
    from ..inspection.words import OUTCOMES
    from .output import amount_cell, size

    def counts(values: dict[str, int], whole: int, remarks: dict[str, str] | None = None) -> list[Line]:
        return [
            (
                name or "(not told)",
                amount_cell(count),
                _joined(_percent(count / whole if whole else None), remarks, name),
            )
            for name, count in values.items()
        ]

    special = {
        "masked": found.masked,
        "incomplete": found.incomplete,
        "damaged": found.damaged,
        "finished": found.finished,
    }
    yield (
        "rollouts",
        [
            ("all", amount_cell(found.rollouts), ""),
            *counts(found.states, found.rollouts),
            *counts({name: count for name, count in special.items() if count}, found.rollouts),
        ],
    )
    yield "sampled ids", [("sampled", amount_cell(found.sampled), ""), *counts(found.categories, found.sampled)]
    yield "why not trained (rollouts)", counts(found.reasons, found.rollouts)
    yield "calls", [("all", amount_cell(found.calls), ""), *counts(found.outcomes, found.calls, OUTCOMES)]
    turns: list[Line] = [
        ("turns", amount_cell(found.turns), ""),
        ("drifted", amount_cell(found.drifted_calls), _percent(found.drift_rate)),
        ("restarted", amount_cell(found.restarted_calls), ""),
        ("ids lost by drift", amount_cell(found.drift_lost), ""),
    ]
    yield "drift", turns if found.drifted_calls or found.restarted_calls else turns[:2]
    yield "policy versions (sampled ids)", counts(found.policy_versions, found.sampled)
    yield "models (rollouts)", counts(found.models, found.rollouts)
    yield "log-prob modes (answers)", counts(found.log_prob_modes, sum(found.log_prob_modes.values()))
    yield (
        "sizes",
        [
            ("files", amount_cell(found.files), ""),
            ("bytes", amount_cell(found.bytes), size(found.bytes)),
            ("bytes per sampled id", _number(found.bytes_per_sampled), ""),
            ("payload", amount_cell(found.payload_bytes), size(found.payload_bytes)),
            ("write amplification", _number(found.write_amplification), ""),
            ("replay factor", _number(found.replay_factor), ""),
        ],
    )


def _histogram(found: Statistics, *, bars: bool) -> Iterable[Line]:
    from ..inspection.row import LOG_PROB_EDGES
    from .output import amount_cell

    known, most = sum(found.log_probs), max(found.log_probs)
    for place, count in enumerate(found.log_probs):
        low = LOG_PROB_EDGES[place]
        name = "0.0 and above" if low == 0.0 else f"{low:g} to {LOG_PROB_EDGES[place + 1]:g}"
        share = _percent(count / known if known else None)
        yield name, amount_cell(count), f"{share:>6} {'█' * round(_BAR * count / (most or 1))}" if bars else share
    if found.zero_log_probs:
        yield (
            "exactly 0.0",
            amount_cell(found.zero_log_probs),
            _percent(found.zero_log_probs / known if known else None),
        )


def _joined(share: str, remarks: dict[str, str] | None, name: str) -> str:
    remark = (remarks or {}).get(name, "")
    return f"{share:>6}  {remark}" if remark and sys.stdout.isatty() else share


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@click.command("du")
@directory
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_LARGEST,
    show_default=True,
    metavar="N",
    help="Show N of the largest; 0: all.",
)
@click.option(
    "--older-than",
    "older_than_s",
    type=duration,
    default="24h",
    show_default=True,
    metavar="AGE",
    help="What a sweep of tombstones of this age would free.",
)
@click.option("--fresh", is_flag=True, help="Look at everything again, whatever is kept of earlier looks.")
@as_json
def du_verb(directory: str | None, limit: int, older_than_s: float, fresh: bool, as_json: bool) -> int:
    """Say what rollouts weigh on the disk, by state and the largest ones, and what a sweep would free.

    Each file counts once, however many names it has: a frozen rollout's segments are hard links. Sizes are lengths of
    files; directories and blocks of the disk come on top. With --json the first line is the whole, the others are
    rollouts.

    \b
    Examples:
      tokcap du --dir /var/lib/tokcap
      tokcap du --limit 0 --json | jq -r 'select(.bytes > 1e9) | .rollout_id // empty'
    """
    from ..inspection import open_to_look
    from ..inspection.scan import rows
    from ..inspection.usage import usage_of_store
    from .naming import nothing
    from .output import amount_cell, line, print_json, print_table, size_cell

    store = open_to_look(directory)
    with progress_bar("looking at rollouts") as progress:
        found = rows(store, whole=False, remember=not fresh, progress=progress)
    if not found:
        nothing(store.directory, asked=False)
    usage = usage_of_store(store, found, older_than_s)
    largest = sorted(found, key=lambda row: (-row.bytes, row.rollout_id))[: limit or None]
    if as_json:
        print_json(usage)
        for row in largest:
            print_json({"rollout_id": row.rollout_id, "state": row.state, "files": row.files, "bytes": row.bytes})
        return 0
    parts = [(state, share) for state, share in usage.states.items()]
    parts += [(name, share) for name, share in (("quarantine", usage.quarantine), ("rest", usage.rest)) if share.files]
    print_table(
        [("WHAT", "left"), ("ROLLOUTS", "right"), ("FILES", "right"), ("SIZE", "right")],
        [
            *(
                [
                    name,
                    amount_cell(share.rollouts) if share.rollouts else "",
                    amount_cell(share.files),
                    size_cell(share.bytes),
                ]
                for name, share in parts
            ),
            ["all", amount_cell(len(found)), amount_cell(usage.files), size_cell(usage.bytes)],
        ],
    )
    line()
    if usage.leftovers.rollouts:
        line(f"left by crashes in {amount_cell(usage.leftovers.rollouts)} rollouts: {size_cell(usage.leftovers.bytes)}")
    line(
        f"a sweep would remove {amount_cell(usage.sweepable_tombstones)} tombstones "
        f"and free {size_cell(usage.sweepable_bytes)}"
    )
    if largest:
        line()
        print_table(
            [("ROLLOUT", "left"), ("STATE", "left"), ("FILES", "right"), ("SIZE", "right")],
            ([row.rollout_id, row.state, amount_cell(row.files), size_cell(row.bytes)] for row in largest),
        )
    return 0
