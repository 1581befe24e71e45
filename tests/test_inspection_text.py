"""Where the bytes of ids come from, what they look like, and what of two calls or two stores differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_examples import Made, call, example, missing
from tokcap import FileStore, TokenEntry
from tokcap.errors import InvalidOptionError
from tokcap.inspection import RolloutView, open_to_look, view_of
from tokcap.inspection.difference import call_difference, rollout_difference, store_differences
from tokcap.inspection.drifts import DriftTotals, drifted_turns
from tokcap.inspection.text import KnownPieces, Texts, TokenizerBytes, joined, models_of, piece_texts, pieces_of_store

# ---- pieces


def test_pieces_are_known_by_model_and_an_id_with_two_is_not() -> None:
    known = KnownPieces()
    assert known.add("m", [1, 2, 3], [b"a", b"b", b"c"]) == 3
    assert known.add("m", [1, 2], [b"a", b"other"]) == 0
    known.add("n", [1, 3], [b"A", b"c"])
    assert [known.get(token, ("m",)) for token in (1, 2, 3, 4)] == [b"a", None, b"c", None]
    assert [known.get(token) for token in (1, 3)] == [None, b"c"]  # the models disagree; they agree
    known.add("m", [2], [b"b"])
    assert known.get(2, ("m",)) is None  # once in doubt, always
    assert len(known) == 4


def test_pieces_that_came_late_or_were_replaced_are_not_believed() -> None:
    known = KnownPieces()
    known.add("m", [1, 2, 3], [b"", "é".encode(), b"x"])
    known.add("m", [4], ["\N{REPLACEMENT CHARACTER}".encode()])
    known.add("m", [5, 6], [b"only one"])
    known.add("m", [7], None)
    assert [known.get(token) for token in range(1, 8)] == [None, None, b"x", None, None, None, None]


def test_characters_are_put_together_before_they_are_shown() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert joined([1, 2, 3], [b"caf", first, second]) == "café"
    assert joined([1, 2, 3], [first, None, second]) == "\\xc3⟨2⟩\\xa9"
    assert joined([], []) == ""
    assert piece_texts([first, None, b"a\x1b"]) == ["\\xc3", "", "a\x1b"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two rollouts of a model, which share ids, and one of another model."""
    with FileStore(tmp_path / "store") as store:
        for rollout, model, ids, pieces in (
            ("r-1", "m", [1, 2], [b"one", b" two"]),
            ("r-2", "m", [3], [b" three"]),
            ("r-3", "n", [1], [b"eins"]),
        ):
            store.put_now(TokenEntry(rollout, "c", [9], ids, [-0.5] * len(ids), model=model, pieces=pieces))
            store.freeze_now(rollout).close()
    return tmp_path / "store"


def test_pieces_of_a_whole_store_are_collected_and_what_cannot_be_read_is_left_out(directory: Path) -> None:
    (directory / "rollouts" / "00").mkdir(exist_ok=True)
    (directory / "rollouts" / "00" / "no id!").write_text("")
    known = pieces_of_store(open_to_look(directory), ["r-2", "absent"])
    assert [known.get(token, ("m",)) for token in (1, 2, 3)] == [b"one", b" two", b" three"]
    assert known.get(1, ("n",)) == b"eins"
    only = pieces_of_store(open_to_look(directory), ["r-2"], most=0)
    assert (only.get(3), only.get(1)) == (b" three", None)


def test_the_models_of_a_rollout_are_read_from_what_is_stored(directory: Path) -> None:
    with open_to_look(directory).read_now("r-3") as snapshot:
        assert models_of(snapshot) == {"n"}


# ---- tokenizers


def saved(path: Path, **parts: Any) -> Path:
    """A tokenizer of words that are taken as they are."""
    path.mkdir()
    told: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    told |= {"pre_tokenizer": None, "post_processor": None, "decoder": None} | parts
    (path / "tokenizer.json").write_text(json.dumps(told))
    return path


def bpe(*words: str) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": []}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def test_a_byte_level_tokenizer_tells_exact_bytes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    end = {"id": 4, "content": "<|end of it|>", **ADDED}
    path = saved(tmp_path / "t", model=bpe("Ġhi", "Ã", "©", "Ċ"), decoder=BYTE_LEVEL, added_tokens=[end])
    tokenizer = TokenizerBytes(path)
    assert not tokenizer.approximate
    assert [tokenizer(token) for token in range(5)] == [b" hi", b"\xc3", b"\xa9", b"\n", b"<|end of it|>"]
    assert [tokenizer(token) for token in (5, -1, 2**40)] == [None] * 3
    texts = Texts(tokenizer=TokenizerBytes(path / "tokenizer.json"))
    assert joined([0, 1, 2], texts.pieces([0, 1, 2])) == " hié"


def test_a_sentencepiece_tokenizer_tells_exact_bytes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokenizer = TokenizerBytes(saved(tmp_path / "t", model=bpe("▁hi", "<0xC3>", "<0xA9>", "<0xZZ>"), decoder=decoder))
    assert not tokenizer.approximate
    assert [tokenizer(token) for token in range(4)] == [b" hi", b"\xc3", b"\xa9", b"<0xZZ>"]


