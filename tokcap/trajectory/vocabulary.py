"""The words in which builds speak: flags, reasons and metrics, each explained."""

from __future__ import annotations

from typing import Final

__all__ = ("FLAGS", "METRICS", "REASONS")

FLAGS: Final = {
    "after_gap": "a lost or open call may lie directly before the first call of this trajectory",
    "drifted": "its first call's prompt no longer holds what an earlier call sampled",
    "restarted": "its first call's prompt parts from an earlier prompt: compacted, edited, forked, or unrelated",
    "not_behaviour": "log-probs of some span are known not to be the sampling distribution",
    "abandoned": "holds an answer that the client did not go on with",
    "ambiguous": "holds an answer of which nothing tells whether the client went on with it",
    "aborted": "holds an answer that was cut off",
    "unknown": "holds sampled ids whose log-probs are unknown, or not to be used",
    "conflict": "holds a call of which two contents were recorded",
    "other_model": "sampled by a model that is not selected",
    "after_final": "came after the scored answer",
}
"""Of a trajectory. Those from `abandoned` on name spans, or parts of them, that are not trained."""

REASONS: Final = {
    "nothing_recorded": "no call of this rollout sampled anything that was recorded",
    "abandoned": FLAGS["abandoned"],
    "ambiguous": FLAGS["ambiguous"],
    "aborted": FLAGS["aborted"],
    "unknown": FLAGS["unknown"],
    "conflict": FLAGS["conflict"],
    "other_model": FLAGS["other_model"],
    "after_final": FLAGS["after_final"],
    "several_models": "several models answered; select with models=, or name the scored call",
    "no_such_call": "the scored answer was declared by an id that no recorded call has",
    "witnesses_disagree": "what is known of the scored answer points to different calls",
    "several_conversations": "several conversations, and nothing tells which one was scored",
    "lost_call": "a call whose record is lost may be the scored one or lie inside its chain",
    "drift": "the scored chain drifted, and on_drift is mask",
    "strict:incomplete": "strict: a call is lost, open or in conflict, or the snapshot is damaged",
    "strict:ambiguous": "strict: an answer is ambiguous",
    "strict:conflict": "strict: two contents were recorded for a call",
    "strict:several_trajectories": "strict: the rollout is no single sequence",
    "unreadable": "the snapshot could not be frozen or read; the error is in the metrics",
    "no_rollout_id": "the record names no rollout",
    "native_ids_differ": "the record carries token ids of its own that differ from what was captured",
    "not_aligned": "the record's output items can't be matched with the captured calls",
}
"""Of a build, a rebuild or a finalized record."""

METRICS: Final = {
    "sampled": "ids sampled by all recorded calls; the sum of the nine categories that follow",
    "trained": "ids that are trained, each once",
    "abandoned": "ids of answers that the client did not go on with, repetitions included",
    "ambiguous": "ids of answers of which nothing tells whether the client went on with them",
    "aborted": "ids of cut-off answers that no later prompt holds",
    "unknown": "ids whose log-prob is missing, infinite, the -9999 sentinel or positive; on which identical calls "
    "disagree; or which exclude_not_behaviour leaves out",
    "conflict": "ids of calls of which two contents were recorded",
    "other_model": "ids sampled by models that are not selected",
    "after_final": "ids sampled after the scored answer",
    "masked": "ids left out because the whole rollout is (strict=True); else 0",
    "repeated": "ids of answers that equal another one in prompt and ids; most of them are in abandoned, too",
    "calls": "model calls in the ledger, answered or not",
    "entries": "recorded answers, one per choice",
    "lost_calls": "calls whose record is lost",
    "open_calls": "calls that never came back",
    "conflict_calls": "calls of which two contents were recorded",
    "aborted_calls": "calls that were cut off",
    "no_generation_calls": "calls that sampled nothing",
    "empty_generation_calls": "recorded answers without a sampled id",
    "merged_calls": "answers that equal another one in prompt and ids",
    "largest_log_prob_difference": "between such answers, natural log",
    "hints_refuted": "recorded parents that the ids refute",
    "turns": "calls whose prompt had an earlier answer to extend: those that do, and those that drifted",
    "roots": "answers that continue no other",
    "trajectories": "all of them",
    "trained_trajectories": "those with trained ids",
    "drifted_calls": "calls whose prompt no longer holds what an earlier call sampled",
    "restarted_calls": "calls whose prompt parts from an earlier call before its answer",
    "drift_lost": "sampled ids that drifted prompts no longer hold",
    "gaps": "calls that a lost or open call may directly precede",
    "distinct_ids": "ids in all trajectories, shared prefixes counted once",
    "total_ids": "lengths of all trajectories together",
    "replay_factor": "total_ids / distinct_ids: how often a trainer reads an id",
    "not_behaviour": "trained ids whose log-probs are known not to be the sampling distribution",
    "zero_log_probs": "log-probs that are exactly 0.0; many of them hint at an engine bug",
    "log_prob_modes": "answers per recorded log-prob mode",
    "mixed_log_prob_modes": "whether there is more than one",
    "delivered": "of a rebuild: trained ids in its response",
    "delivered_fraction": "of a rebuild: delivered / trained; a masked one delivers nothing, its trajectories may",
    "segments": "of a rebuild: contiguous parts of the scored conversation; more than one if it drifted",
}
"""Of a build or a rebuild."""
