"""Broken stores whose codec, chains or caches give back something else than was put."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tokcap import TokenEntry
from tokcap.content import UNSTORABLE_KEY

from .broken_stores import Case, ChangesEntries, changed
from .memory_store import MemorySnapshot, MemoryState, MemoryStore, Rollout


class RefusesNan(ChangesEntries):
    """Records are JSON, written with allow_nan=False."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        if not np.isfinite(entry.generation_log_probs).all():
            raise ValueError("Out of range float values are not JSON compliant")
        return entry


class CannotReadNan(MemoryStore):
    """Non-finite log-probs are written as NaN and -Infinity, which the strict reader refuses for the whole rollout."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        if not all(np.isfinite(entry.generation_log_probs).all() for entry in snapshot.entries):
            raise msgspec.DecodeError("JSON is malformed: invalid number")
        return snapshot


class PadsUnknownWithZero(ChangesEntries):
    """A missing log-prob becomes 0.0: a probability of one."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(
            entry,
            generation_log_probs=np.nan_to_num(entry.generation_log_probs, nan=0.0, posinf=math.inf, neginf=-math.inf),
        )


class ClipsPositive(ChangesEntries):
    """Log-probs above zero can't be, so they are clipped."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, generation_log_probs=np.fmin(entry.generation_log_probs, 0.0))


class StoresSingleFloats(ChangesEntries):
    """Log-probs are stored as float32, whether that loses something or not."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        with np.errstate(over="ignore"):
            single = entry.generation_log_probs.astype(np.float32)
        return changed(entry, generation_log_probs=single.astype(np.float64))


class FlattensExperts(ChangesEntries):
    """routed_experts is stored as bytes without its shape."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        experts = entry.routed_experts
        return changed(entry, routed_experts=None if experts is None else experts.reshape(-1))


class RoundsBigIntegers(ChangesEntries):
    """Contents pass through a JSON parser that reads all numbers as doubles."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, extra=self._rounded(entry.extra), sampling=self._rounded(entry.sampling))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._rounded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._rounded(item) for item in value]
        return int(float(value)) if type(value) is int else value


class RefusesSurrogates(ChangesEntries):
    """Contents are encoded as strict UTF-8; the error loses the token record."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        "".join(self._strings([entry.extra, entry.output_items, entry.model])).encode()
        return entry

    def _strings(self, value: Any) -> Iterable[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, dict)):
            for item in value:
                yield from self._strings(item)
                if isinstance(value, dict):
                    yield from self._strings(value[item])


class TruncatesLongPrompts(ChangesEntries):
    """A column or a message has a maximum length, and what is longer is cut without a word."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, prompt_token_ids=entry.prompt_token_ids[:50_000])


class KeepsReferences(MemoryStore):
    """Keeps the caller's object instead of a copy: what the caller does with it later is trained."""

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put(group)
        for entry in group:
            contents = self.state.rollouts[entry.rollout_id].calls[entry.model_call_id].contents[entry.choice_index]
            if len(contents) == 1:
                contents[0] = entry


class SharesItsCache(MemoryStore):
    """Every snapshot hands out the same cached entries: one reader changes what the next one sees."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        calls = self.state.rollouts[rollout_id].calls.values()
        snapshot._entries = tuple(contents[0] for call in calls for contents in call.contents.values())
        return snapshot


class HandsOutWritableArrays(MemoryStore):
    """Entries are read into fresh arrays, and nobody thought of the flag."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        for entry in snapshot.entries:
            msgspec.structs.force_setattr(entry, "prompt_token_ids", entry.prompt_token_ids.copy())
        return snapshot


