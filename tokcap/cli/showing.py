"""`tokcap show`: one rollout, its calls as a tree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .options import as_json, directory, rollout_argument, tokenizer

if TYPE_CHECKING:
    from ..inspection import CallView, RolloutView
    from ..inspection.branches import Branch, Conversation, Skipped
    from ..store import RolloutStat

__all__ = ("show_verb",)

_LINES = 400
_TRAJECTORIES = 30
"""Of each that a terminal gets without --all."""
_RUNS = 8


@click.command("show")
@rollout_argument()
@click.option("--all", "everything", is_flag=True, help="Every call and trajectory, also on a terminal.")
@tokenizer
@directory
@as_json
def show_verb(rollout: str, everything: bool, tokenizer: str | None, directory: str | None, as_json: bool) -> int:
    """Show one rollout: its calls as a tree, what became of each, and why something is not trained.

    A conversation that goes on stays at one level; what leaves it is indented below the call that it leaves. The two
    numbers of a call are the ids of its prompt and of its answer.

    \b
    Examples:
      tokcap show rollout-17
      tokcap show rollout-17 --tokenizer ./model        # tells kinds of drift apart
      tokcap show rollout-17 --json | jq '.calls[] | select(.outcome == "lost")'
    """
    from ..inspection import open_to_look
    from .naming import looked_at, stat_of, texts_of
    from .output import print_json

    store = open_to_look(directory)
    stat = stat_of(store, rollout)
    if stat.state == "retired":
        if as_json:
            print_json(_facts(stat))
        else:
            _print_retired(stat)
        return 0
    view = looked_at(store, rollout, texts_of(store, tokenizer, [rollout]))
    if as_json:
        print_json(_facts(stat) | _told(view))
        return 0
    short = sys.stdout.isatty() and not everything
    _print_head(stat, view)
    _print_tree(view, short)
    _print_trajectories(view, short)
    _print_reasons(view)
    return 0


# ---- one rollout


def _facts(stat: RolloutStat) -> dict[str, Any]:
    return {
        "rollout_id": stat.rollout_id,
        "state": stat.state,
        "snapshot_id": stat.snapshot_id,
        "version": stat.version,
        "retired_at": stat.retired_at,
        "finished": stat.finished,
        "incomplete": stat.incomplete,
        "meta": stat.meta,
        "files": stat.files,
        "bytes": stat.bytes,
        "damage": [str(damage) for damage in stat.damage],
        "torn": [str(torn) for torn in stat.torn],
        "late": list(stat.late),
    }


def _told(view: RolloutView) -> dict[str, Any]:
    from ..inspection import advice_for
    from .calling import call_facts

    built = view.build
    return {
        "snapshot_id": view.snapshot_id,
        "version": view.version,
        "incomplete": view.incomplete,
        "group": built.group,
        "masked": view.masked,
        "reasons": built.reasons,
        "metrics": built.metrics,
        "models": sorted(built.models),
        "calls": [call_facts(view, call) for call in view.calls],
        "trajectories": [
            {
                "index": trajectory.index,
                "length": len(trajectory),
                "trained": trajectory.trained,
                "flags": trajectory.flags,
                "owned_calls": [span.model_call_ids for span in trajectory.calls if span.owned],
                "context_calls": sum(not span.owned for span in trajectory.calls),
            }
            for trajectory in built.trajectories
        ],
        "advice": dict(advice_for(_reasons(view))),
    }


def _print_retired(stat: RolloutStat) -> None:
    import datetime
    import time

    from .output import age, line, safe

    retired_at = stat.retired_at or 0.0
    when = datetime.datetime.fromtimestamp(retired_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    line(f"{stat.rollout_id}  retired, version {stat.version}")
    _field("retired", f"{when}, {age(time.time() - retired_at)} ago: its consumer had it safely; no record is left")
    _field("snapshot", stat.snapshot_id)
    for said in stat.late:
        _field("late", safe(said))
    for damage in stat.damage:
        _field("damage", safe(str(damage)))


def _field(name: str, value: str) -> None:
    from .output import line

    line(f"  {name:<13}{value}")


def _print_head(stat: RolloutStat, view: RolloutView) -> None:
    from collections import Counter

    from .output import amount, line, safe, size

    metrics = view.build.metrics
    state = "open" if not view.version else f"frozen, version {view.version}"
    line(f"{view.rollout_id}  {state}{', finished' if view.finished else ', not finished by its owner'}")
    _field("snapshot", view.snapshot_id)
    records = view.build.recorded.records  # damage stands among them, and is no call
    outcomes = Counter(record.outcome for record in records if record.model_call_id or record.detail not in view.damage)
    counted = ", ".join(f"{amount(count)} {outcome}" for outcome, count in outcomes.most_common())
    _field("calls", f"{amount(outcomes.total())}{f': {counted}' if counted else ''}")
    sampled, trained = metrics["sampled"], metrics["trained"]
    share = f" ({trained / sampled:.1%})" if sampled else ""
    _field("ids", f"{amount(sampled)} sampled, {amount(trained)} trained{share}")
    _field("size", f"{amount(stat.files)} file{'' if stat.files == 1 else 's'}, {size(stat.bytes)}")
    if view.meta:
        _field("meta", safe(_shown(view.meta)))
    if view.incomplete:
        _field("incomplete", "a call is lost, open or in conflict, or bytes are damaged")
    for damage in view.damage:
        _field("damage", safe(damage))
    for torn in view.torn:
        _field("torn", safe(torn))
    for said in stat.late:
        _field("late", safe(said))


def _shown(value: Any, most: int = 300) -> str:
    from .output import json_of

    text = json_of(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _print_tree(view: RolloutView, short: bool) -> None:
    from ..inspection.branches import conversations, lines, shortened
    from .output import line, safe

    groups = _groups(conversations(view))
    if not groups:
        return
    line()
    widths = _widths(view)
    if sys.stdout.isatty():
        _draw_trees(view, [(title, shortened(branches) if short else branches) for title, branches in groups], short)
        return
    for title, branches in groups:
        if title:
            line(title)
        for branch, marks in lines(branches):
            guides = "".join("│  " if more else "   " for more in marks[:-1]) + ("├─ " if marks[-1] else "└─ ")
            line(guides + safe(_line_of(view, branch, widths)[0]))


def _draw_trees(view: RolloutView, groups: Sequence[tuple[str, Sequence[Branch | Skipped]]], short: bool) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from ..inspection.branches import lines
    from .output import amount, console, line, safe

    screen, widths = console(), _widths(view)
    left, hidden = _LINES if short else sys.maxsize, 0
    for title, branches in groups:
        tree = Tree(title, guide_style="dim", hide_root=not title)
        levels = [tree]
        for branch, marks in lines(branches):
            if left <= 0:
                hidden += 1
                continue
            left -= 1
            del levels[len(marks) :]
            text, style = _line_of(view, branch, widths)
            levels.append(levels[-1].add(Text(safe(text), style)))
        screen.print(tree)
    if hidden:
        line(f"... and {amount(hidden)} lines more (--all)")


def _groups(found: list[Conversation]) -> list[tuple[str, list[Branch]]]:
    """What is shown together, with a title if there are several: conversations of one call need none of their own."""
    from .output import amount, counted

    groups: list[tuple[str, list[Branch]]] = []
    alone = False
    for conversation in found:
        single = conversation.first is not None and conversation.calls == 1
        if single and alone:
            groups[-1][1].extend(conversation.branches)
        elif single:
            groups.append(("by itself", list(conversation.branches)))
        elif conversation.first is None:
            groups.append(("nothing tells where these lie", conversation.branches))
        else:
            trained = amount(conversation.trained)
            groups.append(
                (f"conversation of {counted(conversation.calls, 'call')}, {trained} ids trained", conversation.branches)
            )
        alone = single
    if len(groups) == 1 and found[0].first is not None:
        return [("", groups[0][1])]
    return groups


def _widths(view: RolloutView) -> tuple[int, int, int, int]:
    calls = view.calls
    return (
        len(str(len(calls))) + 1,
        min(max((len(call.name) for call in calls), default=0), 40),
        len(str(max((call.prompt for call in calls), default=0))),
        len(str(max((call.sampled for call in calls), default=0))),
    )


def _line_of(view: RolloutView, branch: Any, widths: tuple[int, int, int, int]) -> tuple[str, str]:
    """The words for one line of the tree, and their style."""
    from ..inspection.branches import Skipped
    from ..inspection.telling import facts_of, fate_of, tie_of
    from .output import amount

    if isinstance(branch, Skipped):
        return f"⋮ {amount(branch.calls)} calls that only continue, trained {amount(branch.trained)} (--all)", "dim"
    call: CallView = branch.call
    number, name, prompt, sampled = widths
    head = f"{f'#{call.number}':<{number}} {call.name or '(nameless)':<{name}}"
    if call.relation == "unrecorded":
        parts = [f"{head}  {fate_of(view, call)}", *facts_of(call)]
        return " · ".join(parts), "yellow" if call.outcome == "no_generation" else "bold red"
    sizes = f"{call.prompt:>{prompt}} + {call.sampled:<{sampled}}"
    parts = [f"{head}  {sizes}  {fate_of(view, call)}", tie_of(view, call, follows=branch.follows), *facts_of(call)]
    if call.outcome in ("lost", "open", "conflict"):
        style = "red"
    elif not call.trained:
        style = "yellow"
    else:
        style = "cyan" if call.relation == "drifted" else ""
    return " · ".join(parts), style


def _print_trajectories(view: RolloutView, short: bool) -> None:
    from .output import amount_cell, line, print_table

    trajectories = view.build.trajectories
    if not trajectories:
        return
    shown = trajectories[:_TRAJECTORIES] if short else trajectories
    numbers = {call.model_call_id: call.number for call in reversed(view.calls)}
    line()
    print_table(
        [
            ("TRAJECTORY", "right"),
            ("LENGTH", "right"),
            ("TRAINED", "right"),
            ("FLAGS", "left"),
            ("OWNS", "left"),
            ("CONTEXT", "left"),
        ],
        (
            [
                str(trajectory.index),
                amount_cell(len(trajectory)),
                amount_cell(trajectory.trained),
                ", ".join(trajectory.flags) or "-",
                _spans([numbers[span.model_call_ids[0]] for span in trajectory.calls if span.owned]),
                _spans([numbers[span.model_call_ids[0]] for span in trajectory.calls if not span.owned]),
            ]
            for trajectory in shown
        ),
    )
    if len(shown) < len(trajectories):
        line(f"... and {amount_cell(len(trajectories) - len(shown))} more (--all)")


def _spans(numbers: Sequence[int]) -> str:
    """#1-#3 #7: numbers, those in a row together; of many runs the first ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = ["-".join(f"#{number}" for number in run) for run in runs[:_RUNS]]
    return " ".join([*shown, f"and {len(runs) - _RUNS} more"] if len(runs) > _RUNS else shown) or "-"


