"""A store to practise on: recorded rollouts, most of them well, some with a defect that you are to find.

Which ones have which is not told; `--answers` tells, and with which command each is seen: at once, or later, with the
same `--seed`, of a store that is there already. Another seed plants them elsewhere. Needs a checkout: the rollouts are
the recorded traffic in tests/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import io
import logging
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests import recordings
from tests.recordings import RecordedCall
from tokcap import FileStore, capture_tokens, captured_call
from tokcap.capture import note_delivery
from tokcap.capture.shapes import StreamJoiner
from tokcap.errors import ConflictError

__all__ = ("DEFECTS", "Planted", "answers", "capture", "plant_all")

WELL = ("token-in-2", "sub-agent-1", "compaction-0", "stream-1", "parallel-0", "linear-1")
"""Recordings of which every sampled id is trained."""

NO_CALL = -1

DIES = """
import os, signal, sys
from tokcap import FileStore
FileStore(sys.argv[1]).begin_call_now(sys.argv[2], sys.argv[3])
os.kill(os.getpid(), signal.SIGKILL)
"""


class Defect(NamedTuple):
    """What is planted."""

    recording: str
    """In which recorded rollout; empty: nothing of one is captured."""
    call: int
    """In which of its calls; NO_CALL: in none of them."""
    what: str
    see: str
    """A command that shows it; {id} and {call} are filled in."""


class Planted(NamedTuple):
    """Where a defect is."""

    name: str
    """A key of `DEFECTS`."""
    rollout_id: str
    call: str
    what: str
    see: str


DEFECTS = {
    "lost": Defect("linear-1", 3, "the engine's answer had no token ids", "tokcap calls {id} --outcome lost"),
    "drift": Defect("linear-2", 5, "a prompt parts from what was sampled", "tokcap drift {id}"),
    "flipped": Defect("linear-5", 4, "a byte of its record was flipped on the disk", "tokcap verify {id}"),
    "retired": Defect("token-in-0", NO_CALL, "it was consumed and retired", "tokcap show {id}"),
    "wrong-url": Defect("", NO_CALL, "its agent asked a URL without the capture prefix: no calls", "tokcap calls {id}"),
    "aborted": Defect("stream-2", 5, "its stream was cut off, and nothing went on from it", "tokcap show {id}"),
    "ambiguous": Defect("retry-last-0", 4, "the last call was sent twice, who knows which counts", "tokcap show {id}"),
    "no-log-probs": Defect("token-in-1", 2, "the engine left out its log-probs", "tokcap cat {id} {call}"),
    "died": Defect("stream-1", 6, "its server was killed while it was answered", "tokcap calls {id} --outcome open"),
    "conflict": Defect("linear-1", 5, "two contents were recorded for it", "tokcap calls {id} --outcome conflict"),
}  # fmt: skip


def plant_all(directory: Path, seed: int = 0) -> list[Planted]:
    """Write the store; what is where, as `answers`. `directory` must not exist yet, or be empty."""
    places = _places(seed)
    asyncio.run(_write(directory, places))
    _kill_a_writer(directory, places["died"])
    return answers(seed)


def answers(seed: int = 0) -> list[Planted]:
    """What is where in a store of this seed, in the order of the ids."""
    places = _places(seed)
    return sorted((_planted(name, places[name]) for name in DEFECTS), key=lambda planted: planted.rollout_id)


def _places(seed: int) -> dict[str, str]:
    """Which rollout has which defect, or which recording that is well."""
    ids = [f"task-{task}-{number}" for task in range(4) for number in range(4)]
    random.Random(seed).shuffle(ids)
    return dict(zip((*DEFECTS, *WELL), ids, strict=True))


def _planted(name: str, rollout_id: str) -> Planted:
    defect = DEFECTS[name]
    call = "" if defect.call == NO_CALL else f"call-{defect.call:04d}"
    return Planted(name, rollout_id, call, defect.what, defect.see.format(id=rollout_id, call=call))


async def _write(directory: Path, places: dict[str, str]) -> None:
    store = FileStore(directory, require_intent=True)
    for name, rollout_id in places.items():
        recording = DEFECTS[name].recording if name in DEFECTS else name
        calls = recordings.load(recording).calls if recording else ()
        for call in calls:
            here = name in DEFECTS and DEFECTS[name].call == call.seq
            await capture(store, rollout_id, call, name if here else "")
        if name == "died":
            continue  # in the middle of its next call, see below
        await store.finish(rollout_id, meta={"reward": float(rollout_id[-1] in "02")})
        with await store.freeze(rollout_id) as snapshot:
            if name == "retired":
                await store.retire(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    await store.close()
    _flip(directory, places["flipped"])


async def capture(store: FileStore, rollout_id: str, call: RecordedCall, defect: str = "") -> None:
    """One recorded call as a server captures it. defect: what goes wrong with it; empty: nothing."""
    async with captured_call(store, rollout_id, request=call.request, model_call_id=call.model_call_id):
        await capture_tokens(_answer(call, defect))
        await note_delivery("partly" if defect == "aborted" else "full")
    if defect == "conflict":
        entry = msgspec.structs.replace(call.entries[0], rollout_id=rollout_id, finish_reason="another")
        with contextlib.suppress(ConflictError):
            await store.put(entry)


def _answer(call: RecordedCall, defect: str) -> Any:
    """What the engine answered: a body, or what came of its stream."""
    if call.sse is not None:
        joiner = StreamJoiner()
        lines = call.sse[: len(call.sse) // 2] if defect == "aborted" else call.sse
        joiner.feed(("\n\n".join(lines) + "\n\n").encode())
        return joiner
    answer = copy.deepcopy(call.response or {})
    for choice in answer["choices"]:
        if defect == "lost":
            del choice["token_ids"]
        if defect == "no-log-probs":
            choice["logprobs"] = None
    return answer


def _kill_a_writer(directory: Path, rollout_id: str) -> None:
    call = f"call-{DEFECTS['died'].call:04d}"
    subprocess.run([sys.executable, "-c", DIES, directory, rollout_id, call], check=False)


def _flip(directory: Path, rollout_id: str) -> None:
    """Flip one bit in the middle of the record of a call."""
    defect = DEFECTS["flipped"]
    mark = recordings.load(defect.recording).calls[defect.call].entries[0].response_id.encode()
    (segment,) = directory.glob(f"rollouts/*/{rollout_id}/*/v1/*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(mark)] ^= 1
    segment.write_bytes(data)  # the same file under its other name


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Those of tokcap would tell where the lost call is."""
    logger = logging.getLogger("tokcap")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the store is made, or was")
    parser.add_argument("--seed", type=int, default=0, help="which rollouts get the defects (default: 0)")
    parser.add_argument("--answers", action="store_true", help="tell where they are")
    options = parser.parse_args(arguments)
    if not options.directory.exists() or not any(options.directory.iterdir()):
        with _without_warnings():
            plant_all(options.directory, options.seed)
        count = f"{len(DEFECTS) + len(WELL)} rollouts, {len(DEFECTS)} of them with a defect"
        print(f"{options.directory}: {count}. Begin with: tokcap ls --dir {shlex.quote(str(options.directory))}")
    elif not options.answers:
        parser.error(f"{options.directory} is not empty; --answers, with its --seed, tells what is in a store of this")
    if options.answers:
        for one in answers(options.seed):
            print(f"{one.rollout_id}  {one.what}{one.call and f' ({one.call})'}: {one.see}")
    return 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
