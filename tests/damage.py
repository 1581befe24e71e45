"""Stores to damage, and what has to be left of them: an oracle that knows every frame of an intact log.

A `Golden` is the bytes of one rollout in an intact store and, frame by frame, what stands where. From the frames that
some damage spares, `expect` derives what a reader must still find, by the rules of the contract and not by the code
under test; `check` compares. Everything here can be pickled, so that cases can be spread over processes.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from tokcap.entry import TokenEntry, content_digest
from tokcap.errors import ConflictError, FrozenError
from tokcap.protocol import SettledOutcome
from tokcap.store import FileStore, Snapshot
from tokcap.store.batch import Batch
from tokcap.store.files import Files
from tokcap.store.frame import GROUP_CONTINUES, HEADER_SIZE, TRAILER_SIZE, Kind, content_end, segment_seed
from tokcap.store.layout import Layout
from tokcap.store.log import read_header
from tokcap.store.looking import Looker
from tokcap.store.records import NO_BASE, BeginRecord, DeliveryRecord, SettleRecord, StoredEntry
from tokcap.store.requests import Requests
from tokcap.store.rollout import Rollout
from tokcap.store.root import boot_id
from tokcap.store.scan import Scan, scan
from tokcap.store.serving import Server

Tree = dict[str, bytes]
"""Path below the store's directory -> what the file holds."""
Key = tuple[str, int]
Fingerprint = tuple[Any, ...]
Broken = list[str]
"""What a case found wrong, in words."""

SEGMENT_BYTES = 900
OPEN, FROZEN, RETIRED = "rollout-open", "rollout-frozen", "rollout-retired"
META = {"reward": 0.5, "group": "g"}
LATER_BOOT = "22222222-2222-4222-8222-222222222222"


def fingerprint(entry: TokenEntry) -> Fingerprint:
    """Everything of an entry, comparable with == and exact to the bit."""
    experts = entry.routed_experts
    return (
        entry.rollout_id,
        entry.model_call_id,
        entry.choice_index,
        entry.prompt_token_ids.tobytes(),
        entry.generation_token_ids.tobytes(),
        entry.generation_log_probs.tobytes(),
        None if experts is None else (str(experts.dtype), experts.shape, experts.tobytes()),
        entry.output_items,
        entry.token_item_index,
        entry.model,
        entry.response_id,
        entry.finish_reason,
        entry.created_at,
        entry.policy_versions,
        entry.sampling,
        entry.pieces,
        entry.extra,
        entry.schema_version,
    )


class Written(msgspec.Struct, frozen=True):
    """One frame of an intact log, and what it says."""

    path: str
    segment: int
    kind: int
    sequence: int
    offset: int
    body_end: int
    end: int
    """Where the frame ends, its padding included."""
    batch_end: int
    """Where the frames of its batch end and the trailer begins."""
    group: int
    """The same number for frames that count only together."""
    call: str = ""
    choice: int = 0
    content: int = 0
    """Which of the contents that were put for this call and choice."""
    base: int = NO_BASE
    """Sequence number of the frame that it builds on."""
    said: str = ""
    choices: int = 1


class Golden(msgspec.Struct):
    """An intact rollout."""

    rollout_id: str
    incarnation: str
    tree: Tree
    written: list[Written]
    durable: dict[str, int]
    """Path of each segment -> how many of its bytes are known durable by another file, or by its name."""
    sealed: bool
    contents: dict[Key, list[Fingerprint]]
    chosen: dict[Key, int]
    """Of several contents, the one with the smallest digest."""
    digests: dict[str, tuple[bytes, ...]]
    version: int = 0
    torn: tuple[str, ...] = ()
    """Segments that have a torn tail when nothing is damaged."""

    def segments(self) -> list[str]:
        return sorted(self.durable)

    def frames_of(self, path: str) -> list[Written]:
        return [frame for frame in self.written if frame.path == path]


class Expected(msgspec.Struct):
    entries: dict[Key, set[int]]
    """Each with the contents that may come back."""
    outcomes: dict[str, str]
    digests: dict[str, tuple[bytes, ...]]
    delivered: dict[str, str]
    finished: bool
    nameless: int
    """Lost calls that were marked without a name."""


