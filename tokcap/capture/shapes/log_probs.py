"""The log-probs of sampled tokens, in the forms in which engines give them.

The log-prob is always that of the position's own entry, never one looked up among the alternatives: those are keyed by
text, and two ids can have the same text. A missing one is None; nothing is padded, dropped or shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...arrays import IdArray, log_prob_array, shown
from ...errors import UnusableAnswerError
from .places import IdReader, as_dict, column, named_ids

__all__ = ("CLAMPED", "LogProbs", "checked_log_probs", "clamped", "from_logprobs", "from_plain", "from_triples")

CLAMPED = -9999.0
"""What OpenAI-style servers write for -inf and, alas, for a missing log-prob as well."""

_TOLERANCE = 1e-3


class LogProbs(msgspec.Struct, frozen=True, eq=False):
    """One column of log-probs, and what stands beside it."""

    place: str
    values: list[float | None]
    named: list[int | None] | None = None
    """The ids that the entries name, if any names one."""
    named_at: str = ""
    """The place of these names, and in `member` the key within an entry."""
    member: str = ""
    pieces: list[bytes] | None = None
    may_echo: bool = False
    """The column may begin with the prompt (`echo: true`)."""

    def last(self, number: int) -> LogProbs:
        """The same without what precedes the last `number` positions."""
        start = len(self.values) - number
        named = None if self.named is None else self.named[start:]
        return LogProbs(self.place, self.values[start:], named, self.named_at, self.member, self.pieces)


def from_logprobs(value: object, place: str) -> LogProbs | None:
    """The `logprobs` object of a choice: entries as of chat, or columns as of completions. None if it has neither."""
    if isinstance(value, list):
        return from_plain(value, place)
    logprobs = as_dict(value)
    if logprobs.get("content") is not None:
        return from_entries(logprobs["content"], f"{place}.content")
    if logprobs.get("token_logprobs") is None:
        return None
    values = _numbers(logprobs["token_logprobs"], f"{place}.token_logprobs")
    tokens = logprobs.get("tokens")
    named = named_ids(tokens, f"{place}.tokens") if isinstance(tokens, list) else None
    if named is not None and len(named) != len(values):
        raise UnusableAnswerError(f"{place} has {len(named)} tokens but {len(values)} token_logprobs")
    return LogProbs(f"{place}.token_logprobs", values, named, f"{place}.tokens", may_echo=True)


def from_entries(entries: object, place: str) -> LogProbs:
    """A list with an object for each token, as in chat answers."""
    if not isinstance(entries, list):
        raise UnusableAnswerError(f"{place} is {shown(entries)}, expected a list of log-probs")
    if set(map(type, entries)) - {dict}:
        for position, entry in enumerate(entries):
            if entry is not None and not isinstance(entry, dict):
                raise UnusableAnswerError(f"{place}[{position}] is {shown(entry)}, expected an object with a logprob")
        entries = [entry if entry is not None else {} for entry in entries]
    values = _numbers([_sampled(entry) for entry in entries], place, ".logprob")
    ids = [entry.get("token_id") for entry in entries]
    if any(token_id is not None for token_id in ids):
        for position, token_id in enumerate(ids):
            if token_id is not None and type(token_id) is not int:
                raise UnusableAnswerError(f"{place}[{position}].token_id is {shown(token_id)}, expected an integer")
        return LogProbs(place, values, ids, place, ".token_id")
    tokens = [entry.get("token") for entry in entries]
    named = named_ids(tokens, place, ".token")
    return LogProbs(place, values, named, place, ".token", None if named is not None else _pieces(entries))


def from_triples(rows: object, place: str) -> LogProbs | None:
    """A list of `[log-prob, token id, text]`, as SGLang gives it; the ids are another matter (`column`)."""
    if rows is None:
        return None
    if not isinstance(rows, list):
        raise UnusableAnswerError(f"{place} is {shown(rows)}, expected a list of [log-prob, token id, text]")
    return LogProbs(place, _numbers(column(rows, 0, place), place, "[0]"))


def from_plain(values: object, place: str) -> LogProbs | None:
    """A list of numbers."""
    return None if values is None else LogProbs(place, _numbers(values, place))


def clamped(values: Sequence[float | None]) -> list[int]:
    """The positions at which the log-prob is the stand-in of OpenAI-style servers."""
    return [position for position, value in enumerate(values) if value == CLAMPED] if CLAMPED in values else []


def checked_log_probs(
    sources: Sequence[LogProbs], ids: IdArray, prompt: IdArray, reader: IdReader
) -> tuple[list[float | None] | None, list[bytes] | None]:
    """The log-probs [G] and the pieces of `ids`, from the first source; the others must not contradict it.

    A source with fewer log-probs than ids is left out: nothing tells which of them are missing. Raises
    `UnusableAnswerError` for more log-probs than ids, and for entries that name other ids.
    """
    candidates = (_fitted(source, ids, prompt, reader) for source in sources)
    fitted = [source for source in candidates if source is not None]
    for source in fitted:
        if source.named is not None:
            reader.check_named(ids, source.named, source.named_at, source.member)
    if not fitted:
        return None, None
    for other in fitted[1:]:
        _check_same(fitted[0], other, reader)
    return fitted[0].values, next((source.pieces for source in fitted if source.pieces is not None), None)


def _fitted(source: LogProbs, ids: IdArray, prompt: IdArray, reader: IdReader) -> LogProbs | None:
    found = len(source.values)
    if found == len(ids):
        return source
    if found < len(ids):
        return None
    if source.may_echo and found == len(prompt) + len(ids):
        # `echo: true`: the columns cover the prompt as well, the ids don't.
        if source.named is not None:
            reader.check_named(prompt, source.named[: len(prompt)], source.named_at, source.member)
        return source.last(len(ids))
    raise reader.refuse(f"{source.place} gives {found} log-probs, but there are {len(ids)} sampled ids")


def _check_same(one: LogProbs, other: LogProbs, reader: IdReader) -> None:
    first = log_prob_array(one.values, field=one.place, where="answer")
    second = log_prob_array(other.values, field=other.place, where="answer")
    # One of them may be clamped or unknown where the other isn't.
    comparable = np.isfinite(first) & np.isfinite(second) & (first != CLAMPED) & (second != CLAMPED)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are no log-probs
        differing = comparable & (np.abs(first - second) > _TOLERANCE * (1 + np.abs(first)))
    if differing.any():
        at = int(np.flatnonzero(differing)[0])
        raise reader.refuse(
            f"{one.place} and {other.place} disagree about the log-prob at position {at}: {first[at]} and {second[at]}"
        )


def _sampled(entry: dict[str, Any]) -> Any:
    value = entry.get("logprob")
    # vLLM 0.32 and later write -9999 for a NaN and for a missing entry, too, but then without a rank.
    return None if value == CLAMPED and "rank" in entry and entry["rank"] is None else value


def _numbers(values: object, place: str, member: str = "") -> list[float | None]:
    if not isinstance(values, list):
        raise UnusableAnswerError(f"{place} is {shown(values)}, expected a list of log-probs")
    kinds = set(map(type, values))
    if kinds <= {float, type(None)}:
        return values
    for position, value in enumerate(values):
        # An integer beyond every float is no log-prob either.
        if value is not None and (type(value) not in (float, int) or (type(value) is int and abs(value) > 1e300)):
            raise UnusableAnswerError(f"{place}[{position}]{member} is {shown(value)}, a log-prob is a number or null")
    return [value if value is None else float(value) for value in values]


def _pieces(entries: Sequence[dict[str, Any]]) -> list[bytes] | None:
    """The bytes of each token; None for all if those of one can't be trusted. Not for entries that name ids.

    vLLM gives `[60]` or `[]` for the bytes of `<|im_end|>`, and others the bytes of a replacement character.
    """
    pieces = []
    for entry in entries:
        token, values = entry.get("token"), entry.get("bytes")
        if not isinstance(token, str) or not isinstance(values, list):
            return None
        try:
            piece = bytes(values)
        except (TypeError, ValueError):
            return None
        if "\ufffd" in token:
            try:
                piece.decode()
            except UnicodeDecodeError:
                pass  # bytes of a part of a character, which have no text of their own
            else:
                return None
        elif token.encode("utf-8", "surrogatepass") != piece:
            return None
        pieces.append(piece)
    return pieces
