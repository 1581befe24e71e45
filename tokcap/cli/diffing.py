"""`tokcap diff`: the first id in which two calls or two rollouts differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import as_json, complete_rollout, directory, tokenizer
from .status import NO, NotThereError

if TYPE_CHECKING:
    from ..inspection import RolloutView
    from ..inspection.difference import CallDifference, RolloutDifference
    from ..inspection.text import Texts
    from ..inspection.view import CallKey
    from ..store import FileStore

__all__ = ("diff_verb",)


@click.command("diff")
@click.argument(
    "things",
    metavar="[ROLLOUT[/CALL]] [ROLLOUT[/CALL]] | ROLLOUT CALL [CALL]",
    nargs=-1,
    shell_complete=complete_rollout,
)
@click.option(
    "--dir2",
    "other_directory",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False),
    help="Another store, in which the second thing is. One thing, or none, is compared with its namesake there.",
)
@click.option(
    "--context", type=click.IntRange(min=0), metavar="N", default=6, show_default=True, help="Ids around the place."
)
@tokenizer
@directory
@as_json
def diff_verb(
    things: tuple[str, ...],
    other_directory: str | None,
    context: int,
    tokenizer: str | None,
    directory: str | None,
    as_json: bool,
) -> int:
    """Show the first id in which two calls, two rollouts or two stores differ, and what is around it.

    Calls are compared by prompt and answer, one after the other; if these are equal, by log-probs, then by all else
    that was recorded. Calls of two rollouts are paired by their ids if they share some, else by their order. One call
    alone is compared with the call that it drifted from, or continues. Exit status 0: equal; 1: not.

    \b
    Examples:
      tokcap diff rollout-17 7                     # with the call that its prompt parts from
      tokcap diff rollout-17 call-a call-b
      tokcap diff rollout-17/3 rollout-18/3
      tokcap diff rollout-17 --dir2 /mnt/copy      # the same rollout in another store
      tokcap diff --dir2 /mnt/copy                 # everything
    """
    from ..inspection import open_to_look
    from .naming import texts_of

    one = open_to_look(directory)
    other = one if other_directory is None else open_to_look(other_directory)
    if len(things) > 3 or (not things and other_directory is None):
        raise click.UsageError("give two rollouts, two calls as ROLLOUT/CALL, or ROLLOUT CALL [CALL]")
    if not things:
        return _stores(one, other, as_json)
    sides = _sides(one, other, things, other_directory is not None)
    (view, key), (other_view, other_key) = sides
    texts = texts_of(one, tokenizer, [view.rollout_id, other_view.rollout_id])
    shown = _Shown(view, other_view, texts, context, as_json)
    if key is not None and other_key is not None:
        from ..inspection.difference import call_difference

        found = call_difference(view, key, other_view, other_key)
        shown.call(found)
        return 0 if found.kind == "equal" else NO
    from ..inspection.difference import rollout_difference

    differ = rollout_difference(view, other_view)
    shown.rollout(differ)
    return 0 if differ.equal else NO


Side = tuple["RolloutView", "CallKey | None"]


def _sides(one: FileStore, other: FileStore, things: tuple[str, ...], two_stores: bool) -> tuple[Side, Side]:
    """What is compared with what."""
    from .naming import looked_at, one_call

    rollout, _, call = things[0].partition("/")
    view = looked_at(one, rollout)
    key = one_call(view, call).key if call else None
    if len(things) == 1:
        if two_stores:
            namesake = looked_at(other, rollout)
            return (view, key), (namesake, key)
        if key is None:
            raise click.UsageError("say with what: another rollout, a call of it, or --dir2")
        return _nearest(view, key)
    if len(things) == 3:
        if call or two_stores:
            raise click.UsageError("three names are ROLLOUT CALL CALL, in one store")
        return (view, one_call(view, things[1]).key), (view, one_call(view, things[2]).key)
    second, _, other_call = things[1].partition("/")
    if not other_call and not call and not two_stores and _is_call(one, view, second):
        return _nearest(view, one_call(view, second).key)
    other_view = looked_at(other, second)
    if other_call:
        other_key: CallKey | None = one_call(other_view, other_call).key
    else:
        other_key = one_call(other_view, call).key if key is not None else None
    if key is None and other_key is not None:
        key = one_call(view, other_call).key
    return (view, key), (other_view, other_key)


def _is_call(store: FileStore, view: RolloutView, name: str) -> bool:
    """Whether a name that may be a rollout or a call of `view` is a call."""
    from ..errors import InvalidIdError

    try:
        if store.stat_now(name).state != "absent":
            return False
    except InvalidIdError:
        return True
    return bool(view.named(name))


def _nearest(view: RolloutView, key: CallKey) -> tuple[Side, Side]:
    """A call, and the one that its prompt parts from or continues."""
    call = view.call(key)
    assert call is not None
    nearest = call.drift.nearest if call.drift is not None else call.parent
    if nearest is None:
        raise NotThereError(f"call {call.name} of rollout {view.rollout_id} begins: it parts from no other call")
    return (view, nearest), (view, key)


def _stores(one: FileStore, other: FileStore, as_json: bool) -> int:
    """Every rollout of two stores; those that are equal are only counted."""
    from ..inspection import wanted_ids
    from ..inspection.difference import store_differences
    from .output import amount, line, print_json, safe
    from .progress import progress_bar

    ids = sorted({*wanted_ids(one), *wanted_ids(other)})
    equal = 0
    with progress_bar("comparing rollouts") as told:
        for place, found in enumerate(store_differences(one, other, ids), 1):
            if told is not None:
                told(place, len(ids))
            equal += found.equal
            if found.equal:
                continue
            if as_json:
                print_json(found)
            else:
                line(f"{safe(found.one)}\t{safe(_in_short(found))}")
    if not as_json:
        line(f"{amount(equal)} of {amount(len(ids))} rollouts are equal")
    return 0 if equal == len(ids) else NO


def _in_short(found: RolloutDifference) -> str:
    parts = [found.error] if found.error else list(found.fields)
    if found.first is not None:
        differ = sum(call.kind != "equal" for call in found.calls)
        first = found.first
        key = first.one or first.other
        where = f" at {first.index}" if first.index >= 0 else ""
        parts.append(f"{differ} of {len(found.calls)} calls differ, first {key[0] if key else ''}: {first.kind}{where}")
    return "; ".join(parts)


class _Shown:
    """Prints what differs between calls of two rollouts."""

    def __init__(self, one: RolloutView, other: RolloutView, texts: Texts, context: int, as_json: bool) -> None:
        self._views, self._texts, self._context, self._as_json = (one, other), texts, context, as_json

    def rollout(self, found: RolloutDifference) -> None:
        from .output import line, print_json, safe

        if self._as_json:
            print_json(found)
            return
        kinds = [call.kind for call in found.calls]
        paired = "their ids" if found.by_name else "their order"
        equal = f"{kinds.count('equal')} of {len(kinds)} pairs of calls are equal (paired by {paired})"
        line(f"{found.one} and {found.other}: {equal}")
        for field in found.fields:
            line(safe(f"{field} differs"))
        for call in found.calls:
            if call.kind == "missing":
                line(safe(_missing(found, call)))
        first = next((call for call in found.calls if call.kind not in ("equal", "missing")), None)
        if first is not None:
            line()
            self.call(first)

    def call(self, found: CallDifference) -> None:
        from .output import line, print_json, safe

        if self._as_json:
            print_json(found)
            return
        for side, view, key, (prompt, sampled) in self._sides(found):
            call = view.call(key) if key is not None else None
            told = "no such call"
            if call is not None:
                told = f"#{call.number} {call.name}: {prompt} + {sampled} ids, {call.outcome}"
            line(safe(f"{side}  {view.rollout_id}/{told}"))
        line(safe(_WORDS[found.kind] + self._where(found)))
        if found.fields and found.kind not in ("ids", "cut"):
            line(f"{'these' if found.kind == 'contents' else 'also differ'}: {', '.join(found.fields)}")
        if found.index >= 0:
            self._windows(found)

    def _sides(self, found: CallDifference) -> list[tuple[str, RolloutView, CallKey | None, tuple[int, int]]]:
        return list(zip("AB", self._views, (found.one, found.other), found.lengths, strict=True))

    def _where(self, found: CallDifference) -> str:
        if found.kind == "log_probs":
            positions = f"{found.log_probs_differ} of {found.lengths[0][1]} positions"
            return f" at {positions}, most at {found.index}: by {found.largest:.6g}"
        if found.kind != "ids":
            return ""
        said = []
        for side, _, _, (prompt, sampled) in self._sides(found):
            part = "is in its answer" if found.index >= prompt else "is in its prompt"
            said.append(f"{side} {part if found.index < prompt + sampled else 'has ended'}")
        return f" at position {found.index}: there {' and '.join(said)}"

    def _windows(self, found: CallDifference) -> None:
        from .output import line, print_table

        start, end = max(found.index - self._context, 0), found.index + self._context + 1
        columns = [self._column(view, key, start, end) for _, view, key, _ in self._sides(found)]
        line()
        rows = []
        for position, (one, other) in enumerate(zip(*columns, strict=True), start):
            if one[0] or other[0]:
                mark = ">" if position == found.index else "" if one[:2] == other[:2] else "!"
                rows.append([mark, str(position), *one, *other])
        print_table(_COLUMNS, rows)

    def _column(self, view: RolloutView, key: CallKey | None, start: int, end: int) -> list[tuple[str, str, str]]:
        """(id, text, log-prob) at each of these positions; empty where there is none."""
        from ..inspection.difference import sequence
        from ..inspection.text import piece_texts

        recorded = view.recorded(key) if key is not None else None
        if recorded is None:
            return [("", "", "")] * (end - start)
        ids = sequence(view, recorded)
        column = []
        for position in range(start, end):
            if position >= len(ids):
                column.append(("", "", ""))
                continue
            place = position - recorded.prompt
            told = recorded.pieces if place >= 0 else None
            piece = told[place] if told is not None and len(told) == recorded.sampled else None
            piece = self._texts.get(int(ids[position]), (recorded.model,)) if piece is None else piece
            log_prob = recorded.generation_log_probs[place] if place >= 0 else None
            text = f"'{piece_texts([piece])[0]}'" if piece is not None else ""
            column.append((str(ids[position]), text, "" if log_prob is None else f"{log_prob:.4f}"))
        return column


def _missing(found: RolloutDifference, call: CallDifference) -> str:
    key = call.one or call.other
    name = key[0] if key is not None else ""
    if call.one is not None and call.other is not None:
        return f"{name} has ids on one side only"
    return f"{name} is only in {'the first' if call.other is None else 'the second'}"


_COLUMNS: list[tuple[str, Any]] = [
    ("", "left"),
    ("POSITION", "right"),
    ("A", "right"),
    ("TEXT", "left"),
    ("LOG-PROB", "right"),
    ("B", "right"),
    ("TEXT", "left"),
    ("LOG-PROB", "right"),
]

_WORDS = {
    "equal": "they are equal",
    "ids": "the ids differ",
    "cut": "the ids are the same, and the answer begins elsewhere",
    "log_probs": "the ids are the same, and log-probs differ",
    "contents": "ids and log-probs are the same, and something else differs",
    "missing": "of one of them no ids are stored",
}
