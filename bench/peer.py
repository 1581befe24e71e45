"""NeMo Gym's token capture, loaded as it is, without the framework around it.

Its capture package consists of leaf modules that need pydantic and orjson only, but `import nemo_gym` loads ray, torch
and more, and wants a newer Python. So the packages get stand-ins that only know where their modules are, and the leaf
modules are imported as usual.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .places import UnavailableError
from .workload import Call

__all__ = ("PEER", "ListedCall", "Peer", "PeerEntry", "PeerSnapshot", "PeerStore", "listed", "load")

PEER = "NeMo Gym"
"""The name of the candidate in every figure."""

INSTALL = "pip install --no-deps --ignore-requires-python nemo-gym==0.7.0, and pydantic and orjson"

_PACKAGES = ("nemo_gym", "nemo_gym.token_id_capture", "nemo_gym.token_id_capture.staging")


class PeerEntry(Protocol):
    """Their `TokenEntry`: one call, a pydantic model."""

    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    prompt_is_delta: bool
    parent_resolution_reason: str


class PeerSnapshot(Protocol):
    """Their `TokenCaptureSnapshot`: everything parsed."""

    entries: tuple[PeerEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int


class PeerStore(Protocol):
    """Their `TokenCaptureStore`: a JSONL file per rollout, each line synced, and a state file beside it."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...
    async def put(self, entry: PeerEntry) -> None: ...
    def append(self, entry: PeerEntry) -> None:
        """`put`, blocking."""
        ...

    async def freeze(self, rollout_id: str) -> PeerSnapshot: ...
    def freeze_now(self, rollout_id: str) -> PeerSnapshot: ...
    def read_entries(self, rollout_id: str) -> list[PeerEntry]: ...
    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool: ...
    def sweep_retired(self, older_than_seconds: float) -> int: ...
    def state_path_for(self, rollout_id: str) -> Path: ...
    def lock_path_for(self, rollout_id: str) -> Path: ...


class ListedCall(msgspec.Struct, frozen=True, eq=False):
    """A call as their capture gets it from the engine: Python lists, and the call that it continues."""

    rollout_id: str
    model_call_id: str
    prompt: list[int]
    generated: list[int]
    log_probs: list[float]
    parent: ListedCall | None
    """The call whose prompt and answer begin this prompt: what their resolver finds by the text of the request."""
    created_at: float
    """Orders the calls of a rollout; their builder takes the first root by it."""


def listed(calls: Iterable[Call]) -> Iterator[ListedCall]:
    """The calls of one rollout as lists, for use outside the measured time.

    Lists of one conversation share their int objects, as far as one prompt extends the other: that is kind to them.
    """
    before: dict[str, ListedCall] = {}
    for number, call in enumerate(calls):
        parent = before.get(call.parent)
        if parent is None:
            prompt = call.prompt.tolist()
        else:
            shared = len(parent.prompt) + len(parent.generated)
            prompt = [*parent.prompt, *parent.generated, *call.prompt[shared:].tolist()]
        made = ListedCall(
            call.rollout_id,
            call.model_call_id,
            prompt,
            call.generated.tolist(),
            call.log_probs.tolist(),
            parent,
            float(number),
        )
        before[call.model_call_id] = made
        yield made


class Peer:
    """What of NeMo Gym is measured.

    version: of the installed package.
    """

    def __init__(self, version: str, modules: dict[str, Any]) -> None:
        self.version = version
        self._records, self._builder = modules["records"], modules["builder"]
        self._store = modules["store"]

    def store(self, directory: Path) -> PeerStore:
        """Their `TokenCaptureStore` on a directory."""
        store: PeerStore = self._store.TokenCaptureStore(directory)
        return store

    def entry(self, call: ListedCall, *, delta: bool = False) -> PeerEntry:
        """Their entry, with its lineage, made as their `capture_tokens` and `commit_entry` make it.

        delta: as with their option `delta_records`: of a call that continues another only the rest of the prompt.
        The fingerprint of the messages is left out, because these calls have none.
        """
        records, parent = self._records, call.parent
        entry = records.TokenEntry(
            rollout_id=call.rollout_id,
            model_call_id=call.model_call_id,
            prompt_token_ids=call.prompt,
            generation_token_ids=call.generated,
            generation_log_probs=call.log_probs,
            created_at=call.created_at,
        )
        cumulative: list[int] | None = None
        if delta and parent is not None:
            known, prompt = parent.prompt + parent.generated, list(entry.prompt_token_ids)
            if len(prompt) >= len(known) and prompt[: len(known)] == known:
                cumulative = prompt + list(entry.generation_token_ids)
                entry.prompt_token_ids = prompt[len(known) :]
                entry.prompt_is_delta = True
        status = records.ParentResolutionStatus
        stamped: PeerEntry = records.stamp_lineage(
            entry,
            None if parent is None else parent.model_call_id,
            parent_resolution=status.ROOT if parent is None else status.RESOLVED,
            cumulative=cumulative,
        )
        return stamped

    def entries(self, calls: Iterable[Call], *, delta: bool = False) -> list[PeerEntry]:
        """`entry` of every call of one rollout."""
        return [self.entry(call, delta=delta) for call in listed(calls)]

    def build(self, entries: Sequence[PeerEntry]) -> Any:
        """Their builder alone (`prefix_merging`): chains of links; the arrays are not joined yet."""
        return self._builder.run_builder(list(entries))

    def project(self, rollout_id: str, built: Any) -> dict[str, Any]:
        """What their consumer makes of a build: checks, and the main chain as one response with token lists."""
        for chain in built.chains:
            chain.validate()
        response: dict[str, Any] = self._builder.project_main_chain_response(rollout_id, built)
        self._builder.assert_prefix_contiguity(response)
        return response


@functools.cache
def load() -> Peer:
    """The installed NeMo Gym. Raises `UnavailableError` if it, or what its capture needs, is not there."""
    # Finding the top package runs none of it.
    found = importlib.util.find_spec("nemo_gym")
    places = None if found is None else found.submodule_search_locations
    if not places:
        raise UnavailableError(f"NeMo Gym is not installed ({INSTALL})")
    root = Path(next(iter(places))).parent
    for name in _PACKAGES:
        _stand_in(name, root)
    try:
        modules = {
            name: importlib.import_module(f"nemo_gym.token_id_capture.{name}")
            for name in ("records", "protocols", "store", "builder")
        }
        version = importlib.metadata.version("nemo-gym")
    except ImportError as error:
        raise UnavailableError(f"NeMo Gym can't be loaded: {error} ({INSTALL})") from error
    return Peer(version, modules)


def _stand_in(name: str, root: Path) -> None:
    if name in sys.modules:
        return
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules[name] = package
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, package)
