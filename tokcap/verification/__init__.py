"""Whether a store is whole, byte by byte, and what can be mended of it.

```
store ─► checking ─► rollout ─► log   every name, frame, record, link and manifest ─► findings  tokcap verify
findings ─► plan ─► mending           under the fence, read before and after        ─► repaired  tokcap verify --repair
        └─► putting_back              a whole rollout that lies in the wrong place
        └─► quarantine                what was moved aside, and what is known since
```

```python
from tokcap.verification import check

for finding in check("/var/lib/tokcap"):
    print(finding.level, finding.path, finding.what)
```
"""

from __future__ import annotations

from .checking import CheckProgress, check
from .finding import CheckSummary, Finding
from .repairing import Repaired, repair

__all__ = ("CheckProgress", "CheckSummary", "Finding", "Repaired", "check", "repair")
