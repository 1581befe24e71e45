"""What the short codes of builds and outcomes mean to whoever has to mend the run: what, why, and what to do."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ("ADVICE", "OUTCOMES", "RELATIONS", "Advice", "advice_for")


class Advice(msgspec.Struct, frozen=True):
    """About one reason, flag or outcome."""

    what: str
    """What it says of the tokens."""
    why: str
    """Where it usually comes from."""
    then: str
    """How to tell, and what to change."""


OUTCOMES: Final = {
    "recorded": "its ids and log-probs are stored",
    "no_generation": "nothing was sampled: the engine refused it, or there was nothing to do",
    "aborted": "cut off: the client went away, or the stream broke; the tokens seen so far are stored",
    "lost": "it was answered, and no usable record of it is left",
    "conflict": "two different contents were recorded for it; neither is trained",
    "open": "it began and nothing was said of it since: it still runs, or its server died",
}
"""Of a call, in words."""

RELATIONS: Final = {
    "root": "begins a conversation",
    "continues": "its prompt holds the call above and its answer, id by id",
    "drifted": "its prompt parts from the answer of the call above",
    "restarted": "its prompt parts from the prompt of the call above: compacted, edited, or rendered anew",
    "forked": "shares its first messages with an earlier call, then goes another way",
    "separate": "begins another conversation, as a sub-agent does: it shares only its first ids with an earlier call",
    "repeats": "the same prompt and the same answer as the call above",
    "unrecorded": "no ids of it are stored, so it can't be placed",
}
"""How a call hangs on another, in words."""

ADVICE: Final = {
    "nothing_recorded": Advice(
        "no call of the rollout has stored ids, so there is nothing to train",
        "the agent used a URL without /ng-rollout/<id>/training-token-capture/, the engine gave no ids, every call "
        "failed before it sampled, or the files are damaged",
        "`tokcap calls ROLLOUT` lists the calls and what became of each; if it lists none, the agent's base URL is "
        "wrong: use rollout_base_url(...). If they are lost, their detail says what the engine left out",
    ),
    "abandoned": Advice(
        "answers that the client did not go on with are evidence, and are not trained",
        "the client asked again: a time-out, a retry after an error, an answer it didn't like",
        "expected for retries. Many of them: compare the client's time-out with how long calls take "
        "(`tokcap calls ROLLOUT`). If both were wanted as samples: ask at the same time, or for choices of one call",
    ),
    "ambiguous": Advice(
        "several answers to one prompt, and nothing tells which one the client went on with",
        "the last call was sent twice, or the history came back changed so much that no answer is recognised in it",
        "name the scored call: build(..., call_id=...) with the x-tokcap-call-id header of the scored answer, or "
        "response_id=; or capture deliveries (the middleware does)",
    ),
    "aborted": Advice(
        "cut-off answers that no later prompt holds are not trained",
        "the client went away (its time-out, a cancelled task) or the stream broke",
        "`tokcap calls ROLLOUT` says when they stopped; raise the client's time-out. What a later prompt holds of them "
        "is trained by itself",
    ),
    "unknown": Advice(
        "sampled ids whose log-prob is missing or can't be one are not trained",
        "the engine left log-probs out (null, -9999, NaN), or gave infinite or positive ones",
        "`tokcap cat ROLLOUT CALL` shows which. Ask the engine for log-probs of every sampled token; a known bug: "
        "streams with tool calls in older vLLM",
    ),
    "conflict": Advice(
        "two different contents were recorded under one call id; neither is trained",
        "two capture points write the same call with different data, or a call id is used twice",
        "use a new model_call_id for every call (captured_call makes one), and capture at one place only",
    ),
    "other_model": Advice(
        "ids sampled by a model that is not trained",
        "the rollout asks several models: a judge, a summariser, a user simulator",
        "expected if they are not the policy; else build(..., models=[...]), or give them one name",
    ),
    "after_final": Advice(
        "ids sampled after the scored answer are not trained",
        "the agent went on after the answer that was scored, with a summary or a goodbye",
        "expected; if the later answer is the one that counts, declare its id as the scored one",
    ),
    "several_models": Advice(
        "several models answered and nothing says which one is trained",
        "a judge or a helper is asked through the same URL",
        "build(..., models=[...]) or name the scored call; or give helpers a URL without capture",
    ),
    "no_such_call": Advice(
        "the id declared for the scored answer is that of no recorded call",
        "the answer was never captured, its record was lost, or the harness declares another kind of id",
        "compare it with `tokcap calls ROLLOUT`: it has call ids and response ids",
    ),
    "witnesses_disagree": Advice(
        "what is known of the scored answer points to different calls",
        "the declared id and the content are those of different calls",
        "check where the harness takes the id from; it has to be that of the answer that was scored",
    ),
    "several_conversations": Advice(
        "several conversations, and nothing tells which one was scored",
        "sub-agents or helpers, and a response that names none of their answers",
        "declare the scored call: x-tokcap-call-id, or its response id. The trajectories are there all the same",
    ),
    "lost_call": Advice(
        "a call whose record is lost may be the scored one, or lie inside its chain",
        "the engine gave no usable ids for it, its server died, or its bytes are damaged",
        "`tokcap calls ROLLOUT --outcome lost --outcome open` says why for each, `tokcap verify ROLLOUT` what is "
        "damaged. Trajectories are still delivered, flagged after_gap; only the single response can't be rebuilt",
    ),
    "drift": Advice(
        "the scored conversation drifted, and on_drift is `mask`",
        "the harness sent text back that became other ids: re-tokenised, reasoning stripped, edited",
        "`tokcap drift ROLLOUT` says where and how. on_drift='last_segment' delivers the part since then; the "
        "trajectories hold all of it",
    ),
    "strict:incomplete": Advice(
        "strict: a call is lost, open or in conflict, or the snapshot is damaged",
        "see `lost_call`",
        "strict=False trains what is exact all the same; `tokcap show ROLLOUT` marks the calls",
    ),
    "strict:ambiguous": Advice("strict: an answer is ambiguous", "see `ambiguous`", "see `ambiguous`, or strict=False"),
    "strict:conflict": Advice("strict: a call is in conflict", "see `conflict`", "see `conflict`, or strict=False"),
    "strict:several_trajectories": Advice(
        "strict: the rollout is no single sequence",
        "drift, a compacted history, a sub-agent, a retry",
        "`tokcap show ROLLOUT` shows where it splits; strict=False trains every part once",
    ),
    "unreadable": Advice(
        "the snapshot could not be frozen or read",
        "a failing disk, missing permissions, or a directory that was changed by hand",
        "`tokcap verify ROLLOUT` says which file, and `--repair` moves aside what is in the way",
    ),
    "no_rollout_id": Advice(
        "the finalized record names no rollout",
        "the harness dropped `_ng_rollout_id` and `rollout_id`",
        "keep one of them in the record",
    ),
    "native_ids_differ": Advice(
        "the record carries ids of its own that differ from what was captured",
        "the framework has tokenised the text again, or the record is that of another attempt",
        "use the captured ones: drop the native arrays before finalizing",
    ),
    "not_aligned": Advice(
        "the record's output items can't be matched with the captured calls",
        "the harness has merged, dropped or rewritten items",
        "train from `trajectories`, which need no alignment",
    ),
}
"""One for each of `tokcap.trajectory.REASONS`."""


def advice_for(reasons: tuple[str, ...]) -> list[tuple[str, Advice]]:
    """Reasons with their advice, in the order given; codes that are not known are left out."""
    return [(reason, ADVICE[reason]) for reason in reasons if reason in ADVICE]