def expect(golden: Golden, survives: Callable[[Written], bool]) -> Expected:
    """What is left of a rollout whose surviving frames are these (contract, sections 4 and 6)."""
    stored: dict[Key, list[int]] = {}
    begun: dict[str, int] = {}
    said: dict[str, set[str]] = {}
    digests: dict[str, tuple[bytes, ...]] = {}
    delivered: dict[str, str] = {}
    whole: set[tuple[int, int]] = set()
    finished = False
    nameless = 0
    for frame in golden.written:
        if not survives(frame):
            continue
        kind, call = frame.kind, frame.call
        based = frame.base == NO_BASE or (frame.segment, frame.base) in whole
        if kind == Kind.ENTRY:
            said.setdefault(call, set())
            if not based:
                said[call].add("lost")
                continue
            contents = stored.setdefault((call, frame.choice), [])
            contents.append(frame.content)
            if len(set(contents)) > 1:
                said[call].add("conflict")
        elif kind == Kind.BEGIN:
            said.setdefault(call, set())
            begun[call] = frame.choices
            digests[call] = golden.digests[call] if based else ()
            if not based:
                continue
        elif kind == Kind.SETTLE:
            said.setdefault(call, set()).add(frame.said)
            nameless += not call
        elif kind == Kind.DELIVERY and call in said:
            delivered[call] = frame.said
        finished |= kind == Kind.FINISH
        whole.add((frame.segment, frame.sequence))
    outcomes = {}
    for call, statements in said.items():
        if call:
            outcomes[call] = _outcome(statements, sum(name == call for name, _ in stored), begun.get(call, 1))
    allowed = {
        key: {golden.chosen[key]} if len(set(contents)) > 1 else set(contents) for key, contents in stored.items()
    }
    return Expected(allowed, outcomes, digests, delivered, finished, nameless)


def _outcome(statements: set[str], stored: int, choices: int) -> str:
    for outcome in ("conflict", "aborted"):
        if outcome in statements:
            return outcome
    if stored and stored >= choices:
        return "recorded"
    if "lost" in statements or ("no_generation" in statements and stored):
        return "lost"
    return "no_generation" if "no_generation" in statements else "open"


class Verdict(msgspec.Struct):
    """What a reader must say of a damaged rollout."""

    expected: Expected
    damaged: tuple[str, int, int] | None = None
    """File and range in which damage must be named; None: nothing may be called damaged."""
    torn: bool | None = None
    """Whether the touched file must be said to have a torn tail; None: it may."""
    path: str = ""


def check(snapshot: Snapshot, golden: Golden, verdict: Verdict, added: dict[Key, Fingerprint] | None = None) -> Broken:
    """What is wrong with a snapshot of a damaged rollout."""
    broken: Broken = []
    expected = verdict.expected
    added = added or {}
    found: set[Key] = set()
    for entry in snapshot.entries:
        key = (entry.model_call_id, entry.choice_index)
        if key in found:
            broken.append(f"{key} comes back twice")
        found.add(key)
        if key in added:
            good = fingerprint(entry) == added[key]
        else:
            good = fingerprint(entry) in [golden.contents[key][i] for i in expected.entries.get(key, ())]
        if not good:
            broken.append(f"{key} is wrong or should not be there")
    missing = (set(expected.entries) | set(added)) - found
    if missing:
        broken.append(f"{sorted(missing)} are missing")
    outcomes = dict(expected.outcomes)
    for call, _ in added:
        outcomes[call] = "recorded"
    named = {call.model_call_id: call for call in snapshot.calls if call.model_call_id}
    told = {name: record.outcome for name, record in named.items()}
    if told != outcomes:
        broken.append(f"outcomes {told} instead of {outcomes}")
    for name, record in named.items():
        if tuple(record.request_digests) != expected.digests.get(name, ()):
            broken.append(f"wrong request digests for {name}")
        if record.delivered != expected.delivered.get(name, "unknown"):
            broken.append(f"wrong delivery for {name}")
    if snapshot.finished != expected.finished or snapshot.meta != (META if expected.finished else {}):
        broken.append(f"meta is {snapshot.meta}")
    broken += _check_reports(snapshot, golden, verdict, outcomes)
    return broken


