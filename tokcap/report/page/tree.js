// The call tree: who continues whom. A conversation that only goes on stays at one level; what leaves it is deeper.

/** How a call hangs on the one above it, in few words. */
function relationText(call) {
  if (call.drift && ["drifted", "restarted"].includes(call.relation)) {
    const where = "at " + amount(call.drift.index);
    if (call.relation === "restarted") return "restarted " + where;
    const kind = call.drift.kind === "unknown" ? "" : ", " + words(call.drift.kind);
    return "drifted " + where + ", " + counted(call.drift.lost, "id") + " lost" + kind;
  }
  return (
    { root: "begins a conversation", separate: "begins another conversation", unrecorded: "no ids stored" }[
      call.relation
    ] || words(call.relation)
  );
}

/** The lines beside a call: one for each level above that goes on, and its own. */
function rails(marks, follows, more) {
  const lines = [];
  const line = (level, kind) => {
    const one = h("span", { class: "rail " + kind });
    one.style.left = 17 + Math.min(level, 8) * 14 + "px";
    lines.push(one);
  };
  const own = marks.length - 1;
  for (let level = 0; level < own; level++) if (marks[level] === "|") line(level, "");
  if (follows) line(own, "up");
  else if (own > 0) line(own - 1, "turn");
  if (more) line(own, "down");
  return h("span", { class: "rails", "aria-hidden": "true" }, lines);
}

function siblingText(call) {
  return (
    (call.samples > 1 ? ", one of " + call.samples + " samples" : "") +
    (call.attempts > 1 ? ", one of " + call.attempts + " attempts" : "")
  );
}

class Tree {
  constructor(rollout, select) {
    this.items = (rollout.tree || []).map(([place, marks, follows]) => ({
      call: rollout.calls[place],
      marks,
      follows,
      level: marks.length - 1,
    }));
    this.placeOf = new Map(this.items.map((item, index) => [item.call.place, index]));
    this.rollout = rollout;
    this.select = select;
    this.current = -1;
    this.element = h("div", {
      class: "tree",
      role: "tree",
      tabindex: 0,
      "aria-label": "Calls: arrows move, Enter shows the tokens",
      onkeydown: (event) => this.key(event),
    });
    this.rows = new Rows(this.element, 42, (index) => this.row(index));
    this.rows.setCount(this.items.length);
  }

  row(index) {
    const { call, level, marks, follows } = this.items[index],
      more = marks.endsWith("|");
    const notes = [];
    if (call.outcome !== "recorded")
      notes.push(badge(words(call.outcome), "o-" + call.outcome, WORDS.outcomes[call.outcome]));
    const isCounted = call.verdict === "unknown" && call.unknown; // by the note with their number
    if (call.verdict && call.verdict !== "trained" && call.verdict !== call.outcome && !isCounted)
      notes.push(badge(words(call.verdict), "warn", WORDS.metrics[call.verdict]));
    if (call.afterGap) notes.push(badge("after gap", "warn", WORDS.flags.after_gap));
    if (call.relation === "drifted") notes.push(badge("drift", "drift"));
    if (call.unknown) notes.push(badge(amount(call.unknown) + " unknown", "warn", WORDS.flags.unknown));
    const item = h(
      "div",
      {
        class: "call" + (index === this.current ? " current" : ""),
        role: "treeitem",
        id: "call-" + this.rollout.number + "-" + call.place,
        "aria-level": level + 1,
        "aria-selected": index === this.current ? "true" : "false",
        "data-call": call.place,
        "data-level": level,
        onclick: () => {
          this.move(index);
          this.select(call.place);
        },
      },
      rails(marks, follows, more),
      h("span", {
        class: "dot o-" + call.outcome + (call.verdict && call.verdict !== "trained" ? " hollow" : ""),
        "aria-hidden": "true",
      }),
      h(
        "span",
        { class: "call-line" },
        h("span", { class: "call-name" }, call.name),
        notes,
        // What the colour of the dot says, where no badge says it.
        notes.length ? null : h("span", { class: "unseen" }, words(call.verdict || call.outcome)),
      ),
      h("span", { class: "call-note" }, relationText(call) + siblingText(call)),
      h(
        "span",
        { class: "call-count" },
        call.outcome === "recorded" || call.sampled ? amount(call.prompt) + " + " + amount(call.sampled) : "",
      ),
    );
    item.style.paddingLeft = 30 + Math.min(level, 8) * 14 + "px";
    item.style.setProperty("--level", Math.min(level, 8));
    return item;
  }

  move(index) {
    if (index < 0 || index >= this.items.length) return;
    const before = this.current;
    this.current = index;
    this.rows.reveal(index);
    for (const one of [before, index]) {
      const row = this.rows.shown.get(one);
      if (!row) continue;
      row.classList.toggle("current", one === index);
      row.setAttribute("aria-selected", one === index ? "true" : "false");
    }
    this.element.setAttribute(
      "aria-activedescendant",
      "call-" + this.rollout.number + "-" + this.items[index].call.place,
    );
  }

  show(place) {
    this.move(this.placeOf.get(place));
  }

  key(event) {
    const at = this.current,
      item = this.items[at];
    const to = {
      ArrowDown: () => at + 1,
      ArrowUp: () => Math.max(0, at - 1),
      Home: () => 0,
      End: () => this.items.length - 1,
      PageDown: () => Math.min(this.items.length - 1, at + 10),
      PageUp: () => Math.max(0, at - 10),
      ArrowLeft: () => (item && item.call.parent !== null ? this.placeOf.get(item.call.parent) : at),
      ArrowRight: () =>
        item
          ? this.placeOf.get((this.items.find((other) => other.call.parent === item.call.place) || item).call.place)
          : 0,
    }[event.key];
    if (to) this.move(Math.min(to(), this.items.length - 1));
    else if ((event.key === "Enter" || event.key === " ") && item) this.select(item.call.place, true);
    else return;
    event.preventDefault();
  }
}