class PacksIdsInThreeBytes(ChangesEntries):
    """Token ids are packed into three bytes each, which has been enough for every vocabulary so far."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, prompt_token_ids=entry.prompt_token_ids & 0xFFFFFF)


class SkipsEmptyGenerations(MemoryStore):
    """`if not tokens: return`: an answer without tokens is taken for no answer, and no record says that it was."""

    def _put(self, group: list[TokenEntry]) -> None:
        answered = [entry for entry in group if len(entry.generation_token_ids)]
        if answered:
            super()._put(answered)


class ReservesKeys(ChangesEntries):
    """A document database keeps keys like `__name__` to itself: a value that was replaced costs the tokens."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        for value in entry.extra.values():
            if isinstance(value, dict) and UNSTORABLE_KEY in value:
                raise ValueError(f"the field name {UNSTORABLE_KEY} is reserved")
        return entry


# ---- chains


class AssumesThatPromptsExtend(MemoryStore):
    """Stores each prompt as a suffix of the call before, by length alone: a drifted prompt comes back as another."""

    def _put(self, group: list[TokenEntry]) -> None:
        entry = group[0]
        calls = self.state.rollouts.get(entry.rollout_id, Rollout()).calls
        if entry.model_call_id not in calls and calls:
            for last, *_ in list(calls.values())[-1].contents.values():
                before = np.concatenate([last.prompt_token_ids, last.generation_token_ids])
                if len(entry.prompt_token_ids) >= len(before):
                    prompt = np.concatenate([before, entry.prompt_token_ids[len(before) :]])
                    group = [changed(entry, prompt_token_ids=prompt), *group[1:]]
        super()._put(group)


