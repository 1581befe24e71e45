"""Who builds trajectories: tokcap and NeMo Gym, each up to what a trainer takes, behind one interface."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokcap import FileStore
from tokcap.trajectory import build

from .figures import OURS
from .peer import PEER, Peer
from .stock import stock, stock_peer, the_peer
from .workload import Call

__all__ = ("Arrays", "Builder", "NemoGym", "Tokcap", "builders", "check_built", "joined")

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float64]]
"""Token ids, loss mask, log-probs."""


class Builder(Protocol):
    """One candidate. What `open` gives goes into `build`, and what that gives into `trained`."""

    name: str

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        """Write these rollouts and freeze them."""
        ...

    def open(self, rollout_id: str) -> Any: ...
    def build(self, opened: Any) -> Any:
        """Everything that a trainer gets."""
        ...

    def trained(self, built: Any) -> int:
        """How many ids of it are trained."""
        ...

    def arrays(self, built: Any) -> Arrays | None:
        """The first trajectory; None if it is not made."""
        ...

    def close(self) -> None: ...


class Tokcap:
    """`tokcap.trajectory.build`, and every array of every trajectory."""

    name = OURS

    def __init__(self, directory: Path) -> None:
        self._store = FileStore(directory / "tokcap")

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        stock(self._store, conversations)
        for conversation in conversations:
            self._store.freeze_now(conversation[0].rollout_id).close()

    def open(self, rollout_id: str) -> Any:
        return self._store.read_now(rollout_id)

    def build(self, opened: Any) -> Any:
        return [(t.token_ids, t.loss_mask, t.log_probs) for t in build(opened).trajectories]

    def trained(self, built: Any) -> int:
        return sum(int(mask.sum()) for _, mask, _ in built)

    def arrays(self, built: Any) -> Arrays | None:
        first: Arrays = built[0]
        return first

    def close(self) -> None:
        self._store.close_now()


class NemoGym:
    """NeMo Gym's builder; with `project` also what its consumer does with the result."""

    def __init__(self, directory: Path, peer: Peer, *, project: bool = True) -> None:
        self.name = PEER if project else f"{PEER}, builder alone"
        self._peer, self._project = peer, project
        self._store = peer.store(directory / self.name.replace(" ", "-"))

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        stock_peer(self._peer, self._store, conversations)
        for conversation in conversations:
            self._store.freeze_now(conversation[0].rollout_id)

    def open(self, rollout_id: str) -> Any:
        return self._store.freeze_now(rollout_id)

    def build(self, opened: Any) -> Any:
        built = self._peer.build(opened.entries)
        return joined(self._peer.project(opened.rollout_id, built)) if self._project else built

    def trained(self, built: Any) -> int:
        if self._project:
            return int(built[1].sum())
        main = [chain for chain in built.chains if chain.chain_id == "main"]
        return sum(len(link.entry.generation_token_ids) for chain in main for link in chain.links)

    def arrays(self, built: Any) -> Arrays | None:
        return built if self._project else None

    def close(self) -> None:
        pass


def joined(response: dict[str, Any]) -> Arrays:
    """The arrays of one projected response: of each item what its prompt adds to the ids before, and its answer."""
    ids: list[npt.NDArray[np.int32]] = []
    masks: list[npt.NDArray[np.bool_]] = []
    log_probs: list[npt.NDArray[np.float64]] = []
    seen = 0
    for item in response["output"]:
        if "generation_token_ids" in item:
            new = np.array(item["prompt_token_ids"][seen:], np.int32)
            answer = np.array(item["generation_token_ids"], np.int32)
            ids += (new, answer)
            masks += (np.zeros(len(new), np.bool_), np.ones(len(answer), np.bool_))
            log_probs += (np.full(len(new), np.nan), np.array(item["generation_log_probs"], np.float64))
            seen += len(new) + len(answer)
    return np.concatenate(ids), np.concatenate(masks), np.concatenate(log_probs)


def builders(directory: Path) -> list[Builder]:
    """The candidates that are there, each with an empty store under `directory`."""
    found: list[Builder] = [Tokcap(directory)]
    peer = the_peer()
    if peer is not None:
        found += [NemoGym(directory, peer), NemoGym(directory, peer, project=False)]
    return found


def check_built(candidate: Builder, conversation: Sequence[Call], built: Any) -> None:
    """Raise `AssertionError` unless a straight conversation gives its last sequence, every sampled id trained."""
    sampled = sum(len(call.generated) for call in conversation)
    trained = candidate.trained(built)
    straight = all(call.parent == before.model_call_id for before, call in itertools.pairwise(conversation))
    if trained > sampled or (straight and trained < sampled):
        raise AssertionError(f"{candidate.name}: {trained} of {sampled} sampled ids are trained")
    arrays = candidate.arrays(built)
    if straight and arrays is not None:
        last = conversation[-1]
        log_probs = np.concatenate([call.log_probs for call in conversation])
        if not (
            np.array_equal(arrays[0], np.concatenate([last.prompt, last.generated]))
            and np.array_equal(arrays[2][arrays[1]], log_probs)
        ):
            raise AssertionError(f"{candidate.name}: the arrays are not those of {last.rollout_id}")
