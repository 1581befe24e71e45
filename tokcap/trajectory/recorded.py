"""What a snapshot recorded, ready for linking: its calls, where they lie in the prefix tree, and when they ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IdArray
from ..entry import TokenEntry, content_digest, identical
from ..protocol import CallRecord, TokenCaptureSnapshot
from ..store.prefix import Node, PrefixSearch
from ..store.records import Contents, EntryHead, decode_contents, decode_entry, decode_pieces
from ..store.snapshot import Entries
from .pieces import Pieces
from .tree import PrefixTree

__all__ = ("PARENT_HINT", "Call", "Reader", "Recorded", "call_of", "read_snapshot", "recorded_of")

PARENT_HINT = "parent_call_id"
"""Key in `TokenEntry.extra` under which a harness may say which call it continued."""


class Call(msgspec.Struct, eq=False, gc=False):
    """One choice of one answered model call, in the prefix tree."""

    # gc=False: a call is part of no cycle, and thousands that are tracked would make every collection slow.

    number: int
    """Position in `Recorded.calls`, which is sorted by call id and choice."""
    model_call_id: str
    choice_index: int
    model: str
    response_id: str
    finish_reason: str
    parent_hint: str
    """The call that it says it continued, or empty."""
    sampling: dict[str, Any]
    policy_versions: tuple[Any, ...]
    generation_token_ids: IdArray
    generation_log_probs: FloatArray
    record: CallRecord
    prompt: int
    """Length of the prompt in ids."""
    total: int
    """Length of prompt and sampled ids together."""
    prompt_vertex: int
    end_vertex: int
    digest: bytes
    """Of the whole entry (`content_digest`), where another call has the same ids; else empty."""
    _entry: TokenEntry | None
    _contents: bytes
    _pieces: bytes

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the call in its rollout."""
        return self.model_call_id, self.choice_index

    @property
    def sampled(self) -> int:
        """How many ids were sampled."""
        return self.total - self.prompt

    @property
    def contents(self) -> Contents:
        """The rest of what was put: output items, finish reason and so on; decoded when asked for."""
        entry = self._entry
        if entry is None:
            return decode_contents(self._contents)
        return Contents(*(getattr(entry, field) for field in Contents._fields))

    @property
    def pieces(self) -> list[bytes] | None:
        """The bytes of each sampled token, if the engine told."""
        return decode_pieces(self._pieces) if self._entry is None else self._entry.pieces


class Recorded(msgspec.Struct, eq=False):
    """The calls of a snapshot, in an order that follows from their ids alone. It keeps no file of the snapshot open."""

    rollout_id: str
    calls: list[Call]
    records: list[CallRecord]
    """Of every model call, answered or not."""
    tree: PrefixTree
    first: list[int]
    """`PrefixTree.ranks`."""
    last: list[int]
    partly_aborted: frozenset[str]
    """Model calls of which at least one choice says that it was cut off: then its other choices were not."""

    def below(self, vertex: int, ancestor: int) -> bool:
        """Whether the sequence of `vertex` starts with that of `ancestor` (or is it)."""
        return self.first[ancestor] <= self.first[vertex] <= self.last[ancestor]

    def prompt_token_ids(self, call: Call) -> IdArray:
        """int32 [P]: what the engine saw."""
        prompt = np.empty(call.prompt, np.int32)
        self.tree.ids_to(call.prompt_vertex, prompt)
        return prompt


def read_snapshot(snapshot: TokenCaptureSnapshot) -> Recorded:
    """Read every call of `snapshot` once, sharing prefixes as the store does."""
    entries = snapshot.entries
    tree = PrefixTree()
    reader = _StoredCalls(entries, tree) if isinstance(entries, Entries) else _GivenCalls(entries, tree)
    return recorded_of(snapshot.rollout_id, reader, tree, snapshot.calls)


class Reader(Protocol):
    """Who has made calls of what a snapshot holds."""

    calls: list[Call]
    conflicts: set[str]
    """Model calls of which several contents were found."""

    def entry(self, call: Call, recorded: Recorded) -> TokenEntry:
        """What was put."""
        ...


def recorded_of(rollout_id: str, reader: Reader, tree: PrefixTree, told: Sequence[CallRecord]) -> Recorded:
    """The calls that `reader` found in the order of their names, with what the ledger told of them."""
    records = list(told)
    known = {record.model_call_id: record for record in records if record.model_call_id}
    reader.calls.sort(key=lambda call: (call.model_call_id, call.choice_index))
    for number, call in enumerate(reader.calls):
        call.number = number
        record = known.get(call.model_call_id)
        if record is None:  # a source that keeps no ledger
            record = known[call.model_call_id] = CallRecord(call.model_call_id, "recorded")
            records.append(record)
        if call.model_call_id in reader.conflicts and record.outcome != "conflict":
            place = records.index(record)
            record = known[call.model_call_id] = records[place] = msgspec.structs.replace(record, outcome="conflict")
        call.record = record
    records.sort(key=lambda record: (record.model_call_id, record.detail))
    partly = frozenset(call.model_call_id for call in reader.calls if call.finish_reason == "aborted")
    recorded = Recorded(rollout_id, reader.calls, records, tree, *tree.ranks(), partly)
    for call in _with_equals(recorded.calls):
        call.digest = content_digest(reader.entry(call, recorded))
    return recorded


_NOT_YET = CallRecord("", "open")


