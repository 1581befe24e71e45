"""`tokcap cat`: one call, id by id, as a table, as ids, as text, as bytes, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli_show import entry, run
from tokcap import FileStore, TokenEntry

PIECES = {2: b"Hel", 3: b"lo", 4: b" caf\xc3", 5: b"\xa9", 6: b"\n", 7: b"<end>"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A rollout whose second prompt holds the first answer; two choices; a lost call and an open one."""
    with FileStore(tmp_path / "store") as store:
        store.begin_call_now("r", "one", idempotency_key="key-1", retry_count=2, request_digests=[b"0" * 16, b"1" * 16])
        first = [2, 3, 4, 5, 7]
        log_probs = [-0.5, None, -1.0, 0.0, -2.0]
        told = [PIECES[token] for token in first]
        fields: dict[str, Any] = {
            "model": "m",
            "response_id": "resp-a",
            "finish_reason": "stop",
            "policy_versions": [("v7", 0, 5)],
        }
        fields |= {"sampling": {"temperature": 1.0}, "extra": {"k": "v"}, "output_items": [{"text": "x"}]}
        store.put_now(TokenEntry("r", "one", [1], first, log_probs, pieces=told, **fields))
        store.begin_call_now("r", "two", 2)
        for choice, token in enumerate((8, 6)):
            pieces = [PIECES[token]] if token in PIECES else None
            prompt = [1, *first, 99]
            store.put_now(entry("r", "two", prompt, [token], choice_index=choice, pieces=pieces, response_id="resp-b"))
        store.begin_call_now("r", "gone")
        store.settle_call_now("r", "gone", "lost", "the answer holds no token ids")
        store.begin_call_now("r", "waiting")
    return tmp_path / "store"


def test_ids_log_probs_mask_and_text_stand_side_by_side(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "cat", "r", "one", "--dir", store)
    assert (status, err) == (0, "")
    assert [line.split("\t") for line in out.splitlines() if "\t" in line] == [
        ["POSITION", "ID", "LOG-PROB", "P", "MASK", "TEXT"],
        ["0", "1", "", "", "prompt", ""],
        ["1", "2", "-0.5000", "0.6065", "trained", "'Hel'"],
        ["2", "3", "unknown", "", "-", "'lo'"],
        ["3", "4", "-1.0000", "0.3679", "trained", "' caf\\xc3'"],
        ["4", "5", "0.0000", "1.0000", "trained", "'\\xa9'"],
        ["5", "7", "-2.0000", "0.1353", "trained", "'<end>'"],
    ]
    for said in ("text         Hello café<end>", "policy       v7 (0..5)", 'sampling     {"temperature":1.0}',
                 'extra        {"k":"v"}', 'output       {"text":"x"}', "response     resp-a", "1 messages", "retry 2",
                 "idempotency key key-1", "trained 4 of 5: 1 with unknown log-probs"):  # fmt: skip
        assert said in out


def test_the_prompt_is_shown_from_its_end_or_whole_with_the_text_that_other_calls_tell(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(store) as writer:
        writer.put_now(entry("long", "one", list(range(100, 140)), [2]))
    out = run(capsys, "cat", "long", "one", "--dir", store)[1]
    assert "(the first 28 ids of the prompt are left out; --prompt)" in out
    assert "27\t127\t" not in out and "28\t128\t" in out
    assert "'Hel'" in out  # another rollout of the model told it
    out = run(capsys, "cat", "long", "one", "--prompt", "--dir", store)[1]
    assert "left out" not in out and "0\t100\t" in out
    out = run(capsys, "cat", "r", "two#1", "--prompt", "--text", "--dir", store)[1]
    assert out == "⟨1⟩Hello café<end>⟨99⟩\n\n"


def test_an_integer_of_thousands_of_digits_is_named_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge: Any = 10**5000
    with FileStore(tmp_path / "store") as store:
        store.put_now(
            TokenEntry(
                "r", "c", [1], [2], [-1.0], policy_versions=[(huge, 0, huge)], sampling={"n": huge}, extra={"n": [huge]}
            )
        )
    for arguments in (
        ["cat", "r", "c"],
        ["cat", "r", "c", "--json"],
        ["show", "r", "--json"],
        ["calls", "r", "--json"],
    ):
        status, out, err = run(capsys, *arguments, "--dir", tmp_path / "store")
        assert (status, err) == (0, "") and "int-" in out, arguments


def test_only_ids_text_or_bytes(store: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from tokcap.command import main

    def out(*options: str) -> tuple[int, bytes]:
        status = main(["cat", "r", "one", *options, "--dir", str(store)])
        return status, capfdbinary.readouterr().out

    assert out("--ids") == (0, b"2 3 4 5 7\n")
    assert out("--ids", "--prompt") == (0, b"1 2 3 4 5 7\n")
    assert out("--raw") == (0, "Hello café<end>".encode())
    assert out("--raw", "--prompt") == (1, b"")  # the bytes of id 1 are not known
    assert out("--text", "--ids")[0] == 2


def test_a_call_is_named_in_many_ways_and_several_are_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "on", "1", "#1", "resp-a", "one#0"):
        assert run(capsys, "cat", "r", name, "--ids", "--dir", store)[:2] == (0, "2 3 4 5 7\n")
    status, out, err = run(capsys, "cat", "r", "two", "--dir", store)
    assert (status, out) == (3, "") and "two#0, two#1" in err
    status, _, err = run(capsys, "cat", "r", "onee", "--dir", store)
    assert status == 3 and "did you mean one or gone?" in err
    status, _, err = run(capsys, "cat", "x", "one", "--dir", store)
    assert status == 3 and "there is no rollout x" in err


def test_of_a_call_without_ids_it_is_said_what_is_known(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "cat", "r", "gone", "--dir", store)
    assert status == 0 and "lost: the answer holds no token ids" in out and "took " in out
    status, out, _ = run(capsys, "cat", "r", "waiting", "--dir", store, "--json")
    assert status == 0 and json.loads(out)["outcome"] == "open"
    status, out, err = run(capsys, "cat", "r", "gone", "--ids", "--dir", store)
    assert (status, out) == (1, "") and "it is lost" in err


def test_json_holds_everything(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(run(capsys, "cat", "r", "one", "--json", "--dir", store)[1])
    assert told["prompt_token_ids"] == [1]
    assert told["generation_token_ids"] == [2, 3, 4, 5, 7]
    assert told["generation_log_probs"] == [-0.5, None, -1.0, 0.0, -2.0]
    assert told["loss_mask"] == [True, False, True, True, True]
    assert (told["text"], told["sampling"], told["extra"]) == ("Hello café<end>", {"temperature": 1.0}, {"k": "v"})
    assert (told["retry_count"], told["messages"], told["version"]) == (2, 1, 0)


def test_without_the_library_for_tokenizers_it_is_said_what_brings_it(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (store / "tokenizer.json").write_text("{}")
    for verb in (["cat", "r", "one"], ["show", "r"], ["drift"], ["diff", "r", "one", "two#0"]):
        status, out, err = run(capsys, *verb, "--tokenizer", store, "--dir", store)
        assert (status, out) == (2, "")
        assert 'pip install "tokcap[tokenizer]"' in err
