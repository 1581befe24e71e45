"""From a frozen snapshot to what a trainer eats.

Every recorded call is by itself exact: its prompt, its ids, its log-probs. Linking only merges calls into longer
sequences, and only where ids prove it. A doubt, a gap or a drift is answered by another trajectory, flagged, never by
a guess.

```
snapshot ─► recorded ─► links ─► siblings ─► drift ─► scored     (links to drift once more if a scored call matters)
   │      (prefix tree)   ├────► verdicts ─► paths ─► findings ─► Build ─► Trajectory (content, when looked at)
   │                      └────► gaps ─────────┘                    │└───► Rebuild (one Responses payload)
   └─────► straight (a conversation that proves to be a plain one) ─┘
```

The rules by number, as docstrings and tests cite them: 1-6 linking (parents by ids, order decides nothing, identical
calls, empty answers, conflicts, linear cost), 7-10 siblings (samples, extended, longest run or text, final retries),
11-12 ownership of spans and trunks, 13 drift, 14 roots that hold assistant turns, 15 lost calls, 16 cut-off answers, 17
models, 18-19 the scored answer and what comes after it, 20 what a trajectory has, 21 log-probs, 22 the account, 23 the
one response, 24-25 finalizing a record, 26 retiring, 27 the mask guard.
"""

from .behaviour import is_behaviour, unknown_log_probs
from .build import Build, build, group_of
from .drift import Drift, DriftKind, TokenBytes
from .response import Rebuild, rebuild_from, rebuild_response
from .scored import Scored
from .trajectory import Span, Trajectory
from .vocabulary import FLAGS, METRICS, REASONS

__all__ = (
    "FLAGS",
    "METRICS",
    "REASONS",
    "Build",
    "Drift",
    "DriftKind",
    "Rebuild",
    "Scored",
    "Span",
    "TokenBytes",
    "Trajectory",
    "build",
    "group_of",
    "is_behaviour",
    "rebuild_from",
    "rebuild_response",
    "unknown_log_probs",
)
