"""What every format can do: take records one by one, and put them into an open file."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol

from ..errors import InvalidOptionError
from .schema import FORMATS, Level, Record

__all__ = ("Writer", "format_of", "writer_for")


class Writer(Protocol):
    """Writes one file of an export."""

    def write(self, record: Record) -> None:
        """The next record. Formats whose layout needs all of them keep it until `close`."""
        ...

    def close(self) -> None:
        """Everything is in the file when this returns; the file stays open."""
        ...

    def abandon(self) -> None:
        """Let go of the file, which nobody wants any more; no-op after `close`."""
        ...


def format_of(name: str) -> str | None:
    """The format that the end of a file's name says, or None."""
    return next((format for format, end in FORMATS.items() if name.endswith(end)), None)


def writer_for(format: str, by: Level) -> Callable[[BinaryIO], Writer]:
    """What makes writers of a format. Raises `InvalidOptionError` if a library for it is missing."""
    try:
        if format in ("jsonl", "jsonl.gz"):
            from .jsonl import JsonLines

            return lambda file: JsonLines(file, by, compressed=format == "jsonl.gz")
        if format == "npz":
            from .npz import Npz

            return lambda file: Npz(file, by)
        if format == "parquet":
            from .parquet import Parquet

            return lambda file: Parquet(file, by)
        if format == "safetensors":
            from .safetensors import Safetensors

            return lambda file: Safetensors(file, by)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        raise InvalidOptionError(f'{format} needs {library}: pip install "tokcap[export]"') from error
    raise InvalidOptionError(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