def _check_reports(snapshot: Snapshot, golden: Golden, verdict: Verdict, outcomes: dict[str, str]) -> Broken:
    broken: Broken = []
    nameless = [call for call in snapshot.calls if not call.model_call_id]
    if any(call.outcome != "lost" for call in nameless):
        broken.append("a nameless call that isn't lost")
    marks = 1 if verdict.expected.nameless else 0
    if len(nameless) != len(snapshot.damage) + marks:
        broken.append(f"{len(nameless)} nameless calls for {len(snapshot.damage)} places and {marks} marks")
    if verdict.damaged is None:
        if snapshot.damage:
            broken.append(f"called damaged: {snapshot.damage}")
    else:
        path, start, end = verdict.damaged
        number = segment_of(path)
        hits = [
            d
            for d in snapshot.damage
            if segment_of(d.path) == number and d.offset <= end and d.end >= start and d.end - d.offset < 1 << 20
        ]
        if not hits:
            broken.append(f"damage in {path} at {start}..{end} isn't reported, but {snapshot.damage}")
        elif not any(d.path in call.detail and str(d.offset) in call.detail for call in nameless for d in hits):
            broken.append("no nameless lost call names the file and the offset")
        if any(segment_of(d.path) != number for d in snapshot.damage):
            broken.append(f"damage reported in another file: {snapshot.damage}")
    incomplete = verdict.damaged is not None or bool(verdict.expected.nameless)
    incomplete |= any(outcome in ("lost", "open", "conflict") for outcome in outcomes.values())
    if snapshot.incomplete != incomplete:
        broken.append(f"incomplete is {snapshot.incomplete}")
    torn = {segment_of(place.path) for place in snapshot.torn}
    must = {segment_of(path) for path in golden.torn if path != verdict.path}
    may = must | {segment_of(verdict.path)} if verdict.path else must
    if verdict.torn:
        must = must | {segment_of(verdict.path)}
    elif verdict.torn is False:
        may = must
    if not must <= torn <= may:
        broken.append(f"torn tails {sorted(torn)}, expected {sorted(must)}")
    return broken


def segment_of(path: str) -> str:
    """The number of a segment, the same for its file and for its links."""
    return path.rpartition("/")[2][:6]


# ---- making intact stores


def make_entry(rollout_id: str, call: str, prompt: list[int], generated: list[int], **more: Any) -> TokenEntry:
    log_probs: list[float | None] = [-0.1 * (i + 1) for i in range(len(generated))]
    return TokenEntry(rollout_id, call, prompt, generated, log_probs, **more)


