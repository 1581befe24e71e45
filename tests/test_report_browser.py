"""The report in a real browser: it draws the right tokens, nothing in a record runs, and it stays small and quick."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.looked_at_stores import recorded_store
from tests.report_examples import CORPUS, assorted_store, hostile_store, large_store
from tokcap import FileStore, TokenEntry
from tokcap.cli.output import safe
from tokcap.inspection import open_to_look, row_of, view_of
from tokcap.report import contents_of, page_of, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

CHROMIUM = shutil.which("chromium") or ""

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this machine"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="the package playwright is not installed"),
]

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]

WATCH = """
window.trouble = [];
document.addEventListener("securitypolicyviolation", (event) => window.trouble.push(event.violatedDirective));
window.addEventListener("error", (event) => window.trouble.push(event.message));
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longest = Math.max(window.longest || 0, task.duration);
}).observe({ type: "longtask", buffered: true });
"""

TOKENS = """(rollout) => JSON.stringify(
  Array.from({ length: tokcapReport.trajectories(rollout) }, (_, trajectory) =>
    tokcapReport.ids(rollout, { trajectory }).map((_, position) => {
      const token = tokcapReport.tokenAt(rollout, { trajectory }, position);
      return [token.id, token.trained, token.logProb];
    })))"""
"""Of every trajectory every token: [id, trained, log-prob]."""

CALLS = """(rollout) => JSON.stringify(
  tokcapReport.calls(rollout).map(([id, choice], call) => [id, choice, tokcapReport.ids(rollout, { call })]))"""
"""Of every call: [id, choice, ids of prompt and answer]."""

SCROLLED = """new Promise((done) => {
  const strip = document.querySelector(".strip"), before = tokcapReport.frames();
  let at = 0;
  const step = () => {
    strip.scrollTop = at++ * 400;
    requestAnimationFrame(at < 60 ? step : () => done(tokcapReport.frames() - before));
  };
  requestAnimationFrame(step);
})"""
"""Scrolls for 60 frames; how often the strip was drawn."""

DRAWN = """() => {
  const strip = document.querySelector(".strip-canvas"), copy = document.createElement("canvas"), found = new Set();
  copy.width = strip.width;
  copy.height = strip.height;
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(strip, 0, 0);
  const data = pen.getImageData(0, 0, copy.width, copy.height).data;
  for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
  return [...found];
}"""
"""The colours of the strip."""

ATTRIBUTES = """() =>
  [...document.querySelectorAll("*")].flatMap((one) => [...one.attributes].map((it) => it.name + "=" + it.value))"""

UNNAMED = """() => {
  const wrong = [], all = (selector) => [...document.querySelectorAll(selector)];
  const used = "button, input, select, a[href], [tabindex='0'], canvas[role], svg[role], [role=tree], [role=grid]";
  const name = (one) => one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") ||
    one.textContent.trim() || (one.labels && one.labels.length) || one.title;
  const ids = all("[id]").map((one) => one.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id twice");
  for (const one of all(used)) if (!name(one)) wrong.push("no name: " + one.outerHTML.slice(0, 120));
  for (const attribute of ["aria-labelledby", "aria-describedby", "aria-activedescendant"])
    for (const one of all("[" + attribute + "]"))
      if (!ids.includes(one.getAttribute(attribute))) wrong.push(attribute + " names nothing");
  for (const [inner, outer] of [["treeitem", "tree"], ["gridcell", "row"], ["columnheader", "row"], ["row", "grid"]])
    for (const one of all("[role=" + inner + "]"))
      if (!one.parentElement.closest("[role=" + outer + "]")) wrong.push(inner + " outside of " + outer);
  if (document.documentElement.lang !== "en" || !document.title) wrong.push("no language, no title");
  if (all("h1").length !== 1 || all("main").length !== 1) wrong.push("not one heading, not one main part");
  return wrong;
}"""
"""What a screen reader could not make sense of."""

Opener = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens a page from disk and watches it; at the end of the test nothing may have gone wrong in it."""
    contexts: list[Any] = []
    pages: list[Page] = []
    said: list[str] = []

    def dismissed(dialog: Dialog) -> None:
        said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_page(html: bytes, where: str = "", **options: Any) -> Page:
        options = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"} | options
        file = tmp_path / f"page-{len(pages)}.html"
        file.write_bytes(html)
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        pages.append(page)
        page.on("console", lambda message: said.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", dismissed)
        page.on("popup", lambda popup: said.append(f"popup: {popup.url}"))
        page.on("download", lambda download: said.append(f"download: {download.url}"))
        page.on("request", lambda request: None if request.url.startswith(file.as_uri()) else said.append(request.url))
        page.on("framenavigated", lambda frame: None if frame.url.startswith(file.as_uri()) else said.append(frame.url))
        page.add_init_script(WATCH)
        page.goto(file.as_uri() + where)
        page.wait_for_selector("#view > *")
        return page

    yield open_page
    for page in pages:
        said += page.evaluate("window.trouble")
        assert page.evaluate("window.ran") is None
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


@pytest.fixture(scope="module")
def assorted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assorted_store(tmp_path_factory.mktemp("assorted") / "store")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return report(open_to_look(large_store(tmp_path_factory.mktemp("large") / "store")), ["large"])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _settled(page: Page) -> None:
    """Two frames later: what was asked for is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _strip(page: Page) -> dict[str, str]:
    return dict(page.evaluate("({...document.querySelector('.strip').dataset})"))


def _text(page: Page, selector: str = "body") -> str:
    """All text that is in the document, seen or folded away; not that of scripts."""
    return str(page.evaluate("(selector) => document.querySelector(selector).innerText", selector))


# ---- the right tokens


def test_every_rollout_of_the_recorded_traffic_is_drawn_with_the_tokens_that_were_recorded(
    recorded: Path, opened: Opener
) -> None:
    store = open_to_look(recorded)
    page = opened(report(store))
    names = page.evaluate("tokcapReport.rollouts()")
    assert len(names) == 25
    for number, name in enumerate(names):
        page.evaluate("(number) => { location.hash = '#r' + number; }", number)
        page.wait_for_function("(name) => document.querySelector('h1').textContent === name", arg=name)
        with store.read_now(name) as snapshot:
            view = view_of(snapshot)
            built = view.build
        told = json.loads(page.evaluate(TOKENS, number))
        assert len(told) == len(built.trajectories)
        for trajectory, tokens in zip(built.trajectories, told, strict=True):
            assert [token[0] for token in tokens] == trajectory.token_ids.tolist()
            mask = trajectory.loss_mask
            assert [token[1] for token in tokens] == mask.tolist()
            log_probs = np.array([np.nan if token[2] is None else token[2] for token in tokens])
            assert np.array_equal(log_probs[mask], trajectory.log_probs[mask])
        for call, choice, ids in json.loads(page.evaluate(CALLS, number)):
            both = [*view.prompt_token_ids((call, choice)), *view.generation_token_ids((call, choice))]
            assert ids == list(map(int, both))


def test_the_keyboard_goes_from_token_to_token_and_says_what_it_is_at(assorted: Path, opened: Opener) -> None:
    store = open_to_look(assorted)
    page = opened(report(store, ["mixed"]))
    with store.read_now("mixed") as snapshot:
        trajectory = view_of(snapshot).build.trajectories[0]
    page.focus(".strip")
    page.keyboard.press("Home")
    assert _strip(page)["position"] == "0" and _strip(page)["id"] == str(trajectory.token_ids[0])
    moves = {"j": 1, "ArrowRight": 2, "k": 1, "ArrowLeft": 0, "a": 30, "End": len(trajectory) - 1}
    for key, position in moves.items():
        page.keyboard.press(key)
        assert int(_strip(page)["position"]) == position, key
        assert int(_strip(page)["id"]) == trajectory.token_ids[position]
    page.keyboard.press("Home")
    page.keyboard.press("u")
    told = _strip(page)
    assert told["category"] == "unknown" and told["logProb"] == "" and told["position"] == "32"
    assert "not trained" in _text(page, ".inspector") and "unknown" in _text(page, ".inspector")
    assert "position 32" in page.inner_text("#status")
    page.keyboard.press("k")
    assert (_strip(page)["text"], _strip(page)["logProb"], _strip(page)["call"]) == (" w2", "-0.05", "a")
    inspector = _text(page, ".inspector")
    assert "95.12%" in inspector and "v1" in inspector and "\N{MINUS SIGN}0.050" in inspector
    before = int(_strip(page)["position"])
    page.keyboard.press("ArrowDown")
    assert int(_strip(page)["position"]) > before


def test_a_pointer_over_a_token_and_a_click_on_it_tell_the_same(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted), ["mixed"]))
    page.focus(".strip")
    page.keyboard.press("Home")
    _settled(page)
    box = page.locator(".strip-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 6 + 24 + 12)  # the first token, below the first heading
    assert "id 100, position 0" in page.inner_text("#tip")
    page.mouse.click(box["x"] + 20 + 2 * 40, box["y"] + 6 + 24 + 12)
    token = page.evaluate("tokcapReport.focused()")
    assert 1 <= token["position"] < 6 and token["id"] == 100 + token["position"]
    assert f"id {token['id']}, position {token['position']}" in page.inner_text("#tip")


def test_search_finds_text_across_tokens_ids_and_calls(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted), ["mixed"]))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"

    def found(query: str) -> list[dict[str, int]]:
        page.fill("#search", query)
        page.keyboard.press("Enter")
        return list(page.evaluate("tokcapReport.found()"))

    assert found("w1 W2") == [] and page.inner_text(".found") == "no match"
    across = found("w1 w2 w")
    assert [(one["trajectory"], one["start"], one["end"]) for one in across] == [(0, 30, 33)]
    assert page.inner_text(".found") == "1 of 1" and _strip(page)["position"] == "30"
    # Two calls begin with id 5 at the same place: that is one place. Id 50 stands in the text of no token.
    assert [(one["start"], one["end"]) for one in found("#5")] == [(35, 36)] and _strip(page)["id"] == "5"
    assert [(one["start"], one["end"]) for one in found("50")] == [(34, 35)]
    assert len(found("w1")) == 5 and page.inner_text(".found") == "1 of 5"  # w1, w11 to w14
    page.keyboard.press("Enter")
    assert page.inner_text(".found") == "2 of 5" and _strip(page)["text"] == " w11"
    page.keyboard.press("Shift+Enter")
    assert page.inner_text(".found") == "1 of 5" and _strip(page)["text"] == " w1"
    # What stands twice in the text of one token, or is an id and its text, is one place.
    letters = found("w")
    assert len({(one["trajectory"], one["start"]) for one in letters if "start" in one}) == len(letters)
    assert any("call" in one for one in found("severa"))
    page.keyboard.press("Escape")
    assert page.evaluate("tokcapReport.found()") == []
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")


def test_a_drifted_prompt_is_shown_beside_what_was_sampled(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted), ["mixed"]))
    windows = page.locator(".drift .window")
    assert windows.count() == 2
    assert page.locator(".drift .chip.parts small, .drift .chip.parts").all_inner_texts()
    sampled, came_back = (windows.nth(place).locator(".chip.parts").get_attribute("title") for place in (0, 1))
    assert (sampled, came_back) == ("id 12, position 40", "id 99, position 40")
    page.click(".drift button.quiet")
    assert (_strip(page)["position"], _strip(page)["id"]) == ("40", "99")


def test_the_tree_moves_by_arrows_and_opens_the_tokens_of_a_call(recorded: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(recorded), ["retry-mid-0"]))
    levels = page.eval_on_selector_all(
        "[role=treeitem]", "all => all.map(one => [one.dataset.call, one.getAttribute('aria-level')])"
    )
    assert len(levels) == 7 and {level for _, level in levels} == {"1", "2"}
    page.focus(".tree")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    current = page.get_attribute(".tree [aria-selected=true]", "data-call")
    assert current == "2" and _strip(page)["call"] == "call-0002"
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute(".tree [aria-selected=true]", "data-call") == "0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # an abandoned answer has a trajectory of its own
    assert _strip(page)["call"] == "call-0001" and _strip(page)["category"] == "abandoned"


# ---- what is wrong is said


def test_damage_losses_tombstones_and_open_rollouts_are_said_in_words(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted)))
    assert page.locator(".table-row").count() == 6
    told = {}
    for number, name in enumerate(page.evaluate("tokcapReport.rollouts()")):
        page.evaluate("(number) => { location.hash = '#r' + number; }", number)
        page.wait_for_function("(name) => document.querySelector('h1').textContent === name", arg=name)
        told[name] = page.evaluate("document.querySelector('#view').textContent")
    assert "damaged" in told["damaged"] and ": bytes " in told["damaged"] and "is lost" in told["damaged"]
    assert "retired" in told["gone"] and "tombstone" in told["gone"] and "its server died" in told["gone"]
    assert "not frozen" in told["open"] and "1 call is still open" in told["open"]
    assert "nothing to train" in told["empty"] and "rollout_base_url" in told["empty"]
    assert "the client went away" in told["mixed"] and "the answer holds no token ids" in told["mixed"]
    assert "several models" in told["judged"] and "None of 4 sampled ids are trained: 4 other model." in told["judged"]


def test_the_plot_of_log_probs_counts_every_sampled_id_that_is_known(recorded: Path, opened: Opener) -> None:
    """Those of a call that says the same as another one, too, as the table of the store and `tokcap stats` do."""
    store = open_to_look(recorded)
    page = opened(report(store, ["edges-0", "linear-0"]))
    for number, name in enumerate(("edges-0", "linear-0")):
        page.evaluate("(number) => { location.hash = '#r' + number; }", number)
        page.wait_for_function("(name) => document.querySelector('h1').textContent === name", arg=name)
        row = row_of(store, name)
        told = page.get_attribute(".plot svg", "aria-label") or ""
        trained, others = (
            int(part.split()[-1].rstrip(".").replace(",", "")) for part in told.split(". ")[1].split(", ")
        )
        assert trained + others == sum(row.log_probs)
        assert trained == row.trained


def test_the_table_filters_sorts_and_opens_rollouts(recorded: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(recorded)))
    first = "document.querySelector('.table-row').dataset.rollout"
    page.click(".cell-sampled button")
    assert page.evaluate(first) == "long-1"
    page.click(".cell-sampled button")
    assert page.evaluate(first) == "edges-0"
    page.keyboard.press("/")
    page.keyboard.type("ambig")
    left = {row.get_attribute("data-rollout") for row in page.locator(".table-row").all()}
    assert left == {"edges-0", "retry-last-0", "retry-last-1"}
    assert page.inner_text(".table-bar [role=status]") == "3 of 25 rollouts"
    page.focus(".table")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tree")
    assert page.inner_text("h1") in ("edges-0", "retry-last-0", "retry-last-1")
    page.keyboard.press("g")
    page.wait_for_selector(".table")


def test_an_empty_store_says_so(store_dir: Path, opened: Opener) -> None:
    from tokcap import FileStore

    with FileStore(store_dir):
        pass
    page = opened(report(open_to_look(store_dir)))
    assert "There is no rollout in this store" in _text(page)


def test_coming_back_to_a_page_finds_it_scrolled_as_it_was(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted)), viewport={"width": 1440, "height": 500})
    mixed = f"#r{page.evaluate('tokcapReport.rollouts()').index('mixed')}"
    tops = "() => [window.scrollY, ...['.tree', '.strip'].map((one) => document.querySelector(one).scrollTop)]"
    page.evaluate("(where) => { location.hash = where; }", mixed)
    _settled(page)
    page.focus(".strip")
    page.keyboard.press("End")
    page.evaluate("() => { window.scrollTo(0, 300); document.querySelector('.tree').scrollTop = 30; }")
    before = page.evaluate(tops)
    assert before[0] == 300 and before[1] > 0
    page.evaluate("location.hash = '#all'")
    page.wait_for_selector(".table")
    assert page.evaluate("window.scrollY") == 0
    page.evaluate("(where) => { location.hash = where; }", mixed)
    _settled(page)
    assert page.evaluate(tops) == before


def test_names_from_records_are_shown_as_they_are_written(store_dir: Path, opened: Opener) -> None:
    names = ["__proto__", "constructor", "lost", "my_model_v2", "m" * 5000]
    with FileStore(store_dir) as store:
        for number, name in enumerate(names):
            store.put_now(
                TokenEntry(
                    f"r{number}", "c", [1], [2], [-1.0], model=name, policy_versions=[(name, 0, 1)], pieces=[b"word"]
                )
            )
    page = opened(report(open_to_look(store_dir)))
    told = page.evaluate("[...document.querySelectorAll('.legend li')].map((one) => [one.textContent, one.title])")
    for name in names[:4]:
        assert [title for text, title in told if text.startswith(f"{name}1")] == [name, name]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    page.evaluate("location.hash = '#r' + tokcapReport.rollouts().indexOf('r4')")
    page.wait_for_selector(".strip")
    _settled(page)
    assert page.inner_text(".piece-large") == "word"
    assert page.evaluate("document.documentElement.scrollHeight") < 3000


def test_where_nothing_is_stored_no_share_is_praised_and_no_plot_is_empty(store_dir: Path, opened: Opener) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("nothing", "c")
        store.settle_call_now("nothing", "c", "lost", "the answer holds no token ids")
    page = opened(report(open_to_look(store_dir), ["nothing"]))
    tiles = {one.split("\n")[0]: one.split("\n")[1:] for one in page.locator(".tile").all_inner_texts()}
    assert tiles["trained"] == ["\N{EN DASH}", "0 ids"] and tiles["lost or open"] == ["1", "of 1 call"]
    assert page.locator(".tile.good, .plot").count() == 0


def test_many_calls_at_once_make_no_tall_timeline(store_dir: Path, opened: Opener) -> None:
    with FileStore(store_dir) as store:
        for number in range(300):
            store.begin_call_now("many", f"c{number:03d}")
    page = opened(report(open_to_look(store_dir), ["many"]))
    assert "at most 300 at the same time" in _text(page)
    box = page.locator(".timeline").bounding_box()
    assert box is not None and box["height"] <= 280
    page.locator(".timeline").click(position={"x": box["width"] - 1, "y": 239.5})
    assert int(page.get_attribute(".tree [aria-selected=true]", "data-call") or 0) >= 295


def test_a_time_that_is_no_date_stops_nothing(store_dir: Path, opened: Opener) -> None:
    with FileStore(store_dir):
        pass
    contents = contents_of(open_to_look(store_dir), [])
    page = opened(page_of(contents, title="odd", made_at=1e300))
    assert "There is no rollout in this store" in _text(page)


def test_a_page_whose_script_may_not_run_says_so(assorted: Path, browser: Browser) -> None:
    html = report(open_to_look(assorted), ["mixed"])

    def told(policy: str) -> str:
        headers = {"content-type": "text/html", "content-security-policy": policy}
        page = browser.new_page()
        page.route("**/*", lambda route: route.fulfill(body=html, headers=headers))
        page.goto("http://reports.invalid/page.html")
        text = str(page.evaluate("document.body.innerText"))
        page.close()
        return text

    assert "open it from disk" in told("default-src 'none'")
    allowed = told("frame-ancestors 'none'")
    assert "open it from disk" not in allowed and "12 of 16 sampled ids are trained" in allowed


def test_what_is_not_in_the_page_is_said_with_the_way_to_get_it(recorded: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(recorded), max_tokens=4000))
    told = _text(page, "#view")
    assert "of 25 rollouts are in this page" in told and "tokcap report ROLLOUT" in told
    alone = opened(report(open_to_look(recorded), ["long-1"], max_tokens=100))
    assert "--max-tokens 2211" in _text(alone, "#view")
    assert alone.locator("[role=treeitem]").count() > 5


# ---- what a model wrote is hostile


def test_nothing_in_a_record_runs_and_all_of_it_is_shown_as_text(tmp_path: Path, opened: Opener) -> None:
    store = open_to_look(hostile_store(tmp_path / "store"))
    with store.read_now("hostile") as snapshot:
        said = {call.model_call_id: call.detail for call in snapshot.calls}
    page = opened(report(store, title=CORPUS[0]), "#all")
    assert page.title() == safe(CORPUS[0])
    overview = page.evaluate("document.querySelector('#view').textContent")
    assert safe(CORPUS[0]) in overview and "<img src=x onerror=window.ran=18>" in overview
    names = page.evaluate("tokcapReport.rollouts()")
    for number in range(len(names)):
        page.evaluate("(number) => { location.hash = '#r' + number; }", number)
        page.wait_for_function("(name) => document.querySelector('h1').textContent !== ''", arg=names[number])
    page.evaluate("(number) => { location.hash = '#r' + number; }", names.index("hostile"))
    page.wait_for_function("document.querySelector('h1').textContent === 'hostile'")
    calls = page.evaluate("(number) => tokcapReport.calls(number)", names.index("hostile"))
    for place, (call, _) in enumerate(calls):
        page.evaluate("(where) => { location.hash = where; }", f"#r{names.index('hostile')}c{place}")
        page.wait_for_function(f"document.querySelector('.call-details h3').textContent.startsWith('{call}')")
        text = CORPUS[int(call[-2:])]
        details = page.evaluate("document.querySelector('.call-details').textContent")
        if call.startswith("lost"):
            assert safe(said[call]) in details
            continue
        assert details.count(safe(text)) >= 3  # finish reason, response id, policy version
        assert page.evaluate("document.querySelector('.piece-large').textContent") == safe(
            text.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
        )
        page.focus(".strip")
        page.keyboard.press("j")
    for query in ("<script>", "javascript:", "${", "__proto__"):
        page.fill("#search", query)
        page.keyboard.press("Enter")
        assert len(page.evaluate("tokcapReport.found()")) >= 1, query
    page.mouse.move(600, 500)
    for mode in ("ids", "dense", "text"):
        page.check(f"input[value={mode}]", force=True)
        _settled(page)
    everything = page.evaluate("document.querySelector('#view').textContent")
    assert not any(ord(char) < 32 and char != "\n" for char in everything)
    assert not set(everything) & set("\u202e\u202c\u2066\u2069\u200b\ufeff\u2028\u2029")
    elements = set(page.evaluate("[...document.querySelectorAll('#view *')].map((one) => one.localName)"))
    assert not elements & {"script", "img", "iframe", "object", "embed", "base", "meta", "link", "style", "form"}
    attributes = page.evaluate(ATTRIBUTES)
    assert not [one for one in attributes if one.startswith(("on", "href=javascript", "src="))]


# ---- large, light and dark, accessible


def test_200_000_tokens_scroll_with_few_elements_and_short_tasks(large: bytes, opened: Opener) -> None:
    page = opened(large)
    _settled(page)
    assert page.evaluate("tokcapReport.ids(0, {trajectory: 0}).length") == 200_000
    elements = page.evaluate("document.querySelectorAll('*').length")
    page.evaluate("window.longest = 0")
    frames = page.evaluate(SCROLLED)
    assert frames >= 30
    assert page.evaluate("document.querySelectorAll('*').length") == elements < 1500
    rows = page.evaluate("document.querySelector('.strip').dataset.rows").split("-")
    assert 0 < int(rows[1]) - int(rows[0]) < 80
    assert page.evaluate("window.longest") < 5000
    page.focus(".strip")
    page.keyboard.press("End")
    assert _strip(page)["position"] == "199999"
    page.check("input[value=dense]", force=True)
    _settled(page)
    assert page.evaluate("document.querySelectorAll('*').length") < 1500
    page.fill("#search", "policy reward")
    page.keyboard.press("Enter")
    assert len(page.evaluate("tokcapReport.found()")) > 100
    page.fill("#search", "policy")
    page.keyboard.press("Enter")
    assert page.inner_text(".found") == "1 of 10,000+"


def test_light_and_dark_are_drawn_and_toggled(assorted: Path, opened: Opener) -> None:
    def colour(page: Page, name: str) -> str:
        value = page.evaluate(
            "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()", name
        )
        return ",".join(str(int(value[place : place + 2], 16)) for place in (1, 3, 5))

    html = report(open_to_look(assorted), ["mixed"])
    light, dark = opened(html), opened(html, color_scheme="dark", reduced_motion="reduce")
    drawn = {}
    for page in (light, dark):
        _settled(page)
        drawn[page] = set(page.evaluate(DRAWN))
        for name in ("--trained", "--step-0", "--step-7", "--context"):
            assert colour(page, name) in drawn[page], name
    assert colour(light, "--step-7") != colour(dark, "--step-7")
    dark.keyboard.press("t")
    _settled(dark)
    assert dark.evaluate("document.documentElement.dataset.theme") == "light"
    assert colour(dark, "--step-7") == colour(light, "--step-7") and colour(dark, "--step-7") in set(
        dark.evaluate(DRAWN)
    )


def test_where_the_system_chooses_the_colours_those_of_the_legends_stay(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted), ["mixed"]), forced_colors="active")
    _settled(page)
    ground = "(one) => getComputedStyle(document.querySelector(one)).backgroundColor"
    legend = [".swatch.c-trained", ".bar-part.c-1", ".dot.o-lost", ".step-5", ".line-mark.trained", ".swatch.o-aborted"]
    assert len({page.evaluate(ground, one) for one in legend}) == 6 - 1  # trained is blue in two of them
    style = "(one) => getComputedStyle(document.querySelector(one)).outlineStyle"
    assert {page.evaluate(style, one) for one in (".call.current", ".modes input:checked + span")} == {"solid"}


def test_everything_that_can_be_used_has_a_name_and_a_role(assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted)))
    assert page.evaluate(UNNAMED) == []
    for number in range(len(page.evaluate("tokcapReport.rollouts()"))):
        page.evaluate("(number) => { location.hash = '#r' + number; }", number)
        _settled(page)
        assert page.evaluate(UNNAMED) == []
    page.evaluate(
        "(number) => { location.hash = '#r' + number; }", page.evaluate("tokcapReport.rollouts().indexOf('mixed')")
    )
    page.wait_for_selector(".strip")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className.split(' ')[0]"))
    assert {"tree", "strip", "search", "theme", "help-button"} <= reached


@pytest.mark.parametrize("width", [1440, 700, 390])
def test_nothing_sticks_out_on_wide_and_narrow_screens(width: int, assorted: Path, opened: Opener) -> None:
    page = opened(report(open_to_look(assorted)), viewport={"width": width, "height": 800})
    for where in ("#all", f"#r{page.evaluate('tokcapReport.rollouts()').index('mixed')}"):
        page.evaluate("(where) => { location.hash = where; }", where)
        _settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
