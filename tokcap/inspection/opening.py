"""Which directory to look into, and how to open it so that nothing in it changes."""

from __future__ import annotations

import os

from ..errors import ConfigError, StoreNotFoundError
from ..store import FileStore

__all__ = ("open_to_change", "open_to_look", "store_directory")


def store_directory(directory: str | os.PathLike[str] | None = None) -> str:
    """The directory that is meant: the one that is given, else the one that the environment names.

    That is the directory in the file of `TOKCAP_CONFIG`, or `TOKCAP_DIR`. Raises `ConfigError` if nothing names one.
    """
    if directory is not None and os.fspath(directory):
        return os.path.abspath(os.fspath(directory))
    from ..config import config_from_environment

    config = config_from_environment()
    found = None if config is None or config.token_id_capture.sink else config.resolved_dir()
    if found is None:
        raise ConfigError(
            "no store is named: give --dir DIRECTORY, or set TOKCAP_DIR, or TOKCAP_CONFIG to a file with one"
        )
    return os.path.abspath(found)


def open_to_look(directory: str | os.PathLike[str] | None = None) -> FileStore:
    """The store in `directory` (see `store_directory`), opened for looking: no locks are taken, nothing is written.

    It may be in use, on a disk that can be read only, or a copy from another machine. Raises `ConfigError`,
    `StoreNotFoundError`, `NewerFormatError`.
    """
    path = store_directory(directory)
    if not os.path.isdir(path):
        raise StoreNotFoundError(2, "there is no such directory; check the path", path)
    return FileStore(path, read_only=True)


def open_to_change(directory: str | os.PathLike[str] | None = None, *, group: str | int | None = None) -> FileStore:
    """The store in `directory` (see `store_directory`), opened for writing: whoever calls it means to change it.

    A store that isn't there is not made. It sweeps nothing by itself. group: as for `FileStore`. Raises what
    `open_to_look` raises, `UnsafeDirectoryError` for a directory of somebody else, `DurabilityError`.
    """
    path = store_directory(directory)
    open_to_look(path).close_now()
    return FileStore(path, group=group, sweep_every_s=0)
