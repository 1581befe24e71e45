"""What a snapshot recorded, ready for linking: its calls, where they lie in the prefix tree, and when they ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..arrays import FloatArray, IdArray
from ..entry import TokenEntry
from ..protocol import CallRecord, TokenCaptureSnapshot
from ..store.prefix import Node, PrefixSearch
from ..store.snapshot import Entries
from .tree import PrefixTree

__all__ = ("Call", "Recorded", "read_snapshot")


class Call(msgspec.Struct, eq=False, gc=False):
    """One choice of one answered model call, in the prefix tree."""

    number: int
    """Position in `Recorded.calls`, which is sorted by call id and choice."""
    answer: TokenEntry
    """What was stored; its prompt may be empty here and is in the tree."""
    record: CallRecord
    prompt: int
    """Length of the prompt in ids."""
    total: int
    """Length of prompt and sampled ids together."""
    prompt_vertex: int
    end_vertex: int

    @property
    def model_call_id(self) -> str:
        return self.answer.model_call_id

    @property
    def choice_index(self) -> int:
        return self.answer.choice_index

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the call in its rollout."""
        return self.answer.model_call_id, self.answer.choice_index

    @property
    def model(self) -> str:
        return self.answer.model

    @property
    def sampled(self) -> int:
        """How many ids were sampled."""
        return self.total - self.prompt

    @property
    def generation_token_ids(self) -> IdArray:
        return self.answer.generation_token_ids

    @property
    def generation_log_probs(self) -> FloatArray:
        return self.answer.generation_log_probs


class Recorded(msgspec.Struct, eq=False):
    """The calls of a snapshot, in an order that follows from their ids alone."""

    rollout_id: str
    calls: list[Call]
    records: list[CallRecord]
    """Of every model call, answered or not."""
    tree: PrefixTree
    first: list[int]
    """`PrefixTree.ranks`."""
    last: list[int]

    def below(self, vertex: int, ancestor: int) -> bool:
        """Whether the sequence of `vertex` starts with that of `ancestor` (or is it)."""
        return self.first[ancestor] <= self.first[vertex] <= self.last[ancestor]

    def entry(self, call: Call) -> TokenEntry:
        """The entry that was put, with its whole prompt."""
        if len(call.answer.prompt_token_ids) == call.prompt:
            return call.answer
        prompt = np.empty(call.prompt, np.int32)
        self.tree.ids_to(call.prompt_vertex, prompt)
        return msgspec.structs.replace(call.answer, prompt_token_ids=prompt)


def read_snapshot(snapshot: TokenCaptureSnapshot) -> Recorded:
    """Read every call of `snapshot` once, sharing prefixes as the store does."""
    entries = snapshot.entries
    tree = PrefixTree()
    found = _from_store(entries, tree) if isinstance(entries, Entries) else _from_entries(entries, tree)
    records = list(snapshot.calls)
    known = {record.model_call_id: record for record in records if record.model_call_id}
    calls: list[Call] = []
    for answer, prompt, vertices in sorted(found, key=lambda item: (item[0].model_call_id, item[0].choice_index)):
        record = known.get(answer.model_call_id)
        if record is None:  # a source that keeps no ledger
            record = known[answer.model_call_id] = CallRecord(answer.model_call_id, "recorded")
            records.append(record)
        total = prompt + len(answer.generation_token_ids)
        calls.append(Call(len(calls), answer, record, prompt, total, *vertices))
    records.sort(key=lambda record: (record.model_call_id, record.detail))
    return Recorded(snapshot.rollout_id, calls, records, tree, *tree.ranks())


Found = list[tuple[TokenEntry, int, tuple[int, int]]]


def _from_store(entries: Entries, tree: PrefixTree) -> Found:
    """Without a single whole prompt: the store says what each call shares with an earlier one."""
    found: Found = []
    chosen = set(entries.chosen)
    for index, node in enumerate(entries.nodes):
        stored = entries.load(node)
        vertices = tree.add(node.parent, node.shared, stored.suffix, stored.generated)
        if index in chosen:
            found.append((entries.answer(stored), node.prompt, vertices))
    return found


def _from_entries(entries: Sequence[TokenEntry], tree: PrefixTree) -> Found:
    """From whole prompts, each compared with the conversations before it at memory speed."""
    found: Found = []
    nodes: list[Node] = []
    search = PrefixSearch(nodes, _no_load)
    # Shorter ones first, so that what a prompt extends is there before it.
    for entry in sorted(entries, key=lambda e: len(e.prompt_token_ids) + len(e.generation_token_ids)):
        prompt, generated = entry.prompt_token_ids, entry.generation_token_ids
        follows, shared = search.find(prompt)
        total = len(prompt) + len(generated)
        nodes.append(Node(0, 0, 0, 0, 0, follows, shared, len(prompt), total))
        search.add(len(nodes) - 1, prompt, generated)
        found.append((entry, len(prompt), tree.add(follows, shared, prompt[shared:], generated)))
    return found


def _no_load(node: Node) -> Any:
    raise AssertionError("every conversation that is compared was given whole")
