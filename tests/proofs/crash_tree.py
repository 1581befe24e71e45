"""Every tree of files that a crash may leave, from what was asked of the file system and what was synced.

What POSIX promises, and nothing more: `fsync` and `fdatasync` of a file make its bytes and its size durable, not its
names; `fsync` of a directory its entries, not the bytes or entries of what they lead to. A rename within a directory
is atomic. What was not synced may be there or not, in two models:

- `weak`: any subset of the entry operations (each on its own, a rename as one), any subset of the data units, and any
  size that the file has had since its last sync, whatever its data. No order holds between them.
- `ordered`: entry operations and sizes persist in the order in which they were asked for, up to any of them, and a
  sync of one takes all before it along (a journal); data units freely, as before.

A data unit is what one write put into one sector. At a crash point with up to `EXHAUSTIVE` states all of them are
made. Beyond: nothing, everything, each unit missing, each alone, all up to each; then all states of the newest units,
with the older ones all there or all missing; then random ones. A budget per crash point can cut that short.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Literal

from .crash_recording import Event, Recording, Tree

__all__ = ("EXHAUSTIVE", "MODELS", "Disk", "Image", "Model", "Pending")

Model = Literal["weak", "ordered"]
MODELS: tuple[Model, ...] = ("weak", "ordered")
EXHAUSTIVE = 4096
"""States of a crash point, before equal ones are left out, up to which all are made: 12 units."""
_NEWEST = 256
_RANDOM = 200

Node = int
Shape = tuple[tuple[str, Node, "Shape | None"], ...]
"""Of a directory: names in order, what they lead to, and for a directory what is in it."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Something that may be there after the crash or not."""

    position: int
    """Of the event that asked for it."""
    where: Node
    event: Event
    options: int = 2
    """Of a size: how many it may be."""
    offset: int = 0
    data: bytes = b""

    @property
    def is_entry(self) -> bool:
        return self.event.kind not in ("write", "size")

    def __str__(self) -> str:
        return f"#{self.position} {self.event}" + (f" [{self.offset}, {len(self.data)} bytes]" if self.data else "")