def test_another_tokenizer_is_approximate_and_recorded_pieces_outrank_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    words = {"type": "WordLevel", "vocab": {"hi": 0, "you": 1}, "unk_token": "hi"}
    tokenizer = TokenizerBytes(saved(tmp_path / "t", model=words))
    known = KnownPieces()
    known.add("m", [0], [b" hi"])
    texts = Texts(known, tokenizer)
    assert tokenizer.approximate and texts.approximate
    assert [texts.get(token, ("m",)) for token in (0, 1)] == [b" hi", b"you"]
    assert [texts.of(("m",))(token) for token in (0, 1)] == [b" hi", None]  # kinds of drift need exact bytes


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidOptionError, match=r"tokenizer\.json"):
        TokenizerBytes(tmp_path)


# ---- differences


def looked(*made: Made) -> RolloutView:
    return view_of(example(*made))


def test_the_first_id_that_differs_is_found_in_prompt_and_answer() -> None:
    view = looked(
        call("a", [1, 2, 3], [4, 5]), call("b", [1, 2, 3, 4], [6]), call("c", [1, 2, 3, 4], [5]), call("d", [1], [2])
    )
    found = {name: call_difference(view, ("a", 0), view, (name, 0)) for name in "abcd"}
    assert found["a"].kind == "equal"
    assert (found["b"].kind, found["b"].index, found["b"].lengths) == ("ids", 4, ((3, 2), (4, 1)))
    assert (found["c"].kind, found["c"].index) == ("cut", -1)
    assert (found["d"].kind, found["d"].index) == ("ids", 2)


def test_log_probs_and_contents_differ_by_themselves() -> None:
    one = looked(call("a", [1], [2, 3, 4], [-1.0, None, -2.0]))

    def against(log_probs: list[float | None], **fields: Any) -> Any:
        return call_difference(one, ("a", 0), looked(call("a", [1], [2, 3, 4], log_probs, **fields)), ("a", 0))

    assert against([-1.0, None, -2.0]).kind == "equal"
    found = against([-1.25, None, -3.0])
    assert (found.kind, found.log_probs_differ, found.index, found.largest) == ("log_probs", 2, 3, 1.0)
    found = against([-1.0, -5.0, -2.0])
    assert (found.kind, found.log_probs_differ, found.index, found.largest) == ("log_probs", 1, 2, 0.0)
    found = against([-1.0, None, -2.0], response_id="x", extra={"k": (1, 2)})
    assert (found.kind, found.fields) == ("contents", ("extra", "response_id"))


def test_rollouts_are_paired_by_call_ids_else_by_order() -> None:
    one = looked(call("a", [1], [2], begun=0, ended=1), call("b", [5], [6], begun=2, ended=3), missing("c", begun=4))
    same_names = looked(call("b", [5], [6], begun=0, ended=1), missing("a", begun=2, ended=3))
    found = rollout_difference(one, same_names)
    assert found.by_name and not found.equal
    assert [(each.one, each.kind) for each in found.calls] == [
        (("a", 0), "missing"), (("b", 0), "equal"), (("c", 0), "missing"),
    ]  # fmt: skip
    assert found.first is not None and found.first.one == ("a", 0)
    other_names = looked(call("x", [1], [2], begun=0, ended=1), call("y", [5], [7], begun=2, ended=3))
    found = rollout_difference(one, other_names)
    assert not found.by_name
    assert [(each.other, each.kind) for each in found.calls] == [
        (("x", 0), "equal"),
        (("y", 0), "ids"),
        (None, "missing"),
    ]


def test_a_copy_of_a_store_is_equal_until_something_in_it_changes(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    ids = ["r-1", "r-2", "r-3"]
    one, other = open_to_look(directory), open_to_look(tmp_path / "copy")
    assert [found.equal for found in store_differences(one, other, ids)] == [True] * 3
    with FileStore(tmp_path / "copy") as store:
        store.reset_now("r-1")
        with store.freeze_now("r-2") as snapshot:
            store.retire_now("r-2", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        store.mark_incomplete_now("r-3", "gone")
    found = {each.one: each for each in store_differences(one, other, ids)}
    assert not any(each.equal for each in found.values())
    assert found["r-1"].fields == ("state: frozen, absent",)
    assert found["r-2"].fields == ("state: frozen, retired",)
    assert found["r-3"].fields == ("incomplete",)


# ---- drift


def test_drifted_turns_are_counted_per_turn_that_had_something_to_extend() -> None:
    told = {3: b"y", 4: b"es", 5: b"yes", 6: b"!", 7: b"<end>"}
    given = example(
        call("a", [1, 2], [3, 4, 7], begun=0, ended=1),
        call("b", [1, 2, 5, 7, 8], [3, 4], begun=2, ended=3),
        call("c", [1, 2, 5, 7, 8, 3, 4, 8], [6], begun=4, ended=5),
        call("compacted", [1, 2, 5, 9], [6], begun=6, ended=7),
        call("other", [9], [6], begun=8, ended=9),
    )
    view = view_of(given, token_bytes=told)
    totals = DriftTotals()
    totals.add(view)
    assert (totals.turns, totals.drifted_calls, totals.restarted_calls, totals.drift_lost) == (2, 1, 1, 3)
    assert (totals.drift_rate, totals.kinds) == (0.5, {"retokenised": 1})
    (turn,) = drifted_turns(view, context=1)
    assert (turn.call, turn.nearest, turn.index, turn.kept, turn.lost) == (("b", 0), ("a", 0), 2, 0, 3)
    assert (turn.start, turn.before.tolist(), turn.after.tolist()) == (1, [2, 3], [2, 5])
    assert [turn.relation for turn in drifted_turns(view, restarted=True)] == ["drifted", "restarted"]
    assert DriftTotals().drift_rate is None
