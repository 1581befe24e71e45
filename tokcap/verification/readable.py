"""What a reader gets of a rollout, before its repair and after: nothing may be gone, or look better than it is."""

from __future__ import annotations

import msgspec

from ..entry import content_digest
from ..errors import CorruptError, TokcapError
from ..store.layout import Layout
from ..store.looking import Looker
from .checking import Place

__all__ = ("Readable", "gone", "readable")


class Readable(msgspec.Struct, frozen=True):
    """What a reader gets of a rollout."""

    state: str
    snapshot_id: str
    version: int
    incomplete: bool
    outcomes: dict[str, str]
    entries: dict[tuple[str, int], bytes]


def readable(place: Place, rollout_id: str) -> Readable | None:
    """None if it can't be read at all."""
    looker = Looker(place.files, Layout(place.layout.root), place.boot_id)
    try:
        said = looker.stat(rollout_id)
        entries: dict[tuple[str, int], bytes] = {}
        if said.state in ("open", "frozen"):
            with looker.read(rollout_id) as snapshot:
                for node in range(len(snapshot.entries)):
                    try:
                        entry = snapshot.entries[node]
                    except CorruptError:
                        continue
                    entries[entry.model_call_id, entry.choice_index] = content_digest(entry)
        outcomes = {call.model_call_id: call.outcome for call in said.calls if call.model_call_id}
        return Readable(said.state, said.snapshot_id, said.version, said.incomplete, dict(outcomes), entries)
    except TokcapError:
        return None


def gone(before: Readable | None, after: Readable | None, restored: bool) -> str:
    """What could be read before and can't be any more, or looks better than it is; empty if nothing.

    restored: bytes came back that a checksum of the manifest proves, so that more may be there than before.
    """
    if before is None:
        return ""
    if after is None:
        return "nothing could be read"
    if (before.state, before.snapshot_id, before.version) != (after.state, after.snapshot_id, after.version):
        return f"it was {after.state}, version {after.version} of {after.snapshot_id}"
    if any(after.entries.get(key) != digest for key, digest in before.entries.items()):
        return "a record could not be read"
    if restored:
        return ""
    if before.incomplete and not after.incomplete:
        return "it seemed complete"
    if any(after.outcomes.get(call) != outcome for call, outcome in before.outcomes.items()):
        return "a call had another outcome"
    return ""