def _reasons(view: RolloutView) -> tuple[str, ...]:
    """Why something is not trained; and what else needs advice."""
    metrics = view.build.metrics
    lost = ("lost_call",) if metrics["lost_calls"] or metrics["open_calls"] else ()
    return tuple(dict.fromkeys((*view.build.reasons, *lost)))


def _print_reasons(view: RolloutView) -> None:
    from textwrap import fill

    from ..inspection import advice_for
    from .output import amount, line

    metrics = view.build.metrics
    drifted = metrics["drifted_calls"]
    if drifted:
        line()
        line(
            f"{amount(drifted)} drifted turn{'s split' if drifted > 1 else ' splits'} the rollout; it masks nothing. "
            f"Where and how: tokcap drift {view.rollout_id}"
        )
    found = advice_for(_reasons(view))
    if not found:
        return
    line()
    line("Why something is not trained:" if view.build.reasons else "Worth a look:")
    for reason, advice in found:
        count = metrics.get(reason)
        line(f"  {reason}{f' ({amount(count)} ids)' if isinstance(count, int) and count else ''}")
        then = advice.then.replace("ROLLOUT", view.rollout_id)  # to be copied
        for words in (advice.what, f"Usually: {advice.why}", f"Then: {then}"):
            line(fill(words, 110, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False))