class CachesChainsAcrossRollouts(MemoryStore):
    """Prompts are stored as suffixes of a chain that another rollout wrote, and go when that one is retired."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        payload = {e.prompt_token_ids.tobytes() for e in self.state.rollouts.get(rollout_id, Rollout()).entries()}
        done = await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)
        for rollout in self.state.rollouts.values():
            for call in rollout.calls.values():
                if done and any(c.prompt_token_ids.tobytes() in payload for cs in call.contents.values() for c in cs):
                    call.contents.clear()
        return done


class TakesItselfForTheOnlyWriter(MemoryStore):
    """A prompt is written as its suffix to the call that this process wrote last, and read as one to the call before
    it in the file, whoever wrote that."""

    def __init__(self, state: MemoryState) -> None:
        super().__init__(state)
        self.last: dict[str, list[int]] = {}

    def _put(self, group: list[TokenEntry]) -> None:
        entry, own = group[0], self.last.get(group[0].rollout_id)
        calls = self.state.rollouts.get(entry.rollout_id, Rollout()).calls
        self.last[entry.rollout_id] = _tokens(entry)
        if own and calls and entry.model_call_id not in calls and entry.prompt_token_ids[: len(own)].tolist() == own:
            for stored, *_ in list(calls.values())[-1].contents.values():
                prompt = [*_tokens(stored), *entry.prompt_token_ids[len(own) :]]
                group = [changed(entry, prompt_token_ids=prompt), *group[1:]]
        super()._put(group)


class AdoptsLateParents(MemoryStore):
    """When a parent arrives after its children, they are rewritten as suffixes to its prompt, without what it
    generated."""

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put(group)
        parent, length = _tokens(group[0]), len(group[0].prompt_token_ids)
        for call in self.state.rollouts[group[0].rollout_id].calls.values():
            for contents in call.contents.values():
                prompt = contents[0].prompt_token_ids.tolist()
                if len(prompt) > len(parent) and prompt[: len(parent)] == parent:
                    contents[0] = changed(contents[0], prompt_token_ids=prompt[:length] + prompt[len(parent) :])


class CountsDepthInOneByte(MemoryStore):
    """The depth of a chain is one byte: after 255 calls it is 0 again, which means that there is no parent."""

    def _put(self, group: list[TokenEntry]) -> None:
        calls = self.state.rollouts.get(group[0].rollout_id, Rollout()).calls
        if calls and len(calls) % 256 == 0 and group[0].model_call_id not in calls:
            for parent, *_ in list(calls.values())[-1].contents.values():
                suffix = group[0].prompt_token_ids[len(_tokens(parent)) :]
                group = [changed(group[0], prompt_token_ids=suffix), *group[1:]]
        super()._put(group)


def _tokens(entry: TokenEntry) -> list[int]:
    return [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]


CASES = [
    Case(RefusesNan, {"non_finite_log_probs_come_back"}, "not JSON compliant"),
    Case(CannotReadNan, {"non_finite_log_probs_come_back"}, "JSON is malformed"),
    Case(
        PadsUnknownWithZero,
        {"non_finite_log_probs_come_back", "any_field_that_differs_is_a_conflict", "an_identical_put_is_a_no_op"},
        "differs at 2 of 4 positions, first at 0: 0.0 instead of nan",
        exact=True,
    ),
    Case(ClipsPositive, {"positive_log_probs_are_kept"}, "0.0 instead of 1e-07"),
    Case(
        StoresSingleFloats,
        {"log_probs_keep_every_bit", "any_field_that_differs_is_a_conflict"},
        "instead of -0.1",
    ),
    Case(
        FlattensExperts,
        {"every_field_comes_back_exact", "routed_experts_keep_dtype_and_shape"},
        "routed_experts is uint8 (24,) instead of uint8 (2, 3, 4)",
    ),
    Case(
        RoundsBigIntegers,
        {"big_integers_and_lone_surrogates_come_back"},
        "extra is",
        exact=True,
    ),
    Case(RefusesSurrogates, {"big_integers_and_lone_surrogates_come_back"}, "UnicodeEncodeError", exact=True),
    Case(
        TruncatesLongPrompts,
        {"a_big_entry_comes_back_exact", "a_snapshot_is_never_torn"},
        "prompt_token_ids is int32 (50000,) instead of int32 (200000,)",
        exact=True,
    ),
    Case(
        KeepsReferences,
        {"later_changes_by_the_caller_do_not_reach_the_store"},
        "change the caller's",
        exact=True,
    ),
    Case(
        SharesItsCache,
        {"changes_by_a_reader_do_not_reach_the_next_reader"},
        "output_items is [] instead of",
        exact=True,
    ),
    Case(HandsOutWritableArrays, {"arrays_of_a_snapshot_are_read_only"}, "int32, writeable", exact=True),
    Case(
        AssumesThatPromptsExtend,
        {
            "drifted_prompts_come_back_exact",
            "retries_of_the_same_prompt_come_back_exact",
            "prompts_that_extend_earlier_calls_come_back_exact",
        },
        "prompt_token_ids differs",
    ),
    Case(
        CachesChainsAcrossRollouts,
        {"equal_chains_of_two_rollouts_do_not_depend_on_each_other"},
        "0 entries; missing: ('call-0', 0)",
        exact=True,
    ),
    Case(
        PacksIdsInThreeBytes,
        {"token_ids_keep_their_full_range"},
        "first at 11: 0 instead of 16777216",
        exact=True,
    ),
    Case(
        SkipsEmptyGenerations,
        {"empty_prompts_and_generations_come_back"},
        "missing: ('neither', 0), ('no-generation', 0)",
        exact=True,
    ),
    Case(
        ReservesKeys,
        {"contents_that_cannot_be_stored_do_not_cost_the_tokens"},
        "the field name __tokcap_unstorable__ is reserved",
        exact=True,
    ),
    Case(
        TakesItselfForTheOnlyWriter,
        {
            "a_chain_written_by_several_sinks_comes_back_exact",
            "a_chain_put_in_any_order_comes_back_exact",
            "a_chain_of_512_calls_comes_back_exact",
            "concurrent_chains_of_several_sinks_are_all_kept",
        },
        "through three sinks in turn",
    ),
    Case(
        AdoptsLateParents,
        {"a_chain_put_in_any_order_comes_back_exact", "retries_of_the_same_prompt_come_back_exact"},
        "from its last call to its first",
    ),
    Case(
        CountsDepthInOneByte,
        {"a_chain_of_512_calls_comes_back_exact"},
        "the entry of call call-256, choice 0",
        exact=True,
    ),
]
