"""What of each call is trained, and why the rest is not: the account of a rollout (rules 5, 17, 19, 21, 22)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from .behaviour import POSITIVE_BEYOND_ROUNDING, SENTINEL, is_behaviour, unknown_log_probs
from .links import Links, received, sound
from .recorded import Call, Recorded
from .siblings import Fate

__all__ = ("CATEGORIES", "UNTRAINED", "Category", "Judged", "account", "judge", "mask_all", "verdict_of_repetition")

Category = Literal[
    "trained", "abandoned", "ambiguous", "aborted", "unknown", "conflict", "other_model", "after_final", "masked"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Every sampled token is in exactly one of them. `masked`: left out because the whole rollout is (`strict=True`)."""


UNTRAINED: tuple[Category, ...] = tuple(category for category in CATEGORIES if category not in ("trained", "masked"))
"""Why single tokens are not trained."""


class Judged(msgspec.Struct, eq=False, gc=False):
    """One representative with the part of its sampled ids that is trained."""

    call: Call
    source: Call
    """Of identical calls the one whose log-probs, policy versions and sampling parameters count."""
    verdict: Category
    """What holds for the whole span; of a trained one single positions may still be unknown."""
    mask: npt.NDArray[np.bool_] | None
    """bool [G], True where trained; None if all of it or nothing is."""
    trained: int
    behaviour: bool | None
    counts: dict[Category, int]
    """How many of its sampled ids fall into each category."""


def judge(
    recorded: Recorded,
    links: Links,
    fates: dict[int, Fate],
    *,
    models: Collection[str],
    after_final: Collection[int],
    exclude_not_behaviour: bool,
) -> dict[int, Judged]:
    """Judge every representative that has sampled ids."""
    judged = {}
    sources = [received(recorded, links, number) for number in links.answered]
    for number, source, known in zip(links.answered, sources, all_known(sources), strict=True):
        call, fate = recorded.calls[number], fates[number]
        behaviour = is_behaviour(source.sampling)
        verdict: Category = "trained"
        if call.model not in models:
            verdict = "other_model"
        elif all(same.record.outcome == "conflict" for same in sound(recorded, links, number)):
            verdict = "conflict"
        elif number in after_final:
            verdict = "after_final"
        elif fate.verdict != "kept":
            verdict = fate.verdict
        elif number in links.unclear or (exclude_not_behaviour and behaviour is False):
            verdict = "unknown"
        judged[number] = _weighed(call, source, verdict, fate.continued, behaviour, known)
    return judged


def all_known(calls: Sequence[Call]) -> list[bool]:
    """Of each call, all of which sampled something, whether each of its log-probs is known."""
    if not calls:
        return []
    arrays = [call.generation_log_probs for call in calls]
    starts = list(itertools.accumulate(map(len, arrays[:-1]), initial=0))
    joined = np.concatenate(arrays)
    # NaN is the least and the largest of everything, and no comparison with it holds.
    with np.errstate(invalid="ignore"):
        known = np.minimum.reduceat(joined, starts) > SENTINEL
        known &= np.maximum.reduceat(joined, starts) <= POSITIVE_BEYOND_ROUNDING
    found: list[bool] = known.tolist()
    return found


def _weighed(
    call: Call, source: Call, verdict: Category, continued: int | None, behaviour: bool | None, known: bool
) -> Judged:
    sampled = call.sampled
    if verdict != "trained":
        return Judged(call, source, verdict, None, 0, behaviour, {verdict: sampled})
    if known and continued is None:
        return Judged(call, source, "trained", None, sampled, behaviour, {"trained": sampled})
    counts: dict[Category, int] = {}
    trainable = sampled if continued is None else continued
    unknown = unknown_log_probs(source.generation_log_probs)
    unknowns = int(np.count_nonzero(unknown[:trainable]))
    trained = trainable - unknowns
    if trained:
        counts["trained"] = trained
    if unknowns:
        counts["unknown"] = unknowns
    if trainable < sampled:
        counts["aborted"] = sampled - trainable
    mask = None
    if trained != sampled:
        mask = ~unknown
        mask[trainable:] = False
    return Judged(call, source, "trained" if trained else "unknown", mask, trained, behaviour, counts)


def mask_all(judged: dict[int, Judged]) -> None:
    """Train nothing of this rollout."""
    for found in judged.values():
        if found.trained:
            found.counts["masked"] = found.counts.pop("trained")
            found.trained, found.mask = 0, None


def account(recorded: Recorded, links: Links, judged: dict[int, Judged]) -> dict[str, int]:
    """How many ids were sampled, and how many of them are in each category.

    sampled = the sum of all categories. An answer that was sampled twice with the same ids counts twice: once as what
    it is, and as `abandoned` for every repetition (unless more is wrong with it): the client went on with one of them.
    """
    counts: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    repeated = 0
    for number, found in judged.items():
        for category, count in found.counts.items():
            counts[category] += count
        members = links.members[number]
        for i in members if len(members) > 1 else ():
            if i != found.source.number:
                counts[verdict_of_repetition(found, recorded.calls[i])] += found.call.sampled
                repeated += found.call.sampled
    sampled = sum(call.sampled for call in recorded.calls)
    return {"sampled": sampled, **counts, "repeated": repeated}


def verdict_of_repetition(found: Judged, call: Call) -> Category:
    """What the ids of a call count as that is identical to the one that `found` judges."""
    if found.verdict == "other_model":
        return "other_model"
    if call.record.outcome == "conflict":
        return "conflict"
    return "after_final" if found.verdict == "after_final" else "abandoned"
