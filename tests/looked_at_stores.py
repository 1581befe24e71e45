"""Stores for the tests of what looks into them, made through the public API."""

from __future__ import annotations

from pathlib import Path

from tokcap import FileStore
from tokcap.digests import request_digests

from . import recordings

__all__ = ("recorded_store",)


def recorded_store(directory: Path) -> Path:
    """The 25 recorded rollouts, finished and frozen, as a capture of them would have stored them."""
    with FileStore(directory, require_intent=True) as store:
        for rollout in recordings.rollouts():
            for call in rollout.calls:
                if not call.generates:
                    continue
                digests = request_digests(call.request)
                store.begin_call_now(rollout.rollout_id, call.model_call_id, call.choices, request_digests=digests)
                if call.outcome == "recorded":
                    store.put_many_now(call.entries)
                else:
                    store.settle_call_now(rollout.rollout_id, call.model_call_id, call.outcome, call.note)
            store.finish_now(rollout.rollout_id, meta={"reward": 1.0, "group": rollout.shape})
        for snapshot in store.freeze_many_now(recordings.names()):
            snapshot.close()
    return directory
