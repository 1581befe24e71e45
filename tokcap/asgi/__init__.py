"""The serving path: model calls of any agent, captured around any engine that speaks ASGI.

```
request ─► urls ─► routes ─► client (body) ─► asks ─► call.admit (intent, durable) ─► the application
answer  ◄─ strip ◄─ call (record, durable) ◄─ answers (whole, or held from the last finish reason on) ◄─┘
```

`/ng-rollout/<id>/...` is evaluation capture, `/ng-rollout/<id>/training-token-capture/...` training capture; what
stands behind is what the application sees. Requests without the prefix are never captured. Where ids are not to be
enough to write to a rollout, its token stands in the URL or in a header: `tokcap.asgi.capability`.
"""

from __future__ import annotations

from .capability import rollout_token
from .middleware import CaptureMiddleware
from .settings import ServingSettings
from .urls import rollout_base_url

__all__ = ("CaptureMiddleware", "ServingSettings", "rollout_base_url", "rollout_token")
