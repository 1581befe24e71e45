// The frame around the pages: header, search, theme, keys, and which page is shown.

const TIP = h("div", { id: "tip", role: "tooltip" });
const STATUS = h("div", { id: "status", class: "unseen", role: "status", "aria-live": "polite" });

function showTip(x, y, lines) {
  TIP.replaceChildren(...lines.filter((line) => line).map((line) => h("div", null, line)));
  TIP.style.display = "block";
  const box = TIP.getBoundingClientRect();
  TIP.style.left = Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8)) + "px";
  TIP.style.top = (y + 20 + box.height > window.innerHeight ? Math.max(4, y - box.height - 10) : y + 16) + "px";
}

function hideTip() {
  TIP.style.display = "none";
}

function announce(text) {
  STATUS.textContent = text;
}

const PAGES = new Map();
const VIEW = h("main", { id: "view" });
const HAS_OVERVIEW = DATA.whole || DATA.rollouts.length !== 1;
let NOW = null;

function pageOf(number) {
  if (!PAGES.has(number))
    PAGES.set(
      number,
      number < 0
        ? new Overview((page) => {
            location.hash = "#r" + page;
          })
        : new RolloutPage(ROLLOUTS[number]),
    );
  return PAGES.get(number);
}

function route() {
  const found = /^#r(\d+)(?:c(\d+))?$/.exec(location.hash);
  let number = found && Number(found[1]) < ROLLOUTS.length ? Number(found[1]) : HAS_OVERVIEW ? -1 : 0;
  const page = pageOf(number);
  hideTip();
  if (NOW !== page) {
    if (NOW) leave(NOW);
    NOW = page;
    VIEW.replaceChildren(page.element);
    comeBack(page);
    SEARCH.value = page.search ? page.search.query : "";
    FOUND.textContent = page.search ? page.search.told() : "";
    SEARCH_BOX.hidden = !page.search;
    CRUMB.replaceChildren(
      ...(number < 0
        ? []
        : [
            HAS_OVERVIEW ? h("a", { class: "crumb", id: "back" }, "all rollouts") : "",
            ROLLOUTS.length > 1 ? pager(number) : "",
          ]),
    );
    const back = document.getElementById("back") || CRUMB.querySelector("#back");
    if (back) back.setAttribute("href", "#all");
    document.body.dataset.page = number < 0 ? "overview" : "rollout";
  }
  page.opened(found && found[2] !== undefined ? Number(found[2]) : undefined);
}

/** What is taken out of the document forgets how far it was scrolled. */
function leave(page) {
  page.left = { top: window.scrollY, tops: page.scrolling().map((element) => element.scrollTop) };
}

function comeBack(page) {
  window.scrollTo(0, page.left ? page.left.top : 0);
  if (page.left)
    page.scrolling().forEach((element, place) => {
      element.scrollTop = page.left.tops[place];
    });
}

function pager(number) {
  const step = (by) => {
    location.hash = "#r" + ((number + by + ROLLOUTS.length) % ROLLOUTS.length);
  };
  return h(
    "span",
    { class: "pager" },
    h(
      "button",
      { type: "button", class: "quiet", "aria-label": "Previous rollout", onclick: () => step(-1) },
      "\u2039",
    ),
    h("span", { class: "muted" }, amount(number + 1) + " of " + amount(ROLLOUTS.length)),
    h("button", { type: "button", class: "quiet", "aria-label": "Next rollout", onclick: () => step(1) }, "\u203a"),
  );
}

const CRUMB = h("nav", { class: "crumbs", "aria-label": "Pages" });
const FOUND = h("span", { class: "found", role: "status" });
const SEARCH = h("input", {
  type: "search",
  id: "search",
  placeholder: "Search text, id, call",
  spellcheck: "false",
  autocomplete: "off",
  "aria-label": "Search token text, token ids and call ids",
  oninput: () => searchSoon(),
  onkeydown: (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      if (NOW.search.query !== SEARCH.value) searchNow();
      else FOUND.textContent = NOW.go(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      SEARCH.value = "";
      searchNow();
      if (NOW.strip) NOW.strip.element.focus();
    }
  },
});
const SEARCH_BOX = h(
  "div",
  { class: "search", role: "search" },
  SEARCH,
  FOUND,
  h(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": "Previous match",
      onclick: () => {
        FOUND.textContent = NOW.go(-1);
      },
    },
    "\u2191",
  ),
  h(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": "Next match",
      onclick: () => {
        FOUND.textContent = NOW.go(1);
      },
    },
    "\u2193",
  ),
);

let searchTimer = 0;

function searchSoon() {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(searchNow, 150);
}

function searchNow() {
  clearTimeout(searchTimer);
  if (NOW.search) FOUND.textContent = NOW.find(SEARCH.value);
}

