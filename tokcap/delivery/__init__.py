"""From a frozen rollout to its consumer, and its end once the consumer has it safely.

Two ways to take rollouts, and one order of events: freeze, build, hand over durably, retire exactly what was read.

```python
async with consume(store, finished_ids) as rollouts:  # a trainer that takes token arrays
    async for rollout in rollouts:
        save_durably(rollout.trajectories)
        await rollout.done()

finalized = await finalize_rollout(record, store)  # a framework whose records carry a Responses payload
write_durably(record)
await retire_rollout(finalized, store)
```

Nothing is retired before the consumer says so; what is masked or failed keeps its evidence. `MaskGuard` stops a run
that delivers too little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .guard import MaskGuard
from .identity import rollout_id_of
from .reset import reset_rollouts
from .retire import retire_rollout

if TYPE_CHECKING:
    from .blocking import consume_now
    from .consumer import consume
    from .finalize import Finalized, finalize_rollout
    from .handover import Delivery
    from .rollouts import Rollouts
    from .settings import consume_from_config

__all__ = (
    "Delivery",
    "Finalized",
    "MaskGuard",
    "Rollouts",
    "consume",
    "consume_from_config",
    "consume_now",
    "finalize_rollout",
    "reset_rollouts",
    "retire_rollout",
    "rollout_id_of",
)

_ON_DEMAND = {
    "Delivery": "handover",
    "Finalized": "finalize",
    "Rollouts": "rollouts",
    "consume": "consumer",
    "consume_from_config": "settings",
    "consume_now": "blocking",
    "finalize_rollout": "finalize",
}


def __getattr__(name: str) -> Any:
    # A launcher that only resets and names rollouts need not load what builds them.
    module = _ON_DEMAND.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
