"""How long one put of a 128k context keeps the event loop from everything else, and how long a fence is waited for.

    python -m bench.stalls [--places disk] [--rounds 3] [--scale quick]

A ticker task wakes up at every turn of the loop; the longest gap between two of its wake-ups is the stall. Windows with
one put in each alternate with idle windows, in which the ticker is alone; what it sees there is the machine, and is
subtracted: the figure of a round is the median of its windows with a put less the median of its idle windows. The first
put of a rollout, which nothing came before, is a figure of its own.

A gap also has in it what other threads held the interpreter for, and whatever took the processor away. `CPU` is the
longest turn in CPU time of the loop's own thread, which no noise can reach.

From arrays, NeMo Gym has to make lists first, because it takes nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec

from tokcap import FileStore, TokenEntry

from .clients import percentile
from .figures import OURS, Figure
from .peer import PEER, ListedCall, Peer, PeerStore, listed
from .places import UnavailableError, place
from .stock import entry_of, own_garbage, print_figures, the_peer
from .workload import FULL, QUICK, Call, Scale, Workload, calls

__all__ = ("CONTEXT", "MEASURES", "Ticker", "main", "measure")

MEASURES = {
    "longest stall": "of the event loop by one put, above an idle loop: median of the puts",
    "longest stall, p99": "the same, 99th percentile of the puts less that of the idle windows",
    "longest stall, first put": "the same for the first put of a rollout",
    "longest stall, CPU": "CPU time of the loop's thread in its longest turn: median of the puts",
    "longest stall, begin_call + put": "with the intent before it",
    "put of a contended rollout p50": "while another process puts to the same rollout without a pause",
    "put of a contended rollout, worst": "the longest of each round",
}
"""What is measured, and how."""

CONTEXT = 131_072
WINDOWS = {FULL.name: 50, QUICK.name: 20}
"""Puts in each round; a few at other scales."""
IDLE_S = 0.02
"""Longest idle window."""
LEAST_MS = 1e-3
"""Figures are at least that: below it there is only noise, and a ratio needs something to divide by."""

Kind = str
"""`arrays` or `lists`: what the engine gives."""
Put = Callable[[], Awaitable[None]]


class Ticker:
    """Wakes up at every turn of the running loop and keeps the longest time between two of them."""

    def __init__(self) -> None:
        self.gap_s = self.cpu_s = 0.0
        self._at, self._cpu = time.perf_counter(), time.thread_time()

    def reset(self) -> None:
        """Begin a window now."""
        self.gap_s = self.cpu_s = 0.0
        self._at, self._cpu = time.perf_counter(), time.thread_time()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(0)
            at, cpu = time.perf_counter(), time.thread_time()
            self.gap_s = max(self.gap_s, at - self._at)
            self.cpu_s = max(self.cpu_s, cpu - self._cpu)
            self._at, self._cpu = at, cpu


class _Stalls(msgspec.Struct):
    """The longest gap of each window, in milliseconds."""

    put: list[float] = []
    put_cpu: list[float] = []
    idle: list[float] = []
    idle_cpu: list[float] = []


def measure(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Figure]:
    """Every figure of this module, in the first of the places."""
    for where in places[:1]:
        try:
            with place(where) as directory:
                yield from _stalls(directory / "stalls", where, rounds, scale)
                yield from _contended(directory / "contended", where, rounds, scale)
        except UnavailableError as error:
            print(f"{where}: not measured: {error}", file=sys.stderr)


def _stalls(directory: Path, where: str, rounds: int, scale: Scale) -> Iterator[Figure]:
    context = max(1_000, round(CONTEXT * min(1.0, scale.turns)))
    windows = WINDOWS.get(scale.name, 3)
    workload = Workload(rollouts=1, turns=windows + 1, first_prompt=context)
    series: dict[tuple[str, Kind, str], list[float]] = {}
    peer = the_peer()
    for number in range(rounds):
        (conversation,) = calls(workload, first=number)
        for kind in ("arrays", "lists"):
            for intents in (False, True):
                own = directory / f"{number}-{kind}-{intents}"
                for name, found in _take_turns(own, conversation, kind, intents, peer):
                    for measure, value in _values(found, intents):
                        series.setdefault((measure, kind, name), []).append(max(LEAST_MS, value))
    for (measure, kind, name), values in series.items():
        yield Figure(measure, "ms", "less", where, f"{context // 1024}k, {kind}", name, tuple(values))


def _take_turns(
    directory: Path, conversation: Sequence[Call], kind: Kind, intents: bool, peer: Peer | None
) -> Iterator[tuple[str, _Stalls]]:
    theirs = list(listed(conversation))
    with own_garbage(), FileStore(directory / "tokcap") as store:
        yield OURS, asyncio.run(_windows(_ours(store, conversation, theirs, kind, intents)))
    if peer is not None:
        other = peer.store(directory / "nemo-gym")
        with own_garbage():
            yield PEER, asyncio.run(_windows(_theirs(peer, other, conversation, theirs, kind, intents)))


def _ours(
    store: FileStore, conversation: Sequence[Call], lists: Sequence[ListedCall], kind: Kind, intents: bool
) -> Iterator[Put]:
    for call, as_lists in zip(conversation, lists, strict=True):

        async def put(call: Call = call, as_lists: ListedCall = as_lists) -> None:
            if intents:
                await store.begin_call(call.rollout_id, call.model_call_id)
            if kind == "arrays":
                entry = entry_of(call)
            else:
                entry = TokenEntry(
                    as_lists.rollout_id,
                    as_lists.model_call_id,
                    as_lists.prompt,
                    as_lists.generated,
                    as_lists.log_probs,
                    model="m",
                )
            await store.put(entry)

        yield put


def _theirs(
    peer: Peer,
    store: PeerStore,
    conversation: Sequence[Call],
    lists: Sequence[ListedCall],
    kind: Kind,
    intents: bool,
) -> Iterator[Put]:
    for call, as_lists in zip(conversation, lists, strict=True):

        async def put(call: Call = call, as_lists: ListedCall = as_lists) -> None:
            if intents:
                await store.begin_call(call.rollout_id, call.model_call_id)
            if kind == "arrays":
                as_lists = msgspec.structs.replace(
                    as_lists,
                    prompt=call.prompt.tolist(),
                    generated=call.generated.tolist(),
                    log_probs=call.log_probs.tolist(),
                )
            await store.put(peer.entry(as_lists))

        yield put


async def _windows(puts: Iterator[Put]) -> _Stalls:
    """Each put in a window of its own, and an idle window of about the same length after it."""
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run())
    found = _Stalls()
    await asyncio.sleep(0)
    for put in puts:
        ticker.reset()
        begun = time.perf_counter()
        await put()
        await asyncio.sleep(0)  # what came after the wake-up is part of the last gap
        found.put.append(ticker.gap_s * 1e3)
        found.put_cpu.append(ticker.cpu_s * 1e3)
        until = time.perf_counter() + min(IDLE_S, time.perf_counter() - begun)
        ticker.reset()
        while time.perf_counter() < until:
            await asyncio.sleep(0)
        found.idle.append(ticker.gap_s * 1e3)
        found.idle_cpu.append(ticker.cpu_s * 1e3)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking
    return found


def _values(found: _Stalls, intents: bool) -> Iterator[tuple[str, float]]:
    """The figures of one round. The first put is apart."""
    idle = statistics.median(found.idle)
    steady = found.put[1:]
    suffix = ", begin_call + put" if intents else ""
    yield f"longest stall{suffix}", statistics.median(steady) - idle
    yield f"longest stall, p99{suffix}", percentile(steady, 0.99) - percentile(found.idle[1:], 0.99)
    yield f"longest stall, CPU{suffix}", statistics.median(found.put_cpu[1:]) - statistics.median(found.idle_cpu)
    if not intents:
        yield "longest stall, first put", found.put[0] - idle


# ---- one rollout, two processes


def _contended(directory: Path, where: str, rounds: int, scale: Scale) -> Iterator[Figure]:
    names = [OURS] if the_peer() is None else [OURS, PEER]
    number = max(10, round(300 * min(1.0, scale.turns)))
    middle: dict[str, list[float]] = {name: [] for name in names}
    worst: dict[str, list[float]] = {name: [] for name in names}
    for at in range(rounds):
        for name in names:
            waits = _waits(directory / f"{at}-{name.replace(' ', '-')}", name, number)
            middle[name].append(statistics.median(waits) * 1e3)
            worst[name].append(max(waits) * 1e3)
    for measure, values in (("put of a contended rollout p50", middle), ("put of a contended rollout, worst", worst)):
        for name in names:
            yield Figure(measure, "ms", "less", where, "two processes", name, tuple(values[name]), 2)


def _waits(directory: Path, name: str, number: int) -> list[float]:
    """Seconds of each of our puts to a rollout that another process never leaves alone."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    other = context.Process(target=_put_without_pause, args=(directory, name, ready, stop), daemon=True)
    other.start()
    waits: list[float] = []
    try:
        if not ready.wait(60):
            raise RuntimeError("the other process does not come up")
        with _small_puts(directory, name, "ours") as put:
            for at in range(number):
                begun = time.perf_counter()
                put(at)
                waits.append(time.perf_counter() - begun)
                time.sleep(0.005)
    finally:
        stop.set()
        other.join(60)
    if other.exitcode != 0:
        raise RuntimeError(f"the other process ended with {other.exitcode}")
    return waits


def _put_without_pause(directory: Path, name: str, ready: Event, stop: Event) -> None:
    with _small_puts(directory, name, "theirs") as put:
        at = 0
        while not stop.is_set():
            put(at)
            at += 1
            ready.set()


@contextlib.contextmanager
def _small_puts(directory: Path, name: str, whose: str) -> Generator[Callable[[int], None], None, None]:
    if name == OURS:
        with FileStore(directory) as store:
            yield lambda at: store.put_now(TokenEntry("rollout", f"{whose}-{at}", [1, 2, 3], [4], [-0.5]))
        return
    peer = the_peer()
    if peer is None:
        raise UnavailableError(f"{name} is not there")
    other = peer.store(directory)
    yield lambda at: other.append(
        peer.entry(ListedCall("rollout", f"{whose}-{at}", [1, 2, 3], [4], [-0.5], None, float(at)))
    )


def main() -> int:
    """Print every figure as it comes."""
    return print_figures(__doc__, measure)


if __name__ == "__main__":
    raise SystemExit(main())
