"""Directories of NeMo Gym 0.7's `TokenCaptureStore`, read without NeMo Gym.

| file of a rollout | what is in it |
|---|---|
| `<id>.tokens.jsonl` | a record a line, synced one by one; a torn last line was never acknowledged |
| `<id>.tokens.state.json` | frozen, retired, incomplete; the SHA-256 of each line by call id |
| `<id>.tokens.intents` | ids of calls that began |
| `<id>.tokens.incomplete` | ids of calls that were marked lost; an empty line is one unnamed |

What becomes of it:

- a record is stored as it is. What tokcap has no field for stands in `extra["nemo_gym"]`, and the parent call as the
  hint `extra["parent_call_id"]`, which the builder checks against the ids.
- a delta record (`prompt_is_delta`) holds only what its prompt adds to its parent: it is expanded, and its length and
  digest must then be those that were written with it (`cum_len`, `digest`). Those of whole records are checked, too.
- a record that can't be read, expanded or verified is a lost call with the reason; so is one that the state file knows
  and the file lacks, an intent without a record, and a mark without one. `incomplete` without any of these is one
  unnamed lost call.
- two different records of one call are a conflict.
- a rollout that is frozen there is frozen here, with an identity of its own (theirs stands in the meta if it is
  finished). One that is retired there has no records any more and is skipped.

Calls get no times: NeMo Gym stores none but the order of its records, which is kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from ..arrays import IdArray
from ..entry import TokenEntry
from ..errors import InvalidEntryError, InvalidIdError, StoreNotFoundError
from ..ids import check_model_call_id
from ..store import FileStore
from ..trajectory.recorded import PARENT_HINT
from .importing import Imported, ImportedRollout, Plan, PlannedCall, Told, import_plans

__all__ = ("import_nemo_gym", "lineage_digest")

RECORDS, STATE, INTENTS, MARKS = ".tokens.jsonl", ".tokens.state.json", ".tokens.intents", ".tokens.incomplete"
_ENDS = (RECORDS, STATE, INTENTS, MARKS)
_SCHEMA_VERSION = 1
_DIGEST_DOMAIN, _DIGEST_VERSION = b"nemo-gym-tokens", 1
_TRIES = 5
_META = "nemo_gym"


def import_nemo_gym(
    directory: str | os.PathLike[str],
    store: FileStore | str | os.PathLike[str],
    *,
    finish: bool = False,
    freeze: bool = False,
    group: str | int | None = None,
    told: Told | None = None,
) -> Imported:
    """Import every rollout of the directory; a repetition changes nothing, completes what was interrupted, and adds
    what has come since to a rollout that is still open.

    finish: note rollouts as finished, with their state there as meta. freeze: freeze all, also those that are open
    there. group: the Unix group that shares the store, as for `FileStore`. told: called for each rollout. A rollout of
    which the store has another content is in `refused` and changes nothing. Nothing is written into the directory,
    which may be in use. Raises `StoreNotFoundError` if it isn't there, and what `FileStore` raises. Memory: one rollout
    at a time, its prompts whole.
    """
    path = os.path.abspath(directory)
    if not os.path.isdir(path):
        raise StoreNotFoundError(2, "there is no such directory; check the path", path)
    found = {name.removesuffix(end) for name in os.listdir(path) for end in _ENDS if name.endswith(end)}
    if not found:
        raise StoreNotFoundError(2, "there are no *.tokens.jsonl of NeMo Gym in it; check the path", path)
    return import_plans(store, (_plan(path, rollout_id, finish, freeze) for rollout_id in sorted(found)), told, group)


class _Files(msgspec.Struct):
    """What the directory has of one rollout."""

    state: dict[str, Any]
    lines: list[bytes]
    intents: list[str]
    marks: list[str]


def _read(stem: str) -> _Files:
    """All files, at one moment: read again if the rollout was dropped meanwhile."""
    for _ in range(_TRIES):
        before = _content(stem + STATE)
        data = _content(stem + RECORDS)
        intents, marks = (_content(stem + end).decode("utf-8", "replace").splitlines() for end in (INTENTS, MARKS))
        if _content(stem + STATE) == before:
            break
    state = msgspec.json.decode(before, type=dict[str, Any]) if before else {}
    lines = data.split(b"\n")
    torn = lines.pop()  # it has no end, or is nothing
    if torn.strip() and _decoded(torn) is not None:
        lines.append(torn)
    return _Files(state, lines, [name.strip() for name in intents if name.strip()], [name.strip() for name in marks])


def _content(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would keep us waiting
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read()


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _plan(directory: str, rollout_id: str, finish: bool, freeze: bool) -> Plan | ImportedRollout:
    try:
        files = _read(os.path.join(directory, rollout_id))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return ImportedRollout(rollout_id, "refused", reason=f"its files can't be read: {error}")
    state = files.state
    if state.get("retired") is True:
        return ImportedRollout(rollout_id, "skipped", reason="it was consumed and retired there")
    reader = _Records(rollout_id, files)
    plan = Plan(rollout_id, reader.calls(), freeze=freeze or state.get("frozen") is True)
    if finish:
        known = ("snapshot_id", "version", "frozen", "incomplete")
        plan.meta = {_META: {name: state[name] for name in known if name in state}}
        plan.meta_key = _META
    return plan


class _Record(msgspec.Struct):
    """A line that could be read."""

    call_id: str
    fields: dict[str, Any]
    own_ids: IdArray
    """The prompt as stored."""
    generated: IdArray
    cumulative: IdArray | None = None
    """Prompt and answer, once expanded and verified."""
    problem: str = ""
    """Why there is no exact record of it."""


class _Records:
    """The records of one rollout, expanded and verified."""

    def __init__(self, rollout_id: str, files: _Files) -> None:
        self._rollout_id, self._files = rollout_id, files
        self._lost: dict[str, str] = {}
        self._nameless: dict[int, str] = {}
        """Lines that have no usable id, and why."""
        self._records: dict[str, list[_Record]] = defaultdict(list)
        digests = files.state.get("entry_digests")
        self._digests: dict[str, Any] = digests if isinstance(digests, dict) else {}
        seen: set[bytes] = set()
        for number, line in enumerate(files.lines, 1):
            payload = line.strip()
            if payload and payload not in seen:  # a repetition is none
                seen.add(payload)
                self._add(number, payload)

    def _add(self, number: int, payload: bytes) -> None:
        fields = _decoded(payload)
        if fields is None:
            self._nameless[number] = f"line {number} of {RECORDS} is no JSON; it has no id any more"
            return
        name = fields.get("model_call_id")
        try:
            call_id = check_model_call_id(name, rollout_id=self._rollout_id)
        except InvalidIdError as error:
            self._nameless[number] = f"line {number} of {RECORDS}: {error}"
            return
        try:
            prompt, generated = (_ids(fields, key) for key in ("prompt_token_ids", "generation_token_ids"))
            record = _Record(call_id, fields, prompt, generated)
            record.problem = self._problem(record, payload)
        except InvalidEntryError as error:
            empty = np.empty(0, np.int32)
            record = _Record(call_id, fields, empty, empty, problem=str(error))
        self._records[call_id].append(record)

    def _problem(self, record: _Record, payload: bytes) -> str:
        fields = record.fields
        if fields.get("rollout_id") != self._rollout_id:
            return f"the record says that it is of rollout {fields.get('rollout_id')!r}"
        version = fields.get("schema_version", _SCHEMA_VERSION)
        if version != _SCHEMA_VERSION:
            return f"its schema_version is {version!r}, and {_SCHEMA_VERSION} is known"
        if fields.get("prompt_is_delta") and not fields.get("parent_call_id"):
            return "it is a delta, and names no parent"
        told = self._digests.get(record.call_id)
        if isinstance(told, str) and len(self._records[record.call_id]) == 0:
            found = hashlib.sha256(payload).hexdigest()
            if found != told:
                return f"its SHA-256 is {found[:12]}..., and the state file says {told[:12]}...: it is damaged"
        return ""

    def calls(self) -> list[PlannedCall]:
        """Every call that anything is known of: those with records in their order, then the others."""
        calls = []
        for call_id, records in self._records.items():
            entries, problems = [], []
            for record in records:
                self._expand(record)
                if record.problem:
                    problems.append(record.problem)
                    continue
                try:
                    entries.append(self._entry(record))
                except InvalidEntryError as error:
                    record.problem = str(error)
                    problems.append(record.problem)
            if entries:
                calls.append(PlannedCall(call_id, entries))
            else:
                self._lost[call_id] = "; ".join(problems)
        self._add_missing()
        for number, why in self._nameless.items():
            name = f"line-{number}"
            while name in self._records or name in self._lost:  # a call may really be called so
                name += "-"
            self._lost[name] = why
        calls += [
            PlannedCall(call_id, settled="lost", detail=detail) for call_id, detail in self._lost.items() if call_id
        ]
        if "" in self._lost:
            calls.append(PlannedCall("", settled="lost", detail=self._lost[""]))
        return calls

    def _add_missing(self) -> None:
        """What was begun, indexed or marked, and has no record."""
        for names, why in (
            (self._digests, "the state file knows its record, and the file of records lacks it"),
            (self._files.intents, "it began, and has no record"),
            (self._files.marks, "it was marked incomplete"),
        ):
            for name in names:
                if name in self._records or name in self._lost:
                    continue
                try:
                    self._lost[check_model_call_id(name)] = why
                except InvalidIdError:
                    self._lost[""] = f"{why}; its id is {name!r}" if name else "a call without an id was marked"
        conflicts = any(len(records) > 1 for records in self._records.values())
        # A mark of a call whose record is there says nothing more.
        explained = (
            self._lost or self._nameless or conflicts or any(name in self._records for name in self._files.marks)
        )
        if self._files.state.get("incomplete") is True and not explained:
            self._lost[""] = "the rollout is marked incomplete, and nothing says why"

    def _expand(self, record: _Record) -> None:
        """Find the whole prompt. Parents first, without recursion: a chain may have thousands of calls."""
        waiting, on_the_way = [record], {id(record)}
        while waiting:
            last = waiting[-1]
            parents = self._parents(last)
            todo = [parent for parent in parents if parent.cumulative is None and not parent.problem]
            if todo and id(todo[0]) not in on_the_way:
                on_the_way.add(id(todo[0]))
                waiting.append(todo[0])
                continue
            waiting.pop()
            if last.cumulative is None and not last.problem:
                self._verify(last, parents, cyclic=bool(todo))

    def _parents(self, record: _Record) -> list[_Record]:
        if not record.fields.get("prompt_is_delta") or record.cumulative is not None or record.problem:
            return []
        return self._records.get(str(record.fields["parent_call_id"]), [])

    def _verify(self, record: _Record, parents: list[_Record], *, cyclic: bool) -> None:
        if not record.fields.get("prompt_is_delta"):
            candidates = [np.concatenate((record.own_ids, record.generated))]
        else:
            name = record.fields["parent_call_id"]
            usable = [parent.cumulative for parent in parents if parent.cumulative is not None]
            if not usable:
                state = "is its own ancestor" if cyclic else "has no exact record" if parents else "isn't there"
                record.problem = f"it is a delta, and its parent {name!r} {state}"
                return
            candidates = [np.concatenate((parent, record.own_ids, record.generated)) for parent in usable]
            if len(candidates) > 1 and not record.fields.get("digest"):
                record.problem = f"it is a delta of {name!r}, of which there are two, and has no digest"
                return
        problems = [_mismatch(record, ids) for ids in candidates]
        if "" in problems:
            record.cumulative = candidates[problems.index("")]
        else:
            record.problem = problems[0]

    def _entry(self, record: _Record) -> TokenEntry:
        fields, whole = dict(record.fields), record.cumulative
        assert whole is not None
        for name in ("rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids"):
            del fields[name]
        parent = fields.pop("parent_call_id", None)
        experts = _experts(fields)
        return TokenEntry(
            self._rollout_id,
            record.call_id,
            whole[: len(whole) - len(record.generated)],
            record.generated,
            fields.pop("generation_log_probs", None),
            routed_experts=experts,
            output_items=_taken(fields, "output_items", list, []),
            token_item_index=fields.pop("token_item_index", None),
            model=_taken(fields, "model", str, ""),
            response_id=_taken(fields, "response_id", str, ""),
            created_at=_taken(fields, "created_at", (int, float), 0.0),
            extra={**({} if parent is None else {PARENT_HINT: parent}), "nemo_gym": fields},
        )


def _taken(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """The value of a field, if it has the right type; else it stays where it is."""
    value = fields.get(name)
    if isinstance(value, kind) and not isinstance(value, bool):
        return fields.pop(name)
    if value is None:
        fields.pop(name, None)
    return default


def _experts(fields: dict[str, Any]) -> Any:
    """Routed experts as an array, if they are nested lists of numbers; anything else stays in `extra`."""
    value = fields.get("routed_experts")
    if value is None:
        fields.pop("routed_experts", None)
        return None
    try:
        array = np.array(value)
    except ValueError:
        return None
    if array.dtype.kind not in "iuf" or not array.ndim:
        return None
    del fields["routed_experts"]
    return array


def _ids(fields: dict[str, Any], name: str) -> IdArray:
    """A list of token ids. Raises `InvalidEntryError` unless it is one."""
    value = fields.get(name)
    whole = isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    if not whole:
        raise InvalidEntryError(f"its {name} are no list of token ids")
    ids: IdArray = np.array(value, np.int32)
    return ids


def _mismatch(record: _Record, ids: IdArray) -> str:
    """What of a whole sequence isn't as it was written; empty if all is."""
    length, digest = record.fields.get("cum_len"), record.fields.get("digest")
    if length is not None and length != len(ids):
        return f"it has {len(ids)} ids with its prompt, and cum_len says {length!r}"
    if digest and digest != lineage_digest(ids):
        return "the digest of its ids isn't the one that was written with them"
    return ""


def lineage_digest(token_ids: IdArray) -> str:
    """NeMo Gym's digest of a sequence: SHA-256 over a domain, a version, the length, and the ids as 64-bit numbers."""
    digest = hashlib.sha256(_DIGEST_DOMAIN)
    if len(token_ids):
        digest.update(bytes((_DIGEST_VERSION,)) + len(token_ids).to_bytes(8, "big"))
        digest.update(token_ids.astype(">u8").tobytes())
    return digest.hexdigest()
