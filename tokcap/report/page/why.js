// Why something is not trained or not there, in words, with what to do.

/** Our own text, in which backticks stand around what is typed; there ROLLOUT is the one that is looked at. */
function withCode(text, rollout) {
  const typed = (part) => (rollout ? part.replace(/\bROLLOUT\b/, () => quoted(rollout.id)) : part);
  return text.split("`").map((part, place) => (place % 2 ? h("code", null, typed(part)) : part));
}

function advised(code, count, rollout = null, note = null) {
  const advice = WORDS.advice[code] || [WORDS.reasons[code] || WORDS.flags[code] || code, "", ""];
  return h(
    "article",
    { class: "reason" },
    h("h3", null, words(code), count ? h("span", { class: "muted" }, count) : null),
    h("p", null, withCode(advice[0], rollout)),
    ["Why ", "Then "].map((name, place) =>
      advice[place + 1] ? h("p", null, h("b", null, name), withCode(advice[place + 1], rollout)) : null,
    ),
    note,
  );
}

function whySection(rollout, select) {
  const metrics = rollout.metrics || {},
    cards = [],
    troubled = rollout.calls.filter(
      (call) =>
        ["lost", "open", "conflict", "aborted"].includes(call.outcome) && !(rollout.damage || []).includes(call.detail),
    );
  for (const reason of rollout.reasons || [])
    cards.push(advised(reason, metrics[reason] ? counted(metrics[reason], "id") : "", rollout));
  if (rollout.error) cards.push(advised("unreadable", "", rollout, h("p", null, shown(rollout.error))));
  if (metrics.lost_calls && !(rollout.reasons || []).includes("lost_call")) {
    cards.push(advised("lost_call", counted(metrics.lost_calls, "call"), rollout));
  }
  const list = [];
  if (troubled.length) {
    list.push(
      h("h3", null, "Calls that did not end well"),
      h(
        "ul",
        { class: "troubled" },
        troubled
          .slice(0, 50)
          .map((call) =>
            h(
              "li",
              null,
              h("button", { type: "button", class: "link call-name", onclick: () => select(call.place) }, call.name),
              " ",
              badge(words(call.outcome), "o-" + call.outcome),
              " ",
              call.detail ? shown(call.detail) : WORDS.outcomes[call.outcome],
            ),
          ),
        troubled.length > 50
          ? h("li", { class: "muted" }, "and " + amount(troubled.length - 50) + " more in the tree")
          : null,
      ),
    );
  }
  for (const [title, lines] of [
    ["Damage", rollout.damage],
    ["Dropped: a tail that was never acknowledged", rollout.torn],
    ["Said after it was closed", rollout.lateNotes],
  ]) {
    if (lines && lines.length)
      list.push(
        h("h3", null, title),
        h(
          "ul",
          { class: "lines" },
          lines.map((line) => h("li", null, shown(line))),
        ),
      );
  }
  const flags = [...new Set(rollout.trajectories.flatMap((one) => one.flags))].filter(
    (flag) => !(rollout.reasons || []).includes(flag) && WORDS.flags[flag],
  );
  if (flags.length) {
    list.push(
      h("h3", null, "Worth knowing, masks nothing"),
      h(
        "ul",
        { class: "lines" },
        flags.map((flag) =>
          h(
            "li",
            null,
            badge(words(flag)),
            " ",
            WORDS.flags[flag],
            h(
              "span",
              { class: "muted" },
              " " +
                counted(
                  rollout.trajectories.filter((one) => one.flags.includes(flag)).length,
                  "trajectory",
                  "trajectories",
                ),
            ),
          ),
        ),
      ),
    );
  }
  if (!cards.length && !list.length) return null;
  return section(
    cards.length || troubled.length ? "Why" : "Worth knowing",
    {
      class: "panel why" + (cards.length ? "" : " only-notes"),
      note: cards.length ? "What is not trained or not there, and what to do." : null,
    },
    cards.length ? h("div", { class: "reasons" }, cards) : null,
    list,
  );
}
