"""Publishing a version of a snapshot: links and a manifest, built aside, that appear by one rename."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from .files import Files
from .layout import DAMAGED, MANIFEST, Directory, LinkName, remove_tree
from .manifest import Index, encode_manifest

__all__ = ("Publication", "publish")


class Publication:
    """One version on its way, step by step: `write`, sync `unsynced`, `rename`, sync `unsynced`, `close`.

    After an error in any of these but `write`: `undo`. The caller holds the fence all the time.
    What is linked was synced when it was acknowledged. The manifest and the directory that names it and the links
    (btrfs alone loses them otherwise) are durable before the rename, the rename before anybody is told.
    """

    def __init__(self, files: Files, directory: Directory, version: int) -> None:
        self.files = files
        self.target = f"{directory.incarnation_path}/v{version}"
        self.unsynced: list[tuple[int, bool]] = []
        """Open descriptors that have to be synced before the next step, and whether each is a directory. In any order:
        until the rename nothing leads to them."""
        self._parent = directory.incarnation_path
        self._temporary = f"{directory.incarnation_path}/tmp-{os.urandom(8).hex()}"
        self._renamed = False
        files.mkdir(self._temporary)

    def write(
        self,
        index: Index,
        sources: list[tuple[str, LinkName]],
        created: tuple[LinkName, list[bytes | memoryview]] | None = None,
    ) -> None:
        """Make links to `sources` and the manifest; `created` is a segment that only this version has: late marks.

        If it fails, it is undone.
        """
        try:
            self._write(index, sources, created)
        except OSError:
            self.undo()
            raise

    def _write(
        self,
        index: Index,
        sources: list[tuple[str, LinkName]],
        created: tuple[LinkName, list[bytes | memoryview]] | None,
    ) -> None:
        files, temporary = self.files, self._temporary
        for source, link in sources:
            files.link(source, f"{temporary}/{link}")
        if created is not None:
            self._write_file(f"{temporary}/{created[0]}", created[1], self._sync_one)
        self._write_file(f"{temporary}/{MANIFEST}", encode_manifest(index), self._keep)
        if index.damage:
            self._write_file(f"{temporary}/{DAMAGED}", [], self._sync_one)
        self._keep(files.open_directory(temporary), is_directory=True)

    def _write_file(self, path: str, buffers: list[bytes | memoryview], then: Callable[[int], None]) -> None:
        fd = self.files.create(path)
        try:
            self.files.write(fd, buffers, 0)
        except BaseException:
            self.files.close(fd)
            raise
        then(fd)

    def _keep(self, fd: int, *, is_directory: bool = False) -> None:
        self.unsynced.append((fd, is_directory))

    def _sync_one(self, fd: int) -> None:
        try:
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)

    def sync(self) -> None:
        """Sync what has to be, one after another."""
        for fd, is_directory in self.unsynced:
            if is_directory:
                self.files.fsync(fd)
            else:
                self.files.fdatasync(fd)

    def rename(self) -> None:
        """Give it its name; all before was synced."""
        self.close()
        # Opened first: without a descriptor for it, nothing has appeared yet.
        self._keep(self.files.open_directory(self._parent), is_directory=True)
        self.files.rename(self._temporary, self.target)
        self._renamed = True

    def close(self) -> None:
        """Let go of the descriptors."""
        unsynced, self.unsynced = self.unsynced, []
        for fd, _ in unsynced:
            with contextlib.suppress(OSError):  # it was synced, or does not count
                self.files.close(fd)

    def finish(self) -> None:
        """All steps after `write`; if one fails, it is undone."""
        try:
            self.sync()
            self.rename()
            self.sync()
        except OSError:
            self.undo()
            raise
        finally:
            self.close()

    def undo(self) -> None:
        """Take back what was done. A second sync could succeed without having done anything: the next try renames
        again."""
        self.close()
        if self._renamed:
            with contextlib.suppress(OSError):
                self.files.rename(self.target, self._temporary)
        with contextlib.suppress(OSError):  # the next operation on this rollout, or a sweep, removes it
            remove_tree(self.files, self._temporary)


def publish(
    files: Files,
    directory: Directory,
    index: Index,
    sources: list[tuple[str, LinkName]],
    created: tuple[LinkName, list[bytes | memoryview]] | None = None,
) -> None:
    """Make a version of a snapshot appear, durably. The caller holds the fence."""
    publication = Publication(files, directory, index.version)
    publication.write(index, sources, created)
    publication.finish()
