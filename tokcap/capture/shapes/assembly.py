"""From what was found in an answer to `ParsedAnswer`: every rule that holds for all shapes is checked here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from ...arrays import IdArray, shown
from ...errors import UnusableAnswerError
from .answer import Asked, ParsedAnswer, ParsedChoice
from .experts import read_experts
from .log_probs import LogProbs, checked_log_probs, clamped
from .places import Found, IdReader, count, text
from .weights import weight_spans

__all__ = ("Draft", "Head", "Problems", "assemble", "reader_for")

T = TypeVar("T")


class Problems:
    """What could not be read of a choice. It only matters once the answer is known to carry ids."""

    def __init__(self) -> None:
        self.first: UnusableAnswerError | None = None
        self.with_ids = False
        """Whether ids stand in what could not be read."""

    def attempt(self, read: Callable[..., T], *arguments: Any, ids: bool = False) -> T | None:
        """`read(*arguments)`, None if it refuses."""
        try:
            return read(*arguments)
        except UnusableAnswerError as error:
            self.first = self.first or error
            self.with_ids |= ids
            return None


class Draft(msgspec.Struct, eq=False):
    """What was found of one choice, as yet unchecked."""

    place: str
    """`choices[0]`, or what else stands for the choice in the answer."""
    index: Any
    """Its number as the answer gives it, else its position."""
    prompt: Found
    sampled: Found
    log_probs: list[LogProbs]
    finish_reason: str = ""
    stop_reason: Any = None
    output_items: list[dict[str, Any]] = []
    token_item_index: int | None = None
    weight_versions: Any = None
    routed_experts: Any = None
    prompt_routed_experts: Any = None
    sampled_count: int | None = None
    """How many tokens the engine says that this choice has, where it says so."""
    prompt_count: int | None = None
    extra: dict[str, Any] = {}
    problems: Problems | None = None

    @property
    def has_sampled(self) -> bool:
        """Whether ids of sampled tokens were found anywhere, readable or not."""
        return (
            any(value is not None for _, value in self.sampled)
            or any(source.named is not None for source in self.log_probs)
            or (self.problems is not None and self.problems.with_ids)
        )


class Head(msgspec.Struct, frozen=True):
    """What an answer says of itself as a whole."""

    model: Any = None
    response_id: Any = None
    created_at: Any = None
    completion_tokens: Any = None
    prompt_tokens: Any = None
    prompts: Literal["shared", "batch"] = "shared"
    """Whether `prompt_tokens` counts one prompt, or those of a batch."""
    completion_tokens_at: str = "usage.completion_tokens"
    prompt_tokens_at: str = "usage.prompt_tokens"


def reader_for(asked: Asked) -> IdReader:
    """A reader whose messages begin with the path of the request."""
    return IdReader(f"{asked.path}: " if asked.path else "")


def assemble(drafts: Sequence[Draft], head: Head, asked: Asked, reader: IdReader, shape: str) -> ParsedAnswer:
    """The answer, all or nothing. Raises `UnusableAnswerError` if ids are there that make no exact record."""
    completion_tokens, prompt_tokens = count(head.completion_tokens), count(head.prompt_tokens)
    answer = ParsedAnswer(
        [],
        text(head.model),
        text(head.response_id),
        _seconds(head.created_at),
        completion_tokens,
        prompt_tokens,
    )
    with_ids = [draft for draft in drafts if draft.has_sampled]
    if not with_ids:
        prompts = [place for draft in drafts for place, value in draft.prompt if value is not None]
        if prompts and not asked.partial and completion_tokens != 0:
            raise reader.refuse(f"{prompts[0]} gives prompt ids, but no ids of sampled tokens are in the answer")
        return answer
    if not asked.partial:
        _check_all_there(drafts, with_ids, asked, reader)
    answer.choices = sorted((_choice(draft, reader) for draft in with_ids), key=lambda choice: choice.choice_index)
    indexes = [choice.choice_index for choice in answer.choices]
    if len(set(indexes)) < len(indexes):
        raise reader.refuse(f"two choices have the same index: {indexes}")
    if not asked.partial:
        _check_usage(answer, head, reader)
    answer.shape, answer.evidence, answer.id_sources = shape, "ids", tuple(reader.sources)
    return answer


def _check_all_there(drafts: Sequence[Draft], with_ids: Sequence[Draft], asked: Asked, reader: IdReader) -> None:
    for draft in drafts:
        if not draft.has_sampled:
            raise reader.refuse(f"{draft.place} has no ids of sampled tokens, but {with_ids[0].place} has")
    if len(drafts) < asked.choices:
        raise reader.refuse(f"{len(drafts)} choices in the answer, but {asked.choices} were asked for")


def _choice(draft: Draft, reader: IdReader) -> ParsedChoice:
    if draft.problems is not None and draft.problems.first is not None:
        raise reader.refuse(str(draft.problems.first)) from draft.problems.first
    if type(draft.index) is not int or not 0 <= draft.index < 2**31:
        raise reader.refuse(f"{draft.place}.index is {shown(draft.index)}, expected an integer from 0")
    prompt = reader.agreed(draft.prompt, "prompt")
    sampled = reader.agreed(draft.sampled, "sampled")
    if sampled is None:
        sampled = _ids_named(draft, reader)
    if prompt is None:
        raise reader.refuse(f"{draft.place} has {len(sampled)} ids of sampled tokens but no prompt ids")
    _check_count("sampled ids", len(sampled), draft.sampled_count, f"{draft.place} counts", reader)
    _check_count("prompt ids", len(prompt), draft.prompt_count, f"{draft.place} counts", reader)
    log_probs, pieces = checked_log_probs(draft.log_probs, sampled, prompt, reader)
    extra = dict(draft.extra)
    spans = weight_spans(draft.weight_versions, len(sampled))
    if spans is None:  # a doubt about the weights must not cost the ids
        extra["weight_versions"] = draft.weight_versions
    experts = read_experts(draft.routed_experts, draft.prompt_routed_experts)
    if experts is not None:
        extra = {**experts.notes(len(prompt) + len(sampled)), **extra}
    return ParsedChoice(
        choice_index=draft.index,
        prompt_token_ids=prompt,
        generation_token_ids=sampled,
        generation_log_probs=[None] * len(sampled) if log_probs is None else log_probs,
        log_probs_present=log_probs is not None,
        finish_reason=draft.finish_reason,
        stop_reason=draft.stop_reason,
        output_items=draft.output_items,
        token_item_index=_carrier(draft),
        policy_versions=spans or [],
        pieces=pieces,
        routed_experts=None if experts is None else experts.array,
        clamped=clamped(log_probs or []),
        extra=extra,
    )


def _ids_named(draft: Draft, reader: IdReader) -> IdArray:
    """The sampled ids, where only the log-probs name them (vLLM before 0.10.2)."""
    source = next(source for source in draft.log_probs if source.named is not None)
    for position, token_id in enumerate(source.named or ()):
        if token_id is None:
            raise reader.refuse(f"{source.named_at}[{position}]{source.member} names no id, but others do")
    return reader.ids(source.named, source.named_at)


def _carrier(draft: Draft) -> int | None:
    if draft.token_item_index is not None:
        return draft.token_item_index
    return len(draft.output_items) - 1 if draft.output_items else None


def _check_usage(answer: ParsedAnswer, head: Head, reader: IdReader) -> None:
    sampled = sum(len(choice.generation_token_ids) for choice in answer.choices)
    _check_count("sampled ids", sampled, answer.usage_completion_tokens, f"{head.completion_tokens_at} is", reader)
    if answer.usage_prompt_tokens is None:
        return
    if head.prompts == "shared":
        for choice in answer.choices:
            found = len(choice.prompt_token_ids)
            _check_count("prompt ids", found, answer.usage_prompt_tokens, f"{head.prompt_tokens_at} is", reader)
    elif answer.usage_prompt_tokens not in _batch_totals(answer.choices):
        totals = _batch_totals(answer.choices)
        raise reader.refuse(f"{totals[0]} prompt ids, but {head.prompt_tokens_at} is {answer.usage_prompt_tokens}")


def _batch_totals(choices: Sequence[ParsedChoice]) -> list[int]:
    """The numbers of prompt ids that a batch can have: each prompt counts once, however many choices it has."""
    totals = []
    lengths = [len(choice.prompt_token_ids) for choice in choices]
    for per_prompt in range(len(choices), 0, -1):
        groups = [lengths[start : start + per_prompt] for start in range(0, len(lengths), per_prompt)]
        if len(lengths) % per_prompt == 0 and all(len(set(group)) == 1 for group in groups):
            totals.append(sum(group[0] for group in groups))
    return totals


def _check_count(what: str, found: int, expected: int | None, says: str, reader: IdReader) -> None:
    if expected is not None and found != expected:
        raise reader.refuse(f"{found} {what}, but {says} {expected}")


def _seconds(value: object) -> float:
    if type(value) not in (int, float):
        return 0.0
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0
