"""`import tokcap` stays light: it is imported by every server process, worker and consumer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tokcap

ROOT = Path(__file__).parent.parent

_PROBE = """
import importlib, json, sys
for name in {needed!r}:
    importlib.import_module(name)
before = set(sys.modules)
for name in {wanted!r}:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

NEEDED = ["numpy", "msgspec"]
ALLOWED = {"tokcap", "filelock", *NEEDED}
HEAVY = {
    "asyncio",
    "distutils",
    "email",
    "http",
    "importlib.metadata",
    "multiprocessing",
    "pydoc",
    "sqlite3",
    "ssl",
    "subprocess",
    "tkinter",
    "unittest",
    "urllib.request",
    "xml",
}


def newly_imported(*wanted: str) -> set[str]:
    """What importing `wanted` adds to a fresh interpreter that has numpy and msgspec."""
    probe = _PROBE.format(needed=NEEDED, wanted=list(wanted))
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def added() -> set[str]:
    return newly_imported("tokcap")


def test_import_pulls_in_nothing_but_the_declared_dependencies(added: set[str]) -> None:
    top_level = {name.partition(".")[0] for name in added}
    foreign = {name for name in top_level - ALLOWED if name not in sys.stdlib_module_names}
    assert foreign == set()


def test_import_pulls_in_no_heavy_module_of_the_standard_library(added: set[str]) -> None:
    heavy = {name for name in added if any(name == root or name.startswith(f"{root}.") for root in HEAVY)}
    assert heavy == set()


def test_import_leaves_out_what_only_tests_and_higher_layers_need(added: set[str]) -> None:
    higher = ("tokcap.conformance", "tokcap.bridges", "tokcap.asgi", "tokcap.delivery")
    assert {name for name in added if name.startswith(higher)} == set()


def test_public_names_can_all_be_imported() -> None:
    for name in tokcap.__all__:
        assert getattr(tokcap, name) is not None


def test_version_is_that_of_the_version_module() -> None:
    from tokcap.version import __version__

    assert tokcap.__version__ == __version__


def test_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (Path(tokcap.__file__).parent / "py.typed").exists()
