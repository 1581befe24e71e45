"""The summaries that were stored: of a live store, of a copy, or of one snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ..entry import TokenEntry
from ..errors import RetiredError, TokcapError
from ..protocol import TokenCaptureSnapshot
from ..store import FileStore
from .entries import SUMMARY_KEY, evaluation_directory, occurrence_of, summary_of
from .summary import ModelCallSummary

__all__ = ("join", "summaries", "summaries_of")


def summaries(directory: str | os.PathLike[str], rollout_id: str | None = None) -> Iterator[ModelCallSummary]:
    """The summaries under `model_call_capture_dir`: of one rollout, or of all that were not retired.

    Takes no lock and writes nothing; servers may go on writing. By rollout, and in it by the time when a call began;
    calls that are open have `outcome="open"` and what was known when they began.

    Raises `StoreNotFoundError` if nothing was ever recorded there; of one rollout `InvalidIdError`, `RetiredError`, and
    `DurabilityError` or `CorruptError` if it can't be read, of all of them the first of these two, after the others.
    A summary whose bytes are damaged is missing, or its call seems open; `FileStore.stat` of the store tells.
    """
    store = FileStore(evaluation_directory(directory), read_only=True)
    return _all(store) if rollout_id is None else _one(store, rollout_id)


def _all(store: FileStore) -> Iterator[ModelCallSummary]:
    failure: TokcapError | None = None
    rollouts = iter(store.rollouts())
    while True:
        try:
            found = list(_one(store, next(rollouts)[0]))
        except StopIteration:
            break
        except RetiredError:
            continue
        except TokcapError as error:
            failure = failure or error
            continue
        yield from found
    if failure is not None:
        raise failure


def _one(store: FileStore, rollout_id: str) -> Iterator[ModelCallSummary]:
    with store.read_now(rollout_id) as snapshot:
        yield from summaries_of(snapshot)


def summaries_of(snapshot: TokenCaptureSnapshot) -> list[ModelCallSummary]:
    """The summaries in one snapshot of an evaluation store, by the time when the calls began."""
    found: dict[tuple[str, int], ModelCallSummary] = {}
    for entry in snapshot.entries:
        summary = summary_of(entry)
        key = (entry.model_call_id, occurrence_of(entry))
        if summary is not None and (key not in found or found[key].is_open):
            found[key] = summary
    known = {model_call_id for model_call_id, _ in found}
    bare = [
        ModelCallSummary(
            rollout_id=snapshot.rollout_id,
            model_call_id=call.model_call_id,
            retry_count=call.retry_count,
            outcome="open",
        )
        for call in snapshot.calls
        if call.outcome == "open" and call.model_call_id not in known
    ]
    return sorted([*found.values(), *bare], key=lambda summary: (summary.began_at, summary.model_call_id))


def join(
    summaries: Iterable[ModelCallSummary], snapshot: TokenCaptureSnapshot
) -> Iterator[tuple[ModelCallSummary, list[TokenEntry]]]:
    """Each summary with the training entries of its call, one for each choice, by `choice_index`.

    snapshot: of the token store. Summaries of other rollouts, and of calls without a training record, have none.
    """
    by_call: dict[str, list[TokenEntry]] = {}
    for entry in snapshot.entries:
        if SUMMARY_KEY not in entry.extra:
            by_call.setdefault(entry.model_call_id, []).append(entry)
    for entries in by_call.values():
        entries.sort(key=lambda entry: entry.choice_index)
    for summary in summaries:
        own = summary.rollout_id == snapshot.rollout_id
        yield summary, list(by_call.get(summary.model_call_id, ())) if own else []