class _Script:
    """Fills one rollout and remembers what was put."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.put: dict[Key, list[TokenEntry]] = {}
        self.digests: dict[str, tuple[bytes, ...]] = {}

    def entry(self, call: str, prompt: list[int], generated: list[int], **more: Any) -> TokenEntry:
        made = make_entry(self.rollout_id, call, prompt, generated, **more)
        self.put.setdefault((call, made.choice_index), []).append(made)
        return made

    def begin(self, store: FileStore, call: str, messages: int, choices: int = 1) -> None:
        self.digests[call] = tuple(bytes([17 + i]) * 16 for i in range(messages))
        store.begin_call_now(self.rollout_id, call, choices, request_digests=self.digests[call])


TRUNK = list(range(300, 318))


def _fill(script: _Script, one: FileStore, other: FileStore, root: Path) -> None:
    """Two chains, intents, a group of two choices, a conflict, marks, another process, a torn tail in the middle."""
    name = script.rollout_id
    script.begin(one, "c0", 2)
    one.put_now(script.entry("c0", TRUNK, [5, 6], model="m", output_items=[{"text": "a"}]))
    script.begin(other, "c1", 3)
    after = [*TRUNK, 5, 6, 9]
    other.put_now(script.entry("c1", after, [70000], extra={"n": 2**70}))
    one.note_delivery_now(name, "c0", "full")
    _put_from_another_process(root, script.entry("c2", [*after, 70000, 8], [1, 2, 3]))
    side = [900 + i for i in range(17)]
    experts = np.arange(4, dtype=np.uint8).reshape(2, 2)
    other.put_now(script.entry("s0", side, [4], routed_experts=experts, pieces=[b"\xff"]))
    _tear_tail(root, script)
    script.begin(one, "g", 3, choices=2)
    pair = [script.entry("g", TRUNK, [i], choice_index=i, finish_reason="stop") for i in range(2)]
    other.put_many_now(pair)
    one.put_now(script.entry("s1", [*side, 4, 11], [12]))
    other.put_now(script.entry("k", TRUNK, [1]))
    try:
        one.put_now(script.entry("k", TRUNK, [2]))
    except ConflictError:
        pass
    else:
        raise AssertionError("no conflict")
    script.begin(one, "open-call", 4)
    _settle(one, name, {"c0": "lost", "a": "aborted", "n": "no_generation"})
    other.mark_incomplete_now(name, "m")
    other.mark_incomplete_now(name)
    other.finish_now(name, META)
    one.put_now(script.entry("t0", TRUNK, [3, 3]))
    _put_in_one_batch(root, [script.entry(f"t{i}", [*TRUNK, 3, 3, 50 + i], [i]) for i in (1, 2, 3)])


def _fill_briefly(script: _Script, one: FileStore, other: FileStore, root: Path) -> None:
    name = script.rollout_id
    script.begin(one, "c0", 2)
    one.put_now(script.entry("c0", TRUNK, [5, 6]))
    script.begin(other, "c1", 3)
    other.put_now(script.entry("c1", [*TRUNK, 5, 6, 9], [70000]))
    other.put_now(script.entry("s0", [900 + i for i in range(17)], [4], pieces=[b"\xff"]))
    _put_from_another_process(root, script.entry("c2", [*TRUNK, 5, 6, 9, 70000, 8], [1, 2, 3]))
    script.begin(one, "g", 3, choices=2)
    other.put_many_now([script.entry("g", TRUNK, [i], choice_index=i) for i in range(2)])
    one.put_now(script.entry("s1", [*(900 + i for i in range(17)), 4, 11], [12]))
    _settle(one, name, {"a": "aborted", "n": "no_generation"})
    other.finish_now(name, META)
    one.put_now(script.entry("t0", TRUNK, [3, 3]))
    other.put_now(script.entry("t1", [*TRUNK, 3, 3, 50], [1]))


def _settle(store: FileStore, name: str, outcomes: dict[str, SettledOutcome]) -> None:
    for call, outcome in outcomes.items():
        store.settle_call_now(name, call, outcome)


_OTHER_PROCESS = """
import os, pickle, sys
from tokcap.store import FileStore
store = FileStore(sys.argv[1], segment_bytes=int(sys.argv[2]), sweep_every_s=0)
store.put_now(pickle.load(sys.stdin.buffer))
os._exit(0)  # as a killed process: nothing is closed
"""


def _put_from_another_process(root: Path, entry: TokenEntry) -> None:
    import pickle

    subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(root), str(SEGMENT_BYTES)],
        input=pickle.dumps(entry),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True,
    )


def _tear_tail(root: Path, script: _Script) -> None:
    """Append the first half of a batch, as a writer that was killed in the middle of its write leaves it."""
    path = max(root.glob(f"rollouts/*/{script.rollout_id}/*/*.open"))
    data = path.read_bytes()
    seed = segment_seed(path.parent.name, path.name[:6])
    end = content_end(data, len(data))
    found = scan(data, seed, limit=end)
    batch = Batch(seed=seed, offset=end, sequence=found.next_sequence, number=found.next_batch)
    batch.add_record(Kind.SETTLE, SettleRecord("never-acknowledged", 1, "lost", ""))
    path.write_bytes(data[:end] + b"".join(batch.buffers())[:48])


def _put_in_one_batch(root: Path, entries: list[TokenEntry]) -> None:
    """As if they had queued up while the sync before them ran."""
    layout, requests = Layout(str(root)), Requests(require_intent=False, max_entry_bytes=1 << 30)
    server = Server(Files(), layout)
    rollout = Rollout(Files(), layout, entries[0].rollout_id, boot_id(), SEGMENT_BYTES)
    assert server.enter(rollout, create=False) == "held"
    server.run(rollout, [requests.put((entry,)) for entry in entries])
    server.leave(rollout)
    rollout.drop()
    rollout.close_descriptors()


def read_tree(root: Path) -> Tree:
    """All files, without the space behind the last batch of a segment."""
    tree = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: data[: content_end(data, len(data))] for name, data in tree.items()}


def write_tree(root: Path, tree: Tree) -> None:
    """Write files below `root`; what was there stays."""
    made = {str(root)}
    for name, data in tree.items():
        path = f"{root}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, 0o700, exist_ok=True)
            made.add(folder)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(fd, data)
        os.close(fd)


def part_of(tree: Tree, rollout_id: str) -> Tree:
    return {name: data for name, data in tree.items() if f"/{rollout_id}/" in f"/{name}"}


def build_store(root: Path) -> tuple[dict[str, Golden], Tree]:
    """A store with an open, a frozen (version 2) and a retired rollout, and its other files.

    `open`: everything that can be in a log, its last segment still written. `closed`: the same, sealed by its writers.
    `frozen`: a rollout that is complete, at version 2. `whole`: the same before its freeze. `retired`.
    """
    one, other = (FileStore(root, segment_bytes=SEGMENT_BYTES, sweep_every_s=0) for _ in range(2))
    scripts = {name: _Script(name) for name in (OPEN, FROZEN, RETIRED)}
    _fill(scripts[OPEN], one, other, root)
    _fill_briefly(scripts[FROZEN], one, other, root)
    unfrozen = read_tree(root)
    one.freeze_now(FROZEN).close()
    other.settle_call_now(FROZEN, "late", "aborted")
    other.put_now(scripts[RETIRED].entry("c0", TRUNK, [1]))
    with one.freeze_now(RETIRED) as snapshot:
        one.retire_now(RETIRED, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    one.settle_call_now(RETIRED, "late", "lost", "said after retirement")
    unclosed = read_tree(root)
    one.close_now()
    other.close_now()
    closed = read_tree(root)
    goldens = {
        "open": _golden(scripts[OPEN], unclosed),
        "closed": _golden(scripts[OPEN], closed),
        "whole": _golden(scripts[FROZEN], unfrozen),
        "frozen": _golden(scripts[FROZEN], closed),
        "retired": _golden(scripts[RETIRED], closed),
    }
    rest = {name: data for name, data in closed.items() if not name.startswith("rollouts/")}
    return goldens, rest


def _golden(script: _Script, whole: Tree) -> Golden:
    tree = part_of(whole, script.rollout_id)
    incarnation = next(iter(tree)).split("/")[3][:32]
    frozen = [name for name in tree if "/v" in name and name.endswith(".seg")]
    paths = frozen or [name for name in tree if name.endswith((".seg", ".torn", ".open"))]
    golden = Golden(
        script.rollout_id,
        incarnation,
        tree,
        [],
        {},
        sealed=bool(frozen) or (bool(paths) and paths[-1].endswith(".seg")),
        contents={key: [fingerprint(entry) for entry in entries] for key, entries in script.put.items()},
        chosen={
            key: min(range(len(entries)), key=lambda i: content_digest(entries[i]))
            for key, entries in script.put.items()
        },
        digests=dict(script.digests),
        version=2 if frozen else 0,
        torn=tuple(path for path in paths if path.endswith(".torn")),
    )
    ends: list[int] = []
    for path in paths:
        for written in _frames(golden, script, path, tree[path], bool(frozen)):
            golden.written.append(written)
        ends.append(golden.written[-1].batch_end)
    for path, end, following in zip(paths, ends, [*paths[1:], ""][: len(paths)], strict=True):
        if frozen:
            end = int(path.rpartition("-")[2].removesuffix(".seg"))
        elif following:
            header = read_header(following, tree[following], segment_seed(incarnation, segment_of(following)), 1 << 20)
            assert header is not None and header.predecessor_end == end
        elif not golden.sealed:
            end = 0
        golden.durable[path] = end
    return golden


def _frames(golden: Golden, script: _Script, path: str, data: bytes, frozen: bool) -> Iterator[Written]:
    found = scan(data, segment_seed(golden.incarnation, segment_of(path)), limit=len(data), believe_tail=frozen)
    assert not found.damage and bool(found.torn) == path.endswith(".torn")
    ends = {frame.batch: frame.end for frame in found.frames}
    group = 0
    for frame in found.frames:
        body = data[frame.body_start : frame.body_end]
        common: dict[str, Any] = {
            "path": path,
            "segment": int(segment_of(path)),
            "kind": frame.kind,
            "sequence": frame.sequence,
            "offset": frame.offset,
            "body_end": frame.body_end,
            "end": frame.end,
            "batch_end": ends[frame.batch],
            "group": group,
        }
        if not frame.flags & GROUP_CONTINUES:
            group += 1
        if frame.kind == Kind.ENTRY:
            head = StoredEntry(body).head
            key = (head.model_call_id, head.choice_index)
            contents = script.put[key]
            seen = sum((known.call, known.choice) == key for known in golden.written)
            common |= {"call": key[0], "choice": key[1], "content": min(seen, len(contents) - 1), "base": head.base}
        elif frame.kind == Kind.BEGIN:
            begin = msgspec.msgpack.decode(body, type=BeginRecord)
            common |= {"call": begin.model_call_id, "base": begin.digests_base, "choices": begin.choices}
        elif frame.kind == Kind.SETTLE:
            settle = msgspec.msgpack.decode(body, type=SettleRecord)
            common |= {"call": settle.model_call_id, "said": settle.outcome}
        elif frame.kind == Kind.DELIVERY:
            delivery = msgspec.msgpack.decode(body, type=DeliveryRecord)
            common |= {"call": delivery.model_call_id, "said": delivery.delivered}
        yield Written(**common)


# ---- what damage must cost


def verdict_of_flip(golden: Golden, path: str, at: int) -> Verdict:
    """For one byte changed: the record that it belongs to, if any, and what runs through that."""
    hit = next((f for f in golden.frames_of(path) if f.offset <= at < f.body_end), None)
    return Verdict(
        expect(golden, lambda frame: frame is not hit),
        None if hit is None else (path, at, at + 1),
        path in golden.torn,
        path,
    )


def verdict_of_loss(golden: Golden, path: str, start: int, end: int, torn: bool | None = False) -> Verdict:
    """For bytes `start..end` of a file that hold something else now: what they touch is lost, and nothing else."""
    lost = {f.sequence for f in golden.frames_of(path) if f.offset < end and start < f.body_end}
    if path in golden.torn and torn is False:
        torn = True
    survives = expect(golden, lambda frame: frame.path != path or frame.sequence not in lost)
    return Verdict(survives, (path, start, end) if lost else None, torn, path)


def verdict_of_cut(golden: Golden, path: str, at: int, *, later_boot: bool) -> Verdict:
    """For a file of which only the first `at` bytes are left."""
    frames = golden.frames_of(path)
    if not frames:
        return Verdict(expect(golden, lambda frame: True), path=path)
    durable = golden.durable[path]
    if durable:
        left = [frame for frame in frames if frame.body_end <= at]
        # Of the seal of the last segment the record counts, not what pads it.
        only_sealed = not golden.version and path == golden.segments()[-1]
        needed = frames[-1].body_end if only_sealed else durable
        torn = path in golden.torn and at > durable + TRAILER_SIZE
        damaged = (path, min(at, left[-1].end if left else 0), durable) if at < needed else None
    elif later_boot:
        left = [frame for frame in frames if all(f.body_end <= at for f in frames if f.group == frame.group)]
        torn, damaged = at > _end_of(left), None
    else:
        left = [frame for frame in frames if frame.batch_end < at]
        torn, damaged = at > _end_of(left), None
    spared = {frame.sequence for frame in left}
    return Verdict(expect(golden, lambda frame: frame.path != path or frame.sequence in spared), damaged, torn, path)


def _end_of(frames: list[Written]) -> int:
    """Where a log that ends with these frames ends."""
    if not frames:
        return 0
    return frames[-1].end + (TRAILER_SIZE if frames[-1].end == frames[-1].batch_end else 0)


# ---- cases without a disk


class MemoryFiles(Files):
    """Files that are read from memory, so that every bit of a store can have its turn."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = {f"/{name}": data for name, data in tree.items()}
        self._names: dict[str, set[str]] = {}
        for path in self.tree:
            while path != "/":
                folder, _, name = path.rpartition("/")
                self._names.setdefault(folder or "/", set()).add(name)
                path = folder or "/"
        self._open: dict[int, bytes] = {}

    def listdir(self, path: str) -> list[str]:
        names = self._names.get(path)
        if names is None:
            raise FileNotFoundError(path)
        return list(names)

    def open(self, path: str, *, write: bool = False) -> int:
        if path not in self.tree:
            raise FileNotFoundError(path)
        fd = len(self._open)
        self._open[fd] = self.tree[path]
        return fd

    def stat(self, path: str) -> os.stat_result:
        if path in self._names:
            return os.stat_result((stat.S_IFDIR | 0o700, 1, 1, 2, 0, 0, 0, 0, 0, 0))
        with_size = self.fstat(fd := self.open(path))
        self.close(fd)
        return with_size

    def mount_life(self, path: str) -> str:
        return ""

    def close(self, fd: int) -> None:
        del self._open[fd]

    def read(self, fd: int, length: int, offset: int) -> bytes:
        return self._open[fd][offset : offset + length]

    def fstat(self, fd: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG | 0o600, 1, 1, 1, 0, 0, len(self._open[fd]), 0, 0, 0))


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return b"".join((data[:at], bytes((data[at] ^ 1 << bit,)), data[at + 1 :]))


