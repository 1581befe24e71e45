"""Records whose checksum holds and that say what can't be: damage with file and offset, and no other record is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokcap.errors import CorruptError
from tokcap.store import FileStore
from tokcap.store.frame import Kind
from tokcap.store.records import DeliveryRecord, FinishRecord, SettleRecord, encode_record

from .damage import fingerprint, make_entry
from .proofs.fuzz_files import HOME, ROLLOUT, SEED, Framed, first_frame, laid_out, looker_of
from .proofs.fuzz_records import bodies_of_every_kind, manifest_tree

BODIES = bodies_of_every_kind()
ENTRY = BODIES[1][1]


def with_field(body: bytes, place: int, value: object, *, head: bool = False) -> bytes:
    fields = msgspec.msgpack.decode(body)
    (fields[0] if head else fields)[place] = value
    return msgspec.msgpack.encode(fields)


def tree_of(*frames: tuple[int, bytes]) -> dict[str, bytes]:
    laid = [first_frame(), *(Framed(kind, body, place) for place, (kind, body) in enumerate(frames, 1))]
    seal = Framed(Kind.SEAL, b"\x92\x01\x01", len(laid))
    return {f"{HOME}/000001.seg": laid_out([*laid, seal], SEED)}


UNSOUND: dict[str, tuple[int, bytes]] = {
    "outcome": (Kind.SETTLE, with_field(encode_record(SettleRecord("c", 1, "lost", "")), 2, "details")),
    "delivery": (Kind.DELIVERY, with_field(encode_record(DeliveryRecord("c0", 1, "no")), 2, "who knows")),
    "meta": (Kind.FINISH, encode_record(FinishRecord(1, 2.0, msgspec.Raw(b"\x93\x01\x02\x03")))),
    "half a digest": (Kind.BEGIN, with_field(BODIES[0][1], 8, b"d" * 17)),
    "digests that nobody has": (Kind.BEGIN, with_field(with_field(BODIES[0][1], 6, 1), 7, 2**62)),
    "ids that are not there": (Kind.ENTRY, with_field(ENTRY, 6, 2**40, head=True)),
    "less than no id": (Kind.ENTRY, with_field(ENTRY, 7, -1, head=True)),
    "a type of ids that there is not": (Kind.ENTRY, with_field(ENTRY, 8, 3, head=True)),
    "experts of a terabyte": (Kind.ENTRY, with_field(ENTRY, 11, ["|u1", [2**40]], head=True)),
    "experts that are objects": (Kind.ENTRY, with_field(ENTRY, 11, ["|O", [0]], head=True)),
    "nesting": (Kind.SETTLE, b"\x95\xa1c\x01\xa4lost\xa0" + b"\x91" * 5000 + b"\x01"),
}


@pytest.mark.parametrize("frame", UNSOUND.values(), ids=UNSOUND)
def test_what_can_not_be_is_damage_and_costs_no_other_record(frame: tuple[int, bytes]) -> None:
    with looker_of(tree_of(*BODIES[:2])).read(ROLLOUT) as intact:
        wanted = [fingerprint(entry) for entry in intact.entries]
    with looker_of(tree_of(*BODIES[:2], frame)).read(ROLLOUT) as snapshot:
        (damage,) = snapshot.damage
        assert "the checksum holds" in damage.reason and damage.path.endswith("000001.seg") and damage.offset > 0
        assert [fingerprint(entry) for entry in snapshot.entries] == wanted
        assert snapshot.incomplete and snapshot.meta == {}


@pytest.mark.parametrize("place", [12, 13], ids=["pieces", "contents"])
def test_contents_that_can_not_be_decoded_are_told_with_file_and_offset(place: int) -> None:
    unsound = with_field(with_field(ENTRY, 0, "c9", head=True), place, "nothing of the kind", head=True)
    with looker_of(tree_of(*BODIES[:2], (Kind.ENTRY, unsound))).read(ROLLOUT) as snapshot:
        sound, other = range(2)
        assert snapshot.entries[sound].model_call_id == "c0"
        with pytest.raises(CorruptError, match="holds") as raised:
            _ = snapshot.entries[other]
        assert raised.value.path.endswith("000001.seg")
        assert raised.value.offset > 0


def test_of_two_contents_one_that_can_not_be_decoded_is_no_conflict() -> None:
    unsound = with_field(ENTRY, 13, [], head=True)
    with looker_of(tree_of(*BODIES[:2], (Kind.ENTRY, unsound))).read(ROLLOUT) as snapshot:
        assert [entry.model_call_id for entry in snapshot.entries] == ["c0"]
        assert [call.outcome for call in snapshot.calls if call.model_call_id] == ["recorded"]
        assert len(snapshot.damage) == 1
    with looker_of(tree_of((Kind.ENTRY, unsound), (Kind.ENTRY, unsound))).read(ROLLOUT) as snapshot:
        assert len(snapshot.entries) == 0
        assert [call.outcome for call in snapshot.calls if call.model_call_id] == ["lost"]


@pytest.mark.parametrize(
    ("place", "value"),
    [(7, b"odd"), (7, b"\xff" * 72), (8, [7]), (8, [-1]), (6, [[1, 2**40, 5]]), (6, [[-1, 5, 5]]), (12, b"\xff")],
)
def test_manifest_that_says_what_can_not_be_is_made_again(place: int, value: Any) -> None:
    def change(fields: list[Any]) -> list[Any]:
        fields[place] = value
        return fields

    with looker_of(manifest_tree(lambda fields: fields)).read(ROLLOUT) as intact:
        wanted = [fingerprint(entry) for entry in intact.entries]
    with looker_of(manifest_tree(change)).read(ROLLOUT) as snapshot:
        assert [fingerprint(entry) for entry in snapshot.entries] == wanted
        assert len(wanted) == 2


def test_what_is_intact_is_no_damage_for_a_reader_whose_stack_is_nearly_full(store_dir: Path) -> None:
    nested: Any = "x"
    for _ in range(150):
        nested = [nested]
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(make_entry("r", "c", [1], [2], extra={"deep": nested}))

    def deep(levels: int) -> int:
        if levels:
            return deep(levels - 1)
        with FileStore(store_dir, read_only=True).read_now("r") as snapshot:
            return len(snapshot.damage)

    tried = 0
    for levels in range(0, sys.getrecursionlimit(), 20):
        try:
            assert deep(levels) == 0
            tried += 1
        except RecursionError:
            break
    assert tried > 10


def test_name_that_is_written_otherwise_than_a_store_writes_it_is_no_segment(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(make_entry("r", "c", [1], [2]))
        (folder,) = store_dir.glob("rollouts/*/r/*")
        for name in ("0000002.seg", "0900001.torn", "note-0000001"):
            (folder / name).write_bytes(b"")
        store.put_now(make_entry("r", "d", [1], [3]))
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(make_entry("r", "e", [1], [4]))
        with store.freeze_now("r") as snapshot:
            assert {entry.model_call_id for entry in snapshot.entries} == {"c", "d", "e"}
            assert not snapshot.damage


def test_nothing_is_acknowledged_in_a_segment_whose_name_nobody_would_read(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(make_entry("r", "c", [1], [2]))
    (folder,) = store_dir.glob("rollouts/*/r/*")
    (folder / "999999999.seg").write_bytes(b"")
    with FileStore(store_dir, sweep_every_s=0) as store:
        with pytest.raises(CorruptError, match="last number"):
            store.put_now(make_entry("r", "d", [1], [3]))
        with store.freeze_now("r") as snapshot:
            assert [entry.model_call_id for entry in snapshot.entries] == ["c"]
            assert 0 < len(snapshot.damage) < 200