const KEYS = [
  ["/", "search token text, ids (#123: only ids) and call ids; Enter and Shift+Enter: next and previous"],
  ["n / N", "next and previous match"],
  ["j k, arrows", "token by token; up and down: row by row; Page Up and Down, Home, End"],
  ["a / A", "next and previous answer"],
  ["d / D", "next and previous place where a prompt parts"],
  ["u / U", "next and previous token that was sampled and is not trained"],
  ["[ / ]", "previous and next call"],
  ["arrows in the tree", "left: the call that it hangs on; right: the first that hangs on it; Enter: its tokens"],
  ["g", "all rollouts"],
  ["t", "light or dark"],
  ["?", "these keys"],
  ["Esc", "close, or leave the search"],
];
const HELP = h(
  "dialog",
  { id: "help", "aria-label": "Keys" },
  h("h2", null, "Keys"),
  h(
    "dl",
    { class: "keys" },
    KEYS.map(([key, told]) => h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, told))),
  ),
  h("button", { type: "button", onclick: () => HELP.close() }, "Close"),
);

const DARK = window.matchMedia("(prefers-color-scheme: dark)");
let themeChosen = false;

function toggleTheme() {
  themeChosen = true;
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField =
    /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) &&
    event.target.type !== "radio" &&
    event.target.type !== "checkbox";
  if (HELP.open || inField) return;
  const does = {
    "/": () => {
      if (NOW.search) (SEARCH.focus(), SEARCH.select());
      else if (NOW.filter) NOW.filter.focus();
    },
    "?": () => HELP.showModal(),
    t: toggleTheme,
    g: () => {
      if (HAS_OVERVIEW) location.hash = "#all";
    },
    n: () => {
      if (NOW.search) FOUND.textContent = NOW.go(1);
    },
    N: () => {
      if (NOW.search) FOUND.textContent = NOW.go(-1);
    },
    "]": () => stepCall(1),
    "[": () => stepCall(-1),
    ...(NOW.strip && event.target === document.body
      ? { j: () => NOW.strip.element.focus(), k: () => NOW.strip.element.focus() }
      : {}),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
}

function stepCall(by) {
  if (!NOW.tree) return;
  const at = Math.max(0, Math.min(NOW.tree.current + by, NOW.tree.items.length - 1));
  NOW.showCall(NOW.tree.items[at].call.place);
}

document.documentElement.dataset.theme = DARK.matches ? "dark" : "light";
DARK.addEventListener("change", () => {
  if (!themeChosen) setTheme(DARK.matches ? "dark" : "light");
});

/** On paper it is light, and as it was afterwards. */
const PAPER = window.matchMedia("print");
let onScreen = "";

function toPaper(begins) {
  if (begins && !onScreen) {
    onScreen = document.documentElement.dataset.theme;
    setTheme("light");
  } else if (!begins && onScreen) {
    setTheme(onScreen);
    onScreen = "";
  }
}

PAPER.addEventListener("change", () => toPaper(PAPER.matches));
window.addEventListener("beforeprint", () => toPaper(true));
window.addEventListener("afterprint", () => toPaper(false));
document.body.append(
  h("a", { class: "skip", id: "skip" }, "To the content"),
  h(
    "header",
    { class: "top" },
    h("span", { class: "brand", "aria-label": "tokcap report" }, "tokcap"),
    CRUMB,
    SEARCH_BOX,
    h("span", { class: "push" }),
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        id: "theme",
        "aria-label": "Light or dark",
        title: "Light or dark (t)",
        onclick: toggleTheme,
      },
      "\u25d0",
    ),
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        id: "help-button",
        "aria-label": "Keys",
        title: "Keys (?)",
        onclick: () => HELP.showModal(),
      },
      "?",
    ),
  ),
  VIEW,
  h(
    "footer",
    { class: "foot" },
    "tokcap " +
      DATA.tokcap +
      ", " +
      moment(DATA.madeAt) +
      (HAS_OVERVIEW ? "" : ", " + shown(DATA.title)) +
      ". What was recorded is shown as text; control characters and what can't be seen are escaped.",
  ),
  HELP,
  TIP,
  STATUS,
);
document.getElementById("skip").setAttribute("href", "#view");
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  VIEW.setAttribute("tabindex", "-1");
  VIEW.focus();
});
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", route);
route();
document.getElementById("waiting").remove();

/** For scripts and tests: what the page knows, read only. `where` is {trajectory: n} or {call: n}. */
function sequenceOf(rollout, where) {
  return where.trajectory !== undefined
    ? ROLLOUTS[rollout].trajectory(where.trajectory)
    : ROLLOUTS[rollout].call(where.call);
}

window.tokcapReport = Object.freeze({
  rollouts: () => ROLLOUTS.map((rollout) => rollout.id),
  calls: (rollout) => ROLLOUTS[rollout].calls.map((call) => [call.id, call.choice]),
  trajectories: (rollout) => ROLLOUTS[rollout].trajectories.length,
  ids: (rollout, where) => Array.from(sequenceOf(rollout, where).ids),
  tokenAt: (rollout, where, position) => sequenceOf(rollout, where).tokenAt(position),
  focused: () => (NOW && NOW.strip && NOW.strip.sequence ? NOW.strip.sequence.tokenAt(NOW.strip.position) : null),
  frames: () => (NOW && NOW.strip ? NOW.strip.frames : 0),
  found: () => (NOW && NOW.search ? NOW.search.found.map((one) => ({ ...one })) : []),
});
