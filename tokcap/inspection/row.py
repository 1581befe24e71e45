"""`RolloutRow`: what one look at a rollout found out, small enough to keep for a hundred thousand of them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any, Literal

import msgspec
import numpy as np

from ..content import name_of
from ..errors import TokcapError
from ..ids import check_rollout_id
from ..store import FileStore, RolloutStat, Snapshot
from ..store.layout import Layout
from ..store.records import decode_contents, decode_contents_head
from ..store.snapshot import Entries
from ..trajectory import Build, build, group_of
from ..trajectory.content import joined_versions
from .fingerprint import NOTHING_SEEN, Seen, see

__all__ = ("LOG_PROB_EDGES", "RolloutRow", "RowState", "look_at", "proper", "row_of")

_TRIES = 3
_INCOMPLETE = ("lost", "open", "conflict")

RowState = Literal["open", "frozen", "retired", "unreadable", "absent"]
"""As the store names them; `unreadable`: looking at it raised, and `error` says what."""

LOG_PROB_EDGES = (
    float("-inf"),
    -20.0,
    -10.0,
    -8.0,
    -6.0,
    -5.0,
    -4.0,
    -3.0,
    -2.0,
    -1.5,
    -1.0,
    -0.5,
    -0.2,
    -0.1,
    -0.01,
    0.0,
)
"""Natural log: bin i of `RolloutRow.log_probs` holds LOG_PROB_EDGES[i] <= x < LOG_PROB_EDGES[i + 1]; the last one
holds what is exactly 0.0 or above. NaN is in none."""


class RolloutRow(msgspec.Struct, frozen=True, gc=False):
    """One rollout in a list."""

    rollout_id: str
    state: RowState
    snapshot_id: str = ""
    version: int = 0
    """Of the published snapshot, or of the one that was retired; 0: open."""
    changed_at: float = 0.0
    """Unix seconds: when what is shown last changed on disk; of a retired one, when it was retired."""
    finished: bool = False
    """Whether its owner said `finish`."""
    group: str = ""
    files: int = 0
    bytes: int = 0
    """Each file counted once, however many names it has."""
    leftover: int = 0
    """Bytes among them of what a crash left half-built or half-deleted; the next sweep frees them."""
    calls: int = 0
    outcomes: dict[str, int] = {}
    """Calls by outcome."""
    incomplete: bool = False
    damage: tuple[str, ...] = ()
    """Where bytes that were durable are not whole any more, and what that means, in words."""
    torn: int = 0
    """Tails that were dropped because they were never acknowledged."""
    late: int = 0
    """Statements made after its log was closed."""
    models: tuple[str, ...] = ()
    masked: bool = False
    """Whether nothing of it is trained; of an open one, whether nothing is of what was sampled so far."""
    reasons: tuple[str, ...] = ()
    """Why something is not trained: keys of `tokcap.trajectory.REASONS`."""
    metrics: dict[str, Any] = {}
    """Those of its build that are not 0 (`tokcap.trajectory.METRICS`)."""
    policy_versions: dict[str, int] = {}
    """Sampled ids per version of the weights; under "" where the engine told none."""
    log_probs: tuple[int, ...] = ()
    """Sampled ids per bin of `LOG_PROB_EDGES`."""
    error: str = ""
    """Why it could not be read, or built."""

    def metric(self, name: str) -> int:
        """A metric of the build that is a whole number; 0 if it isn't there."""
        value = self.metrics.get(name, 0)
        return value if isinstance(value, int) else 0

    @property
    def sampled(self) -> int:
        """Sampled ids of all recorded calls."""
        return self.metric("sampled")

    @property
    def trained(self) -> int:
        """Sampled ids that are trained."""
        return self.metric("trained")

    @property
    def why(self) -> str:
        """Why something is not trained, or not as it should be, in few words; empty if all is well."""
        said = []
        if self.state == "unreadable" or self.error:
            said.append(f"unreadable: {self.error}" if self.state == "unreadable" else self.error)
        if self.damage:
            said.append("damaged")
        if self.incomplete:
            said += [_counted_calls(self.outcomes[kind], kind) for kind in _INCOMPLETE if self.outcomes.get(kind)]
        if self.masked:
            said.append(f"masked: {', '.join(self.reasons)}" if self.reasons else "masked")
        else:
            said.extend(self.reasons)
        if self.late:
            said.append(f"{self.late} said afterwards")
        return ", ".join(said)


def _counted_calls(count: int, kind: str) -> str:
    kind = "in conflict" if kind == "conflict" else kind
    return f"{count} call{'' if count == 1 else 's'} {kind}"