def look_at_every_bit(golden: Golden, path: str, start: int, end: int) -> Broken:
    """Flip each bit of `path[start:end]` in turn and read the rollout, in the boot that wrote it and in a later one.

    What a reader makes of a file depends on the frames that a scan finds in it. So the rollout is read with one bit of
    each byte flipped, and for the other bits the scans must find the same; in the header of a file each bit is read.
    """
    files = MemoryFiles(golden.tree)
    data = golden.tree[path]
    broken: Broken = []
    for at in range(start, end):
        verdict = verdict_of_flip(golden, path, at)
        first = at % 8
        boots = (boot_id(), LATER_BOOT)[: 1 if golden.version else 2]
        for turn, boot in enumerate(boots):
            looker = Looker(files, Layout(""), boot)
            with _Scans() as scans:
                files.tree[f"/{path}"] = scans.watched = flipped(data, at, first)
                broken += _look(looker, golden, verdict, f"{path}: bit {first} of byte {at}, boot {boot}")
            for bit in range(turn, 8, len(boots)):
                changed = flipped(data, at, bit)
                if at < HEADER_SIZE or not scans.made:
                    files.tree[f"/{path}"] = changed
                    broken += _look(looker, golden, verdict, f"{path}: bit {bit} of byte {at}, boot {boot}")
                elif any(scan(changed, seed, **how) != found for seed, how, found in scans.made):
                    broken.append(f"{path}: bit {bit} of byte {at} is judged otherwise than bit {first}")
    return broken


