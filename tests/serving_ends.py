"""Calls that don't come to their end: streams that break off, clients that go away, handlers that raise."""

from __future__ import annotations

from tests.fake_script import Script, choice
from tests.serving_harness import Harness
from tests.serving_lines import covers_row
from tests.serving_steps import (
    CHAT,
    COMPLETIONS,
    assert_aborted,
    assert_recorded,
    assert_same_view,
    call,
    plain,
    read_by_engine,
    situation,
)

# ---- row: streams that break off


@situation()
@covers_row("stream with an error event, or that just ends")
def a_stream_that_just_ends_is_aborted_with_the_tokens_seen(h: Harness) -> None:
    for done in (False, True):
        rollout = h.new_rollout()
        script = Script(choices=[choice(1000, 6)], stops_after=4, done=done)
        answer = call(h, rollout, script, stream=True)
        assert_same_view(answer, plain(h, script, stream=True))
        assert_aborted(h, rollout, script, 3)


@situation()
@covers_row("stream with an error event, or that just ends")
def a_stream_with_an_error_event_is_aborted_with_the_tokens_seen(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(choices=[choice(1000, 6)], error_after=3)
    answer = call(h, rollout, script, stream=True)
    assert '"error"' in answer.events[-2]
    assert_same_view(answer, plain(h, script, stream=True))
    assert_aborted(h, rollout, script, 2)


@situation()
@covers_row("stream with an error event, or that just ends")
def a_stream_that_breaks_before_its_first_token_is_aborted(h: Harness) -> None:
    for script in (Script(stops_after=0), Script(error_after=0), Script(error_after=1)):
        rollout = h.new_rollout()
        call(h, rollout, script, stream=True)
        assert h.settled(rollout) == ["aborted"]
        assert h.entries(rollout) == []


# ---- rows: clients that go away


@situation()
@covers_row("client disconnects while streaming")
def a_client_that_leaves_a_stream_aborts_it_and_the_engine_is_told(h: Harness) -> None:
    for path, events, tokens in ((CHAT, 3, 2), (COMPLETIONS, 2, 2)):
        rollout = h.new_rollout()
        script = Script(choices=[choice(1000, 6)], waits=[str(events)])
        answer = call(h, rollout, script, path, stream=True, disconnect_after=events)
        assert not answer.ended
        assert len(answer.events) == events
        assert_aborted(h, rollout, script, tokens)
        h.until(lambda label=rollout: h.notes.read(label)[0].ended in ("gone", "cancelled"))  # type: ignore[misc]
        (seen,) = h.notes.read(rollout)
        assert seen.events == events  # and not one more


@situation()
@covers_row("client disconnects before the answer of a non-streamed call")
def an_answer_that_comes_although_the_client_has_gone_is_recorded_as_not_delivered(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(waits=["answer"], deaf=True)
    call(
        h,
        rollout,
        script,
        disconnect_when=read_by_engine(h, rollout),
        then=lambda: h.notes.tell(f"{rollout}-answer"),
    )
    if h.kind == "proxy":  # it hangs up on the engine, so nothing comes any more
        assert h.settled(rollout) == ["aborted"]
        return
    assert h.settled(rollout) == ["recorded"]
    h.until(lambda: h.calls(rollout)[0].delivered != "unknown")
    assert_recorded(h, rollout, script)
    assert h.calls(rollout)[0].delivered == "no"


@situation()
@covers_row("client disconnects before the answer of a non-streamed call")
def a_call_whose_client_has_gone_and_whose_engine_gave_up_is_aborted(h: Harness) -> None:
    rollout = h.new_rollout()
    call(h, rollout, Script(waits=["answer"]), disconnect_when=read_by_engine(h, rollout))
    assert h.settled(rollout) == ["aborted"]
    assert h.entries(rollout) == []


@situation()
@covers_row("client disconnects before the answer of a non-streamed call")
def a_client_that_leaves_before_the_first_byte_of_a_stream_aborts_it(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(waits=["0"])
    call(h, rollout, script, stream=True, disconnect_when=read_by_engine(h, rollout))
    assert h.settled(rollout) == ["aborted"]
    assert h.entries(rollout) == []


@situation()
@covers_row("client seen gone only after the last body message")
def a_client_that_closes_after_the_end_has_everything(h: Harness) -> None:
    for stream in (False, True):
        rollout, script = h.new_rollout(), Script()
        answer = call(h, rollout, script, stream=stream, headers=[("connection", "close")])
        assert answer.ended
        h.until(lambda rollout=rollout: h.calls(rollout)[0].delivered != "unknown")  # type: ignore[misc]
        assert_recorded(h, rollout, script)
        assert h.calls(rollout)[0].delivered == "full"


# ---- row: handler raises


@situation(kinds=("in process", "workers"))
@covers_row("handler raises")
def a_handler_that_raises_before_it_read_the_request_is_no_generation(h: Harness) -> None:
    rollout = h.new_rollout()
    answer = call(h, rollout, Script(raises="early"))
    assert answer.error is not None or answer.status == 500
    assert h.settled(rollout) == ["no_generation"]


@situation()
@covers_row("handler raises")
def a_handler_that_raises_after_it_read_the_request_is_lost(h: Harness) -> None:
    rollout = h.new_rollout()
    answer = call(h, rollout, Script(raises="late"))
    assert answer.error is not None or answer.status == 500
    assert h.settled(rollout) == ["lost"]


@situation()
@covers_row("handler raises")
def a_handler_that_raises_in_mid_stream_is_never_recorded(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(choices=[choice(1000, 6)], raises_after=3)
    answer = call(h, rollout, script, stream=True)
    assert not answer.ended
    assert h.settled(rollout)[0] in ("aborted", "lost")
