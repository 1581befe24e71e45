"""Putting the page together: one file, whose only script and style are named by their hashes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

from ..inspection import ADVICE, LOG_PROB_EDGES, OUTCOMES, RELATIONS, Texts, pieces_of_store, row_of, rows
from ..store import FileStore
from ..trajectory import FLAGS, METRICS, REASONS
from ..trajectory.verdicts import CATEGORIES
from ..version import __version__
from .contents import MAX_TOKENS, Contents, contents_of
from .overview import COLUMNS

__all__ = ("SCRIPTS", "json_for_html", "page_of", "report")

SCRIPTS = (
    "text.js",
    "elements.js",
    "data.js",
    "colour.js",
    "rows.js",
    "plots.js",
    "tree.js",
    "timeline.js",
    "layout.js",
    "strip.js",
    "barcode.js",
    "drift.js",
    "search.js",
    "head.js",
    "why.js",
    "details.js",
    "distributions.js",
    "rollout.js",
    "overview.js",
    "app.js",
)
"""The modules of the page's script, in the order in which they are joined."""

_MARK = re.compile(r"\{\{(\w+)\}\}")
_ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def report(
    store: FileStore,
    ids: Collection[str] | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    texts: Texts | None = None,
    title: str = "",
) -> bytes:
    """A page about the rollouts `ids`, or about all of a store.

    store: opened to look (`tokcap.inspection.open_to_look`); nothing is written into it. ids that aren't there are
    shown as absent. max_tokens: distinct token ids in the page; of rollouts beyond that only a row is there. texts: the
    bytes of token ids; by default those that the store's calls tell. title: a name for the whole; the directory of the
    store by default.

    Returns HTML in UTF-8 (ASCII, in fact). Never raises for what is wrong with a rollout: the page says it.
    """
    found = rows(store) if ids is None else [row_of(store, rollout_id) for rollout_id in dict.fromkeys(ids)]
    chosen = None if ids is None else tuple(dict.fromkeys(ids))
    if texts is None:
        texts = Texts(pieces_of_store(store, chosen or ()))
    contents = contents_of(store, found, chosen=chosen, max_tokens=max_tokens, texts=texts)
    return page_of(contents, title=title or store.directory, whole=ids is None)


def page_of(contents: Contents, *, title: str, whole: bool = True, made_at: float | None = None) -> bytes:
    """The page as one file. whole: whether it is about a store and not about chosen rollouts. made_at: unix seconds."""
    data = {
        "title": title,
        "whole": whole,
        "madeAt": time.time() if made_at is None else made_at,
        "tokcap": __version__,
        "maxTokens": contents.max_tokens,
        "columns": COLUMNS,
        "table": contents.table(),
        "totals": contents.totals(),
        "rollouts": contents.rollouts,
        "vocabulary": contents.vocabulary,
        "words": _words(),
    }
    blocks = [_block("application/json", "data", json_for_html(data))]
    for position, parts in enumerate(contents.parts):
        for name, array in parts.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            encoded = base64.b64encode(little.tobytes()).decode()
            blocks.append(_block("application/octet-stream;base64", f"{name}-{position}", encoded, str(array.dtype)))
    return _assembled(html.escape(_plain(title)), "\n".join(blocks)).encode("ascii", "xmlcharrefreplace")


def _plain(title: str) -> str:
    """What a browser may show in its frame: printable, and no longer than anybody reads."""
    return "".join(char if char.isprintable() else "?" for char in title)[:200]


def _words() -> dict[str, Any]:
    """What short codes mean."""
    return {
        "advice": {code: [advice.what, advice.why, advice.then] for code, advice in ADVICE.items()},
        "reasons": REASONS,
        "flags": FLAGS,
        "metrics": METRICS,
        "outcomes": OUTCOMES,
        "relations": RELATIONS,
        "categories": CATEGORIES,
        "edges": [None if edge == float("-inf") else edge for edge in LOG_PROB_EDGES],
    }


def json_for_html(value: Any) -> str:
    """`value` as JSON that can stand in a `script` element: ASCII, and without a character that HTML knows.

    NaN and infinities are not allowed: arrays are binary, and numbers are checked where they are gathered.
    """
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def _block(kind: str, name: str, body: str, dtype: str = "") -> str:
    """Data that no browser runs: its type is that of no script."""
    told = f' data-dtype="{dtype}"' if dtype else ""
    return f'<script type="{kind}" id="{name}"{told}>{body}</script>'


@cache
def _source(name: str) -> str:
    return (files(__package__) / "page" / name).read_text("utf-8")


@cache
def script() -> str:
    """The whole script of the page."""
    return '"use strict";\n(() => {\n' + "\n".join(_source(name) for name in SCRIPTS) + "\n})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _assembled(title: str, blocks: str) -> str:
    style, code = _source("report.css"), script()
    for name, text in (("script", code), ("style", style)):
        assert f"</{name}" not in text.lower(), name
        assert text.isascii(), f"the page's {name} is hashed as it stands; write \\u escapes"
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {"policy": policy, "title": title, "style": style, "script": code, "data": blocks}
    # One pass: nothing is looked for in what a record says.
    return _MARK.sub(lambda mark: parts[mark[1]], _source("report.html"))
