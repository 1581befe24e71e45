"""`tokcap export` and `tokcap import` on the command line: what they say, where, and their exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import recordings
from tests.exported import read
from tests.nemo_gym_directory import unpacked
from tokcap import FileStore, TokenEntry
from tokcap.command import main

ROOT = Path(__file__).parent.parent
NAMES = ("linear-0", "linear-1", "token-in-0")


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A store with three frozen rollouts, a masked one, and an open one."""
    with FileStore(tmp_path / "store") as store:
        for name in NAMES:
            store.put_many_now(recordings.load(name).entries)
            store.freeze_now(name).close()
        store.put_now(TokenEntry("masked-1", "c", [1], [2], [None]))
        store.freeze_now("masked-1").close()
        store.put_now(TokenEntry("open-1", "c", [1], [2], [-0.5]))
    return str(tmp_path / "store")


def tree(directory: str) -> dict[str, Any]:
    return {
        os.path.join(where, name): os.lstat(os.path.join(where, name)).st_mtime_ns
        for where, directories, files in os.walk(directory)
        for name in (*directories, *files)
    }


def test_export_tells_what_it_did_and_what_it_left_out(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(directory)
    assert main(["export", "--dir", directory, "--to", str(tmp_path / "out.npz")]) == 0
    said = capsys.readouterr()
    count = len(read(tmp_path / "out.npz", "trajectory"))
    assert said.out.startswith(f"4 rollouts, {count} records, ")
    assert said.out.endswith(f"to {tmp_path}/out.npz\n")
    assert "left out: 1 open" in said.err
    assert "nothing of them is trained: 1" in said.err
    assert tree(directory) == before


def test_export_for_programs(directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "linear-*", "--dir", directory, "--to", str(tmp_path / "parts"), "--format", "parquet"]
    assert main([*arguments, "--json", "--by", "call", "--part-bytes", "1KB"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["rollouts"], told["by"], len(told["parts"])) == (2, "call", 2)
    assert sum(len(read(Path(part), "call")) for part in told["parts"]) == told["records"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--to", "out.jsonl"], 0),
        (["--to", "out.jsonl", "--strict"], 1),
        (["linear-0", "--to", "out.jsonl", "--strict"], 0),
        (["nobody-*", "--to", "out.jsonl"], 1),
        (["linear-9", "--to", "out.jsonl"], 3),
        (["--to", "parts"], 2),
        (["--to", "out.npz", "--part-bytes", "1KB"], 2),
        (["--to", "out.npz", "--part-bytes", "much"], 2),
        (["--to", "out.npz", "--format", "parquet"], 2),
        (["--to", "out.npz", "--by", "token"], 2),
        ([], 2),
    ],
)
def test_exit_statuses_of_export(
    arguments: list[str], status: int, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--dir", directory, *arguments]) == status
    appears = status < 2 and arguments[0] != "nobody-*"
    assert [path.name for path in tmp_path.glob("out.*")] == (["out.jsonl"] if appears else [])


def test_a_rollout_that_is_not_there_is_named_with_its_neighbours(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "linear-9", "--dir", directory, "--to", str(tmp_path / "out.npz")]) == 3
    assert "linear-0" in capsys.readouterr().err


def test_a_rollout_is_exported_by_name_though_another_one_is_damaged(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other,) = Path(directory).glob("rollouts/*/masked-1")
    shutil.rmtree(other)
    other.write_bytes(b"")
    arguments = ["export", "linear-0", "--dir", directory, "--to", str(tmp_path / "out.jsonl"), "--strict"]
    assert (main(arguments), capsys.readouterr().err) == (0, "")
    assert {record["rollout_id"] for record in read(tmp_path / "out.jsonl", "trajectory")} == {"linear-0"}


def test_reasons_name_files_without_their_directory(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for segment in Path(directory).glob("rollouts/*/linear-0/*/v1/*.seg"):
        data = bytearray(segment.read_bytes())
        data[data.index(recordings.load("linear-0").entries[0].response_id.encode())] ^= 1
        segment.write_bytes(data)
    assert main(["export", "linear-*", "--dir", directory, "--to", str(tmp_path / "out.jsonl")]) == 0
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "linear-0: " in line)
    assert ".seg" in said and directory not in said


def test_nothing_to_export_writes_nothing_and_says_so(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "nobody-*", "--dir", directory, "--to", str(tmp_path / "out.jsonl")]) == 1
    assert capsys.readouterr() == ("0 rollouts, 0 records, 0 B; nothing was written\n", "tokcap: nothing matches\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_changed_since_is_named_with_what_to_do(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", "--dir", directory, "--to", str(tmp_path / "parts"), "--format", "jsonl"]
    assert main(arguments) == 0
    with FileStore(directory) as store:
        store.mark_incomplete_now("linear-1", "late")
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "changed since it was exported: linear-1: it is in part-00000.jsonl; remove that file" in said.err
    assert "(4 rollouts there already)" in said.out
    assert main([*arguments, "--strict"]) == 1


