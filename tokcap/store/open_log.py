"""What a writer keeps in memory of an open rollout: what its log says, and where the next batch goes."""

from __future__ import annotations

from .layout import Directory, SegmentName
from .ledger import Ledger
from .log import LogReader
from .prefix import PrefixSearch
from .records import SegmentHeader

__all__ = ("OpenLog", "OpenSegment")


class OpenSegment:
    """The segment that the next batch goes to, and its one long-lived descriptor."""

    __slots__ = (
        "append_at",
        "below",
        "fd",
        "header",
        "inode",
        "name",
        "next_batch",
        "next_sequence",
        "path",
        "seed",
        "size",
    )

    def __init__(self, name: SegmentName, path: str, seed: int, header: SegmentHeader) -> None:
        self.name, self.path, self.seed, self.header = name, path, seed, header
        self.below = f"{header.incarnation}/{name}"
        """Its path from the rollout's directory."""
        self.fd = -1
        self.inode = (0, 0)
        self.append_at = self.next_sequence = self.next_batch = 0
        self.size = 0
        """Of the file, with the space behind `append_at`."""


class OpenLog:
    """The log of an open (or still absent) rollout, as far as it was acknowledged."""

    def __init__(self, directory: Directory, reader: LogReader) -> None:
        self.directory = directory
        self.reader = reader
        self.search = PrefixSearch(reader.ledger.nodes, reader.load)
        self.segment: OpenSegment | None = None
        self.predecessor = 0
        """The last segment that holds anything."""
        self.last_end = 0
        """Where its believed bytes end; -1 if it can't be read."""
        self.last_name: SegmentName | None = None
        self.closing = False
        """A freeze waits for open calls: no new ones."""

    @property
    def number(self) -> int:
        """Of the segment that is written."""
        assert self.segment is not None
        return self.segment.name.number

    @property
    def boot_id(self) -> str:
        return self.reader.boot_id

    @property
    def ledger(self) -> Ledger:
        return self.reader.ledger

    @property
    def nbytes(self) -> int:
        """Rough size in memory, for the cache."""
        ledger = self.ledger
        return 4000 + self.search.nbytes + ledger.digest_bytes + 700 * len(ledger.nodes) + 900 * len(ledger.calls)
