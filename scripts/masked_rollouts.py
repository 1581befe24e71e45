"""Which rollouts are not trained, or not wholly: why, how many ids for each reason, the worst first, and what to do.

Looks at a live store or at a copy of one; nothing is written into it. Exit status: 0 if every rollout trains something,
1 if one trains nothing or can't be read, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence

from tokcap.errors import TokcapError
from tokcap.inspection import ADVICE, RolloutRow, open_to_look, rows

NOT_TRAINED = (
    "abandoned", "ambiguous", "aborted", "unknown", "conflict", "other_model", "after_final", "masked",
)  # fmt: skip
"""The metrics that say why sampled ids are not trained; with `trained` they add up to `sampled`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="*", metavar="ROLLOUT|GLOB", help="which ones (default: all)")
    parser.add_argument("-d", "--dir", help="the store (default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG)")
    parser.add_argument("-n", "--limit", type=int, default=20, help="list so many, 0 for all (default: 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object a rollout")
    options = parser.parse_args(arguments)
    try:
        found = rows(open_to_look(options.dir), options.rollouts)
    except TokcapError as error:
        parser.error(str(error))
    wrong = sorted(filter(is_wrong, found), key=badness, reverse=True)
    listed = wrong[: options.limit or None]
    if options.json:
        for row in listed:
            print(json.dumps(told(row)))
    else:
        print_summary(found, wrong)
        print_list(listed)
        print_advice(wrong)
    return 1 if any(trains_nothing(row) for row in wrong) else 0


def is_over(row: RolloutRow) -> bool:
    """Open ones may still record something, unless their owner said that they are finished."""
    return row.state == "frozen" or (row.state == "open" and row.finished)


def is_wrong(row: RolloutRow) -> bool:
    """Whether something of it is not trained, or is missing. A retired one was delivered."""
    lacking = row.outcomes.get("lost", 0) + row.outcomes.get("open", 0)
    return bool(row.error or row.damage or (is_over(row) and (row.reasons or lacking)))


def trains_nothing(row: RolloutRow) -> bool:
    return bool(row.error) or (is_over(row) and not row.trained)


def badness(row: RolloutRow) -> tuple[bool, int, int, str]:
    lost = row.outcomes.get("lost", 0) + row.outcomes.get("open", 0)
    return trains_nothing(row), row.sampled - row.trained, lost, row.rollout_id


def why(row: RolloutRow) -> str:
    """In words: ids by reason, reasons without ids, calls without a record, damage."""
    if row.error:
        return f"can't be read: {shown(row.error)}"
    parts = [f"{row.metric(name):,} {name}" for name in NOT_TRAINED if row.metric(name)]
    parts += [reason for reason in row.reasons if not row.metric(reason)]
    parts += [f"calls {name}: {row.outcomes[name]}" for name in ("lost", "open") if row.outcomes.get(name)]
    return ", ".join(parts + (["damaged"] if row.damage else []))


def shown(text: str) -> str:
    """What comes from a store may hold anything: no control character of it gets to the terminal."""
    return text if text.isprintable() else repr(text)


def print_summary(found: list[RolloutRow], wrong: list[RolloutRow]) -> None:
    sampled, trained = sum(row.sampled for row in found), sum(row.trained for row in found)
    nothing = sum(map(trains_nothing, wrong))
    retired = sum(row.state == "retired" for row in found)
    print(f"{len(found):,} rollouts: {nothing:,} train nothing, {len(wrong) - nothing:,} not all that was sampled")
    if retired:
        print(f"{retired:,} are retired: their consumer has them, and nothing is left to look at")
    print(f"{trained:,} of {sampled:,} sampled ids are trained ({trained / max(sampled, 1):.1%})")
    ids: Counter[str] = Counter()
    for row in wrong:
        ids.update({name: row.metric(name) for name in NOT_TRAINED if row.metric(name)})
    for name, count in ids.most_common():
        print(f"  {count:>8,} ids {name}; rollouts: {sum(bool(row.metric(name)) for row in wrong):,}")


def print_list(listed: list[RolloutRow]) -> None:
    if listed:
        print(f"\n{'rollout':<32} {'state':<10} {'sampled':>9} {'trained':>9}  why")
    for row in listed:
        print(f"{shown(row.rollout_id):<32} {row.state:<10} {row.sampled:>9,} {row.trained:>9,}  {why(row)}")


def print_advice(wrong: list[RolloutRow]) -> None:
    """What each reason that was met means, the most frequent first."""
    counts = Counter(reason for row in wrong for reason in row.reasons)
    lacking = sum(bool(row.outcomes.get("lost") or row.outcomes.get("open")) for row in wrong)
    counts.update({"lost_call": lacking, "unreadable": sum(bool(row.error) for row in wrong)})
    for reason, count in counts.most_common():
        if count and reason in ADVICE:
            advice = ADVICE[reason]
            print(f"\n{reason} (rollouts: {count:,}): {advice.what}\n  why:  {advice.why}\n  then: {advice.then}")


def told(row: RolloutRow) -> dict[str, object]:
    return {
        "rollout_id": row.rollout_id, "state": row.state, "group": row.group, "sampled": row.sampled,
        "trained": row.trained, "reasons": row.reasons, "outcomes": row.outcomes, "damage": row.damage,
        "ids": {name: row.metric(name) for name in NOT_TRAINED if row.metric(name)}, "error": row.error,
    }  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
