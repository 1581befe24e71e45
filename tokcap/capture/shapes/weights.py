"""Which weights sampled which tokens, as far as the engine tells."""

from __future__ import annotations

from .places import as_dict

__all__ = ("weight_spans",)

Spans = list[tuple[object, int, int]]


def weight_spans(value: object, generated: int) -> Spans | None:
    """The spans (version, start, end) over `generated` tokens; empty if there are none.

    None if they can't be true: they must follow each other without gaps and cover the whole generation.
    """
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        return None
    spans: Spans = []
    for item in value:
        span = as_dict(item)
        version, start, end = span.get("version"), span.get("start"), span.get("end")
        if type(version) not in (str, int) or type(start) is not int or type(end) is not int:
            return None
        if start != (spans[-1][2] if spans else 0) or end < start:
            return None
        spans.append((version, start, end))
    return spans if spans[-1][2] == generated else None
