"""What `tokcap` does on the command line, one module per verb or family of verbs.

Everything looks without writing, at a live store or at a copy of one, but for the verbs that say so: `verify --repair`,
`import`, `retire`, `reset`, `sweep`, and `serve`.

| exit status | |
|---|---|
| 0 | done; what was asked is so |
| 1 | the answer is no: damage was found, two rollouts differ, a snapshot was not retired, nothing matched |
| 2 | wrong usage; `serve` ends with it after every error |
| 3 | no such store, rollout or call |
| 4 | the store refused or failed, or a part of it could not be read; the message says why |
| 130 | interrupted; `top` and `tail -f`, which nothing else ends, end with 0 then |

Nothing matched is said of a glob or a condition; a plain name that isn't there is 3. A store without rollouts is 0
where neither is given, with a line on standard error.
"""

from __future__ import annotations

from .group import run

__all__ = ("run",)
