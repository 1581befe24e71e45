"""What goes to the terminal. What a model wrote is hostile: no control character of it gets there."""

from __future__ import annotations

import codecs
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = (
    "age",
    "amount",
    "amount_cell",
    "console",
    "counted",
    "json_of",
    "line",
    "print_json",
    "print_table",
    "safe",
    "size",
    "size_cell",
)

Justify = Literal["left", "right"]
_SPACE = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SHORT = 24
"""Characters of a sentence that is not folded if there is room for it."""
_NARROW = 12
"""Of a folded one, at least: rather wider than the terminal than in pieces of a few characters."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that move the cursor, turn text around, or can't be seen or encoded."""


def safe(text: str) -> str:
    """`text` with everything escaped that a terminal or a reader could take for something else."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if not _is_hidden(char) else _escaped(char) for char in text)


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _escaped(char: str) -> str:
    if char in _SPACE:
        return _SPACE[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def line(text: str = "") -> None:
    """One line to standard output; `text` is already safe, or ours."""
    sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    """One JSON object on a line of its own; NaN and infinities are null. It is UTF-8, whatever the terminal takes."""
    text = json_of(value)
    if not text.isascii() and codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8":
        import json

        # Outside its strings JSON is ASCII.
        text = "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text)
    sys.stdout.write(text + "\n")


_MOST_BITS = 14_000
"""Of an integer that Python writes out: 4,300 digits."""


def json_of(value: Any) -> str:
    """`value` as JSON, whatever a record holds."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain).decode()
    except (TypeError, ValueError, OverflowError):  # half of a character, a key that JSON has not, a large number
        import json

        return json.dumps(_for_json(msgspec.to_builtins(value, enc_hook=_plain, str_keys=False)))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    raise NotImplementedError(type(value).__name__)


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _for_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(inner) for inner in value]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        from ..content import name_of

        return name_of(value)
    return None if isinstance(value, float) and not isfinite(value) else value


def console(*, stderr: bool = False) -> Console:
    """Where tables, trees and progress go. Colours only where somebody looks, and NO_COLOR isn't set."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def print_table(
    columns: Sequence[tuple[str, Justify]],
    rows: Iterable[Sequence[str]],
    *,
    styles: dict[int, str] | None = None,
    optional: Sequence[int] = (),
) -> None:
    """A table to look at on a terminal; elsewhere one tab-separated line a row, the first with the names.

    Cells are made `safe` here. styles: of columns, by position. On a terminal columns without any content are left
    out, and of `optional` columns as many as it takes, the first one first, if it is too narrow. Only sentences are
    folded: where numbers and names have no room in one piece, the table is wider than the terminal.
    """
    if not sys.stdout.isatty():
        line("\t".join(name for name, _ in columns))
        for row in rows:
            line("\t".join(safe(cell) for cell in row))
        return
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(safe(cell)) for cell in row] for row in rows]
    if not cells:
        return
    widths = [max(len(columns[at][0]), *(row[at].cell_len for row in cells)) for at in range(len(columns))]
    told = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    whole = {at for at in told if columns[at][1] == "right" or not any(" " in row[at].plain for row in cells)}
    least = [width if at in whole else min(width, _SHORT) for at, width in enumerate(widths)]
    terminal = console()
    spare = list(optional)
    while spare and _room(least, told) > terminal.width:
        told = [at for at in told if at != spare[0]]
        del spare[0]
    fits = _room(least, told) <= terminal.width
    if not fits:
        least = [width if at in whole else min(width, _NARROW) for at, width in enumerate(widths)]
        terminal.width = max(terminal.width, _room(least, told))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at in told:
        name, justify = columns[at]
        style = (styles or {}).get(at, "")
        table.add_column(
            name,
            justify=justify,
            style=style,
            overflow="fold",
            no_wrap=at in whole or (fits and widths[at] <= _SHORT),
            min_width=widths[at] if at in whole else None,
        )
    for texts in cells:
        table.add_row(*(texts[at] for at in told))
    terminal.print(table)


def _room(widths: Sequence[int], columns: Iterable[int]) -> int:
    """How wide a table of these columns is."""
    return sum(widths[at] + 2 for at in columns)


def size(count: int) -> str:
    """Bytes in words: 812 B, 14.2 KiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 call`, `2,000 calls`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amount(count: int) -> str:
    """A number with separators: 12,345."""
    return f"{count:,}"


def age(seconds: float) -> str:
    """A duration in words: 3s, 12m, 5h, 3d."""
    for limit, unit, per in ((120, "s", 1), (7200, "m", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{max(seconds, 0) / per:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def amount_cell(count: int) -> str:
    """A number for a cell: with separators on a terminal, plain for programs."""
    return amount(count) if sys.stdout.isatty() else str(count)


def size_cell(count: int) -> str:
    """Bytes for a cell: in words on a terminal, plain for programs."""
    return size(count) if sys.stdout.isatty() else str(count)
