"""`Delivery`: one rollout in its consumer's hands."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..trajectory import Build, Trajectory

__all__ = ("Delivery", "Retire", "same_trained")

_LOOK_S = 0.2
"""How often a thread that waits for the consumer's event loop looks whether that is still there."""

Retire = Callable[["Delivery"], Awaitable[bool]]
"""Retires what a delivery was made of."""


class Delivery:
    """A rollout that is frozen and built. It stays in the store until `done` retires exactly what was read.

    rollout_id, group, meta: which rollout it is; `meta` is what its owner said with `finish`.
    record: the record that was given in place of an id, if any.
    trajectories: those with trained ids (`build.trained`); empty if masked.
    build: the whole build with its account; None if the rollout could not be read.
    masked: nothing is trained. reasons: why (`tokcap.trajectory.REASONS`; `unreadable` with `metrics["error"]`).
    snapshot_id, version: what was read. Delivery is at least once: a consumer that ended between its hand-over and
        `done` gets the rollout again, with the same pair.
    replaces: the version that was handed over before, if a late mark changed what may be trained; else None. A consumer
        that still can should drop what it took under that version.
    replaced: the newer version is on its way out of the loop, or was handed over.
    resumed: it was frozen before this consumer began to follow the store.
    """

    def __init__(
        self,
        retire: Retire,
        rollout_id: str,
        *,
        snapshot_id: str = "",
        version: int = 0,
        build: Build | None = None,
        reason: str = "unreadable",
        error: str = "",
        group: str = "",
        record: Mapping[str, Any] | None = None,
        resumed: bool = False,
    ) -> None:
        self._retire = retire
        self._loop = asyncio.get_running_loop()
        self._retired = False
        self.rollout_id, self.group, self.record = rollout_id, group, record
        self.snapshot_id, self.version = snapshot_id, version
        self.build = build
        self.meta: dict[str, Any] = {} if build is None else build.meta
        self.masked = build is None or build.masked
        self.reasons: tuple[str, ...] = (reason,) if build is None else build.reasons
        self.metrics: dict[str, Any] = {"error": error} if build is None else build.metrics
        self.replaces: int | None = None
        self.replaced = False
        self.resumed = resumed

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """What a trainer takes: each has `token_ids`, `loss_mask` and `log_probs` as read-only numpy arrays."""
        return () if self.build is None else self.build.trained

    async def done(self, *, discard: bool = False) -> bool:
        """The consumer has it safely: retire exactly what was read. True if it is gone, also when repeated.

        False, and the evidence stays: for a masked rollout, unless `discard` gives up what it recorded; if the source
        fails, which is logged; and if a late mark changed what may be trained. Then the newer version comes out of the
        loop again, with `replaces` set, once, however often this is repeated. One that changes nothing of it is retired
        at once.
        """
        if not self._retired and self.version and (discard or not self.masked):
            self._retired = await self._retire(self)
        return self._retired

    def done_now(self, *, discard: bool = False) -> bool:
        """`done`, blocking, for any thread but that of the consumer's event loop; also after that has ended."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise RuntimeError("done_now would block the event loop that it waits for: await done() instead")
        if self._loop.is_running():
            work = self.done(discard=discard)
            try:
                asked = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # it was closed at this moment
                work.close()
            else:
                while not concurrent.futures.wait([asked], timeout=_LOOK_S).done:
                    if self._loop.is_closed():  # it ended before it came to this
                        asked.cancel()
                        break
                else:
                    return asked.result()
        # In a thread, because there may be a running loop in this one.
        with concurrent.futures.ThreadPoolExecutor(1, "tokcap-done") as thread:
            return thread.submit(asyncio.run, self.done(discard=discard)).result()

    def __repr__(self) -> str:
        state = f"masked: {', '.join(self.reasons)}" if self.masked else f"{len(self.trajectories)} trajectories"
        return f"<Delivery {self.rollout_id} version {self.version}, {state}>"


def same_trained(one: Build | None, other: Build | None) -> bool:
    """Whether a trainer gets the same from both: ids, masks, log-probs and policy versions of every trajectory."""
    if one is None or other is None or len(one.trained) != len(other.trained):
        return False
    pairs = list(zip(one.trained, other.trained, strict=True))
    return all((len(a), a.trained) == (len(b), b.trained) for a, b in pairs) and all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.log_probs, b.log_probs, equal_nan=True)  # NaN wherever the mask is False
        and a.policy_versions == b.policy_versions
        for a, b in pairs
    )