@pytest.mark.parametrize(("library", "suffix"), [("pyarrow", "parquet"), ("safetensors", "safetensors")])
def test_a_library_that_is_missing_is_named_with_the_command(
    library: str, suffix: str, directory: str, tmp_path: Path
) -> None:
    script = (
        "import sys\nsys.modules[sys.argv[1]] = None\nfrom tokcap.command import main\nsys.exit(main(sys.argv[2:]))"
    )
    command = [
        sys.executable,
        "-c",
        script,
        library,
        "export",
        "--dir",
        directory,
        "--to",
        str(tmp_path / f"o.{suffix}"),
    ]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert f'{suffix} needs {library}: pip install "tokcap[export]"' in done.stderr
    assert not (tmp_path / f"o.{suffix}").exists()


def test_export_shows_a_bar_on_a_terminal_only(directory: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    at_once = "import sys; from tokcap.cli import progress; progress.BAR_AFTER_S = 0; "
    run = [sys.executable, "-c", at_once + "from tokcap.command import main; sys.exit(main())"]
    command = [*run, "export", "--dir", directory, "--to", str(tmp_path / "o.jsonl")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, env=environment, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # of the end
            while data := os.read(ours, 65536):
                shown += data
    finally:
        os.close(ours)
    assert done.returncode == 0
    assert b"exporting" in shown
    assert b"\x1b" not in done.stdout
    piped = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert b"exporting" not in piped.stderr
    assert b"\x1b" not in piped.stderr


def test_import_traffic_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(recordings.TRAFFIC / f"{name}.jsonl.gz") for name in ("linear-0", "edges-0")]
    arguments = ["import", "traffic", *files, "--dir", str(tmp_path / "new"), "--finish", "--freeze"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "2 rollouts imported, 0 unchanged, 2 of them frozen" in said.out
    assert "edges-0: call call-0003 is lost: the answer holds no token ids" in said.err
    assert main([*arguments, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(rollout["rollout_id"], rollout["status"]) for rollout in told] == [
        ("linear-0", "unchanged"),
        ("edges-0", "unchanged"),
    ]
    assert main(["ls", "--dir", str(tmp_path / "new"), "--json"]) == 0


def test_import_of_nemo_gym_refuses_what_is_there_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gym").mkdir()
    unpacked(tmp_path / "gym")
    with FileStore(tmp_path / "new") as store:
        store.put_now(TokenEntry("linear-1", "mine", [1], [2], [-0.5]))
    assert main(["import", "nemo-gym", str(tmp_path / "gym"), "--dir", str(tmp_path / "new")]) == 4
    said = capsys.readouterr()
    assert "refused: linear-1: it is here already, with another content of call mine" in said.err
    assert "skipped: linear-2: it was consumed and retired there" in said.err
    assert "4 rollouts imported" in said.out
    for path in list((tmp_path / "gym").iterdir()):
        if not path.name.startswith("linear-2."):
            path.unlink()
    assert main(["import", "nemo-gym", str(tmp_path / "gym"), "--dir", str(tmp_path / "new")]) == 1
    assert main(["import", "nemo-gym", str(tmp_path / "nowhere"), "--dir", str(tmp_path / "new")]) == 3
    assert main(["import", "traffic", str(tmp_path / "nowhere"), "--dir", str(tmp_path / "new")]) == 2


@pytest.mark.parametrize("verb", [["export"], ["import"], ["import", "nemo-gym"], ["import", "traffic"]])
def test_help_has_examples(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--help"]) == 0
    assert f"tokcap {' '.join(verb)} " in capsys.readouterr().out.split("Example")[1]


def test_imports_need_no_nemo_gym() -> None:
    script = (
        "import sys\nsys.modules['nemo_gym'] = None\nimport tokcap.transfer\n"
        "assert not {'pyarrow', 'safetensors', 'rich'} & set(sys.modules)"
    )
    assert importlib.util.find_spec("tokcap.transfer") is not None
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