class _Scans:
    """Remembers which scans are made of one file, how, and what they found."""

    def __init__(self) -> None:
        self.watched = b""
        self.made: list[tuple[int, dict[str, Any], Scan]] = []
        self._patches = [mock.patch(f"tokcap.store.{module}.scan", self._scan) for module in ("log", "manifest")]

    def _scan(self, data: bytes, seed: int, **how: Any) -> Scan:
        found = scan(data, seed, **how)
        if data is self.watched:
            self.made.append((seed, how, msgspec.structs.replace(found)))
        return found

    def __enter__(self) -> _Scans:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def look_at_every_cut(golden: Golden, path: str, start: int, end: int) -> Broken:
    """Cut `path` at each offset in turn and read the rollout, in the boot that wrote it and in a later one."""
    files = MemoryFiles(golden.tree)
    broken: Broken = []
    for at in range(start, end):
        files.tree[f"/{path}"] = golden.tree[path][:at]
        for boot in (boot_id(), LATER_BOOT)[: 1 if golden.version else 2]:
            verdict = verdict_of_cut(golden, path, at, later_boot=boot == LATER_BOOT)
            broken += _look(Looker(files, Layout(""), boot), golden, verdict, f"{path}: cut at {at}, boot {boot}")
    return broken


def look_at(golden: Golden, changed: Tree, verdict: Verdict, *, later_boot: bool = False) -> Broken:
    """Read a rollout some of whose files hold something else."""
    looker = Looker(MemoryFiles(golden.tree | changed), Layout(""), LATER_BOOT if later_boot else boot_id())
    return _look(looker, golden, verdict, f"{', '.join(changed)}{' in a later boot' if later_boot else ''}")