def row_of(store: FileStore, rollout_id: str, changed_at: float = 0.0, *, whole: bool = True) -> RolloutRow:
    """Look at one rollout; never raises for what is wrong with it, `state` and `error` say so.

    changed_at: see `RolloutRow`; 0: found out. whole: False leaves out everything that a build tells.
    """
    row = look_at(store, rollout_id, whole=whole)[1]
    if changed_at and row.state != "retired":
        row = msgspec.structs.replace(row, changed_at=changed_at)
    return row


def look_at(store: FileStore, rollout_id: str, *, whole: bool) -> tuple[Seen | None, RolloutRow]:
    """`row_of`, and what its directory showed before; None if it can't be walked through."""
    seen: Seen | None = None
    snapshot: Snapshot | None = None
    try:
        seen = _seen(store, rollout_id)
        stat, snapshot = store.look_now(rollout_id, weigh=False)
    except TokcapError as error:
        changed_at = 0.0 if seen is None else seen.changed_at
        return seen, RolloutRow(proper(rollout_id), "unreadable", changed_at=changed_at, error=proper(str(error)))
    told: dict[str, Any] = {}
    if snapshot is not None:
        with snapshot:
            told = _built(snapshot) if whole else {}
    seen_or_not = seen or NOTHING_SEEN
    return seen, RolloutRow(
        rollout_id,
        stat.state,
        stat.snapshot_id,
        stat.version,
        seen_or_not.changed_at if stat.retired_at is None else stat.retired_at,
        finished=stat.finished,
        group=proper(group_of(rollout_id, stat.meta)),
        files=seen_or_not.files,
        bytes=seen_or_not.bytes,
        leftover=seen_or_not.leftover,
        damage=tuple(proper(str(damage)) for damage in stat.damage),
        torn=len(stat.torn),
        late=len(stat.late),
        **(_counted(stat) | told),
    )


def _seen(store: FileStore, rollout_id: str) -> Seen | None:
    layout = Layout(store.directory)
    path = layout.rollout(check_rollout_id(rollout_id)).removeprefix(f"{layout.rollouts}/")
    with contextlib.suppress(OSError):  # the look that follows says what is wrong
        rollouts = os.open(layout.rollouts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    return see(rollouts, path)
        finally:
            os.close(rollouts)
    return None


def proper(text: str) -> str:
    """`text` as it can be encoded: lone surrogates are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _counted(stat: RolloutStat) -> dict[str, Any]:
    damage = set(map(str, stat.damage))  # each stands among the calls, and is none
    outcomes = Counter(call.outcome for call in stat.calls if call.model_call_id or call.detail not in damage)
    return {
        "calls": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "incomplete": stat.incomplete,
    }


def _built(snapshot: Snapshot) -> dict[str, Any]:
    try:
        return _told(build(snapshot), snapshot.entries)
    except TokcapError as error:
        return {"error": proper(str(error))}


_NO_VERSIONS = b"\x90"
_EDGES = np.array(LOG_PROB_EDGES)


def _told(built: Build, entries: Entries) -> dict[str, Any]:
    """What the build says, and what the entries say without a single whole prompt."""
    versions: Counter[str] = Counter()
    models: set[str] = set()
    log_probs = [np.empty(0)]
    for index in entries.chosen:
        stored = entries.load(entries.nodes[index])
        model, spans = _model_and_versions(stored.head.contents)
        models.add(proper(model))
        log_probs.append(stored.log_probs)
        for version, start, end in joined_versions([(spans, 0, stored.head.generated)]):
            versions["" if version is None else proper(name_of(version))] += end - start
    known = np.concatenate(log_probs, dtype=np.float64)
    known = known[known == known]  # which NaN is not
    bins = np.bincount(_EDGES.searchsorted(known, "right") - 1, minlength=len(_EDGES))
    return {
        "models": tuple(sorted(models)),
        # Of an open one that has nothing yet, nothing is left out.
        "masked": built.masked and (built.version > 0 or built.metrics["sampled"] > 0),
        "reasons": built.reasons,
        "metrics": {name: _proper_names(value) for name, value in built.metrics.items() if value},
        "policy_versions": dict(sorted(versions.items())),
        "log_probs": tuple(bins.tolist()),
    }


def _proper_names(value: Any) -> Any:
    return {proper(name): count for name, count in value.items()} if isinstance(value, dict) else value


def _model_and_versions(contents: msgspec.Raw) -> tuple[str, list[Any]]:
    try:
        head = decode_contents_head(contents)
        if bytes(head.policy_versions) == _NO_VERSIONS:
            return head.model, []
    except msgspec.DecodeError:  # a name that is no plain text
        pass
    whole = decode_contents(bytes(contents))
    return whole.model, whole.policy_versions
