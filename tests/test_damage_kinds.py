"""What sort of damage was found: read from what a manifest keeps of it, in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage import TRUNK, make_entry
from tests.damage_by_hand import one
from tokcap.store import FileStore
from tokcap.store.ledger import RECORD_UNSOUND, SEGMENT_MISSING, Damage, segments_missing
from tokcap.verification import check


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (SEGMENT_MISSING, "missing"),
        (segments_missing(1_234_567), "missing"),
        (f"{RECORD_UNSOUND}: Expected `int`, got `str`", "record"),
        ("checksum mismatch, frame 3 and maybe others are lost", "bytes"),
        ("the end of the segment is missing", "bytes"),
        ("", "bytes"),
        # As manifests that are on disks by now say it.
        ("the segment file is missing", "missing"),
        ("the segment files up to 000123 are missing", "missing"),
        ("the checksum holds but the record doesn't: Input data was truncated", "record"),
    ],
)
def test_kind_of_damage_is_told_by_its_reason(reason: str, kind: str) -> None:
    assert Damage("somewhere", 0, 0, reason).kind == kind


def test_damage_has_on_disk_what_it_had() -> None:
    assert Damage.__struct_fields__ == ("path", "offset", "end", "reason")


@pytest.mark.parametrize("gap", [1, 2000])
def test_missing_segments_are_found_as_such_open_frozen_and_from_the_manifest(tmp_path: Path, gap: int) -> None:
    root = tmp_path / "store"
    with FileStore(root, sweep_every_s=0, segment_bytes=500) as store:
        for number in range(3):
            store.put_now(make_entry("a", f"c{number}", TRUNK, [5], output_items=[{"text": "x" * 300}]))
    one("rollouts/*/a/*/000002.seg", root).unlink()
    if gap > 1:
        last = one("rollouts/*/a/*/000003.*", root)
        last.rename(last.with_name(f"{gap:06d}.seg"))
    found = [finding for finding in check(root) if finding.kind == "missing"]
    assert found
    with FileStore(root, sweep_every_s=0) as store:
        store.freeze_now("a").close()
    assert [finding.what for finding in check(root) if finding.kind == "missing"] == [one.what for one in found]
