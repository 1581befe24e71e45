"""Do prompts that repeat earlier calls come back exactly, whoever wrote those?"""

from __future__ import annotations

from ..entry import TokenEntry
from .kit import Kit, expect_entries
from .registry import behaviour
from .samples import entry_of, ids_of

_RULE = "A prompt that extends an earlier call may be stored as its suffix, but comes back in full and exactly."


def chain(rollout_id: str, count: int, *, name: str = "call", start: int = 40) -> list[TokenEntry]:
    """Calls of which each prompt is the previous prompt, its generation and a few tokens of a tool's answer."""
    prompt = ids_of(f"{rollout_id}/{name}/start", start)
    entries = []
    for number in range(count):
        generation = ids_of(f"{rollout_id}/{name}/{number}", 3 + number % 4)
        entries.append(entry_of(rollout_id, f"{name}-{number}", prompt=prompt, generation=generation))
        prompt = prompt + generation + ids_of(f"{rollout_id}/{name}/{number}/tool", number % 5)
    return entries


@behaviour(_RULE)
async def prompts_that_extend_earlier_calls_come_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 30) + chain(rollout, 30, name="other")
    # Interleaved, so that the call before is not always the parent.
    mixed = [entry for pair in zip(entries[:30], entries[30:], strict=True) for entry in pair]
    await kit.put_in_order(sink, mixed)
    expect_entries(await kit.freeze(rollout), entries, did="put two interleaved chains of 30 calls, freeze")


@behaviour(_RULE)
async def a_chain_written_by_several_sinks_comes_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    sinks = [await kit.sink() for _ in range(3)]
    entries = chain(rollout, 30)
    for number, entry in enumerate(entries):
        await sinks[number % 3].put(entry)
        if number == 14:
            await sinks[0].close()
            sinks[0] = await kit.sink()
    did = "put a chain of 30 calls through three sinks in turn, one of them closed and replaced half-way, freeze"
    expect_entries(await kit.freeze(rollout), entries, did=did)


@behaviour(_RULE)
async def a_chain_put_in_any_order_comes_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    backwards, at_once = chain(rollout, 12, name="backwards"), chain(rollout, 12, name="at-once")
    await kit.put_in_order(one, reversed(backwards))
    await kit.together((one, other)[number % 2].put(entry) for number, entry in enumerate(at_once))
    did = "put one chain from its last call to its first, another all at once through two sinks, freeze"
    expect_entries(await kit.freeze(rollout), backwards + at_once, did=did)


@behaviour("A prompt that drifts from what was sampled (stripped, re-tokenised, edited) is kept as the engine saw it.")
async def drifted_prompts_come_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    parent = entry_of(rollout, "parent", prompt=ids_of("p", 300), generation=ids_of("g", 40))
    full = parent.prompt_token_ids.tolist() + parent.generation_token_ids.tolist()
    changed_early, changed_late = [*full], [*full]
    changed_early[3] += 1
    changed_late[-1] += 1
    prompts = {
        "whole": full,
        "stripped-one": full[:-1],
        "stripped-all": full[:300],
        "inside-the-prompt": full[:120],
        "first-token-gone": full[1:],
        "one-id-early": changed_early,
        "one-id-late": changed_late,
        "one-id-more": [*full[:320], 77, *full[320:]],
        "summarised": full[:10] + full[-10:],
        "twice": full + full,
        "one-token": full[:1],
    }
    entries = [parent, *(entry_of(rollout, call, prompt=prompt) for call, prompt in prompts.items())]
    await kit.put_in_order(sink, entries)
    expect_entries(
        await kit.freeze(rollout), entries, did=f"put a call and drifted followers ({', '.join(prompts)}), freeze"
    )


@behaviour("Retries of one prompt are calls of their own, also with equal tokens.")
async def retries_of_the_same_prompt_come_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    prompt, generation = ids_of("prompt", 100), ids_of("generation", 20)
    entries = [
        *(entry_of(rollout, f"equal-{number}", prompt=prompt, generation=generation) for number in range(4)),
        *(entry_of(rollout, f"resampled-{number}", prompt=prompt) for number in range(4)),
        entry_of(rollout, "cut-short", prompt=prompt, generation=generation[:7], finish_reason="length"),
    ]
    follower = prompt + generation + [11, 12]
    entries += [entry_of(rollout, f"follower-{number}", prompt=follower) for number in range(3)]
    await kit.put_in_order(one, entries[::2])
    await kit.put_in_order(other, entries[1::2])
    expect_entries(await kit.freeze(rollout), entries, did="put retries of one prompt through two sinks, freeze")


@behaviour("A chain never reaches into another rollout, even if the tokens are the same.")
async def equal_chains_of_two_rollouts_do_not_depend_on_each_other(kit: Kit) -> None:
    one, other = kit.rollout(), kit.rollout()
    sink = await kit.sink()
    entries = chain(one, 10)
    copies = [
        entry_of(
            other,
            entry.model_call_id,
            prompt=entry.prompt_token_ids,
            generation=entry.generation_token_ids,
            log_probs=entry.generation_log_probs,
        )
        for entry in entries
    ]
    for pair in zip(entries, copies, strict=True):
        await kit.put_in_order(sink, pair)
    first = await kit.freeze(one)
    expect_entries(first, entries, did="put the same chain into two rollouts, freeze the first")
    first.close()
    await kit.retire(one, first.snapshot_id, first.version)
    did = "put the same chain into two rollouts, freeze and retire the first, freeze the second"
    expect_entries(await kit.freeze(other), copies, did=did)


@behaviour(_RULE)
async def a_chain_of_512_calls_comes_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    sinks = [await kit.sink(), await kit.sink()]
    entries = chain(rollout, 512)
    for number, entry in enumerate(entries):
        await sinks[number // 64 % 2].put(entry)
    did = "put a chain of 512 calls, changing between two sinks every 64 calls, freeze"
    expect_entries(await kit.freeze(rollout), entries, did=did)
