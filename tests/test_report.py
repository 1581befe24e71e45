"""What goes into the report: the right tokens, bounded, and nothing that a browser could take for anything else."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import stat
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.looked_at_stores import recorded_store
from tests.report_examples import CORPUS, MODEL, assorted_store, hostile_store, large_store
from tokcap import FileStore, TokenEntry, build
from tokcap.command import main
from tokcap.inspection import open_to_look, row_of, view_of
from tokcap.report import contents_of, page_of, report
from tokcap.report.page import SCRIPTS, script

PAGE = Path(report.__code__.co_filename).parent / "page"
VERDICTS = {
    "a": "trained",
    "b": "abandoned",
    "c": "trained",
    "d": "trained",
    "e": "trained",
    "cut": "aborted",
    "gone": "",
    "refused": "",
    "several": "trained",
    "several#": "trained",
}
TYPES = {"int32": np.int32, "float32": np.float32, "float64": np.float64, "uint8": np.uint8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


@pytest.fixture(scope="module")
def assorted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assorted_store(tmp_path_factory.mktemp("assorted") / "store")


class _Elements(HTMLParser):
    """The elements of a page, and the text of each script and style."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._name = ""
        self.feed(page.decode("ascii"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self._name = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._name = ""

    def handle_data(self, data: str) -> None:
        if self._name:
            self.texts[self._name] = self.texts.get(self._name, "") + data


def _data(page: bytes) -> tuple[dict[str, Any], _Elements]:
    elements = _Elements(page)
    data: dict[str, Any] = json.loads(elements.texts["data"])
    return data, elements


def _array(elements: _Elements, name: str, number: int) -> np.ndarray[Any, Any]:
    told = next(attributes for _, attributes in elements.attributes if attributes.get("id") == f"{name}-{number}")
    encoded = elements.texts.get(f"{name}-{number}", "")
    dtype = told["data-dtype"]
    assert dtype is not None
    return np.frombuffer(base64.b64decode(encoded), TYPES[dtype])


def _sequence(elements: _Elements, number: int, vertex: int) -> list[int]:
    """As the script of the page does it."""
    parents, starts, ids = (_array(elements, name, number) for name in ("parents", "starts", "ids"))
    way: list[int] = []
    while vertex > 0:
        way.append(vertex)
        vertex = int(parents[vertex])
    return [int(token) for one in reversed(way) for token in ids[starts[one] : starts[one + 1]]]


def test_the_page_holds_every_id_log_prob_and_mask_of_every_call(recorded: Path, assorted: Path) -> None:
    compared = 0
    for directory in (recorded, assorted):
        store = open_to_look(directory)
        data, elements = _data(report(store))
        for number, facts in enumerate(data["rollouts"]):
            if not facts["calls"]:
                continue
            with store.read_now(facts["id"]) as snapshot:
                view = view_of(snapshot)
                entries = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
            log_probs = _array(elements, "logProbs", number)
            mask = np.unpackbits(_array(elements, "mask", number), bitorder="little").astype(bool)
            for call in facts["calls"]:
                if "first" not in call:
                    assert (call["id"], call["choice"]) not in entries
                    continue
                entry = entries.pop((call["id"], call["choice"]))
                assert _sequence(elements, number, call["promptVertex"]) == entry.prompt_token_ids.tolist()
                both = [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]
                assert _sequence(elements, number, call["endVertex"]) == both
                here = slice(call["first"], call["first"] + call["sampled"])
                assert np.array_equal(log_probs[here], entry.generation_log_probs, equal_nan=True)
                assert np.array_equal(mask[here], view.loss_mask((call["id"], call["choice"])))
                compared += call["sampled"]
            assert not entries
    assert compared > 6000


def test_the_masks_of_all_trajectories_add_up_to_what_is_trained(recorded: Path) -> None:
    store = open_to_look(recorded)
    data, _ = _data(report(store))
    for facts in data["rollouts"]:
        with store.read_now(facts["id"]) as snapshot:
            built = build(snapshot)
        assert [one["length"] for one in facts["trajectories"]] == [len(one) for one in built.trajectories]
        assert sum(one["trained"] for one in facts["trajectories"]) == facts["metrics"].get("trained", 0)
        owned = [place for one in facts["trajectories"] for place in one["owned"]]
        assert len(owned) == len(set(owned))
        assert sum(facts["calls"][place]["trained"] for place in owned) == facts["metrics"].get("trained", 0)


def test_shared_prefixes_are_in_the_page_once(recorded: Path) -> None:
    store = open_to_look(recorded)
    data, elements = _data(report(store, ["long-1"]))
    metrics = data["rollouts"][0]["metrics"]
    assert len(_array(elements, "ids", 0)) == data["rollouts"][0]["distinct"] == metrics["distinct_ids"]
    assert metrics["total_ids"] > 5 * metrics["distinct_ids"]


def test_log_probs_that_float32_would_round_are_kept_whole(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(TokenEntry("exact", "c", [1], [2, 3], [-0.1, -1 / 3]))
        store.put_now(TokenEntry("narrow", "c", [1], [2, 3], [-0.5, -0.25]))
    data, elements = _data(report(open_to_look(store_dir), ["exact", "narrow"]))
    assert [facts["id"] for facts in data["rollouts"]] == ["exact", "narrow"]
    assert _array(elements, "logProbs", 0).tolist() == [-0.1, -1 / 3]
    assert _array(elements, "logProbs", 0).dtype == np.float64
    assert _array(elements, "logProbs", 1).dtype == np.float32


def test_the_text_of_an_id_comes_from_any_call_and_what_differs_stays_with_its_call(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        late = [b"a", b"", b"\xf0\x9f\x99\x82"]
        store.put_now(TokenEntry("r", "one", [8], [1, 2, 3], [-1.0] * 3, model=MODEL, pieces=late))
        store.put_now(TokenEntry("r", "two", [1, 2], [1, 4], [-1.0] * 2, model=MODEL, pieces=[b"b", b"\xff"]))
        store.put_now(TokenEntry("r", "else", [1], [1], [-1.0], model="other", pieces=[b"z" * 1000]))
    data, _ = _data(report(open_to_look(store_dir), ["r"]))
    known = {model: dict(zip(ids, texts, strict=True)) for model, ids, texts in data["vocabulary"]}
    pieces = {call["id"]: dict(call.get("pieces", ())) for call in data["rollouts"][0]["calls"]}
    assert known[MODEL] == {4: "\\xff"}  # two calls disagree on 1; of 2 and 3 none has the bytes by itself
    assert pieces == {"one": {0: "a", 1: "", 2: "\N{SLIGHTLY SMILING FACE}"}, "two": {0: "b"}, "else": {}}
    assert known["other"][1].startswith("z" * 200 + "\N{HORIZONTAL ELLIPSIS} (1,000")


def test_nothing_that_a_record_says_is_markup(tmp_path: Path) -> None:
    store = open_to_look(hostile_store(tmp_path / "store"))
    page = report(store, title="</title><script>window.ran=20</script>{{data}}")
    data, elements = _data(page)
    assert page.isascii()
    ours = ["html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "p"]
    assert elements.tags[: len(ours)] == ours
    assert set(elements.tags[len(ours) :]) == {"script"}
    inert = {"application/json", "application/octet-stream;base64"}
    kinds = [attributes.get("type") for tag, attributes in elements.attributes if tag == "script"]
    assert set(kinds[:-1]) <= inert and kinds[-1] is None
    assert b"window.ran=20</script>" not in page
    assert page.count(b"</script") == elements.tags.count("script")
    body = elements.texts["data"]
    assert not set(body) & set("<>&")
    assert elements.texts["title"] == "</title><script>window.ran=20</script>{{data}}"
    hostile = data["rollouts"][[one["id"] for one in data["rollouts"]].index("hostile")]
    recorded = [call for call in hostile["calls"] if "first" in call]
    assert [call["finish"] for call in recorded] == list(CORPUS)
    assert max(map(len, (call.get("items", "") for call in recorded))) < 5000
    assert len(page) < 2_000_000


def test_the_only_script_and_style_are_named_by_their_hashes(assorted: Path) -> None:
    _, elements = _data(report(open_to_look(assorted)))
    policy = next(told["content"] for tag, told in elements.attributes if "http-equiv" in told)
    assert policy is not None
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert "unsafe" not in policy and "http" not in policy


def test_the_script_writes_no_markup_and_every_module_is_in_the_page() -> None:
    assert {path.name for path in PAGE.glob("*.js")} == set(SCRIPTS)
    for path in PAGE.glob("*.js"):
        code = path.read_text("ascii")
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch("):
            assert forbidden not in code, (path.name, forbidden)


def test_no_list_becomes_the_arguments_of_one_call() -> None:
    """Browsers take some 65,000 to 120,000 of them, and a store has more rollouts than that."""
    assert re.findall(r"Math\.(?:max|min)\([^;]*?\.\.\.[^;]*", script()) == []


def test_what_is_wrong_is_said_and_stops_nothing_else(assorted: Path) -> None:
    data, _ = _data(report(open_to_look(assorted), ["damaged", "open", "gone", "empty", "never-there", "mixed"]))
    told = {facts["id"]: facts for facts in data["rollouts"]}
    assert list(told) == ["damaged", "open", "gone", "empty", "never-there", "mixed"]
    assert told["damaged"]["damage"] and ": bytes " in told["damaged"]["damage"][0]
    assert [call["outcome"] for call in told["damaged"]["calls"]].count("lost") >= 1
    assert told["open"]["version"] == 0 and {call["outcome"] for call in told["open"]["calls"]} == {"open", "recorded"}
    assert (told["gone"]["state"], told["gone"]["version"], len(told["gone"]["snapshot"])) == ("retired", 1, 32)
    assert any("after" in note for note in told["gone"]["lateNotes"])
    assert told["empty"]["calls"] == [] and told["empty"]["reasons"] == ["nothing_recorded"]
    assert told["never-there"]["state"] == "absent"
    assert {call["id"] + "#" * call["choice"]: call["verdict"] for call in told["mixed"]["calls"]} == VERDICTS


def test_every_call_is_in_the_tree_once(recorded: Path, assorted: Path) -> None:
    for directory in (recorded, assorted):
        data, _ = _data(report(open_to_look(directory)))
        for facts in data["rollouts"]:
            if facts["calls"]:
                assert sorted(place for place, _, _ in facts["tree"]) == list(range(len(facts["calls"])))


def test_an_empty_store_makes_a_page(store_dir: Path) -> None:
    with FileStore(store_dir):
        pass
    data, _ = _data(report(open_to_look(store_dir)))
    assert data["table"] == [] and data["rollouts"] == [] and data["totals"]["rollouts"] == 0


def test_tokens_beyond_the_bound_are_left_out_and_it_is_said(recorded: Path) -> None:
    store = open_to_look(recorded)
    rows = [row_of(store, rollout_id) for rollout_id, _ in store.rollouts()]
    contents = contents_of(store, rows, max_tokens=4000)
    assert 0 < contents.with_tokens < 25 and contents.tokens <= 4000
    assert all(facts["calls"] for facts in contents.rollouts), "what doesn't fit has a row and nothing else"
    data, elements = _data(page_of(contents, title="t"))
    assert len(data["table"]) == 25
    place = data["columns"].index("page")
    assert {row[place] for row in data["table"]} == {None, *range(len(contents.rollouts))}
    wrong = {row.rollout_id for row in rows if row.reasons or row.incomplete or row.metric("drifted_calls")}
    assert {facts["id"] for facts in data["rollouts"]} <= wrong
    alone = contents_of(store, [row_of(store, "long-1")], max_tokens=100)
    assert alone.with_tokens == 0 and alone.rollouts[0]["tokensLeftOut"]
    assert len(alone.rollouts[0]["calls"]) == 30 and alone.rollouts[0]["distinct"] == 2211
    assert not any(name.get("id") == "ids-0" for _, name in _data(page_of(alone, title="t"))[1].attributes)
    assert len(elements.attributes) > 10


def test_the_totals_are_those_of_the_rollouts(recorded: Path) -> None:
    store = open_to_look(recorded)
    data, _ = _data(report(store))
    built = []
    for rollout_id, _ in store.rollouts():
        with store.read_now(rollout_id) as snapshot:
            built.append(build(snapshot))
    totals = data["totals"]
    assert totals["sampled"] == sum(one.metrics["sampled"] for one in built) == sum(dict(totals["categories"]).values())
    assert totals["trained"] == sum(one.metrics["trained"] for one in built)
    assert totals["drifted"] == sum(one.metrics["drifted_calls"] for one in built)
    assert sum(totals["logProbs"]) == sum(
        int((~np.isnan(call.generation_log_probs)).sum()) for one in built for call in one.recorded.calls
    )


# ---- the verb


def test_the_verb_writes_a_page_that_only_its_owner_reads(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    assert main(["report", "long-1", "edges-*", "--dir", str(recorded), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(out) and told["bytes"] == out.stat().st_size
    assert (told["rollouts"], told["shown"], told["with_tokens"]) == (2, 2, 2)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert {facts["id"] for facts in _data(out.read_bytes())[0]["rollouts"]} == {"long-1", "edges-0"}
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["page.html"]


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.html").write_text("the old one")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tokcap.cli.reporting.os.replace", refuse)
    assert main(["report", "long-1", "--dir", str(recorded), "--out", str(tmp_path / "page.html")]) == 4
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["page.html"]


def test_the_verb_writes_into_what_is_there_and_is_no_file(recorded: Path, tmp_path: Path) -> None:
    """As root, a page for /dev/null would otherwise take its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert main(["report", "long-1", "--dir", str(recorded), "--out", str(pipe)]) == 0
    reader.join(10)
    assert pipe.is_fifo() and read[0].startswith(b"<!doctype html>")


def test_the_verb_says_what_is_not_there_and_what_is_left_out(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "page.html")
    assert main(["report", "long-2", "--dir", str(recorded), "--out", out]) == 3
    assert "long-1" in capsys.readouterr().err
    assert main(["report", "nothing-*", "--dir", str(recorded), "--out", out]) == 1
    assert main(["report", "--dir", str(tmp_path / "no"), "--out", out]) == 3
    assert not os.path.exists(out)
    capsys.readouterr()
    assert main(["report", "--dir", str(recorded), "--out", out, "--max-tokens", "3000"]) == 0
    told = capsys.readouterr()
    assert re.search(r"\d+ of 25 rollouts have only a row", told.err) and "--max-tokens" in told.err
    assert "25 rollouts" in told.out


def test_a_page_of_200_000_tokens_is_small(tmp_path: Path) -> None:
    page = report(open_to_look(large_store(tmp_path / "store")), ["large"])
    data, _ = _data(page)
    assert data["rollouts"][0]["distinct"] == 200_000
    assert len(page) < 5_000_000


# ---- colours


def _themes() -> dict[str, dict[str, str]]:
    style = (PAGE / "report.css").read_text("ascii")
    blocks = re.findall(r':root(\[data-theme="dark"\])? \{(.*?)\n\}', style, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body)) for _, body in blocks)
    return {"light": light, "dark": light | dark}


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


COLOURED = ("accent", "good", "warn", "bad", "drift")
TEXTS = (
    *((ink, ground) for ink in ("ink", "muted", *COLOURED) for ground in ("panel", "ground", "sunk")),
    *((ink, f"{ink}-soft") for ink in COLOURED),
    *((ink, "accent-soft") for ink in ("ink", "muted")),
    ("ink", "warn-soft"),
    ("context-ink", "context"),
    ("trained", "panel"),
    ("untrained", "panel"),
    ("panel", "drift"),
    ("panel", "version"),
    ("panel", "ink"),
    *((f"step-ink-{step}", f"step-{step}") for step in range(8)),
)
MARKS = tuple((mark, "panel") for mark in ("trained", "untrained", "accent", "drift", "hatch", "elsewhere"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out_from_their_ground(theme: str) -> None:
    colours = _themes()[theme]
    weak = {pair: round(_contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in TEXTS}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
    marks = {pair: round(_contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in MARKS}
    assert {pair: ratio for pair, ratio in marks.items() if ratio < 3} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_colours_of_log_probs_are_told_apart_by_lightness_alone(theme: str) -> None:
    lightness = [_luminance(_themes()[theme][f"step-{step}"]) for step in range(8)]
    assert lightness == sorted(lightness, reverse=theme == "light")
    assert all(abs(one - other) > 0.005 for one, other in pairwise(lightness))
