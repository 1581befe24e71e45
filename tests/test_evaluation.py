"""Evaluation capture: every call leaves a summary, its failures reach no call, and the token store never notices."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.children import Channel, Nursery
from tests.children import nursery as _nursery
from tests.faulty_files import Fault, FaultyFiles
from tests.test_evaluation_summary import SECRET
from tokcap import FileStore, TokenEntry
from tokcap.capture.shapes import StreamJoiner
from tokcap.errors import CorruptError, InvalidIdError, RetiredError, StoreNotFoundError
from tokcap.evaluation import (
    CallObservation,
    EvaluationRecorder,
    ModelCallSummary,
    join,
    summaries,
    summaries_of,
)
from tokcap.evaluation import recorder as recorder_module

REQUEST = {"model": "policy", "messages": [{"role": "user", "content": SECRET}], "temperature": 0.5}
ANSWER = {
    "id": "chatcmpl-1",
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": SECRET}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}

nursery = pytest.fixture(scope="module")(_nursery)


@pytest.fixture(autouse=True)
def _quiet_store() -> Iterator[None]:
    """What a store says of its file system is not meant here."""
    store = logging.getLogger("tokcap.store")
    store.setLevel(logging.ERROR)
    yield
    store.setLevel(logging.NOTSET)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def begin(recorder: EvaluationRecorder, call: str = "c-1", rollout: str = "r-1", **more: Any) -> CallObservation:
    known: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "dialect": "chat",
        "request": REQUEST,
        "request_bytes": 99,
        "training": False,
        **more,
    }
    return recorder.begin(rollout, call, **known)


async def observe(
    recorder: EvaluationRecorder, call: str = "c-1", rollout: str = "r-1", *, begins: Any = None, **ends: Any
) -> CallObservation:
    """One whole call."""
    observation = begin(recorder, call, rollout, **(begins or {}))
    observation.status(200)
    observation.answered(7)
    await observation.end(**{"answer": ANSWER, **ends})
    return observation


def run(directory: Path, work: Callable[[EvaluationRecorder], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """`work` with a recorder that is patient, and closed afterwards."""

    async def whole() -> Any:
        recorder = EvaluationRecorder(directory, **{"patience_s": 60.0, **options})
        try:
            return await work(recorder)
        finally:
            await recorder.close()

    return asyncio.run(whole())


def record(directory: Path, *calls: str, rollout: str = "r-1", failures: dict[str, int] | None = None) -> None:
    """Whole calls of one rollout, one after another, in a recorder of their own."""

    async def work(recorder: EvaluationRecorder) -> None:
        for call in calls:
            await observe(recorder, call, rollout)
        assert recorder.failures == (failures or {})

    run(directory, work)


def one(directory: Path, **wanted: Any) -> ModelCallSummary:
    (summary,) = summaries(directory, **wanted)
    return summary


def evaluation_store(directory: Path, **options: Any) -> FileStore:
    return FileStore(directory / "evaluation", sweep_every_s=0, **options)


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, and what is in the files."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


# ---- what is recorded


def test_a_call_leaves_its_summary(store_dir: Path) -> None:
    clock = Clock()

    async def work(recorder: EvaluationRecorder) -> None:
        observation = begin(recorder, training=True, retry_count=1, engine="vllm 0.32.0")
        clock.seconds += 0.25
        observation.status(200)
        observation.first_token()
        clock.seconds += 1.0
        observation.first_token()
        observation.answered(10)
        observation.answered(20)
        clock.seconds += 0.5
        await observation.end(answer=ANSWER, outcome="recorded")
        assert recorder.failures == {}

    run(store_dir, work, clock=clock, now=lambda: 1_800_000_000.5)
    summary = one(store_dir)
    assert (summary.rollout_id, summary.model_call_id) == ("r-1", "c-1")
    assert (summary.began_at, summary.latency_s, summary.first_token_s) == (1_800_000_000.5, 1.75, 0.25)
    assert (summary.method, summary.path, summary.dialect) == ("POST", "/v1/chat/completions", "chat")
    assert (summary.engine, summary.retry_count) == ("vllm 0.32.0", 1)
    assert (summary.request_bytes, summary.answer_bytes, summary.status) == (99, 30, 200)
    assert (summary.requested_model, summary.roles, summary.sampling) == ("policy", {"user": 1}, {"temperature": 0.5})
    assert (summary.response_id, summary.usage.completion_tokens, summary.finish_reasons) == (
        "chatcmpl-1",
        2,
        ("stop",),
    )
    assert (summary.training, summary.outcome, summary.error_class) == (True, "recorded", "")


def test_failed_and_cancelled_calls_leave_theirs(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        refused = begin(recorder, "refused", training=True)
        refused.status(429)
        await refused.end(answer={"error": {"type": "rate_limit", "message": "x"}}, outcome="no_generation")
        cancelled = begin(recorder, "cancelled")
        await cancelled.end(answer=None, error=asyncio.CancelledError())
        gone = begin(recorder, "gone", request={**REQUEST, "stream": True}, training=True)
        gone.status(200)
        joiner = StreamJoiner()
        joiner.feed(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        await gone.end(answer=joiner.answer(), client_gone=True, outcome="aborted", detail="it did not end")

    run(store_dir, work)
    found = {summary.model_call_id: summary for summary in summaries(store_dir, "r-1")}
    assert {call: (each.error_class, each.outcome) for call, each in found.items()} == {
        "refused": ("rate_limited", "no_generation"),
        "cancelled": ("cancelled", ""),
        "gone": ("client_gone", "aborted"),
    }
    assert (found["gone"].client_gone, found["gone"].detail, found["gone"].streamed) == (True, "it did not end", True)
    assert found["gone"].choice_count == 1


def test_a_call_ends_once(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        observation = await observe(recorder)
        await observation.end(answer=None, error=ValueError("x"))
        assert observation.summary.error_class == ""
        assert recorder.failures == {}

    run(store_dir, work)
    assert one(store_dir).error_class == ""


def test_no_content_reaches_the_disk(store_dir: Path) -> None:
    record(store_dir, "c-1", "c-2")
    files = [path for path in (store_dir / "evaluation").rglob("*") if path.is_file()]
    assert any(b"chat/completions" in path.read_bytes() for path in files)
    assert not any(SECRET.encode() in path.read_bytes() for path in files)


def test_the_end_of_a_call_waits_for_its_durable_record(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await observe(recorder)
        assert one(store_dir).status == 200

    run(store_dir, work)


def test_beginning_does_not_wait_for_anything(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        observation = begin(recorder)
        assert not (store_dir / "evaluation").exists()
        await observation.end(answer=ANSWER)

    run(store_dir, work)
    assert one(store_dir).outcome == ""


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        record(tmp_path / "new" / "captures", "c-1")
    finally:
        os.umask(mask)
    for directory in ("new", "new/captures", "new/captures/evaluation", "new/captures/evaluation/rollouts"):
        assert (tmp_path / directory).stat().st_mode & 0o7777 == 0o700


def test_nothing_is_made_before_the_first_call(tmp_path: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        assert recorder.failures == {}

    run(tmp_path / "captures", work)
    assert not (tmp_path / "captures").exists()


def test_a_relative_directory_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = EvaluationRecorder("captures")
    monkeypatch.chdir("/")
    assert recorder.directory == tmp_path / "captures" / "evaluation"


def test_calls_of_many_rollouts_at_once_are_all_recorded(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await asyncio.gather(*(observe(recorder, f"c-{n % 10}", f"r-{n // 10}") for n in range(200)))
        assert recorder.failures == {}

    run(store_dir, work)
    found = list(summaries(store_dir))
    assert len({(each.rollout_id, each.model_call_id) for each in found}) == len(found) == 200
    assert {each.outcome for each in found} == {""}


def test_event_loops_one_after_another_share_a_recorder(store_dir: Path) -> None:
    recorder = EvaluationRecorder(store_dir, patience_s=60)
    asyncio.run(_observed(recorder, "c-1"))
    asyncio.run(_observed(recorder, "c-2"))
    asyncio.run(recorder.close())
    assert [each.model_call_id for each in summaries(store_dir)] == ["c-1", "c-2"]
    assert recorder.failures == {}


async def _observed(recorder: EvaluationRecorder, call: str) -> None:
    await observe(recorder, call)


def test_event_loops_of_several_threads_share_a_recorder(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_began = threading.Barrier(3)
    tries: list[Path] = []

    def opened(directory: Path) -> FileStore:
        both_began.wait(60)
        tries.append(directory)
        return FileStore(directory)

    async def work(call: str) -> None:
        observation = begin(recorder, call)
        for _ in range(10):  # until its write waits for the store
            await asyncio.sleep(0)
        both_began.wait(60)
        await observation.end(answer=ANSWER)

    monkeypatch.setattr(recorder_module, "FileStore", opened)
    recorder = EvaluationRecorder(store_dir, patience_s=60)
    threads = [threading.Thread(target=asyncio.run, args=(work(f"c-{number}"),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(recorder.close())
    assert recorder.failures == {}
    assert {each.outcome for each in summaries(store_dir)} == {""}
    assert len(list(summaries(store_dir))) == 2
    assert len(tries) == 1


# ---- calls that did not end


def test_a_call_that_runs_shows_as_open_with_what_is_known_of_it(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        observation = begin(recorder, training=True, retry_count=3)
        assert observation.intent is not None
        await observation.intent
        summary = one(store_dir)
        assert summary == observation.summary
        assert (summary.outcome, summary.is_open, summary.latency_s) == ("open", True, None)
        assert (summary.requested_model, summary.roles, summary.training) == ("policy", {"user": 1}, True)
        with evaluation_store(store_dir, read_only=True) as store:
            (call,) = store.stat_now("r-1").calls
        assert (call.model_call_id, call.outcome, call.retry_count) == ("c-1", "open", 3)
        await observation.end(answer=ANSWER)
        assert one(store_dir).outcome == ""

    run(store_dir, work)
    with evaluation_store(store_dir, read_only=True) as store:
        stat = store.stat_now("r-1")
    assert ([call.outcome for call in stat.calls], stat.incomplete) == (["recorded"], False)


def _begin_and_wait(channel: Channel, directory: str) -> None:
    async def work() -> None:
        recorder = EvaluationRecorder(directory, patience_s=60)
        await observe(recorder, "ended")
        observation = begin(recorder, "running")
        assert observation.intent is not None
        await observation.intent
        channel.send("begun")
        await asyncio.sleep(3600)

    asyncio.run(work())


def test_calls_of_a_server_that_was_killed_show(store_dir: Path, nursery: Nursery) -> None:
    child = nursery.start(_begin_and_wait, str(store_dir))
    assert child.receive() == "begun"
    child.kill()
    found = {each.model_call_id: each for each in summaries(store_dir)}
    assert {call: each.outcome for call, each in found.items()} == {"ended": "", "running": "open"}
    assert found["running"].message_count == 1


def test_an_intent_without_its_summary_still_shows_the_call(store_dir: Path) -> None:
    with evaluation_store(store_dir) as store:
        store.begin_call_now("r-1", "c-1", choices=2, retry_count=4)
    summary = one(store_dir)
    assert summary == ModelCallSummary(rollout_id="r-1", model_call_id="c-1", outcome="open", retry_count=4)


# ---- ids that come again


def test_a_call_id_that_comes_twice_gives_two_summaries_and_no_conflict(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await observe(recorder, outcome="recorded")
        await observe(recorder, outcome="lost")
        again = begin(recorder)
        assert again.intent is not None
        await again.intent
        assert recorder.failures == {}

    run(store_dir, work)
    record(store_dir, "c-1")  # another process
    assert sorted(each.outcome for each in summaries(store_dir)) == ["", "lost", "open", "recorded"]
    with evaluation_store(store_dir, read_only=True) as store:
        assert [call.outcome for call in store.stat_now("r-1").calls] == ["recorded"]


def test_a_rollout_id_that_is_used_again_keeps_the_summaries_of_both_attempts(store_dir: Path) -> None:
    record(store_dir, "c-1")
    with FileStore(store_dir, sweep_every_s=0) as tokens:
        tokens.put_now(TokenEntry("r-1", "c-1", [1], [2], [-0.5]))
        tokens.reset_now("r-1")
    record(store_dir, "c-2")
    assert [each.model_call_id for each in summaries(store_dir, "r-1")] == ["c-1", "c-2"]


# ---- states of the evaluation store


def test_a_frozen_rollout_takes_no_summaries_and_the_call_goes_on(
    store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(store_dir, "c-1")
    with evaluation_store(store_dir) as store:
        store.freeze_now("r-1").close()
    caplog.set_level(logging.WARNING, "tokcap.evaluation")
    record(store_dir, "c-2", "c-3", failures={"FrozenError": 4})
    assert [message.count("FrozenError") for message in caplog.messages] == [1]
    assert [each.model_call_id for each in summaries(store_dir)] == ["c-1"]
    record(store_dir, "c-2", rollout="r-2")
    assert {each.rollout_id for each in summaries(store_dir)} == {"r-1", "r-2"}


def test_a_retired_rollout_has_no_summaries_any_more(store_dir: Path) -> None:
    record(store_dir, "c-1")
    record(store_dir, "c-1", rollout="r-2")
    with evaluation_store(store_dir) as store, store.freeze_now("r-1") as snapshot:
        assert [each.model_call_id for each in summaries_of(snapshot)] == ["c-1"]
        assert store.retire_now("r-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert [each.status for each in summaries_of(snapshot)] == [200]  # readable until it is closed
    record(store_dir, "c-2", failures={"RetiredError": 2})
    assert [each.rollout_id for each in summaries(store_dir)] == ["r-2"]
    with pytest.raises(RetiredError):
        list(summaries(store_dir, "r-1"))


def test_what_began_before_a_reset_is_dropped_and_what_begins_after_it_is_kept(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        straggler = begin(recorder, "straggler")
        assert straggler.intent is not None
        await straggler.intent
        with evaluation_store(store_dir) as store:
            store.reset_now("r-1")
        await observe(recorder, "next")
        await straggler.end(answer=ANSWER)
        assert recorder.failures == {"StaleAttemptError": 1}

    run(store_dir, work)
    assert [each.model_call_id for each in summaries(store_dir)] == ["next"]


def test_ids_that_can_not_be_are_counted(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await observe(recorder, "a b")
        await observe(recorder, "c-1", "../r")
        await observe(recorder)
        assert recorder.failures == {"InvalidIdError": 4}

    run(store_dir, work)
    assert one(store_dir).status == 200


# ---- a disk that fails


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """What the recorder's store uses."""
    faulty = FaultyFiles()
    store = functools.partial(FileStore, files=faulty, sweep_every_s=0)
    monkeypatch.setattr(recorder_module, "FileStore", store)
    return faulty


