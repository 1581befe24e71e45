"""`tokcap top` and `tokcap tail`: a live store."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

import click

from .options import as_json, directory
from .status import REFUSED

if TYPE_CHECKING:
    from ..inspection.events import CallEvent
    from ..inspection.pulse import Frame, Pulse

__all__ = ("tail_verb", "top_verb")

_SHOWN = 8
_SHORTEST_S = 0.1
_TEXT = 60


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that the terminal is left as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: nobody's signals come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- top


@click.command("top")
@directory
@click.option(
    "--interval",
    type=click.FloatRange(min=_SHORTEST_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="One frame, after one interval.")
@as_json
def top_verb(directory: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Watch a live store: calls and tokens a second, open calls with their age, rollouts by state, room on the disk.

    An open call whose writer is dead never ends by itself: its rollout stays incomplete. What is read at a time is
    bounded, so that a large store is looked through little by little. Ctrl-C ends it.

    \b
    Examples:
      tokcap top --dir /var/lib/tokcap
      tokcap top --once --json | jq .dead_calls
    """
    from ..inspection import open_to_look
    from ..inspection.pulse import Pulse
    from .naming import nothing
    from .output import line, print_json

    store = open_to_look(directory)
    pulse = Pulse(store)
    with _ending_by_signals(), contextlib.suppress(KeyboardInterrupt):
        pulse.look()
        if once:
            while pulse.is_behind:
                pulse.look()
            time.sleep(interval)
            pulse.look()
            if not pulse.frame().states:
                nothing(store.directory, asked=False)
        if sys.stdout.isatty() and not once and not as_json:
            _show(pulse, store.directory, interval)
            return 0
        while True:
            frame = pulse.frame()
            if as_json:
                print_json(frame)
            else:
                line("\n".join(text for text, _ in _lines(frame, store.directory)))
            if once:
                return 0
            sys.stdout.flush()
            time.sleep(interval)
            pulse.look()
    return 0


