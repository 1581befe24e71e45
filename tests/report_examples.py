"""Stores for the tests of the report: everything that a record can say, ordinary and hostile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.store.layout import Layout

__all__ = ("CORPUS", "MODEL", "assorted_store", "hostile_store", "large_store")

MODEL = "policy"

CORPUS = (
    "</script><script>window.ran=1</script>",
    "</SCRIPT ><script>window.ran=2</script>",
    "<!--<script>window.ran=3",
    "--><script>window.ran=4</script>",
    "]]><script>window.ran=5</script>",
    "<img src=x onerror=window.ran=6>",
    "<svg/onload=window.ran=7>",
    '"><body onload=window.ran=8>',
    "' onmouseover='window.ran=9' x='",
    "javascript:window.ran=10",
    "<a href=javascript:window.ran=11>here</a>",
    "<iframe srcdoc='<script>parent.ran=12</script>'></iframe>",
    "<meta http-equiv=refresh content='0;url=javascript:window.ran=13'>",
    "<base href=//example.invalid/><link rel=stylesheet href=x>",
    "</title></style><style>*{display:none}</style>",
    "{{constructor.constructor('window.ran=14')()}}",
    "${window.ran=15}`+window.ran+`",
    "<%= window.ran=16 %>",
    "{{data}}{{script}}{{policy}}",
    "&lt;script&gt;window.ran=17&lt;/script&gt;",
    "__proto__",
    "constructor",
    "toString",
    "line\u2028separator\u2029paragraph",
    "nothing\0there",
    "\u202egnp.exe\u202c turned around",
    "\u2066isolated\u2069 \u200bhidden\ufeff",
    "lone \ud800 and \udfff surrogates",
    "\x1b[31mred\x1b]0;title\x07",
    "new\nline\r\n\ttab",
    "\U000e0041 tagged \U0001f600",
)
"""What a model, or somebody who writes for it, may put wherever a record carries text."""


def hostile_store(directory: Path) -> Path:
    """One rollout whose every text is from `CORPUS`, open calls, losses and a late note included; and hostile names."""
    with FileStore(directory) as store:
        for number, text in enumerate(CORPUS):
            call = f"c{number:02d}"
            piece = text.encode("utf-8", "surrogatepass")
            versions: list[Any] = [(text, 0, 2), [text, 2, 3]]
            store.begin_call_now("hostile", call, idempotency_key=text)
            store.put_now(
                TokenEntry(
                    "hostile",
                    call,
                    [1, 2, 3, number],
                    [1000 + number, 5000 + number, 9],
                    [-0.5, -3.0, None],
                    output_items=[{"type": "message", text: [text, {"content": text}]}],
                    model=MODEL if number else text,
                    response_id=text,
                    finish_reason=text,
                    policy_versions=versions,
                    sampling={text: text, "temperature": 1.0},
                    pieces=[piece, b"<" * 1_000_000 if number == 1 else piece[:3], b"\xff\xfe</script>"],
                    extra={text: {text: text}},
                )
            )
            store.begin_call_now("hostile", f"lost-{number:02d}")
            store.settle_call_now("hostile", f"lost-{number:02d}", "lost", text)
        meta = {"group": CORPUS[0], "reward": float("nan"), **dict.fromkeys(CORPUS, CORPUS[5])}
        store.finish_now("hostile", meta=meta)
        store.freeze_now("hostile").close()
        for number, text in enumerate(CORPUS):
            store.put_now(TokenEntry(f"group-{number}", "c", [1], [2], [-1.0], model=text))
            store.finish_now(f"group-{number}", meta={"group": text})
        for log_prob in (-1.0, float("-inf")):
            huge: Any = {"number": 10**5000}
            store.put_now(
                TokenEntry(
                    "numbers",
                    f"c{log_prob == -1.0}",
                    [1],
                    [2, 3],
                    [log_prob, float("inf")],
                    policy_versions=[(10**5000, 0, 1), (1, -3, 10**30), (2, 0, 10**5000)],
                    sampling=huge,
                    output_items=[huge],
                    extra=huge,
                )
            )
        store.finish_now("numbers", meta={"group": 10**5000, "reward": float("inf")})
        store.put_now(TokenEntry("gone", "c", [1], [2], [-1.0]))
        snapshot = store.freeze_now("gone")
        store.begin_call_now("late", "c")
        assert store.retire_now("gone", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        snapshot.close()
    shard = Path(Layout(os.fspath(directory)).shard("hostile"))
    for text in ("<img src=x onerror=window.ran=18>", "javascript:window.ran=19", "\u202egnp"):
        (shard / text).mkdir()
    return directory


def assorted_store(directory: Path) -> Path:
    """`mixed`: choices, retries, a cut-off, a conflict, a loss, drift, unknown log-probs, versions.
    `judged` (by another model), `open`, `gone` (retired), `empty` (frozen without a call), `damaged`."""
    with FileStore(directory) as store:
        _mixed(store)
        store.begin_call_now("open", "running")
        store.put_now(TokenEntry("open", "first", [1, 2], [3, 4], [-0.1, -0.2], model=MODEL, pieces=[b"so", b" far"]))
        store.put_now(TokenEntry("gone", "c", [1], [2], [-1.0]))
        gone = store.freeze_now("gone")
        assert store.retire_now("gone", snapshot_id=gone.snapshot_id, version=gone.version)
        gone.close()
        store.settle_call_now("gone", "after", "lost", "its server died")
        store.freeze_now("empty").close()
        for model in ("policy", "judge"):
            store.put_now(TokenEntry("judged", model, [900, 901], [902, 903], [-0.1, -0.1], model=model))
        store.freeze_now("judged").close()
        for call in range(3):
            store.put_now(TokenEntry("damaged", f"c{call}", [7] * 40, range(call, call + 30), [-0.5] * 30, model=MODEL))
        store.freeze_now("damaged").close()
    damaged = max(
        (path for path in directory.rglob("*/damaged/**/*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with damaged.open("r+b") as file:
        file.seek(400)  # in one of its records; most of the file is room
        file.write(b"\xa5" * 8)
    return directory


def _mixed(store: FileStore) -> None:
    name = "mixed"
    prompt = list(range(100, 130))

    def put(call: str, ids: list[int], sampled: list[int], log_probs: list[float | None], **others: Any) -> None:
        store.begin_call_now(name, call)
        others.setdefault("model", MODEL)
        others.setdefault("pieces", [f" w{token}".encode() for token in sampled])
        store.put_now(TokenEntry(name, call, ids, sampled, log_probs, **others))

    put("a", prompt, [1, 2, 3, 4], [-0.005, -0.05, None, -9.0], policy_versions=[("v1", 0, 2), ("v2", 2, 4)])
    put("b", [*prompt, 1, 2, 3, 4, 50], [5, 6], [-0.3, -0.7])
    put("c", [*prompt, 1, 2, 3, 4, 50], [5, 7, 8], [-0.3, -1.7, -2.5])
    put("d", [*prompt, 1, 2, 3, 4, 50, 5, 7, 8, 60], [11, 12, 13], [-0.2] * 3)
    put("e", [*prompt, 1, 2, 3, 4, 50, 5, 7, 8, 60, 11, 99, 61], [14], [-4.5])  # 12, 13 came back as 99
    store.begin_call_now(name, "cut")
    store.put_now(TokenEntry(name, "cut", [800, 801], [802], [-0.1], model=MODEL, finish_reason="aborted"))
    store.settle_call_now(name, "cut", "aborted", "the client went away")
    store.begin_call_now(name, "gone")
    store.settle_call_now(name, "gone", "lost", "the answer holds no token ids")
    store.begin_call_now(name, "refused")
    store.settle_call_now(name, "refused", "no_generation", "status 429")
    store.begin_call_now(name, "several", 2)
    pair = [TokenEntry(name, "several", [700], [701 + n], [-0.4], choice_index=n, model=MODEL) for n in range(2)]
    store.put_many_now(pair)
    store.finish_now(name, meta={"reward": 0.25, "group": "g"})
    store.freeze_now(name).close()


def large_store(directory: Path, calls: int = 40, sampled: int = 4500, between: int = 500) -> Path:
    """`large`: one conversation of about calls * (sampled + between) ids."""
    random = np.random.default_rng(7)
    words = [
        b" the",
        b" a",
        b" model",
        b" answers",
        b"\n",
        b".",
        b" policy",
        b" reward",
        b" step",
        b",",
        b" is",
        b" in",
    ]
    with FileStore(directory) as store:
        ids = random.integers(0, len(words), between)
        for call in range(calls):
            tokens = random.integers(0, len(words), sampled)
            log_probs = -np.abs(random.gumbel(0.2, 1.2, sampled))
            log_probs[100:103] = np.nan
            pieces = [words[token] for token in tokens]
            store.put_now(TokenEntry("large", f"c{call:04d}", ids, tokens, log_probs, model=MODEL, pieces=pieces))
            ids = np.concatenate([ids, tokens, random.integers(0, len(words), between)])
        store.freeze_now("large").close()
    return directory