def test_a_full_disk_costs_summaries_only_while_it_is_full(
    store_dir: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tokcap.evaluation")

    async def work(recorder: EvaluationRecorder) -> None:
        await observe(recorder, "before")
        with files.failing(Fault(1, errno.ENOSPC, "kind", ("pwritev", "create", "mkdir"))):
            for number in range(5):
                await observe(recorder, f"meanwhile-{number}")
        await observe(recorder, "after")
        assert set(recorder.failures) == {"DurabilityError ENOSPC"}
        assert recorder.failures.total() == 10

    run(store_dir, work)
    assert [each.model_call_id for each in summaries(store_dir)] == ["before", "after"]
    assert len([name for name, _, message in caplog.record_tuples if "ENOSPC" in message or "No space" in message]) == 1


def test_a_lost_intent_costs_no_summary(store_dir: Path, files: FaultyFiles) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await observe(recorder, "before")
        observation = begin(recorder)
        with files.failing(Fault(1, errno.EIO, "kind", ("fdatasync",))):
            assert observation.intent is not None
            await observation.intent
        await observation.end(answer=ANSWER)
        assert recorder.failures == {"DurabilityError EIO": 1}

    run(store_dir, work)
    assert [(each.model_call_id, each.outcome) for each in summaries(store_dir)] == [("before", ""), ("c-1", "")]


def test_every_fault_of_the_disk_is_survived(store_dir: Path, files: FaultyFiles) -> None:
    clock = Clock()

    async def work(recorder: EvaluationRecorder) -> int:
        for number in range(1, 200):
            clock.seconds += 60  # so that a directory that could not be opened is tried again
            with files.failing(Fault(number, errno.EIO)) as plan:
                await observe(recorder, f"c-{number}", f"r-{number}")
            if plan.hit is None:
                break
        await observe(recorder, "last", "last")
        assert set(recorder.failures) <= {"DurabilityError EIO"}
        return number

    faults = run(store_dir, work, clock=clock)
    assert 10 < faults < 199
    found = {each.model_call_id: each for each in summaries(store_dir)}
    assert "last" in found
    assert f"c-{faults}" in found


def test_a_directory_that_can_not_be_is_tried_again_later(
    store_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = Clock(), 0

    def opened(directory: Path) -> FileStore:
        nonlocal tries
        tries += 1
        return FileStore(directory)

    monkeypatch.setattr(recorder_module, "FileStore", opened)
    caplog.set_level(logging.WARNING, "tokcap.evaluation")
    (store_dir / "evaluation").write_text("in the way")

    async def work(recorder: EvaluationRecorder) -> None:
        await asyncio.gather(*(observe(recorder, f"c-{number}") for number in range(50)))
        assert recorder.failures == {"UnsafeDirectoryError ENOTDIR": 100}
        assert tries == 1
        (store_dir / "evaluation").unlink()
        await observe(recorder, "still-too-soon")
        clock.seconds += 60
        await observe(recorder, "later")
        assert recorder.failures == {"UnsafeDirectoryError ENOTDIR": 102}

    run(store_dir, work, clock=clock)
    assert one(store_dir).model_call_id == "later"
    assert len(caplog.messages) == 1
    assert tries == 2


def test_a_disk_that_hangs_delays_nobody(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileStore.put
    record(store_dir, "before")

    async def work(recorder: EvaluationRecorder) -> None:
        moves = asyncio.Event()

        async def put(store: FileStore, entry: TokenEntry) -> None:
            await moves.wait()
            await real(store, entry)

        monkeypatch.setattr(FileStore, "put", put)
        await observe(recorder, "meanwhile")  # returns
        assert [each.outcome for each in summaries(store_dir)].count("") == 1
        moves.set()

    run(store_dir, work, patience_s=0.0)
    found = {each.model_call_id: each.outcome for each in summaries(store_dir)}
    assert found == {"before": "", "meanwhile": ""}


def test_a_directory_that_hangs_delays_nobody(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, asked = threading.Event(), threading.Event()

    def opened(directory: Path) -> FileStore:
        asked.set()
        assert moves.wait(60)
        return FileStore(directory)

    monkeypatch.setattr(recorder_module, "FileStore", opened)
    monkeypatch.setattr(recorder_module, "_MOST_INTENTS", 1)
    monkeypatch.setattr(recorder_module, "_CLOSE_PATIENCE_S", 0)

    async def work() -> EvaluationRecorder:
        recorder = EvaluationRecorder(store_dir, patience_s=0)
        await observe(recorder)
        while not asked.is_set():
            await asyncio.sleep(0)
        await observe(recorder, "c-2")
        assert recorder.failures == {"_TooManyWritesError": 1}
        await recorder.close()
        moves.set()
        return recorder

    recorder = asyncio.run(work())
    assert recorder.failures == {"_TooManyWritesError": 1}


def test_writes_that_pile_up_are_left_out(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_INTENTS", 2)

    async def work(recorder: EvaluationRecorder) -> None:
        begun = [begin(recorder, f"c-{number}") for number in range(4)]
        assert recorder.failures == {"_TooManyWritesError": 2}
        await asyncio.gather(*(each.end(answer=ANSWER) for each in begun))

    run(store_dir, work)
    assert [each.outcome for each in summaries(store_dir)] == ["", "", "", ""]


# ---- cancellations, loops, processes


def test_a_caller_that_is_cancelled_leaves_the_write_running(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileStore.put

    async def work(recorder: EvaluationRecorder) -> None:
        moves = asyncio.Event()

        async def put(store: FileStore, entry: TokenEntry) -> None:
            await moves.wait()
            await real(store, entry)

        monkeypatch.setattr(FileStore, "put", put)
        observation = begin(recorder)
        task = asyncio.create_task(observation.end(answer=ANSWER, error=asyncio.CancelledError()))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        moves.set()

    run(store_dir, work)
    assert (one(store_dir).outcome, one(store_dir).error_class) == ("", "cancelled")


def test_without_an_event_loop_nothing_is_written_and_nothing_raised(store_dir: Path) -> None:
    recorder = EvaluationRecorder(store_dir)
    observation = begin(recorder)
    assert recorder.failures == {"RuntimeError": 1}
    asyncio.run(observation.end(answer=ANSWER))
    asyncio.run(recorder.close())
    assert (one(store_dir).outcome, one(store_dir).response_id) == ("", "chatcmpl-1")


def test_a_request_that_can_not_be_read_costs_only_its_details(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(SECRET)

    async def work(recorder: EvaluationRecorder) -> None:
        monkeypatch.setattr(recorder_module, "begun", fails)
        await observe(recorder)
        assert recorder.failures == {"ZeroDivisionError": 1}
        monkeypatch.setattr(recorder_module, "ended", fails)
        await observe(recorder, "c-2")
        assert recorder.failures == {"ZeroDivisionError": 3}

    run(store_dir, work)
    assert [(each.model_call_id, each.status, each.outcome) for each in summaries(store_dir)] == [
        ("c-1", 200, ""),
        ("c-2", 0, "open"),
    ]


def test_a_closed_recorder_raises_nothing(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        running = begin(recorder, "running")
        await recorder.close()
        await recorder.close()
        await running.end(answer=ANSWER)
        await observe(recorder, "late")
        assert recorder.failures == {"ClosedError": 3}

    run(store_dir, work)
    assert [(each.model_call_id, each.outcome) for each in summaries(store_dir)] == [("running", "open")]


def test_a_recorder_that_is_closed_before_its_first_call_makes_nothing(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        await recorder.close()
        await observe(recorder)
        assert recorder.failures == {"ClosedError": 2}

    run(store_dir, work)
    assert tree(store_dir) == {}


def test_closing_waits_for_what_is_being_written(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        for number in range(20):
            await begin(recorder, f"c-{number}").end(answer=ANSWER)

    run(store_dir, work, patience_s=0.0)
    assert {each.outcome for each in summaries(store_dir)} == {""}
    assert len(list(summaries(store_dir))) == 20


def _fork_and_observe(channel: Channel, directory: str) -> None:
    recorder = EvaluationRecorder(directory, patience_s=60)

    async def before() -> CallObservation:
        await observe(recorder, "parent")
        return begin(recorder, "inherited")

    inherited = asyncio.run(before())
    recorder.failures["of the parent"] += 1
    child = os.fork()
    if not child:
        try:

            async def in_child() -> None:
                await inherited.end(answer=ANSWER)
                await observe(recorder, "child")
                await recorder.close()

            asyncio.run(in_child())
            os._exit(0 if recorder.failures == {} else 3)
        finally:
            os._exit(4)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    asyncio.run(_observed(recorder, "parent-again"))
    asyncio.run(recorder.close())
    channel.send((status, dict(recorder.failures)))


def test_a_forked_process_records_its_own_calls(store_dir: Path, nursery: Nursery) -> None:
    child = nursery.start(_fork_and_observe, str(store_dir))
    assert child.receive() == (0, {"of the parent": 1})
    found = {each.model_call_id: each.outcome for each in summaries(store_dir)}
    assert {call: outcome for call, outcome in found.items() if call != "inherited"} == {
        "parent": "",
        "child": "",
        "parent-again": "",
    }
    assert found.get("inherited", "open") == "open"


# ---- beside the token store


def entry(call: str = "c-1", rollout: str = "r-1", **more: Any) -> TokenEntry:
    return TokenEntry(rollout, call, [1, 2, 3], [4, 5], [-0.5, None], **more)


def test_a_token_store_in_the_same_directory_sees_nothing_of_it(store_dir: Path) -> None:
    def look(store: FileStore) -> Any:
        usage = {state: (each.rollouts, each.files, each.bytes) for state, each in store.usage_now().items()}
        with store.read_now("r-1") as snapshot:
            entries = list(snapshot.entries)
        return list(store.rollouts()), usage, entries, store.stat_now("r-2"), store.stat_now("evaluation")

    with FileStore(store_dir, require_intent=True, sweep_every_s=0) as tokens:
        tokens.begin_call_now("r-1", "c-1")
        tokens.put_now(entry())
        before = look(tokens)
        assert before[0] == [("r-1", "open")]
        record(store_dir, "c-1", "c-2")
        record(store_dir, "c-1", rollout="r-2")
        assert look(tokens) == before
        recorded = tree(store_dir / "evaluation")
        assert tokens.sweep_now(0) == 0
        with tokens.freeze_now("r-1") as snapshot:
            assert list(snapshot.entries) == [entry()]
            assert not snapshot.incomplete
            assert tokens.retire_now("r-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        tokens.reset_now("r-2")
        assert tokens.sweep_now(0) == 1
        assert tokens.expire_now(0) == 0
        assert list(tokens.rollouts()) == []
    assert tree(store_dir / "evaluation") == recorded
    assert len(list(summaries(store_dir))) == 3


def test_what_is_done_to_the_evaluation_store_leaves_the_token_store_alone(store_dir: Path) -> None:
    with FileStore(store_dir, require_intent=True, sweep_every_s=0) as tokens:
        for rollout in ("r-1", "r-2"):
            tokens.begin_call_now(rollout, "c-1")
            tokens.put_now(entry(rollout=rollout))
        tokens.freeze_now("r-2").close()
    record(store_dir, "c-1")
    record(store_dir, "c-1", rollout="r-2")
    before = tree(store_dir / "rollouts")
    with evaluation_store(store_dir) as store:
        assert sorted(store.rollouts()) == [("r-1", "open"), ("r-2", "open")]
        with store.freeze_now("r-1") as snapshot:
            assert store.retire_now("r-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert store.sweep_now(0) == 1
        assert store.expire_now(-1) == 1
        assert list(store.rollouts()) == []
    assert tree(store_dir / "rollouts") == before
    with FileStore(store_dir, sweep_every_s=0) as tokens:
        assert sorted(tokens.rollouts()) == [("r-1", "open"), ("r-2", "frozen")]


def test_a_frozen_token_rollout_does_not_close_evaluation(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as tokens:
        tokens.freeze_now("r-1").close()
        record(store_dir, "c-1")
    assert one(store_dir).status == 200


def test_summaries_find_the_training_entries_of_their_calls(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as tokens:
        tokens.put_many_now([entry("c-1", choice_index=1), entry("c-1"), entry("c-3")])
        with tokens.read_now("r-1") as snapshot:
            record(store_dir, "c-1", "c-2")
            record(store_dir, "c-1", rollout="r-2")
            found = [
                (summary.rollout_id, summary.model_call_id, [each.choice_index for each in entries])
                for summary, entries in join(summaries(store_dir), snapshot)
            ]
    assert sorted(found) == [("r-1", "c-1", [0, 1]), ("r-1", "c-2", []), ("r-2", "c-1", [])]


def test_a_summary_is_no_training_entry(store_dir: Path) -> None:
    record(store_dir, "c-1")
    with evaluation_store(store_dir, read_only=True) as store, store.read_now("r-1") as snapshot:
        assert [entries for _, entries in join(summaries_of(snapshot), snapshot)] == [[]]


# ---- reading


def test_reading_changes_nothing_and_a_copy_reads_the_same(store_dir: Path, tmp_path: Path) -> None:
    record(store_dir, "c-1", "c-2")
    with evaluation_store(store_dir) as store:
        store.freeze_now("r-1").close()
    record(store_dir, "c-1", rollout="r-2")
    before = tree(store_dir)
    found = list(summaries(store_dir))
    assert tree(store_dir) == before
    calls = [(each.rollout_id, each.model_call_id) for each in found]
    assert sorted(calls) == [("r-1", "c-1"), ("r-1", "c-2"), ("r-2", "c-1")]
    copy = shutil.copytree(store_dir, tmp_path / "copy")
    assert list(summaries(copy)) == found


def test_reading_while_calls_are_recorded(store_dir: Path) -> None:
    async def work(recorder: EvaluationRecorder) -> None:
        for number in range(20):
            running = begin(recorder, f"open-{number}")
            assert running.intent is not None
            await running.intent
            await observe(recorder, f"ended-{number}")
            found = list(summaries(store_dir, "r-1"))
            assert [each.model_call_id for each in found if not each.is_open] == [
                f"ended-{n}" for n in range(number + 1)
            ]
            assert sum(each.is_open for each in found) == number + 1

    run(store_dir, work)


def test_calls_come_in_the_order_in_which_they_began(store_dir: Path) -> None:
    clock = Clock()

    async def work(recorder: EvaluationRecorder) -> None:
        first = begin(recorder, "z-first")
        clock.seconds += 1
        await observe(recorder, "a-second")
        await first.end(answer=ANSWER)

    run(store_dir, work, now=clock)
    assert [each.model_call_id for each in summaries(store_dir)] == ["z-first", "a-second"]


def test_where_nothing_was_recorded_reading_says_so(store_dir: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        summaries(store_dir)
    record(store_dir, "c-1")
    assert list(summaries(store_dir, "r-unknown")) == []
    with pytest.raises(InvalidIdError):
        list(summaries(store_dir, "../r-1"))


def test_what_is_no_summary_is_passed_over(store_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(store_dir, "c-1")
    with evaluation_store(store_dir) as store:
        store.put_now(entry("c-2"))
        store.put_now(entry("c-3", extra={"model_call_summary": {"status": "two hundred"}}))
        store.put_now(entry("c-4", extra={"model_call_summary": "none"}))
        store.put_now(entry("c-5", choice_index=1, extra={"model_call_summary": {"status": 200, "of_tomorrow": [1]}}))
    assert sorted(each.model_call_id for each in summaries(store_dir)) == ["c-1", "c-5"]
    assert len(caplog.messages) == 3


def test_a_rollout_that_can_not_be_read_costs_no_other_one(store_dir: Path) -> None:
    for rollout in ("r-1", "r-2", "r-3"):
        record(store_dir, "c-1", rollout=rollout)
    (incarnation,) = (store_dir / "evaluation" / "rollouts").glob("*/r-2/*")
    incarnation.with_name("0" * 32).mkdir()
    found = []
    with pytest.raises(CorruptError):
        for summary in summaries(store_dir):
            found.append(summary.rollout_id)  # noqa: PERF401  (so that those before the error count)
    assert sorted(found) == ["r-1", "r-3"]
    with pytest.raises(CorruptError):
        list(summaries(store_dir, "r-2"))