class _StoredCalls:
    """Calls of a file store, without a single whole prompt: it says what each call shares with an earlier one."""

    def __init__(self, entries: Entries, tree: PrefixTree) -> None:
        self.calls: list[Call] = []
        self._entries = entries
        self.conflicts: set[str] = set()
        self._node_of: dict[tuple[str, int], Node] = {}
        nodes, chosen = entries.nodes, set(entries.chosen)
        if not nodes:
            return
        heads, ids, log_probs = _copied(entries)
        done = 0
        for index, (node, head) in enumerate(zip(nodes, heads, strict=True)):
            start, cut = done, done + node.prompt - node.shared
            done = start + node.total - node.shared
            generated, known = ids[cut:done], log_probs[: node.total - node.prompt]
            log_probs = log_probs[len(known) :]
            vertices = tree.add(node.parent, node.shared, ids[start:cut], generated)
            if index not in chosen:
                continue
            encoded = bytes(head.contents)
            contents = decode_contents(encoded)
            call = call_of(
                head.model_call_id, head.choice_index, contents, generated, known, node.prompt, node.total, vertices
            )
            call._contents, call._pieces = encoded, bytes(head.pieces)
            self.calls.append(call)
            self._node_of[call.key] = node

    def entry(self, call: Call, recorded: Recorded) -> TokenEntry:
        stored = self._entries.load(self._node_of[call.key])
        return decode_entry(recorded.rollout_id, stored, recorded.prompt_token_ids(call))


def _copied(entries: Entries) -> tuple[list[EntryHead], IdArray, FloatArray]:
    """What every node stores, in two arrays, so that no view keeps a file of the snapshot open."""
    heads: list[EntryHead] = []
    ids: list[npt.NDArray[Any]] = []
    log_probs: list[npt.NDArray[Any]] = []
    pieces = Pieces(entries)
    for node in entries.nodes:
        stored = entries.load(node)
        known, suffix, generated = pieces.of(node, stored)
        heads.append(stored.head)
        log_probs.append(known)
        ids += (suffix, generated)
    joined = np.concatenate(ids, dtype=np.int32, casting="same_kind")
    known = np.concatenate(log_probs, dtype=np.float64)
    joined.flags.writeable = known.flags.writeable = False
    return heads, joined, known


class _GivenCalls:
    """Calls of any other source, from whole prompts, each compared with the conversations before it."""

    def __init__(self, entries: Sequence[TokenEntry], tree: PrefixTree) -> None:
        self.calls: list[Call] = []
        nodes: list[Node] = []
        search = PrefixSearch(nodes, _no_load)
        # Shorter ones first, so that what a prompt extends is there before it.
        self.conflicts: set[str] = set()
        for entry in sorted(self._unique(entries), key=_length):
            prompt, generated = entry.prompt_token_ids, entry.generation_token_ids
            follows, shared = search.find(prompt)
            total = len(prompt) + len(generated)
            nodes.append(Node(0, 0, 0, 0, 0, follows, shared, len(prompt), total))
            search.add(len(nodes) - 1, prompt, generated)
            vertices = tree.add(follows, shared, prompt[shared:], generated)
            contents = Contents(*(getattr(entry, field) for field in Contents._fields))
            log_probs = entry.generation_log_probs
            call = call_of(
                entry.model_call_id, entry.choice_index, contents, generated, log_probs, len(prompt), total, vertices
            )
            call._entry = entry
            self.calls.append(call)

    def _unique(self, entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        """One entry for each choice; a source that gives two different ones shows a conflict, whatever it says."""
        found: dict[tuple[str, int], TokenEntry] = {}
        for entry in entries:
            other = found.setdefault((entry.model_call_id, entry.choice_index), entry)
            if other is not entry and not identical(other, entry):
                self.conflicts.add(entry.model_call_id)
                found[entry.model_call_id, entry.choice_index] = min(other, entry, key=content_digest)
        return list(found.values())

    def entry(self, call: Call, recorded: Recorded) -> TokenEntry:
        assert call._entry is not None
        return call._entry


def _length(entry: TokenEntry) -> int:
    return len(entry.prompt_token_ids) + len(entry.generation_token_ids)


def call_of(
    model_call_id: str,
    choice_index: int,
    contents: Contents,
    generated: IdArray,
    log_probs: FloatArray,
    prompt: int,
    total: int,
    vertices: tuple[int, int],
) -> Call:
    """A call whose number and record are not known yet."""
    hint = contents.extra.get(PARENT_HINT)
    return Call(
        -1,
        model_call_id,
        choice_index,
        contents.model,
        contents.response_id,
        contents.finish_reason,
        hint if isinstance(hint, str) else "",
        contents.sampling,
        tuple(contents.policy_versions),
        generated,
        log_probs,
        _NOT_YET,
        prompt,
        total,
        *vertices,
        b"",
        None,
        b"",
        b"",
    )


def _with_equals(calls: list[Call]) -> list[Call]:
    """The calls whose prompt and answer another call has, too."""
    first: dict[tuple[int, int], Call] = {}
    groups: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        place = call.prompt_vertex, call.end_vertex
        if first.setdefault(place, call) is not call:
            groups[place].append(call)
    return [call for place, others in groups.items() for call in (first[place], *others)]


def _no_load(node: Node) -> Any:
    raise AssertionError("every conversation that is compared was given whole")
