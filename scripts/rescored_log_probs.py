"""Do the captured log-probs agree with those that another engine, or the trainer, gives the same ids?

`--write-template ids.jsonl` writes what is to be scored: for every call its prompt_token_ids, generation_token_ids and
how it was sampled. Put one log-prob per sampled id (natural log) into log_probs, then compare:
`rescored_log_probs.py scored.jsonl`. What is read of a line: rollout_id, model_call_id, choice_index (0 if it is left
out), log_probs. An npz file has the same as arrays, log_probs flat, with log_probs_offsets [calls + 1].

d is captured minus re-scored. k1 = mean(d) and k3 = mean(exp(-d) - 1 + d) estimate KL(policy that sampled || policy
that scored); k3 is never negative and varies less. Engines in bf16 differ from a trainer by 0.01 to 0.04 on average;
another checkpoint, temperature or template by far more. Exit status: 0; 1 if more than `--share` of the ids differ by
more than `--threshold`, or something could not be compared; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from tokcap import FileStore, TokenEntry
from tokcap.errors import TokcapError
from tokcap.inspection import open_to_look, wanted_ids
from tokcap.trajectory import is_behaviour, unknown_log_probs

Floats = npt.NDArray[np.float64]
Key = tuple[str, str, int]
Scores = dict[Key, Floats]
"""float64 [G] for (rollout_id, model_call_id, choice_index)."""
COLUMNS = ("ids", "mean |d|", "max |d|", "k1", "k3", "over")


class Compared(NamedTuple):
    """One call."""

    name: str
    d: Floats
    """float64 [G]: captured minus re-scored, NaN where one of them is unknown."""
    versions: list[Any]
    """(version, start, end)"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scored", nargs="?", help="JSONL, or npz")
    parser.add_argument("-d", "--dir", help="the store (default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG)")
    parser.add_argument("--write-template", metavar="FILE", help="write the ids that are to be scored, as JSONL")
    parser.add_argument("--rollout", action="append", default=[], metavar="GLOB", help="into the template (all)")
    parser.add_argument("--threshold", type=float, default=0.5, help="for one id, natural log (default: 0.5)")
    parser.add_argument("--share", type=float, default=0.01, help="of ids that may be above it (default: 0.01)")
    parser.add_argument("--worst", type=int, default=5, help="calls to list, and positions of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object a call, then one of them all")
    options = parser.parse_args(arguments)
    if (options.scored is None) == (options.write_template is None):
        parser.error("give a file of scores, or --write-template FILE")
    notes, problems = Counter[str](), list[str]()
    try:
        store = open_to_look(options.dir)
        if options.write_template:
            with open(options.write_template, "w", encoding="utf-8") as file:
                write_template(store, wanted_ids(store, options.rollout), file)
            return 0
        scores = read_scores(options.scored)
        if not scores:
            problems.append(f"nothing is scored in {options.scored}: log_probs has to hold one of each sampled id")
        found = list(compare(store, scores, notes, problems))
    except (TokcapError, OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    parts = {"all": [call.d for call in found]}
    for version, start, end, d in ((*span, call.d) for call in found for span in call.versions):
        parts.setdefault(f"policy version {version!r}", []).append(d[start:end])
    sums = {name: figures(np.concatenate([*part, []]), options.threshold) for name, part in parts.items()}
    calls = [(call, figures(call.d, options.threshold)) for call in found]
    calls.sort(key=lambda one: -one[1]["mean |d|"])
    if options.json:
        for call, numbers in calls:
            print(json.dumps({"call": call.name, **numbers, "worst": worst_of(call.d, options.worst)}))
        print(json.dumps({"sums": sums, "notes": notes, "problems": problems}))
    else:
        print(f"{len(found):,} calls compared; over: share of ids with |d| > {options.threshold:g}\n")
        print(f"{'':<40}" + "".join(f"{name:>10}" for name in COLUMNS))
        for name, numbers in sums.items():
            print(line(name, numbers))
        for call, numbers in calls[: options.worst]:
            worst = ", ".join(f"[{i}] {d:+.3f}" for i, d in worst_of(call.d, options.worst))
            print(f"{line(call.name, numbers)}  worst d: {worst}")
        for note, count in notes.items():
            print(f"note: {count:,} {note}")
        for problem in problems:
            print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems or not sums["all"]["ids"] or sums["all"]["over"] > options.share else 0


def line(name: str, numbers: dict[str, float]) -> str:
    return f"{name:<40}" + "".join(f"{value:>10.4g}" for value in numbers.values())


def figures(d: Floats, threshold: float) -> dict[str, float]:
    """`COLUMNS` of these differences."""
    d = d[~np.isnan(d)]
    n, most = max(len(d), 1), abs(d).max(initial=0.0)
    with np.errstate(over="ignore"):  # infinite where the two have nothing to do with each other
        values = (
            len(d),
            abs(d).sum() / n,
            most,
            d.sum() / n,
            (np.expm1(-d) + d).sum() / n,
            (abs(d) > threshold).sum() / n,
        )
    return dict(zip(COLUMNS, map(float, values), strict=True))


def worst_of(d: Floats, most: int) -> list[tuple[int, float]]:
    known = np.flatnonzero(~np.isnan(d))
    return [(int(i), float(d[i])) for i in known[np.argsort(-abs(d[known]), kind="stable")][:most]]


def compare(store: FileStore, scores: Scores, notes: Counter[str], problems: list[str]) -> Iterator[Compared]:
    for rollout_id in sorted({key[0] for key in scores}):
        left = {key for key in scores if key[0] == rollout_id}
        try:
            with store.read_now(rollout_id) as snapshot:
                for entry in snapshot.entries:
                    key, captured = (rollout_id, entry.model_call_id, entry.choice_index), entry.generation_log_probs
                    left.discard(key)
                    if key not in scores:
                        notes["calls of these rollouts were not scored"] += 1
                    elif len(scores[key]) != len(captured):
                        problems.append(f"{name_of(key)}: {len(scores[key])} scores for {len(captured)} sampled ids")
                    else:
                        known = ~(unknown_log_probs(captured) | unknown_log_probs(scores[key]))
                        d = np.full(len(captured), np.nan)
                        d[known] = captured[known] - scores[key][known]
                        notes[told_of(entry)] += 1
                        notes.update(
                            {"ids have no log-prob on one side": int((~known).sum())} if not known.all() else {}
                        )
                        yield Compared(name_of(key), d, entry.policy_versions)
        except TokcapError as error:
            problems.append(str(error))
        problems += [f"{name_of(key)} is not in the store" for key in sorted(left)]


def name_of(key: Key) -> str:
    return f"{key[0]} {key[1]}" + (f"#{key[2]}" if key[2] else "")


def told_of(entry: TokenEntry) -> str:
    mode, temperature = entry.sampling.get("logprobs_mode"), entry.sampling.get("temperature")
    known = {True: "are", False: "are not", None: "may be, or not,"}[is_behaviour(entry.sampling)]
    return f"calls: log-probs {known} of the sampling distribution (mode {mode!r}, temperature {temperature!r})"


def write_template(store: FileStore, wanted: Sequence[str], file: TextIO) -> None:
    for rollout_id in wanted:
        try:
            with store.read_now(rollout_id) as snapshot:
                for entry in snapshot.entries:
                    asked = {name: getattr(entry, name) for name in ("rollout_id", "model_call_id", "choice_index")}
                    asked |= {"model": entry.model, "policy_versions": entry.policy_versions}
                    asked |= {name: entry.sampling.get(name) for name in ("temperature", "logprobs_mode")}
                    ids = {name: getattr(entry, name).tolist() for name in ("prompt_token_ids", "generation_token_ids")}
                    file.write(json.dumps(asked | ids | {"log_probs": None}) + "\n")
        except TokcapError as error:
            print(f"left out: {error}", file=sys.stderr)


def read_scores(path: str) -> Scores:
    """float64 [G] per call; null and NaN are unknown. Lines that were not scored are left out."""
    if path.endswith(".npz"):
        with np.load(path) as arrays:
            parts = np.split(arrays["log_probs"].astype(np.float64), arrays["log_probs_offsets"][1:-1])
            ids = zip(arrays["rollout_id"], arrays["model_call_id"], arrays["choice_index"], strict=True)
            return {(str(r), str(c), int(i)): part for (r, c, i), part in zip(ids, parts, strict=True)}
    with open(path, encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if line["log_probs"] is not None]
    keys = ((line["rollout_id"], line["model_call_id"], line.get("choice_index", 0)) for line in lines)
    return {key: np.array(line["log_probs"], np.float64) for key, line in zip(keys, lines, strict=True)}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
