"""What became of a call, as a sentence: how it hangs on others, and what of it is trained."""

from __future__ import annotations

from ..content import name_of
from ..store.layout import Layout
from ..trajectory import FLAGS
from .view import CallKey, CallView, RolloutView
from .words import OUTCOMES

__all__ = ("detail_of", "facts_of", "fate_of", "tie_of", "why_lost", "why_untrained", "without_directory")

_PARTS = {
    "unknown": "with unknown log-probs",
    "aborted": "cut off",
    "masked": "masked",
}

_OPEN_OR_DAMAGED = (
    "it began, and nothing that can be read says how it ended: its record may have been in the damaged bytes; else it "
    "still runs, or its server died"
)


def tie_of(view: RolloutView, call: CallView, *, follows: bool = False) -> str:
    """How it hangs on other calls. follows: the call that it hangs on stands directly above."""
    above = "" if follows or call.parent is None else f" {_number(view, call.parent)}"
    drift = call.drift
    if call.relation == "unrecorded":
        return "no ids stored"
    if call.relation == "root" or (call.relation in ("forked", "separate") and drift is None):
        return "begins"
    if call.relation == "repeats":
        return f"repeats{above or ' the one above'}: the same prompt and answer"
    if call.relation == "continues":
        parts = "" if drift is None else f"; parts from the prompt of {_number(view, drift.nearest)} at {drift.index}"
        return f"continues{above}{parts}"
    assert drift is not None
    other = _number(view, drift.nearest)
    if call.relation == "drifted":
        how = "how is unknown" if drift.kind == "unknown" else drift.kind.replace("_", " ")
        return f"drifted at {drift.index} from {other}: keeps {drift.kept} of its ids, lost {drift.lost} ({how})"
    if call.relation == "restarted":
        nearest = view.call(drift.nearest)
        length = f" of {nearest.prompt}" if nearest is not None else ""
        return f"restarted: parts at {drift.index}{length} from the prompt of {other}: compacted, edited or forked"
    if call.relation == "forked":
        return f"begins a fork: {_ids(drift.index)} as the prompt of {other}, then another way"
    return f"begins another conversation: only its first {_ids(drift.index)} are those of {other}"


def fate_of(view: RolloutView, call: CallView) -> str:
    """What became of its answer."""
    if call.relation == "unrecorded" or not call.sampled:
        if call.outcome == "recorded":
            return "nothing was sampled"
        return f"{call.outcome}: {why_lost(view, call)}"
    said = f"not trained: {call.verdict.replace('_', ' ')}"
    if call.verdict == "abandoned" and call.instead is not None:
        other = _number(view, call.instead)
        said += f", the client went on with {other}"
        if view.same_answer(call.key, call.instead):
            said = f"not trained again: the same answer counts as {other}"
    if call.verdict == "trained" or (call.verdict == "unknown" and call.trained):
        rest = [f"{count} {_PARTS.get(name, name)}" for name, count in call.counts.items() if name != "trained"]
        said = f"trained {call.trained}" + (f" of {call.sampled}: {', '.join(rest)}" if rest else "")
    if call.outcome in ("lost", "open"):
        said += f"; {call.outcome}: other choices of it are not there"
    elif call.outcome == "aborted" and call.verdict != "aborted":
        said += "; cut off"
    elif call.outcome == "conflict" and call.verdict != "conflict":
        said += "; conflict"
    return said


def why_untrained(call: CallView) -> str:
    """Why not all of its answer is trained, in words; empty if all is, or if nothing was sampled."""
    words = [FLAGS[name] for name in call.counts if name in FLAGS]
    return "; ".join(words) or ("the whole rollout is masked" if "masked" in call.counts else "")


def why_lost(view: RolloutView, call: CallView) -> str:
    """Why a call has no record: what was noted, else what the outcome means. Its files are named without the directory
    of the rollout, which `RolloutView.damage` has."""
    if call.detail:
        return detail_of(view, call)
    return _OPEN_OR_DAMAGED if call.outcome == "open" and view.damage else OUTCOMES[call.outcome]


def detail_of(view: RolloutView, call: CallView) -> str:
    """`call.detail`, its files named without the directory of the rollout."""
    for damage in view.damage[:1]:
        above, found, _ = damage.rpartition(f"/{view.rollout_id}/")
        if found:
            return call.detail.replace(above + found, "")
    return call.detail


def without_directory(text: str, directory: str, rollout_id: str) -> str:
    """What is said of a rollout of the store in `directory`, its files named without the directory of the rollout."""
    return text.replace(f"{Layout(directory).rollout(rollout_id)}/", "")


def facts_of(call: CallView) -> list[str]:
    """What else is worth knowing of it, each in a few words."""
    facts = []
    if call.samples > 1:
        facts.append(f"one of {call.samples} samples")
    if call.attempts > 1:
        facts.append(f"prompt sent {call.attempts} times")
    if call.after_gap:
        facts.append("after a gap")
    if call.retry_count:
        facts.append(f"the client's retry {call.retry_count}")
    if call.delivered in ("no", "partly"):
        facts.append("not delivered" if call.delivered == "no" else "delivered in part")
    if call.took_s is not None:
        facts.append(_seconds(call.took_s))
    versions = list(dict.fromkeys(name_of(span[0]) for span in call.policy_versions if len(span) == 3))
    if versions:
        facts.append(f"policy {', '.join(versions)}")
    if call.finish_reason and call.finish_reason not in ("stop", "aborted"):
        facts.append(f"finish: {call.finish_reason}")
    return facts


def _number(view: RolloutView, key: CallKey) -> str:
    other = view.call(key)
    return f"#{other.number}" if other is not None else key[0]


def _ids(count: int) -> str:
    return f"{count} id{'' if count == 1 else 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 0.0005:
        return "<1 ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
