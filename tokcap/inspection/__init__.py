"""Looking into a store: live, or a copy from another machine, without a server, without a lock, without a write.

```
store ─► row       one per rollout, kept in a cache ─► rows, statistics      ls, stats, du
     └─► view      one rollout, call by call, in words ─► drift, difference  show, calls, cat, diff, drift
     └─► following what is recorded just now ─► events, pulse                tail, top
```

```python
from tokcap.inspection import open_to_look, row_of, view_of

store = open_to_look("/var/lib/tokcap")
for rollout_id, state in store.rollouts():
    print(row_of(store, rollout_id).reasons)
```
"""

from __future__ import annotations

from .branches import Branch, Conversation, conversations
from .difference import CallDifference, RolloutDifference, call_difference, rollout_difference
from .drifts import DriftedTurn, DriftTotals, drifted_turns
from .opening import open_to_change, open_to_look, store_directory
from .row import LOG_PROB_EDGES, RolloutRow, row_of
from .scan import Progress, rows, wanted_ids
from .statistics import Statistics, statistics, statistics_by
from .text import Texts, TokenizerBytes, models_of, pieces_of_store
from .usage import StoreUsage, usage_of_store
from .view import CallView, DriftView, RolloutView, view_of
from .wanted import Wanted
from .words import ADVICE, OUTCOMES, RELATIONS, Advice, advice_for

__all__ = (
    "ADVICE",
    "LOG_PROB_EDGES",
    "OUTCOMES",
    "RELATIONS",
    "Advice",
    "Branch",
    "CallDifference",
    "CallView",
    "Conversation",
    "DriftTotals",
    "DriftView",
    "DriftedTurn",
    "Progress",
    "RolloutDifference",
    "RolloutRow",
    "RolloutView",
    "Statistics",
    "StoreUsage",
    "Texts",
    "TokenizerBytes",
    "Wanted",
    "advice_for",
    "call_difference",
    "conversations",
    "drifted_turns",
    "models_of",
    "open_to_change",
    "open_to_look",
    "pieces_of_store",
    "rollout_difference",
    "row_of",
    "rows",
    "statistics",
    "statistics_by",
    "store_directory",
    "usage_of_store",
    "view_of",
    "wanted_ids",
)