def _look(looker: Looker, golden: Golden, verdict: Verdict, case: str) -> Broken:
    try:
        with looker.read(golden.rollout_id) as snapshot:
            return [f"{case}: {what}" for what in check(snapshot, golden, verdict)]
    except Exception as error:
        return [f"{case}: {type(error).__name__}: {error}"]


class Case(msgspec.Struct, frozen=True):
    """One file with one damage: cut at `at`, or one bit of the byte there flipped."""

    path: str
    at: int
    bit: int | None = None


# ---- cases on a disk: everything that is done to a rollout in its life


class Bench:
    """A store directory in memory, restored for each case, and the objects that work on it."""

    def __init__(self, rest: Tree, *, later_boot: bool = False, directory: str | None = None) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(prefix="tokcap-", dir=directory or memory))
        write_tree(self.root, rest)
        self._boot = LATER_BOOT if later_boot else boot_id()
        self.one, self.other = self.store(), self.store()

    def store(self) -> FileStore:
        with mock.patch("tokcap.store.base.boot_id", return_value=self._boot):
            return FileStore(self.root, segment_bytes=SEGMENT_BYTES, sweep_every_s=0)

    def restore(self, tree: Tree) -> None:
        shutil.rmtree(self.root / "rollouts", ignore_errors=True)
        write_tree(self.root, tree)

    def close(self) -> None:
        self.one.close_now()
        self.other.close_now()
        shutil.rmtree(self.root)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def live(bench: Bench, golden: Golden, verdict: Verdict) -> Broken:
    """Take a damaged rollout that is on the bench through the rest of its life."""
    return (_live_frozen if golden.version else _live_open)(bench, golden, verdict)