@dataclass
class _File:
    durable: bytes = b""
    size: int = 0
    units: list[_Unit] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(position, size), since the last sync."""


@dataclass
class _Directory:
    durable: dict[str, Node] = field(default_factory=dict)
    units: list[_Unit] = field(default_factory=list)


@dataclass(frozen=True)
class Image:
    """One state: directories, and files with their bytes, by number."""

    shape: Shape
    contents: dict[Node, bytes]
    missing: tuple[_Unit, ...]
    """Units that are not there, for people."""
    is_everything: bool

    @cached_property
    def key(self) -> int:
        """Equal for equal trees, whichever calls they come from."""
        places: dict[Node, int] = {}
        digest = blake2b(digest_size=8)
        for part in self._plainly(self.shape, places):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
        return int.from_bytes(digest.digest(), "little")

    def _plainly(self, shape: Shape, places: dict[Node, int]) -> Iterator[bytes]:
        for name, node, below in shape:
            yield name.encode()
            if below is None:
                yield bytes([places.setdefault(node, len(places)) % 256])
                yield self.contents[node]
            else:
                yield b"("
                yield from self._plainly(below, places)
                yield b")"

    def write_to(self, base: str) -> None:
        """Make it real in the empty directory `base`."""
        self._write(base, self.shape, {})

    def _write(self, path: str, shape: Shape, made: dict[Node, str]) -> None:
        for name, node, below in shape:
            target = f"{path}/{name}"
            if below is not None:
                os.mkdir(target, 0o700)
                self._write(target, below, made)
            elif node in made:
                os.link(made[node], target)
            else:
                made[node] = target
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(fd, self.contents[node])
                os.close(fd)


class Disk:
    """What is durable and what is pending, after the first so many events of a recording."""

    def __init__(self, before: Tree, *, unit: int) -> None:
        self.unit = unit
        self.files = {number: _File(data, len(data)) for number, data in before.files.items()}
        self.directories = {number: _Directory(dict(entries)) for number, entries in before.directories.items()}
        self.journalled = -1
        """Ordered model: position of the last entry operation or size that some sync took along."""
        self._position = -1
        self._contents: dict[tuple[object, ...], bytes] = {}

    @classmethod
    def of(cls, recording: Recording, *, unit: int) -> Disk:
        return cls(recording.before, unit=unit)

    def apply(self, event: Event) -> None:
        """The next event of the recording."""
        self._position += 1
        match event.kind:
            case "write":
                self.files[event.where].units += self._units(event)
            case "size":
                file = self.files[event.where]
                file.sizes.append((self._position, event.offset))
            case "sync":
                self._sync(event.where)
            case "settled":
                for number in (*self.files, *self.directories):
                    self._sync(number)
            case kind:
                if kind == "mkdir":
                    self.directories[event.what] = _Directory()
                elif kind == "create":
                    self.files[event.what] = _File()
                self.directories[event.where].units.append(_Unit(self._position, event.where, event))

    def skip(self) -> None:
        """The next event is a sync that somebody took out."""
        self._position += 1

    def _units(self, event: Event) -> Iterator[_Unit]:
        begin, end = event.offset, event.offset + len(event.data)
        while begin < end:
            until = min(end, (begin // self.unit + 1) * self.unit)
            data = event.data[begin - event.offset : until - event.offset]
            yield _Unit(self._position, event.where, event, offset=begin, data=data)
            begin = until

    def _sync(self, number: Node) -> None:
        file = self.files.get(number)
        if file is not None:
            if file.sizes:
                self.journalled = max(self.journalled, file.sizes[-1][0])
            size = file.sizes[-1][1] if file.sizes else file.size
            self.files[number] = _File(_content(file.durable, file.units, size), size)
            return
        directory = self.directories[number]
        if directory.units:
            self.journalled = max(self.journalled, directory.units[-1].position)
        self.directories[number] = _Directory(_entries(directory.durable, directory.units))

    # ---- what may be there

    def pending(self) -> Pending:
        """The units of everything that some state can reach, the oldest first."""
        reachable, waiting = {0}, [0]
        while waiting:
            directory = self.directories.get(waiting.pop())
            if directory is None:
                continue
            targets = set(directory.durable.values()) | {unit.event.what for unit in directory.units}
            waiting += targets - reachable
            reachable |= targets
        units: list[_Unit] = []
        for number in reachable:
            if number in self.files:
                file = self.files[number]
                units += file.units
                if file.sizes:
                    position = file.sizes[-1][0]
                    event = Event("size", number, offset=file.sizes[-1][1], path="of the file")
                    units.append(_Unit(position, number, event, 1 + len(file.sizes)))
            else:
                units += self.directories[number].units
        units.sort(key=lambda unit: (unit.position, unit.offset))
        return Pending(self, units)

    def image(self, units: list[_Unit], chosen: tuple[int, ...], everything: bool) -> Image:
        """The tree in which unit i is there if chosen[i]; of a size it says which."""
        kept: dict[Node, list[_Unit]] = {}
        sizes: dict[Node, int] = {}
        missing: list[_Unit] = []
        for unit, option in zip(units, chosen, strict=True):
            if unit.event.kind == "size":
                sizes[unit.where] = option
            elif option:
                kept.setdefault(unit.where, []).append(unit)
            if option < unit.options - 1:
                missing.append(unit)
        contents: dict[Node, bytes] = {}

        def shape_of(number: Node) -> Shape:
            directory = self.directories[number]
            entries = _entries(directory.durable, kept.get(number, ()))
            shape: list[tuple[str, Node, Shape | None]] = []
            for name in sorted(entries):
                child = entries[name]
                if child in self.directories:
                    shape.append((name, child, shape_of(child)))
                else:
                    if child not in contents:
                        contents[child] = self._content_of(child, kept.get(child, []), sizes.get(child, 0))
                    shape.append((name, child, None))
            return tuple(shape)

        return Image(shape_of(0), contents, tuple(missing), everything)

    def _content_of(self, number: Node, kept: list[_Unit], size: int) -> bytes:
        file = self.files[number]
        length = file.sizes[size - 1][1] if size else file.size
        key = (number, length, len(file.durable), tuple((unit.position, unit.offset) for unit in kept), file.durable)
        found = self._contents.get(key)
        if found is None:
            found = self._contents[key] = _content(file.durable, kept, length)
        return found


def _content(durable: bytes, units: Iterable[_Unit], size: int) -> bytes:
    data = bytearray(durable[:size].ljust(size, b"\0"))
    for unit in units:
        part = unit.data[: max(0, size - unit.offset)]
        data[unit.offset : unit.offset + len(part)] = part
    return bytes(data)


def _entries(durable: dict[str, Node], units: Iterable[_Unit]) -> dict[str, Node]:
    entries = dict(durable)
    for unit in units:
        event = unit.event
        if event.kind in ("unlink", "rmdir"):
            if entries.get(event.name) == event.what:
                del entries[event.name]
        elif event.kind == "rename":
            if entries.get(event.name) == event.what:
                del entries[event.name]
            entries[event.new_name] = event.what
        else:
            entries[event.name] = event.what
    return entries


class Pending:
    """The states of one crash point."""

    def __init__(self, disk: Disk, units: list[_Unit]) -> None:
        self.disk, self.units = disk, units
        self.is_exhaustive = True
        """Whether every state was or will be made; false once there are too many."""

    @property
    def everything(self) -> Image:
        """What is seen if the machine stays up."""
        return self.disk.image(self.units, tuple(unit.options - 1 for unit in self.units), True)

    def images(self, model: Model, chance: random.Random) -> Iterator[Image]:
        """States, also equal ones; see above for which."""
        last = tuple(unit.options - 1 for unit in self.units)
        for chosen in self._weak(chance) if model == "weak" else self._ordered(chance):
            yield self.disk.image(self.units, chosen, chosen == last)

    def without(self, dropped: set[int], others: bool) -> Image:
        """Units `dropped` are missing; of the others all are there, or none."""
        chosen = [0 if index in dropped or not others else unit.options - 1 for index, unit in enumerate(self.units)]
        return self.disk.image(self.units, tuple(chosen), False)

    def _weak(self, chance: random.Random) -> Iterator[tuple[int, ...]]:
        options = [unit.options for unit in self.units]
        return self._some(options, chance)

    def _some(self, options: list[int], chance: random.Random) -> Iterator[tuple[int, ...]]:
        total = 1
        for count in options:
            total = min(total * count, EXHAUSTIVE + 1)
        full = [count - 1 for count in options]
        if total <= EXHAUSTIVE:
            every = list(itertools.product(*map(range, options)))
            # Everything, nothing and their like first, in case a budget cuts this short.
            yield from self._edges(full)
            chance.shuffle(every)
            yield from every
            return
        self.is_exhaustive = False
        yield from self._edges(full)
        window, states = len(options), 1
        while window and states * options[window - 1] <= _NEWEST:
            window -= 1
            states *= options[window]
        newest = [tuple(part) for part in itertools.product(*map(range, options[window:]))]
        chance.shuffle(newest)
        for part in newest:
            yield (*full[:window], *part)
            yield (*(0 for _ in range(window)), *part)
        for _ in range(_RANDOM):
            odds = chance.choice((0.2, 0.5, 0.8))
            yield tuple(chance.choice(range(n)) if n > 2 else int(chance.random() < odds) for n in options)

    @staticmethod
    def _edges(full: list[int]) -> Iterator[tuple[int, ...]]:
        nothing = [0] * len(full)
        yield tuple(full)
        yield tuple(nothing)
        for index, most in enumerate(full):
            yield (*full[:index], 0, *full[index + 1 :])
            yield (*nothing[:index], most, *nothing[index + 1 :])
            yield (*full[:index], *nothing[index:])

    def _ordered(self, chance: random.Random) -> Iterator[tuple[int, ...]]:
        disk = self.disk
        positions = sorted(
            {unit.position for unit in self.units if unit.is_entry}
            | {
                position
                for unit in self.units
                if unit.event.kind == "size"
                for position, _ in disk.files[unit.where].sizes
            }
        )
        limits = [disk.journalled, *(position for position in positions if position > disk.journalled)]
        data = [index for index, unit in enumerate(self.units) if unit.event.kind == "write"]
        if len(limits) * 2 ** len(data) > EXHAUSTIVE:
            self.is_exhaustive = False
        choices = {limit: self._some([2] * len(data), chance) for limit in reversed(limits)}
        while choices:  # in turn, in case a budget cuts this short
            for limit in list(choices):
                part = next(choices[limit], None)
                if part is None:
                    del choices[limit]
                    continue
                chosen = [self._up_to(unit, limit) for unit in self.units]
                for index, option in zip(data, part, strict=True):
                    chosen[index] = option
                yield tuple(chosen)

    def _up_to(self, unit: _Unit, limit: int) -> int:
        if unit.event.kind == "size":
            return sum(position <= limit for position, _ in self.disk.files[unit.where].sizes)
        return int(unit.position <= limit)
