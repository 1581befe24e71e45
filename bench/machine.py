"""What a report was measured on and with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tokcap.version import __version__

__all__ = ("Machine", "look")


class Machine(msgspec.Struct, frozen=True):
    """The head of a report."""

    date: str
    """UTC, to the minute."""
    processor: str
    cores: int
    """Those that this process may use."""
    kernel: str
    python: str
    packages: dict[str, str]
    """The versions of everything that is measured, `not installed` included."""
    file_systems: dict[str, str]
    """What each place is."""

    def lines(self) -> list[str]:
        """For people."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        places = "; ".join(f"{name}: {described}" for name, described in self.file_systems.items())
        return [
            f"{self.date}, {self.processor}, {self.cores} cores, Linux {self.kernel}, Python {self.python}",
            packages,
            places,
        ]


def look(packages: Iterable[str], file_systems: Mapping[str, str]) -> Machine:
    """This machine, this interpreter and these distributions."""
    versions = {"tokcap": __version__, "SQLite": _sqlite_version()}
    return Machine(
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        _processor(),
        len(os.sched_getaffinity(0)),
        platform.release(),
        platform.python_version(),
        versions | {name: _version(name) for name in packages},
        dict(file_systems),
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sqlite_version() -> str:
    import sqlite3

    return sqlite3.sqlite_version


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
