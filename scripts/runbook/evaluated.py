"""Evaluation capture beside training capture: every call has its summary, whichever URL it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokcap import FileStore
from tokcap.evaluation import ModelCallSummary, join, summaries

from .drive import Drive

__all__ = ("configuration", "problems_of_evaluation")


def configuration(place: Path) -> Path:
    """A configuration file with both kinds of capture on. YAML is JSON, too."""
    settings = {
        "token_id_capture": {"enabled": True, "dir": str(place / "store")},
        "observability_enabled": True,
        "model_call_capture_dir": str(place / "calls"),
    }
    path = place / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def problems_of_evaluation(place: Path, drive: Drive) -> Iterator[str]:
    """What the summaries lack of the exchanges of the clients, before the token store is frozen."""
    found = list(summaries(place / "calls"))
    made = [each for each in drive.clients.exchanges if each.call_id or not each.training]
    if len(found) != len(made):
        yield f"{len(found)} summaries of {len(made)} calls"
    by_call = {summary.model_call_id: summary for summary in found}
    for exchange in made:
        if exchange.training and exchange.call_id not in by_call:
            yield f"{exchange}: no summary"
    yield from (problem for summary in found for problem in _problems_of(summary))
    store = FileStore(place / "store", read_only=True)
    for rollout, _ in store.rollouts():
        with store.read_now(rollout) as snapshot:
            own = [summary for summary in found if summary.rollout_id == rollout]
            for summary, entries in join(own, snapshot):
                sampled = sum(len(entry.generation_token_ids) for entry in entries)
                if summary.outcome != "recorded" or summary.choice_count != len(entries):
                    yield f"{rollout} {summary.model_call_id}: {summary.outcome}, {len(entries)} entries"
                elif summary.usage.completion_tokens not in (None, sampled):
                    yield f"{rollout} {summary.model_call_id}: {summary.usage}, and {sampled} ids"


def _problems_of(summary: ModelCallSummary) -> Iterator[str]:
    what = f"the summary of {summary.rollout_id} {summary.path}"
    if summary.is_open or summary.status != 200 or summary.error_class:
        yield f"{what}: {summary}"
    if summary.training == summary.rollout_id.startswith("evaluated"):
        yield f"{what}: training is {summary.training}"
    if summary.streamed and summary.first_token_s is None:
        yield f"{what}: no time of a first token"
    if not summary.engine.startswith("vllm") or summary.requested_model != "smollm2":
        yield f"{what}: {summary.engine}, {summary.requested_model}"
