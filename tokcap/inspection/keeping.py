"""One look at a rollout, with the fingerprint by which the next look knows whether it still holds."""

from __future__ import annotations

import contextlib
import os
from hashlib import blake2b

from ..store import FileStore
from ..store.layout import Layout
from .cache import Kept
from .row import look_at

__all__ = ("kept_of", "life_of")


def kept_of(store: FileStore, rollout_id: str, whole: bool) -> Kept | None:
    """The row of a rollout, and the fingerprint that its directory had before; None if it isn't there."""
    seen, row = look_at(store, rollout_id, whole=whole)
    if row.state == "absent" or (row.state == "unreadable" and seen is None and _is_gone(store, rollout_id)):
        return None
    if seen is None or row.error:  # what fails may pass
        return Kept(0, "", "", row)
    # Of a batch of an open rollout that nobody acknowledged a later boot thinks otherwise, though no file changes.
    mark = seen.mark ^ life_of(store) if row.state == "open" and seen.mark else seen.mark
    return Kept(mark, seen.folder, seen.names, row)


def life_of(store: FileStore) -> int:
    """What identifies this boot of the machine, and this mount of the store's file system; never negative."""
    mount = ""
    with contextlib.suppress(OSError):
        mount = store.files.mount_life(Layout(store.directory).rollouts)
    return int.from_bytes(blake2b(f"{store._boot_id} {mount}".encode(), digest_size=7).digest())


def _is_gone(store: FileStore, rollout_id: str) -> bool:
    try:
        return not os.path.lexists(Layout(store.directory).rollout(rollout_id))
    except OSError:
        return False
