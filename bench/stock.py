"""Fills the stores of tokcap and of NeMo Gym with the same rollouts, outside of every measured time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tokcap import FileStore, TokenEntry

from .figures import OURS, Figure, find, ratio
from .peer import PEER, ListedCall, Peer, PeerStore, listed, load
from .places import PLACES, UnavailableError
from .workload import FULL, QUICK, SMOKE, Call, Scale

__all__ = ("copies", "entry_of", "own_garbage", "print_figures", "stock", "stock_peer", "the_peer")


def the_peer() -> Peer | None:
    """NeMo Gym if it is installed; else it is said on stderr why it is not measured."""
    try:
        return load()
    except UnavailableError as error:
        print(f"{PEER}: not measured: {error}", file=sys.stderr)
        return None


def entry_of(call: Call) -> TokenEntry:
    """The call as tokcap is given it, from arrays."""
    return TokenEntry(call.rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs, model="m")


@contextlib.contextmanager
def own_garbage() -> Generator[None, None, None]:
    """Whatever runs inside pays for the collection of its own garbage, not for that of who ran before it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def copies(conversations: Sequence[Sequence[Call]], number: int, prefix: str) -> list[list[Call]]:
    """`number` rollouts with ids of their own, which share the arrays of these conversations."""
    return [
        [
            msgspec.structs.replace(call, rollout_id=f"{prefix}-{at:05d}")
            for call in conversations[at % len(conversations)]
        ]
        for at in range(number)
    ]


def stock(store: FileStore, conversations: Iterable[Sequence[Call]]) -> None:
    """Begin and put every call, as serving does, many rollouts at once."""

    async def one(conversation: Sequence[Call]) -> None:
        for call in conversation:
            await store.begin_call(call.rollout_id, call.model_call_id)
            await store.put(entry_of(call))

    async def main() -> None:
        await asyncio.gather(*map(one, conversations))

    asyncio.run(main())


def stock_peer(peer: Peer, store: PeerStore, conversations: Iterable[Sequence[Call]]) -> None:
    """The same with NeMo Gym: intents and entries, each synced, its lineage as it would stamp it."""

    def one(conversation: Sequence[Call]) -> None:
        async def main(calls: Iterable[ListedCall]) -> None:
            for call in calls:
                await store.begin_call(call.rollout_id, call.model_call_id)
                store.append(peer.entry(call))

        asyncio.run(main(listed(conversation)))

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(one, conversations):
            pass


def print_figures(text: str | None, measure: Callable[[Sequence[str], int, Scale], Iterable[Figure]]) -> int:
    """The command line of one module of measures: every figure in a line, with how many times better tokcap is."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=",".join(PLACES), help="where: %(default)s, or some of these")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each candidate (3)")
    parser.add_argument("--scale", choices=sorted(_SCALES), default="quick", help="how much (quick)")
    options = parser.parse_args()
    figures: list[Figure] = []
    for figure in measure(options.places.split(","), options.rounds, _SCALES[options.scale]):
        figures.append(figure)
        ours = find(figures, OURS, figure)
        beside = "" if ours is None or ours is figure else f" | tokcap {ratio(ours, figure):.1f}x"
        print(
            f"{figure.place or '-'} | {figure.workload} | {figure.measure} | {figure.candidate} "
            f"| {figure.value:,.4g} {figure.unit}{beside}",
            flush=True,
        )
    return 0


_SCALES = {scale.name: scale for scale in (FULL, QUICK, SMOKE)}