def _show(pulse: Pulse, directory: str, interval: float) -> None:
    """On a screen of its own, which is gone when it ends, whatever ends it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from .output import console

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            lines = _lines(pulse.frame(), directory)
            shown = lines[: max(live.console.height - 1, 1)]
            live.update(
                Group(*(Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in shown)), refresh=True
            )
            time.sleep(interval)
            pulse.look()


def _lines(frame: Frame, directory: str) -> list[tuple[str, str]]:
    """A frame as lines, each with its style."""
    from .output import age, amount, counted, safe, size

    states = ", ".join(f"{amount(count)} {state}" for state, count in frame.states.items()) or "none"
    outcomes = ", ".join(f"{amount(count)} {outcome}" for outcome, count in frame.outcomes.items()) or "none"
    lines = [
        (f"{safe(directory)}  {time.strftime('%H:%M:%S', time.localtime(frame.at))}", "bold"),
        (f"rollouts    {states}{'  (still looking)' if frame.behind else ''}", ""),
        (f"calls       {frame.calls_per_s:,.1f}/s, {frame.sampled_per_s:,.0f} sampled ids/s", ""),
        (f"            ended while watching: {outcomes}", ""),
    ]
    if frame.unreadable:
        lines.append((f"            {amount(frame.unreadable)} can't be read: tokcap verify says why", "bold red"))
    disk = frame.disk
    if disk is not None:
        near = disk.is_near_floor
        lines.append(
            (
                f"disk        {size(disk.free_bytes)} of {size(disk.all_bytes)} free"
                + (f", near the floor of {size(disk.floor_bytes)}: below it no call begins" if near else ""),
                "bold red" if near else "",
            )
        )
    dead = f", {amount(frame.dead_calls)} of dead writers" if frame.dead_calls else ""
    lines.append((f"open calls  {amount(frame.open_calls)}{dead}", "yellow" if dead else ""))
    for call in frame.oldest_open[:_SHOWN]:
        since = "?" if call.age_s is None else age(call.age_s)
        told = "" if call.alive else "  writer is dead"
        style = "" if call.alive else "yellow"
        lines.append((f"  {since:>5}  {safe(call.rollout_id)} {safe(call.model_call_id)}{told}", style))
    if frame.finished:
        lines.append(("finished last", ""))
        lines += [
            (f"  {age(frame.at - one.at):>5}  {safe(one.rollout_id)}, {counted(one.calls, 'call')}", "")
            for one in frame.finished[:_SHOWN]
        ]
    if frame.grown:
        lines.append(("growing most", ""))
        lines += [
            (f"  +{size(count)}  {safe(rollout_id)}", "") for rollout_id, count in list(frame.grown.items())[:_SHOWN]
        ]
    return lines


# ---- tail


@click.command("tail")
@directory
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("-n", "--lines", "count", type=click.IntRange(min=0), metavar="N", help="The last N. [default: 10]")
@click.option(
    "--interval",
    type=click.FloatRange(min=_SHORTEST_S),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks, with --follow.",
)
@as_json
def tail_verb(directory: str | None, follow: bool, count: int | None, interval: float, as_json: bool) -> int:
    """Show the calls that ended last, one line for each answer: as they are recorded with --follow.

    Time, rollout, call, outcome, prompt + sampled ids, mean log-prob, and the beginning of the answer if the engine
    told the bytes of its tokens, or why it ended so. What can't be read is named once on standard error; then the exit
    status is 4, with --follow always 0. Ctrl-C ends it.

    \b
    Examples:
      tokcap tail -f --dir /var/lib/tokcap
      tokcap tail -n 100 --json | jq -r 'select(.outcome == "lost") | .detail'
      tokcap tail -f -n 0 --json
    """
    from ..inspection import open_to_look, wanted_ids
    from ..inspection.events import last_calls
    from ..inspection.following import Follower
    from ..inspection.telling import without_directory
    from .naming import nothing

    store = open_to_look(directory)
    since = time.time()
    unreadable: dict[str, str] = {}
    last = last_calls(store, 10 if count is None else count, unreadable=unreadable)

    def show(event: CallEvent) -> None:
        _print_call(event, without_directory(event.detail, store.directory, event.rollout_id), as_json)

    if count != 0 and not last and not unreadable and not wanted_ids(store, unlisted={}):
        nothing(store.directory, asked=False)
    said: set[str] = set()
    _say_unreadable(unreadable, said, store.directory)
    for event in last:
        show(event)
    if not follow:
        return REFUSED if unreadable else 0
    sys.stdout.flush()
    told = {event.key for event in last}
    with _ending_by_signals(), contextlib.suppress(KeyboardInterrupt):
        follower = Follower(store, since=since)
        while True:
            for event in follower.look():
                if event.key not in told:
                    show(event)
            _say_unreadable(follower.unreadable, said, store.directory)
            sys.stdout.flush()
            if not follower.is_behind:
                time.sleep(interval)
    return 0


def _say_unreadable(unreadable: Mapping[str, str], said: set[str], directory: str) -> None:
    """Each once; `said` gets those that were."""
    from ..inspection.telling import without_directory
    from .output import safe

    for name, why in unreadable.items():
        if name not in said:
            said.add(name)
            sys.stderr.write(f"tokcap: {safe(name)} can't be read: {safe(without_directory(why, directory, name))}\n")


def _print_call(event: CallEvent, detail: str, as_json: bool) -> None:
    from .output import line, print_json, safe

    if as_json:
        print_json(event)
        return
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    mean = "" if event.mean_log_prob is None else f"{event.mean_log_prob:.2f}"
    said = event.text[:_TEXT] if event.text else detail
    call = event.model_call_id + (f"#{event.choice_index}" if event.choice_index else "")
    cells = (at, event.rollout_id, call or "(unnamed)", event.outcome, f"{event.prompt}+{event.sampled}", mean, said)
    line("\t".join(map(safe, cells)) if not sys.stdout.isatty() else "  ".join(map(safe, cells)).rstrip())
