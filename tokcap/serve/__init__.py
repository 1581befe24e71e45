"""`tokcap serve`: a reverse proxy that captures, for engines that take no Python middleware.

    tokcap serve --upstream http://127.0.0.1:30000 --dir /var/lib/tokcap

Everything that reaches it goes on to the engine, unchanged and as it comes; what is asked under `/ng-rollout/<id>/` is
captured by `tokcap.asgi.CaptureMiddleware`, which stands in front. Its own routes lie under `/tokcap/`. It needs what
`pip install "tokcap[serve]"` brings: uvicorn, h11 and prometheus-client.

| module | what it does |
|---|---|
| `address` | where the engine is; targets and redirects |
| `headers` | which headers go on, in both directions |
| `connection` | one HTTP/1.1 connection to the engine |
| `upstream` | all connections to it, and which engine it is |
| `proxied` | the ASGI application that passes requests on |
| `own_routes` | `/tokcap/health` and `/tokcap/metrics` |
| `app` | all of it as one application: `make_app` |
| `patience` | how long a client may take over its request |
| `heads` | how long the head of a request may be |
| `options` | the options, on the command line and in the environment |
| `server` | one server process, and how it stops |
| `workers` | several of them, and who watches over them |
| `run` | one or the other: `serve` |
"""
