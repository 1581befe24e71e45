"""Makes `tests/nemo_gym.tar.gz`: a directory of NeMo Gym's token capture, written by NeMo Gym 0.7.0 itself.

    pip install --no-deps --ignore-requires-python nemo-gym==0.7.0; pip install pydantic orjson
    python -m tests.nemo_gym_directory

What it holds is in `ROLLOUTS`; the entries are those of the recorded traffic. Tests unpack it and need no NeMo Gym.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib
import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests import recordings
from tokcap import TokenEntry

__all__ = ("ARCHIVE", "ROLLOUTS", "unpacked")

ARCHIVE = Path(__file__).parent / "nemo_gym.tar.gz"

ROLLOUTS = {
    "linear-0": "whole records, frozen",
    "long-token-in-0": "delta records, frozen",
    "token-in-0": "delta records, frozen, incomplete: a call was begun and never recorded",
    "token-in-1": "delta records, open, incomplete: one call marked, and an unnamed one",
    "linear-1": "whole records, open",
    "linear-2": "dropped: retired, without records",
}
_DELTAS = ("long-token-in-0", "token-in-0", "token-in-1")
_FROZEN = ("linear-0", "long-token-in-0", "token-in-0", "linear-2")


def unpacked(directory: Path) -> Path:
    """The directory, unpacked into `directory`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


async def _write(directory: Path) -> None:
    package: Any = importlib.import_module("nemo_gym.token_id_capture")
    store = package.TokenCaptureStore(directory)
    for name in ROLLOUTS:
        before: list[tuple[str, list[int]]] = []
        for entry in recordings.load(name).entries:
            await store.begin_call(name, entry.model_call_id)
            prompt = entry.prompt_token_ids.tolist()
            whole = prompt + entry.generation_token_ids.tolist()
            parents = [(call, ids) for call, ids in before if prompt[: len(ids)] == ids]
            parent = max(parents, key=lambda found: len(found[1]), default=None)
            context = package.CaptureContext(
                rollout_id=name,
                model_call_id=entry.model_call_id,
                token_sink=store,
                delta_records=name in _DELTAS,
            )
            token = package.set_token_sink(context)
            await package.commit_entry(_theirs(package, entry), parent_resolution=_resolution(package, parent))
            package.reset_token_sink(token)
            before.append((entry.model_call_id, whole))
    await store.begin_call("token-in-0", "call-never-came-back")
    await store.mark_incomplete("token-in-1", "call-that-failed")
    await store.mark_incomplete("token-in-1")
    for name in _FROZEN:
        await store.freeze(name)
    snapshot = await store.freeze("linear-2")
    await store.drop("linear-2", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def _theirs(package: Any, entry: TokenEntry) -> Any:
    return package.TokenEntry(
        rollout_id=entry.rollout_id,
        model_call_id=entry.model_call_id,
        model=entry.model,
        prompt_token_ids=entry.prompt_token_ids.tolist(),
        generation_token_ids=entry.generation_token_ids.tolist(),
        generation_log_probs=entry.generation_log_probs.tolist(),
        output_items=entry.output_items,
        token_item_index=entry.token_item_index,
        response_id=entry.response_id,
        created_at=entry.created_at,
    )


def _resolution(package: Any, parent: tuple[str, list[int]] | None) -> Any:
    status = package.ParentResolutionStatus
    if parent is None:
        return package.LineageResolution(status.ROOT, reason="no earlier call")
    match = package.LineageMatch(
        model_call_id=parent[0], cumulative_token_ids=tuple(parent[1]), digest=package.compute_digest(parent[1])
    )
    return package.LineageResolution(status.RESOLVED, match=match, reason="prefix")


def _packed(directory: Path) -> bytes:
    """A tar file without times and owners in it."""
    data = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, data, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(directory.iterdir()):
            about = tarfile.TarInfo(path.name)
            about.size, about.mode = path.stat().st_size, 0o600
            archive.addfile(about, io.BytesIO(path.read_bytes()))
    return data.getvalue()


def main() -> int:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_write(Path(directory)))
        ARCHIVE.write_bytes(_packed(Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
