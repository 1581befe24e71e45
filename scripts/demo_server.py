"""A model server of the demo: it answers with recorded bodies, and captures what it answers.

Reads one job per line of standard input, and writes one line when the call began and one when its answer may go out:
when its record is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from tests import recordings
from tokcap import process_sink, token_id_capture_config
from tokcap.capture import capture_tokens, captured_call
from tokcap.capture.shapes import StreamJoiner

__all__ = ("Job", "Line", "configuration", "main")


class Job(msgspec.Struct, frozen=True):
    """One recorded model call to be made."""

    rollout_id: str
    seq: int
    """Position of the call in its recording."""
    model_call_id: str
    retry_count: int = 0
    hangs: bool = False
    """Generation never ends, so that the server can be killed in the middle of it."""


class Line(msgspec.Struct, frozen=True):
    """What the server says of a job."""

    model_call_id: str
    rollout_id: str
    answered: bool


def configuration(directory: str) -> dict[str, Any]:
    """The configuration that servers and trainer share."""
    return {"token_id_capture": {"enabled": True, "dir": directory}}


async def serve(directory: str) -> None:
    sink = process_sink(token_id_capture_config(configuration(directory)))
    assert sink is not None
    rollouts = {rollout.rollout_id: rollout for rollout in recordings.rollouts()}
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            job = msgspec.json.decode(line, type=Job)
            group.create_task(_answer(sink, job, rollouts[job.rollout_id].calls[job.seq]))
    await sink.close()


async def _answer(sink: Any, job: Job, recorded: recordings.RecordedCall) -> None:
    async with captured_call(
        sink,
        job.rollout_id,
        job.model_call_id,
        choices=recorded.choices,
        request=recorded.request,
        path=recorded.path,
        retry_count=job.retry_count,
    ):
        _say(job, answered=False)
        if job.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # generation
        if recorded.sse is None:
            await capture_tokens(recorded.response, status=recorded.status)
        else:
            joiner = StreamJoiner(choices=recorded.choices)
            for line in recorded.sse:
                joiner.feed(f"{line}\n\n".encode())
            await capture_tokens(joiner)
    _say(job, answered=True)


def _say(job: Job, *, answered: bool) -> None:
    sys.stdout.write(msgspec.json.encode(Line(job.model_call_id, job.rollout_id, answered)).decode() + "\n")
    sys.stdout.flush()


def main(directory: str) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(directory))
    return 0
