"""`tokcap drift`: where prompts part from what was sampled, over a whole store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .options import as_json, directory, rollout_globs, tokenizer
from .status import NO, REFUSED

if TYPE_CHECKING:
    from ..errors import TokcapError
    from ..inspection import RolloutView
    from ..inspection.drifts import DriftedTurn, DriftTotals
    from ..inspection.text import Texts

__all__ = ("drift_verb",)

_KINDS = (
    "retokenised",
    "stripped_reasoning",
    "whitespace_or_stop",
    "edited",
    "truncated_or_compacted",
    "other",
    "unknown",
)


@click.command("drift")
@rollout_globs
@click.option("--kind", "kinds", multiple=True, type=click.Choice(_KINDS), help="Only turns that drifted like this.")
@click.option(
    "--restarted", is_flag=True, help="Also prompts that part from an earlier prompt: compaction, sub-agents."
)
@click.option(
    "--context", type=click.IntRange(min=0), metavar="N", default=8, show_default=True, help="Ids around the place."
)
@click.option("--totals", "only_totals", is_flag=True, help="Only the numbers at the end.")
@tokenizer
@directory
@as_json
def drift_verb(
    globs: tuple[str, ...],
    kinds: tuple[str, ...],
    restarted: bool,
    context: int,
    only_totals: bool,
    tokenizer: str | None,
    directory: str | None,
    as_json: bool,
) -> int:
    """Find turns whose prompt no longer holds what was sampled: where, how many ids, and how it came about.

    Nothing is masked for drift: the turn begins a trajectory of its own. The rate is drifted turns per turn that had an
    earlier answer to extend. How a turn drifted is told by bytes: those that engines told of the same model's answers
    anywhere in the store, or a --tokenizer's, which knows all of them. Exit status 1 if no turn is of a --kind, 4 if
    something can't be read.

    \b
    Examples:
      tokcap drift --totals --tokenizer ./model
      tokcap drift rollout-17 --context 12
      tokcap drift --kind edited --json | jq -r '.rollout_id // empty' | sort | uniq -c
    """
    from ..inspection import open_to_look
    from ..inspection.drifts import DriftTotals, drifted_turns
    from .naming import meant, nothing, say_unlisted, texts_of, views_of
    from .output import print_json
    from .progress import progress_bar

    store = open_to_look(directory)
    unlisted: dict[str, TokcapError] = {}
    ids = meant(store, globs, unlisted)
    if not ids and not unlisted:
        return nothing(store.directory, asked=bool(globs or kinds))
    say_unlisted(unlisted)
    texts = texts_of(store, tokenizer, ids[:1] if len(ids) > 1 else ids)
    totals, unreadable, matched = DriftTotals(), 0, False
    shown = _Shown(texts, as_json)
    with progress_bar("reading rollouts") as told:
        for rollout_id, view in views_of(store, ids, texts, told):
            if isinstance(view, Exception):
                unreadable += 1
                shown.unreadable(rollout_id, view)
                continue
            totals.add(view)
            for turn in drifted_turns(view, restarted=restarted, context=context):
                if not kinds or turn.kind in kinds:
                    matched = True
                    if not only_totals:
                        shown.turn(view, turn)
    if as_json:
        print_json({"totals": _facts(totals), "unreadable": unreadable, "unlisted": sorted(unlisted)})
    else:
        _print_totals(totals, unreadable, tokenizer is None)
    if unreadable or unlisted:
        return REFUSED
    return NO if kinds and not matched else 0


def _facts(totals: DriftTotals) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(totals) | {"drift_rate": totals.drift_rate}


class _Shown:
    """Prints turns one by one: a block on a terminal, a line elsewhere."""

    def __init__(self, texts: Texts, as_json: bool) -> None:
        self._texts, self._as_json = texts, as_json
        self._as_blocks = sys.stdout.isatty()
        self._begun = False

    def unreadable(self, rollout_id: str, error: Exception) -> None:
        from .output import print_json, safe

        if self._as_json:
            print_json({"rollout_id": rollout_id, "error": str(error)})
        else:
            sys.stderr.write(safe(f"tokcap: rollout {rollout_id} can't be read: {error}") + "\n")

    def turn(self, view: RolloutView, turn: DriftedTurn) -> None:
        import msgspec

        from ..inspection.text import joined
        from .output import print_json

        texts = [joined(ids, self._texts.pieces(ids, (turn.model,))) for ids in (turn.before, turn.after)]
        call, nearest = view.call(turn.call), view.call(turn.nearest)
        assert call is not None and nearest is not None
        if self._as_json:
            print_json(
                msgspec.structs.asdict(turn)
                | {"before": turn.before, "after": turn.after, "before_text": texts[0], "after_text": texts[1]}
                | {"number": call.number, "nearest_number": nearest.number}
            )
        elif self._as_blocks:
            self._block(turn, call.number, nearest.number, texts)
        else:
            self._line(turn, call.name, nearest.name, texts)

    def _block(self, turn: DriftedTurn, number: int, nearest: int, texts: list[str]) -> None:
        from .output import console, line, safe

        what: str = turn.relation
        if turn.relation == "drifted":
            what = f"keeps {turn.kept} of its ids, lost {turn.lost}; {turn.kind}".replace("_", " ")
        line(safe(f"{turn.rollout_id}  #{number} parts from #{nearest} at {turn.index}: {what}"))
        screen = console()
        for title, ids, text, style in (
            ("was", turn.before, texts[0], "green"),
            ("is", turn.after, texts[1], "red"),
        ):
            from rich.text import Text

            split = turn.index - turn.start
            shown = " ".join(map(str, ids[:split])) + " | " + " ".join(map(str, ids[split:]))
            screen.print(Text.assemble(f"  {title:<4}", (shown, style)))
            screen.print(Text.assemble("      ", (safe(text), "")))
        line()

    def _line(self, turn: DriftedTurn, name: str, nearest: str, texts: list[str]) -> None:
        from .output import line, safe

        if not self._begun:
            self._begun = True
            line("ROLLOUT\tCALL\tFROM\tTIE\tINDEX\tKEPT\tLOST\tKIND\tSTART\tWAS\tIS\tWAS_TEXT\tIS_TEXT")
        ids = [" ".join(map(str, part)) for part in (turn.before, turn.after)]
        cells = [turn.rollout_id, name, nearest, turn.relation, str(turn.index), str(turn.kept), str(turn.lost)]
        line("\t".join(map(safe, [*cells, turn.kind, str(turn.start), *ids, *texts])))


def _print_totals(totals: DriftTotals, unreadable: int, without_tokenizer: bool) -> None:
    from .output import amount_cell, line

    drifted, restarted = amount_cell(totals.drifted_calls), amount_cell(totals.restarted_calls)
    line(
        f"{drifted} of {amount_cell(totals.turns)} turns drifted ({totals.drift_rate or 0:.1%}) in "
        f"{amount_cell(totals.rollouts)} rollouts; {amount_cell(totals.drift_lost)} sampled ids stand no more in the "
        "prompt behind them"
    )
    for kind, count in sorted(totals.kinds.items(), key=lambda item: -item[1]):
        hint = "  (give --tokenizer)" if kind == "unknown" and without_tokenizer else ""
        line(f"{amount_cell(count):>5}  {kind.replace('_', ' ')}{hint}")
    if totals.restarted_calls:
        parts = "prompt parts" if totals.restarted_calls == 1 else "prompts part"
        line(f"{restarted} {parts} from an earlier prompt: compaction, sub-agents (--restarted)")
    if unreadable:
        line(f"{amount_cell(unreadable)} rollouts can't be read")
