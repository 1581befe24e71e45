"""Where the captured calls stand among the output items of a record (rule 25)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..digests import answer_digest
from ..trajectory.scored import is_model_item

__all__ = ("aligned_output", "prompts_extend")

Item = Mapping[str, Any]

_SPLIT_FURTHER = 8
"""Harnesses split one message into several; by at most so many more items an answer is looked for."""


def aligned_output(output: Sequence[Any], groups: Sequence[Sequence[Item]], *, named: bool = False) -> list[Any] | None:
    """The record's output with the items of each captured call in the places of the record's own; None if unclear.

    output: the items of a record. groups: those of each delivered call, in order. named: an id, not only its text, says
    that the last of them gave the record's answer.

    The calls are looked for from the end backwards, by content: text, and names and arguments of tool calls; reasoning
    may be missing on either side. Each must be found, with nothing of the model's between. Items of the model before
    the first of them are an earlier segment's: they stay, without tokens. What isn't the model's (tool results) stays
    where it is. Without any, a record that shows its last answers only gets the calls before them, too; one that shows
    nothing, or whose answer was named, gets the captured items as a whole.
    """
    everything = [item for group in groups for item in group]
    foreign = not all(_is_models(item) for item in output)
    placing = _Placing(output)
    if not foreign and not placing.shows_more():
        return everything
    for done, group in enumerate(reversed(groups)):
        if placing.place(group):
            continue
        if foreign:
            return None
        if done and not placing.shows_more():
            return [item for earlier in groups[: len(groups) - done] for item in earlier] + placing.result()
        return everything if named else None
    return placing.result()


def prompts_extend(output: Sequence[Any]) -> bool:
    """Whether the prompt of every item that carries tokens starts with all tokens of the carriers before it."""
    before: list[int] = []
    for item in output:
        if not isinstance(item, Mapping) or not item.get("generation_token_ids"):
            continue
        prompt = list(item["prompt_token_ids"])
        if prompt[: len(before)] != before:
            return False
        before = prompt + list(item["generation_token_ids"])
    return True


def _under_its_names(item: Item, own: Item) -> Item:
    """A captured item with the ids that the record gave its own: tool results refer to them."""
    return {**item, **{key: own[key] for key in ("id", "call_id") if key in own}}


def _is_models(item: Any) -> bool:
    return isinstance(item, Mapping) and is_model_item(item)


def _is_silent(item: Item) -> bool:
    """Reasoning, or an empty message: nothing by which it could be found."""
    return answer_digest([item]) is None


class _Placing:
    """Goes through the output from its end, and notes what takes the place of what."""

    def __init__(self, output: Sequence[Any]) -> None:
        self._output = output
        self._left = [place for place, item in enumerate(output) if _is_models(item)]
        """Places of the model's items that no call has taken yet."""
        self._instead: dict[int, list[Item]] = {}
        self._before: dict[int, list[Item]] = {}
        """What is put in before a place; `len(output)` is the end."""
        self._next = len(output)
        """First place of the call that was placed last."""

    def shows_more(self) -> bool:
        """Whether anything is left by which a call could be found."""
        return not all(_is_silent(self._output[place]) for place in self._left)

    def place(self, group: Sequence[Item]) -> bool:
        if answer_digest(group) is None:
            return self._place_silent(group)
        while self._left and self._silent_at(-1):
            self._instead[self._left.pop()] = []
        taken = self._find(group)
        if not taken:
            return False
        del self._left[-len(taken) :]
        for place in self._adjacent_silent(taken[0]):
            self._instead[place] = []
        self._put(group, taken)
        self._next = taken[0]
        return True

    def result(self) -> list[Any]:
        result: list[Any] = []
        for place, item in enumerate(self._output):
            result += self._before.get(place, [])
            result += self._instead.get(place, [item])
        return result + self._before.get(len(self._output), [])

    def _place_silent(self, group: Sequence[Item]) -> bool:
        """A call that shows nothing takes the place of reasoning, if there is some, or stands before the next call."""
        taken: list[int] = []
        while self._left and self._silent_at(-1) and (not taken or self._left[-1] == taken[0] - 1):
            taken.insert(0, self._left.pop())
        if taken:
            self._instead.update({place: [] for place in taken})
            self._instead[taken[0]] = list(group)
            self._next = taken[0]
        else:
            self._before[self._next] = [*group, *self._before.get(self._next, [])]
        return True

    def _find(self, group: Sequence[Item]) -> list[int]:
        """The last places that are left which together say what this call said; empty if they don't."""
        wanted = answer_digest(group)
        most = sum(not _is_silent(item) for item in group) + _SPLIT_FURTHER
        seen = 0
        for count in range(1, len(self._left) + 1):
            seen += not self._silent_at(-count)
            if seen > most:
                break
            if answer_digest([self._output[place] for place in self._left[-count:]]) == wanted:
                return self._left[-count:]
        return []

    def _put(self, group: Sequence[Item], taken: list[int]) -> None:
        self._instead.update({place: [] for place in taken})
        visible = [place for place in taken if not _is_silent(self._output[place])]
        heard = [item for item in group if not _is_silent(item)]
        if [answer_digest([self._output[place]]) for place in visible] != [answer_digest([item]) for item in heard]:
            self._instead[taken[0]] = list(group)  # cut into items in another way
            return
        places = iter(visible)
        waiting: list[Item] = []
        place = taken[0]
        for item in group:
            waiting.append(item)
            if not _is_silent(item):
                place = next(places)
                waiting[-1] = _under_its_names(item, self._output[place])
                self._instead[place], waiting = waiting, []
        self._instead[place] = self._instead[place] + waiting

    def _adjacent_silent(self, place: int) -> list[int]:
        """The places of reasoning directly before `place`, which belongs to the same call."""
        found: list[int] = []
        while self._left and self._left[-1] == place - 1 and self._silent_at(-1):
            place = self._left.pop()
            found.append(place)
        return found

    def _silent_at(self, position: int) -> bool:
        return _is_silent(self._output[self._left[position]])
