"""What somebody, or a failing disk, does to the files of a store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from tokcap.store.manifest import decode_manifest, encode_manifest

__all__ = (
    "INCARNATION",
    "flip",
    "misplace",
    "one",
    "plant_file",
    "rename_shard",
    "replace_by_file",
    "rewrite_manifest",
)

INCARNATION = "0123456789abcdef0123456789abcdef"
"""A name that an incarnation may have."""


def one(pattern: str, root: Path) -> Path:
    """The only file or directory of that pattern."""
    (path,) = root.glob(pattern)
    return path


def rewrite_manifest(path: Path, change: dict[str, Any]) -> None:
    """As something that knows the format would have written it."""
    version = path.parent
    index = decode_manifest(
        str(path), path.read_bytes(), version.parent.parent.name, version.parent.name, int(version.name[1:])
    )
    assert index is not None
    path.write_bytes(b"".join(encode_manifest(msgspec.structs.replace(index, **change))))


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1 << bit,)))


def plant_file(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o600)


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    plant_file(path)


def misplace(rollout: Path, root: Path) -> None:
    """Into a shard where nobody looks for it."""
    wrong = root / "rollouts" / "00"
    wrong.mkdir(mode=0o700)
    shutil.move(rollout, wrong / "a-open")


def rename_shard(rollout: Path) -> None:
    rollout.parent.rename(rollout.parent.with_name("shard.bak"))
