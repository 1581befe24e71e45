"""`tokcap calls`: the calls of many rollouts, one a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .options import as_json, directory, rollout_globs
from .status import NO, REFUSED

if TYPE_CHECKING:
    from ..errors import TokcapError
    from ..inspection import CallView, RolloutView

__all__ = ("call_facts", "calls_verb")

_CALLS = 1000
_OUTCOMES = ("recorded", "no_generation", "aborted", "lost", "conflict", "open")
_VERDICTS = ("trained", "abandoned", "ambiguous", "aborted", "unknown", "conflict", "other_model", "after_final")


@click.command("calls")
@rollout_globs
@click.option("--outcome", multiple=True, type=click.Choice(_OUTCOMES), help="Only calls with this outcome.")
@click.option("--verdict", multiple=True, type=click.Choice(_VERDICTS), help="Only answers of which this holds.")
@click.option("--drifted", is_flag=True, help="Only calls whose prompt no longer holds what was sampled.")
@click.option("--unknown-log-probs", is_flag=True, help="Only answers with ids whose log-prob is unknown.")
@click.option("--model", "models", multiple=True, metavar="GLOB", help="Only answers of this model.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Show N of them; 0: all. [default: {_CALLS} on a terminal, else all]",
)
@directory
@as_json
def calls_verb(
    globs: tuple[str, ...],
    outcome: tuple[str, ...],
    verdict: tuple[str, ...],
    drifted: bool,
    unknown_log_probs: bool,
    models: tuple[str, ...],
    limit: int | None,
    directory: str | None,
    as_json: bool,
) -> int:
    """List calls, one a line, in the order in which they began; with the reason where one has no record.

    Exit status 1 if no call matches, 4 if something can't be read.

    \b
    Examples:
      tokcap calls rollout-17
      tokcap calls --outcome lost --outcome open          # over the whole store
      tokcap calls 'task-9-*' --unknown-log-probs --json
    """
    from itertools import islice

    from ..inspection import open_to_look
    from ..inspection.wanted import is_named
    from .naming import meant, nothing, say_unlisted, texts_of, views_of
    from .output import line, print_json, print_table
    from .progress import progress_bar

    store = open_to_look(directory)
    asked = bool(globs or outcome or verdict or drifted or unknown_log_probs or models)
    unlisted: dict[str, TokcapError] = {}
    ids = meant(store, globs, unlisted)
    if not ids and not unlisted:
        return nothing(store.directory, asked=asked)
    say_unlisted(unlisted)
    texts = texts_of(store, None, ids[:1]) if ids else None  # as `tokcap drift` does, so that both say the same
    if limit is None:
        limit = _CALLS if sys.stdout.isatty() and not as_json else 0
    matched = failed = 0

    def found() -> Iterator[tuple[str, RolloutView | Exception, CallView | None]]:
        nonlocal matched, failed
        with progress_bar("reading rollouts") as told:
            for rollout_id, view in views_of(store, ids, texts, told):
                if isinstance(view, Exception):
                    failed += 1
                    yield rollout_id, view, None
                    continue
                for call in view.calls:
                    if (
                        (not outcome or call.outcome in outcome)
                        and (not verdict or call.verdict in verdict)
                        and (not drifted or call.relation == "drifted")
                        and (not unknown_log_probs or call.unknown_log_probs)
                        and (not models or (call.relation != "unrecorded" and is_named(call.model, models)))
                    ):
                        matched += 1
                        yield rollout_id, view, call

    chosen = islice(found(), limit + 1) if limit else found()
    if as_json:
        for place, (rollout_id, view, call) in enumerate(chosen, 1):
            if limit and place > limit:
                break
            if call is None or isinstance(view, Exception):
                print_json({"rollout_id": rollout_id, "error": str(view)})
            else:
                print_json({"rollout_id": rollout_id} | call_facts(view, call))
        return REFUSED if failed or unlisted else 0 if matched or not asked else NO
    rows = ([rollout_id, *_row(view, call)] for rollout_id, view, call in chosen)
    cut = False

    def limited() -> Iterator[list[str]]:
        nonlocal cut
        for place, row in enumerate(rows, 1):
            if limit and place > limit:
                cut = True
                return
            yield row

    print_table(_COLUMNS, limited(), styles={3: "bold"}, optional=_OPTIONAL)
    if cut:
        line("... and more (--limit 0 shows all)")
    if not matched and not failed:
        sys.stderr.write("tokcap: no call matches\n" if asked else "tokcap: no calls\n")
    return REFUSED if failed or unlisted else 0 if matched or not asked else NO


_COLUMNS: list[tuple[str, Any]] = [
    ("ROLLOUT", "left"),
    ("#", "right"),
    ("CALL", "left"),
    ("OUTCOME", "left"),
    ("PROMPT", "right"),
    ("SAMPLED", "right"),
    ("TRAINED", "right"),
    ("VERDICT", "left"),
    ("TIE", "left"),
    ("LOG-PROB", "right"),
    ("UNKNOWN", "right"),
    ("SECONDS", "right"),
    ("DELIVERED", "left"),
    ("MODEL", "left"),
    ("RESPONSE", "left"),
    ("REASON", "left"),
]


_OPTIONAL = [
    next(at for at, (name, _) in enumerate(_COLUMNS) if name == wanted)
    for wanted in ("RESPONSE", "MODEL", "DELIVERED", "UNKNOWN", "LOG-PROB", "SECONDS", "VERDICT", "PROMPT")
]
"""What a narrow terminal does without."""


def _row(view: RolloutView | Exception, call: CallView | None) -> list[str]:
    from .output import amount_cell

    if call is None or isinstance(view, Exception):
        return ["", "", "unreadable", *[""] * 11, str(view)]
    return [
        str(call.number),
        call.name or "(nameless)",
        call.outcome,
        amount_cell(call.prompt),
        amount_cell(call.sampled),
        amount_cell(call.trained),
        call.verdict,
        call.relation,
        "" if call.mean_log_prob is None else f"{call.mean_log_prob:.3f}",
        amount_cell(call.unknown_log_probs) if call.unknown_log_probs else "",
        "" if call.took_s is None else f"{call.took_s:.3f}",
        "" if call.delivered == "unknown" else call.delivered,
        call.model,
        call.response_id,
        _reason(view, call),
    ]


def _reason(view: RolloutView, call: CallView) -> str:
    from ..inspection.telling import why_lost, why_untrained

    if call.outcome in ("lost", "open", "conflict", "aborted", "no_generation"):
        return why_lost(view, call)
    return why_untrained(call)


def call_facts(view: RolloutView, call: CallView) -> dict[str, Any]:
    """A call for programs, with the sentences that people get."""
    import msgspec

    from ..inspection.telling import fate_of, tie_of

    facts = msgspec.structs.asdict(call)
    return facts | {"name": call.name, "tie": tie_of(view, call), "fate": fate_of(view, call)}
