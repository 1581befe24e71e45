"""`tokcap cat`: one call, id by id."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .options import as_json, call_argument, directory, rollout_argument, tokenizer
from .status import NO

if TYPE_CHECKING:
    from ..inspection import CallView, RolloutView
    from ..inspection.text import Texts

__all__ = ("cat_verb",)

_TAIL = 12
"""Ids of the prompt that are shown where not all of it is asked for."""


@click.command("cat")
@rollout_argument()
@call_argument()
@click.option("--prompt", "whole_prompt", is_flag=True, help=f"The whole prompt too, not only its last {_TAIL} ids.")
@click.option("--ids", "only_ids", is_flag=True, help="Only ids, with spaces between them.")
@click.option("--text", "only_text", is_flag=True, help="Only the text; control characters are escaped.")
@click.option("--raw", is_flag=True, help="Only the bytes, exactly. Whatever they do to a terminal.")
@tokenizer
@directory
@as_json
def cat_verb(
    rollout: str,
    call: str,
    whole_prompt: bool,
    only_ids: bool,
    only_text: bool,
    raw: bool,
    tokenizer: str | None,
    directory: str | None,
    as_json: bool,
) -> int:
    """Show one call: ids, log-probs, mask and text side by side, and everything else that was recorded with it.

    CALL is its id, ID#N for choice N, a response id, the beginning of either, or its number in `tokcap show`. The mask
    says which ids are trained. Text comes from what the engine told of this answer and of others in the store; what no
    engine told is ⟨id⟩, unless there is a --tokenizer.

    \b
    Examples:
      tokcap cat rollout-17 7
      tokcap cat rollout-17 chatcmpl-5f0c --prompt --tokenizer ./model
      tokcap cat rollout-17 7 --ids --prompt              # exactly what the engine saw, and sampled
    """
    if only_ids + only_text + raw + as_json > 1:
        raise click.UsageError("give one of --ids, --text, --raw and --json")
    from ..inspection import open_to_look
    from .naming import looked_at, one_call, texts_of

    store = open_to_look(directory)
    texts = None if only_ids else texts_of(store, tokenizer, [rollout])
    view = looked_at(store, rollout, texts)
    found = one_call(view, call)
    if view.recorded(found.key) is None:
        return _cat_unrecorded(view, found, as_json, only_ids or only_text or raw)
    if only_ids:
        parts = [view.prompt_token_ids(found.key)] if whole_prompt else []
        sys.stdout.write(" ".join(str(t) for ids in (*parts, view.generation_token_ids(found.key)) for t in ids) + "\n")
        return 0
    assert texts is not None
    if raw:
        return _cat_raw(view, found, texts, whole_prompt)
    if only_text:
        return _cat_text(view, found, texts, whole_prompt)
    if as_json:
        return _cat_json(view, found, texts)
    _print_head(view, found)
    _print_ids(view, found, texts, whole_prompt)
    _print_rest(view, found, texts)
    return 0


def _pieces(view: RolloutView, call: CallView, texts: Texts) -> tuple[list[bytes | None], list[bytes | None]]:
    """The bytes of the prompt's ids and of the answer's."""
    recorded = view.recorded(call.key)
    assert recorded is not None
    prompt = texts.pieces(view.prompt_token_ids(call.key), (call.model,))
    return prompt, texts.pieces(recorded.generation_token_ids, (call.model,), recorded.pieces)


def _cat_unrecorded(view: RolloutView, call: CallView, as_json: bool, wants_ids: bool) -> int:
    from .calling import call_facts
    from .output import print_json

    if as_json:
        print_json({"rollout_id": view.rollout_id} | call_facts(view, call) | _request(view, call))
        return 0
    if wants_ids:
        sys.stderr.write(f"tokcap: no ids of call {call.name} are stored: it is {call.outcome}\n")
        return NO
    _print_head(view, call)
    _print_request(view, call)
    return 0


def _cat_raw(view: RolloutView, call: CallView, texts: Texts, whole_prompt: bool) -> int:
    prompt, answer = _pieces(view, call, texts)
    pieces = [*prompt, *answer] if whole_prompt else answer
    missing = sum(piece is None for piece in pieces)
    if missing:
        sys.stderr.write(f"tokcap: the bytes of {missing} of {len(pieces)} ids are not known; give --tokenizer\n")
        return NO
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(piece for piece in pieces if piece is not None))
    sys.stdout.buffer.flush()
    return 0


def _cat_text(view: RolloutView, call: CallView, texts: Texts, whole_prompt: bool) -> int:
    from .output import line, safe

    for each in _text(view, call, texts, whole_prompt).split("\n"):
        line(safe(each))
    return 0


def _text(view: RolloutView, call: CallView, texts: Texts, whole_prompt: bool) -> str:
    from ..inspection.text import joined

    prompt, answer = _pieces(view, call, texts)
    ids = view.generation_token_ids(call.key)
    if not whole_prompt:
        return joined(ids, answer)
    return joined(view.prompt_token_ids(call.key), prompt) + joined(ids, answer)


def _cat_json(view: RolloutView, call: CallView, texts: Texts) -> int:
    from ..inspection.text import piece_texts
    from .calling import call_facts
    from .output import print_json

    recorded = view.recorded(call.key)
    assert recorded is not None
    _, answer = _pieces(view, call, texts)
    print_json(
        {"rollout_id": view.rollout_id, "snapshot_id": view.snapshot_id, "version": view.version}
        | call_facts(view, call)
        | _request(view, call)
        | {
            "prompt_token_ids": view.prompt_token_ids(call.key),
            "generation_token_ids": recorded.generation_token_ids,
            "generation_log_probs": [None if x != x else x for x in recorded.generation_log_probs.tolist()],
            "loss_mask": view.loss_mask(call.key),
            "texts": piece_texts(answer),
            "text": _text(view, call, texts, False),
            "prompt_text": _prompt_text(view, call, texts),
        }
        | recorded.contents._asdict()
    )
    return 0


def _prompt_text(view: RolloutView, call: CallView, texts: Texts) -> str:
    from ..inspection.text import joined

    prompt, _ = _pieces(view, call, texts)
    return joined(view.prompt_token_ids(call.key), prompt)


def _request(view: RolloutView, call: CallView) -> dict[str, Any]:
    """What was noted of the request."""
    for record in view.build.recorded.records:
        if record.model_call_id == call.model_call_id and record.detail == call.detail:
            return {
                "idempotency_key": record.idempotency_key,
                "retry_count": record.retry_count,
                "messages": max(len(record.request_digests) - 1, 0) if record.request_digests else None,
                "boot_id": record.boot_id,
                "begun_at": record.begun_at,
                "ended_at": record.ended_at,
            }
    return {}


def _print_head(view: RolloutView, call: CallView) -> None:
    from ..inspection import RELATIONS
    from ..inspection.telling import fate_of, tie_of, why_lost, why_untrained
    from .output import line, safe

    state = "open" if not view.version else f"frozen, version {view.version}"
    line(f"rollout      {view.rollout_id} ({state})")
    line(f"call         #{call.number} {call.name or '(nameless)'}")
    line(safe(f"outcome      {call.outcome}: {why_lost(view, call)}"))
    if call.relation != "unrecorded":
        why = why_untrained(call)
        line(safe(f"answer       {fate_of(view, call)}{f' ({why})' if why else ''}"))
        line(f"ids          {call.prompt} of the prompt, {call.sampled} sampled")
    line(safe(f"tie          {call.relation}: {RELATIONS[call.relation]}"))
    if call.relation != "unrecorded":
        line(safe(f"             {tie_of(view, call)}"))


def _print_ids(view: RolloutView, call: CallView, texts: Texts, whole_prompt: bool) -> None:
    from math import exp

    from ..inspection.text import piece_texts
    from .output import line, print_table

    prompt, answer = _pieces(view, call, texts)
    skipped = 0 if whole_prompt else max(call.prompt - _TAIL, 0)
    ids = [*view.prompt_token_ids(call.key).tolist(), *view.generation_token_ids(call.key).tolist()]
    pieces = [*prompt, *answer]
    shown = [text if piece is None else f"'{text}'" for piece, text in zip(pieces, piece_texts(pieces), strict=True)]
    log_probs, mask = view.log_probs(call.key).tolist(), view.loss_mask(call.key).tolist()
    line()

    def row(position: int) -> list[str]:
        place = position - call.prompt
        head = [str(position), str(ids[position])]
        if place < 0:
            return [*head, "", "", "prompt", shown[position]]
        known = log_probs[place] == log_probs[place]
        told = [f"{log_probs[place]:.4f}", f"{exp(min(log_probs[place], 0.0)):.4f}"] if known else ["unknown", ""]
        return [*head, *told, "trained" if mask[place] else "-", shown[position]]

    if skipped:
        line(f"(the first {skipped} ids of the prompt are left out; --prompt)")
    print_table(
        [
            ("POSITION", "right"),
            ("ID", "right"),
            ("LOG-PROB", "right"),
            ("P", "right"),
            ("MASK", "left"),
            ("TEXT", "left"),
        ],
        (row(position) for position in range(skipped, len(ids))),
    )


def _print_rest(view: RolloutView, call: CallView, texts: Texts) -> None:
    from ..content import name_of
    from .output import json_of, line, safe

    recorded = view.recorded(call.key)
    assert recorded is not None
    contents = recorded.contents
    line()
    line("text         " + safe(_text(view, call, texts, False)))
    for name, value in (
        ("model", call.model),
        ("response", call.response_id),
        ("finish", call.finish_reason),
        (
            "policy",
            ", ".join("{} ({}..{})".format(*map(name_of, span)) for span in call.policy_versions if len(span) == 3),
        ),
    ):
        if value:
            line(f"{name:<13}{safe(value)}")
    for name, held in (("sampling", contents.sampling), ("extra", contents.extra)):
        if held:
            line(f"{name:<13}{safe(json_of(held))}")
    for place, item in enumerate(contents.output_items):
        line(f"{'output' if not place else '':<13}{safe(json_of(item))}")
    _print_request(view, call)


def _print_request(view: RolloutView, call: CallView) -> None:
    from .output import line, safe

    told = _request(view, call)
    parts = []
    if told.get("messages") is not None:
        parts.append(f"{told['messages']} messages")
    if call.retry_count:
        parts.append(f"retry {call.retry_count}")
    if told.get("idempotency_key"):
        parts.append(f"idempotency key {told['idempotency_key']}")
    if call.began_s is not None:
        parts.append(f"began {call.began_s:.3f} s after the first")
    if call.took_s is not None:
        parts.append(f"took {call.took_s:.3f} s")
    if call.delivered != "unknown":
        parts.append(f"delivered {call.delivered}")
    if parts:
        line(f"{'request':<13}{safe(', '.join(parts))}")
