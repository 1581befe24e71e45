"""How often a turn of a run no longer holds what was sampled before it: by turn, by kind, by group, by model.

A turn here is a call whose prompt should hold an earlier answer: either it does, id by id, or it drifted. Calls that
begin a conversation anew (compacted histories, sub-agents) are counted apart. Kinds need the bytes of ids: those that
the store recorded, and those of `--tokenizer`; else they are `unknown`. Exit status: 0, 1 if the rate is above `--most`
or a rollout can't be read, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tokcap.errors import RetiredError, TokcapError
from tokcap.inspection import (
    RolloutView,
    Texts,
    TokenizerBytes,
    models_of,
    open_to_look,
    pieces_of_store,
    view_of,
    wanted_ids,
)  # fmt: skip

Turn = tuple[dict[str, str], bool]
"""What it is counted under, and whether it drifted."""
BY = ("turn", "group", "model")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="*", metavar="ROLLOUT|GLOB", help="which ones (default: all)")
    parser.add_argument("-d", "--dir", help="the store (default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG)")
    parser.add_argument("--most", type=float, default=1.0, metavar="RATE", help="exit with 1 above it (default: 1)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, to tell kinds apart")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    run = Run()
    try:
        store = open_to_look(options.dir)
        unlisted: dict[str, TokcapError] = {}
        wanted = wanted_ids(store, options.rollouts, unlisted=unlisted)
        tokenizer = TokenizerBytes(options.tokenizer) if options.tokenizer else None
        texts = Texts(pieces_of_store(store), tokenizer)
    except TokcapError as error:
        parser.error(str(error))
    run.unreadable = {name: str(error) for name, error in unlisted.items()}
    for rollout_id in wanted:
        try:
            with store.read_now(rollout_id) as snapshot:
                run.add(view_of(snapshot, token_bytes=texts.of(models_of(snapshot))))
        except RetiredError:
            run.retired += 1
        except TokcapError as error:
            run.unreadable[rollout_id] = str(error)
    if options.json:
        print(json.dumps(run.told()))
    else:
        run.print()
    return 1 if run.rate > options.most or run.unreadable else 0


class Run:
    """The counts of many rollouts."""

    def __init__(self) -> None:
        self.rollouts = self.retired = self.turns = self.drifted = self.lost = 0
        self.by: dict[str, dict[str, list[int]]] = {
            name: defaultdict(lambda: [0, 0]) for name in ("turn", "group", "model")
        }
        """Turns and drifted ones, under each value."""
        self.kinds: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        """How calls that are no turns hang on another."""
        self.unreadable: dict[str, str] = {}

    @property
    def rate(self) -> float:
        return self.drifted / max(self.turns, 1)

    def add(self, view: RolloutView) -> None:
        self.rollouts += 1
        for under, drifted in turns_of(view):
            self.turns += 1
            self.drifted += drifted
            for name, value in under.items():
                self.by[name][value][0] += 1
                self.by[name][value][1] += drifted
        for call in view.calls:
            if call.relation == "drifted" and call.drift is not None:
                self.kinds[call.drift.kind] += 1
                self.lost += call.drift.lost
            elif call.relation != "continues":
                self.others[call.relation] += 1

    def told(self) -> dict[str, object]:
        tables = {f"by_{name}": dict(table) for name, table in self.by.items()}
        counts = {"rollouts": self.rollouts, "retired": self.retired, "turns": self.turns}
        return counts | tables | {
            "drifted_calls": self.drifted, "drift_lost": self.lost,
            "drift_rate": self.rate if self.turns else None, "kinds": self.kinds, "other_calls": self.others,
            "unreadable": self.unreadable,
        }  # fmt: skip

    def print(self) -> None:
        print(f"{self.drifted:,} of {self.turns:,} turns drifted ({self.rate:.1%}), in {self.rollouts:,} rollouts")
        if self.retired:
            print(f"{self.retired:,} more are retired: nothing of them is left")
        print(f"{self.lost:,} sampled ids are no longer in the prompt that follows them")
        print(f"kinds: {counted(self.kinds)}; other calls: {counted(self.others)}")
        for name, table in self.by.items():
            print(f"\n{name:<32} {'turns':>8} {'drifted':>8} {'rate':>7}")
            for value, (turns, drifted) in sorted(table.items(), key=lambda item: by_number(item[0])):
                print(f"{shown(value):<32} {turns:>8,} {drifted:>8,} {drifted / turns:>7.1%}")
        for rollout_id, error in self.unreadable.items():
            print(f"can't read {shown(rollout_id)}: {shown(error)}", file=sys.stderr)


def turns_of(view: RolloutView) -> Iterator[Turn]:
    """The turns of a rollout. Turn 1 is the second call of a conversation."""
    number: dict[tuple[str, int], int] = {}
    for call in view.calls:
        number[call.key] = 0
        if call.relation in ("continues", "drifted") and call.parent is not None:
            number[call.key] = number.get(call.parent, 0) + 1
            under = {"turn": span(number[call.key]), "group": view.build.group, "model": call.model}
            yield under, call.relation == "drifted"


def span(turn: int) -> str:
    """Each of the first ten turns by itself, later ones by tens."""
    return str(turn) if turn <= 10 else f"{(turn - 1) // 10 * 10 + 1}-{(turn - 1) // 10 * 10 + 10}"


def by_number(value: str) -> tuple[int, str]:
    first = value.partition("-")[0]
    return (int(first), "") if first.isdecimal() else (0, value)


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"


def shown(text: str) -> str:
    """What comes from a store may hold anything: no control character of it gets to the terminal."""
    return text if text.isprintable() else repr(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