def _live_open(bench: Bench, golden: Golden, verdict: Verdict) -> Broken:
    name = golden.rollout_id
    with bench.other.read_now(name) as snapshot:
        broken = [f"read: {what}" for what in check(snapshot, golden, verdict)]
    added: dict[Key, Fingerprint] = {}
    for store, call in ((bench.one, "after-0"), (bench.other, "after-1")):
        entry = make_entry(name, call, [*TRUNK, 3, 3, 60], [7, 8])
        store.put_now(entry)
        added[call, 0] = fingerprint(entry)
    bench.one.put_now(entry)
    with bench.other.freeze_now(name) as snapshot:
        broken += [f"freeze: {what}" for what in check(snapshot, golden, verdict, added)]
        version = snapshot.version
    bench.one.settle_call_now(name, "late", "aborted")
    verdict.expected.outcomes["late"] = "aborted"
    with bench.one.freeze_now(name) as snapshot:
        broken += [f"late: {what}" for what in check(snapshot, golden, verdict, added)]
    return broken + _retire(bench, snapshot, version)


def _live_frozen(bench: Bench, golden: Golden, verdict: Verdict) -> Broken:
    name = golden.rollout_id
    with bench.one.freeze_now(name) as snapshot:
        broken = [f"freeze: {what}" for what in check(snapshot, golden, verdict)]
        version = snapshot.version
    try:
        bench.one.put_now(make_entry(name, "after", TRUNK, [7]))
        broken.append("a put after the freeze")
    except FrozenError:
        pass
    bench.other.settle_call_now(name, "late-2", "aborted")
    verdict.expected.outcomes["late-2"] = "aborted"
    with bench.one.freeze_now(name) as snapshot:
        broken += [f"late: {what}" for what in check(snapshot, golden, verdict)]
    return broken + _retire(bench, snapshot, version)


def _retire(bench: Bench, snapshot: Snapshot, earlier: int) -> Broken:
    name, identity = snapshot.rollout_id, snapshot.snapshot_id
    broken: Broken = []
    if bench.other.retire_now(name, snapshot_id=identity, version=earlier):
        broken.append("retired by a stale version")
    if not bench.one.retire_now(name, snapshot_id=identity, version=snapshot.version):
        broken.append("not retired")
    if bench.other.stat_now(name).state != "retired":
        broken.append("not retired for others")
    return broken


def live_through(golden: Golden, rest: Tree, cases: list[Case], *, later_boot: bool) -> Broken:
    """Each case on a fresh copy of the rollout; what is broken, in words."""
    broken: Broken = []
    with Bench(rest, later_boot=later_boot) as bench:
        for case in cases:
            data = golden.tree[case.path]
            cut = case.bit is None
            bench.restore(golden.tree | {case.path: data[: case.at] if cut else flipped(data, case.at, case.bit or 0)})
            what = "cut" if cut else f"bit {case.bit} flipped"
            where = f"{case.path}: {what} at {case.at}{', later boot' if later_boot else ''}"
            if cut:
                verdict = verdict_of_cut(golden, case.path, case.at, later_boot=later_boot)
            else:
                verdict = verdict_of_flip(golden, case.path, case.at)
            try:
                broken += [f"{where}: {found}" for found in live(bench, golden, verdict)]
            except Exception as error:
                broken.append(f"{where}: {type(error).__name__}: {error}")
    return broken
