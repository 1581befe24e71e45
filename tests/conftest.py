"""Fixtures and options that every test may use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no health check on speed: how fast a machine is never fails a test.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("same-every-time", _UNTIMED, derandomize=True)
settings.register_profile("torture", _UNTIMED, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torture", action="store_true", default=False, help="also run the tests marked torture")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("torture" if config.getoption("--torture") else "same-every-time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--torture"):
        return
    skip = pytest.mark.skip(reason="a longer run, only with --torture")
    for item in items:
        if item.get_closest_marker("torture"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests look at is kept in a directory of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_not_ignored() -> None:
    """As they are if a shell starts the tests in the background: processes that tests start would ignore them, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """An empty directory that only its owner can use, whatever the umask."""
    directory = tmp_path / "store"
    directory.mkdir()
    directory.chmod(0o700)
    return directory
