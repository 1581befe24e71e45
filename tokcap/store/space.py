"""Space that is written ahead of the end of an open segment: a sync that makes no file longer commits no journal.

What is left of it means nothing, so whatever fails here is let be.
"""

from __future__ import annotations

import contextlib

from .files import Files
from .frame import content_end
from .log import LogReader
from .open_log import OpenSegment

__all__ = ("cut_much_space", "cut_space", "write_space")

_LEAST, _MOST = 16 << 10, 256 << 10
_MUCH = 64 << 10
_PAGE = 4096


def write_space(files: Files, segment: OpenSegment, offset: int) -> None:
    """Make room behind a batch, to be synced with it: as much as there is already, within bounds."""
    segment.size = offset
    length = (min(max(offset, _LEAST), _MOST) + offset) // _PAGE * _PAGE - offset
    with contextlib.suppress(OSError):  # a full disk: it goes without
        segment.size += files.write_space(segment.fd, length, offset)


def cut_space(files: Files, segment: OpenSegment) -> None:
    """Cut off all of it, at the end of a segment that is open here."""
    if segment.fd >= 0 and segment.size > segment.append_at:
        with contextlib.suppress(OSError):
            files.truncate(segment.fd, segment.append_at)
            segment.size = segment.append_at


def cut_much_space(files: Files, reader: LogReader) -> None:
    """Cut it off where a log that was read has much of it.

    Cutting a little off takes a tenth of a whole freeze, and goes with the rollout anyway.
    """
    for read in reader.segments:
        end = read.scan.append_at
        if end is None or read.size - end < _MUCH or content_end(reader.buffers[read.number], read.size) != end:
            continue  # what is not space is evidence
        with contextlib.suppress(OSError):
            fd = files.open(reader.paths[read.number], write=True)
            try:
                files.truncate(fd, end)
            finally:
                files.close(fd)
