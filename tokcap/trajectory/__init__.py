"""From a frozen snapshot to what a trainer eats.

Every recorded call is by itself exact: its prompt, its ids, its log-probs. Linking only merges calls into longer
sequences, and only where ids prove it. A doubt, a gap or a drift is answered by another trajectory, flagged, never by
a guess.

```
snapshot ─► recorded ─► links ─► siblings ─┐
              │           │    ─► gaps     ├─► verdicts ─► paths ─► Build ─► Trajectory (arrays when looked at)
           prefix tree    └────► drift   ──┘                          └────► Rebuild (one Responses payload)
                               scored ─────┘
```
"""

from .build import Build, build, group_of
from .drift import Drift, TokenBytes
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
    "Rebuild",
    "Scored",
    "Span",
    "TokenBytes",
    "Trajectory",
    "build",
    "group_of",
    "rebuild_from",
    "rebuild_response",
)
