// Where prompts part from what was sampled: both sides beside each other.

const DRIFT_BEFORE = 6,
  DRIFT_AFTER = 16;

function chips(sequence, start, end, parts, what) {
  const tokens = [];
  for (let position = Math.max(0, start); position < Math.min(end, sequence.length); position++) {
    const text = sequence.textAt(position);
    tokens.push(
      h(
        "span",
        {
          class: "chip" + (position < parts ? " same" : position === parts ? " parts" : ""),
          title: "id " + sequence.ids[position] + ", position " + amount(position),
        },
        text === undefined ? String(sequence.ids[position]) : stripText(text),
        text === undefined ? null : h("small", null, sequence.ids[position]),
      ),
    );
  }
  if (end < sequence.length) tokens.push(h("span", { class: "muted" }, "\u2026"));
  return h(
    "div",
    { class: "window" },
    h("h3", null, what),
    h("div", { class: "chips" }, tokens.length ? tokens : h("span", { class: "muted" }, "nothing: it ends here")),
  );
}

function driftWindows(rollout, call) {
  const { drift } = call;
  if (!rollout.hasTokens || drift.nearest === null)
    return h("p", { class: "muted" }, "The tokens are not in this page.");
  const before = rollout.call(drift.nearest),
    after = rollout.call(call.place),
    from = drift.index - DRIFT_BEFORE,
    to = drift.index + DRIFT_AFTER;
  return h(
    "div",
    { class: "windows" },
    chips(before, from, to, drift.index, "sampled by " + rollout.calls[drift.nearest].name),
    chips(after, from, Math.min(to, call.prompt), drift.index, "in the prompt of " + call.name),
  );
}

const DRIFT_WORDS = {
  retokenised: "the same bytes came back as other ids",
  stripped_reasoning: "the reasoning was left out",
  whitespace_or_stop: "only white space or the stop token differs",
  edited: "the text was changed",
  truncated_or_compacted: "the answer came back shorter",
  other: "something else stands there",
  unknown: "the bytes of the ids are not known, so nobody can say how (give a tokenizer)",
};

function driftSection(rollout, select) {
  const drifted = rollout.calls.filter((call) => call.relation === "drifted");
  if (!drifted.length) return null;
  const lost = drifted.reduce((sum, call) => sum + call.drift.lost, 0),
    list = h("div", { class: "drifts" });
  let next = 0;
  const more = h("button", { type: "button", class: "quiet", onclick: () => add() });
  function add() {
    for (const call of drifted.slice(next, next + 20)) {
      const details = h(
        "details",
        { class: "drift" },
        h(
          "summary",
          null,
          h("span", { class: "call-name" }, call.name),
          h("span", null, "parts at " + amount(call.drift.index) + " from "),
          h(
            "span",
            { class: "call-name" },
            call.drift.nearest === null ? "\u2013" : rollout.calls[call.drift.nearest].name,
          ),
          h("span", { class: "muted" }, amount(call.drift.kept) + " kept, " + amount(call.drift.lost) + " lost"),
          badge(words(call.drift.kind), "drift"),
        ),
      );
      details.addEventListener("toggle", () => {
        if (details.open && details.childElementCount === 1) {
          details.append(
            driftWindows(rollout, call),
            h("p", { class: "muted" }, DRIFT_WORDS[call.drift.kind] || words(call.drift.kind)),
            h(
              "button",
              { type: "button", class: "quiet", onclick: () => select(call.place, call.drift.index) },
              "Show it in the strip",
            ),
          );
        }
      });
      list.append(details);
    }
    next = Math.min(next + 20, drifted.length);
    more.textContent = "Show " + counted(Math.min(20, drifted.length - next), "more drifted call");
    more.hidden = next >= drifted.length;
  }
  add();
  if (list.firstChild) list.firstChild.open = true;
  return section(
    "Drift",
    {
      class: "panel",
      note:
        counted(drifted.length, "prompt") +
        " no longer " +
        (drifted.length === 1 ? "holds" : "hold") +
        " what was sampled; " +
        counted(lost, "sampled id") +
        " stand in no later prompt. They are trained all the same, each once.",
    },
    list,
    more,
  );
}
