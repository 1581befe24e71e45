"""One HTML file about a rollout, several, or a whole store: it opens from disk and asks no network for anything.

```
store ─► overview  a row for every rollout, and the totals ─┐
     └─► contents  the calls and tokens of some of them ────┴─► page  one file: inert data, a style, a script
```

```python
from tokcap.inspection import open_to_look
from tokcap.report import report

page = report(open_to_look("/var/lib/tokcap"), ["task-9-3"])
open("task-9-3.html", "wb").write(page)
```

What a model wrote is hostile. It goes into the page as JSON in which no `<` is left, or as base64; the script shows it
as text and never as markup; and the page forbids itself every script, style and address but its own.
"""

from __future__ import annotations

from .contents import MAX_TOKENS, Contents, contents_of
from .page import page_of, report

__all__ = ("MAX_TOKENS", "Contents", "contents_of", "page_of", "report")
