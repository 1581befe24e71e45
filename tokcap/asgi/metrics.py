"""What the serving path counts and times, for Prometheus. Never by rollout: their number has no bound.

| name | kind | of |
|---|---|---|
| `tokcap_calls_total{outcome}` | counter | training calls that have ended; `open`: even that could not be written |
| `tokcap_tokens_total{kind}` | counter | recorded token ids, `prompt` or `sampled` |
| `tokcap_open_calls` | gauge | calls whose intent is durable and that have not ended |
| `tokcap_intent_seconds` | histogram | writing the intent, before the engine is asked |
| `tokcap_put_seconds` | histogram | from a whole answer to its durable record |
| `tokcap_refused_begins_total{reason}` | counter | calls that were not begun: `busy`, `no_space`, `state`, `other` |
| `tokcap_pending_bytes`, `tokcap_pending_operations` | gauge | what waits for the disk, as of the last call |

Without the library `prometheus-client` nothing is counted. With it, everything goes to the registry of the process, so
that an engine's own `/metrics` shows it, too. If `PROMETHEUS_MULTIPROC_DIR` was set before the library was imported,
the values lie in files there, and a `MultiProcessCollector` sums those of all processes; `forget_dead_processes` takes
the open calls of processes that died out of the sum.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary

from ..errors import BusyError, FrozenError, InvalidIdError, NoSpaceError, RetiredError
from ..protocol import Outcome, Pending

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ("Metrics", "forget_dead_processes")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds of the histograms: a sync takes from a tenth of a millisecond to, on a disk in trouble, many seconds."""
_OUTCOMES: tuple[str, ...] = get_args(Outcome)
_REASONS = ("busy", "no_space", "state", "other")
_GAUGE_FILE = re.compile(r"gauge_live[a-z]*_(\d+)\.db")


class _Instruments:
    """The instruments of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.calls: Counter = _registered(
            registry, Counter, "tokcap_calls", "Calls of training capture that have ended.", labelnames=("outcome",)
        )
        self.tokens: Counter = _registered(
            registry, Counter, "tokcap_tokens", "Token ids in durable records.", labelnames=("kind",)
        )
        self.open: Gauge = _registered(
            registry, Gauge, "tokcap_open_calls", "Calls that have not ended yet.", multiprocess_mode="livesum"
        )
        self.intent: Histogram = _registered(
            registry, Histogram, "tokcap_intent_seconds", "Writing the durable intent of a call.", buckets=_SECONDS
        )
        self.put: Histogram = _registered(
            registry,
            Histogram,
            "tokcap_put_seconds",
            "From a whole answer to its durable record.",
            buckets=_SECONDS,
        )
        self.refused: Counter = _registered(
            registry, Counter, "tokcap_refused_begins", "Calls that could not begin.", labelnames=("reason",)
        )
        self.pending_bytes: Gauge = _registered(
            registry, Gauge, "tokcap_pending_bytes", "Bytes that wait for the disk.", multiprocess_mode="livesum"
        )
        self.pending_operations: Gauge = _registered(
            registry,
            Gauge,
            "tokcap_pending_operations",
            "Records that wait for the disk.",
            multiprocess_mode="livesum",
        )
        # Series that exist from the beginning, at zero: else the first of a kind is no increase.
        self.by_outcome = {outcome: self.calls.labels(outcome) for outcome in _OUTCOMES}
        self.prompt, self.sampled = self.tokens.labels("prompt"), self.tokens.labels("sampled")
        self.by_reason = {reason: self.refused.labels(reason) for reason in _REASONS}


_guard = threading.Lock()
_known: WeakKeyDictionary[CollectorRegistry, _Instruments] = WeakKeyDictionary()


class Metrics:
    """Counts calls; all objects of one process and registry count together. Without the library it does nothing."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """registry: of `prometheus-client`; None: the one of the process, if the library is installed."""
        self._instruments = _instruments_of(registry)

    def begun(self) -> None:
        """The intent of a call is durable."""
        if self._instruments is not None:
            self._instruments.open.inc()

    def ended(self, outcome: str, *, prompt_tokens: int = 0, sampled_tokens: int = 0) -> None:
        """A call that `begun` has counted has ended.

        outcome: as the ledger has it; anything else is counted as `other`. prompt_tokens, sampled_tokens: how many ids
        its entries hold, over all choices.
        """
        found = self._instruments
        if found is None:
            return
        found.open.dec()
        child = found.by_outcome.get(outcome)
        (found.calls.labels("other") if child is None else child).inc()
        if prompt_tokens:
            found.prompt.inc(prompt_tokens)
        if sampled_tokens:
            found.sampled.inc(sampled_tokens)

    def intent_seconds(self, seconds: float) -> None:
        """How long it took to write the intent of a call."""
        if self._instruments is not None:
            self._instruments.intent.observe(seconds)

    def refused(self, error: Exception) -> None:
        """A call could not begin; nothing was generated for it."""
        if self._instruments is not None:
            self._instruments.by_reason[_reason(error)].inc()

    def pending(self, sink: object) -> None:
        """Look at what waits for the disk, if the sink tells: `pending.bytes`, `pending.operations`."""
        found = self._instruments
        pending = getattr(sink, "pending", None)
        if found is not None and isinstance(pending, Pending):
            found.pending_bytes.set(pending.bytes)
            found.pending_operations.set(pending.operations)

    def put_seconds(self, seconds: float) -> None:
        """How long it took from a whole answer to its durable record."""
        if self._instruments is not None:
            self._instruments.put.observe(seconds)


def _reason(error: Exception) -> str:
    if isinstance(error, NoSpaceError):
        return "no_space"
    if isinstance(error, BusyError):
        return "busy"
    return "state" if isinstance(error, (FrozenError, InvalidIdError, RetiredError)) else "other"


def forget_dead_processes(directory: str) -> list[int]:
    """Remove the gauges of processes that are no more from a multiprocess directory; returns their process ids.

    Counters and histograms stay: what was counted was counted. Whether a process lives is asked of the kernel, so both
    have to be in one process namespace. Without the library nothing happens.
    """
    try:
        from prometheus_client import multiprocess
    except ImportError:
        return []
    dead = sorted({process for process in _with_gauges(directory) if not _lives(process)})
    for process in dead:
        with suppress(FileNotFoundError):  # another process does the same
            multiprocess.mark_process_dead(process, directory)  # type: ignore[no-untyped-call]
    return dead


def _instruments_of(registry: CollectorRegistry | None) -> _Instruments | None:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    chosen = REGISTRY if registry is None else registry
    with _guard:
        found = _known.get(chosen)
        if found is None:
            found = _known[chosen] = _Instruments(chosen)
        return found


def _registered(registry: CollectorRegistry, kind: Any, name: str, text: str, **options: Any) -> Any:
    """A new instrument, or the one that another copy of this module has registered."""
    try:
        return kind(name, text, registry=registry, **options)
    except ValueError:
        there = getattr(registry, "_names_to_collectors", {}).get(name)
        if type(there) is not kind:
            raise
        return there


def _with_gauges(directory: str) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            match = _GAUGE_FILE.fullmatch(name)
            if match:
                yield int(match[1])


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
