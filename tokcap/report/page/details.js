// What is said of one token and of one call, and what the colours mean.

function legendOf(rollout) {
  const edges = ["1", "0.99", "0.90", "0.61", "0.37", "0.14", "0.02", "0.0003"];
  const known = rollout.calls.some((call) => call.versions.length);
  return h(
    "div",
    { class: "strip-legend", "aria-label": "Legend" },
    h(
      "span",
      null,
      "probability",
      h(
        "span",
        { class: "scale" },
        edges.map((edge, step) => h("span", { class: "step step-" + step }, edge)),
      ),
    ),
    h("span", null, h("span", { class: "swatch hatch" }), "log-prob unknown"),
    h("span", null, h("span", { class: "swatch context" }), "prompt"),
    h("span", null, h("span", { class: "line-mark trained" }), "trained"),
    h("span", null, h("span", { class: "line-mark untrained" }), "not trained"),
    h("span", null, h("span", { class: "line-mark elsewhere" }), "belongs to another trajectory"),
    h("span", null, h("span", { class: "flag-mark drift" }), "a prompt parts here"),
    known ? h("span", null, h("span", { class: "flag-mark version" }), "other policy version") : null,
  );
}

function inspected(sequence, token) {
  const rows = [],
    from = Math.max(0, Math.min(token.position - 5, sequence.length - 11)),
    to = Math.min(sequence.length, from + 11);
  for (let position = from; position < to; position++) {
    const one = sequence.tokenAt(position);
    rows.push(
      h(
        "tr",
        {
          class: position === token.position ? "current" : null,
          "aria-current": position === token.position ? "true" : null,
        },
        h("td", { class: "number" }, one.position),
        h("td", { class: "number" }, one.id),
        h("td", { class: "piece" }, one.text === null ? "" : beginning(stripText(one.text), 14)),
        h(
          "td",
          { class: "number" },
          one.category === "prompt" ? "" : one.logProb === null ? "?" : logProbText(one.logProb),
        ),
        h(
          "td",
          null,
          h(
            "span",
            {
              class:
                "line-mark " +
                (one.category === "prompt"
                  ? "none"
                  : ["trained", "elsewhere"].includes(one.category)
                    ? one.category
                    : "untrained"),
              title: words(one.category),
            },
            h("span", { class: "unseen" }, words(one.category)),
          ),
        ),
      ),
    );
  }
  return h(
    "div",
    null,
    h(
      "p",
      { class: "piece-large" },
      token.text
        ? shown(token.text)
        : h("span", { class: "muted" }, token.text === null ? "text not known" : "no bytes of its own"),
    ),
    facts([
      ["id", String(token.id)],
      ["position", amount(token.position)],
      ["log-prob", token.category === "prompt" ? null : logProbText(token.logProb)],
      ["probability", token.category === "prompt" ? null : probabilityText(token.logProb)],
      ["call", token.call === null ? null : shown(token.call) + (token.choice ? "#" + token.choice : "")],
      ["policy version", token.version === null ? null : shown(token.version)],
      ["mask", token.trained ? "trained" : "not trained here"],
      ["why", token.why],
    ]),
    h(
      "table",
      { class: "around" },
      h("caption", { class: "unseen" }, "Tokens around it"),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          ["at", "id", "text", "log-prob", ""].map((name) =>
            h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "mask")),
          ),
        ),
      ),
      h("tbody", null, rows),
    ),
  );
}

function sentence(text) {
  return text ? text[0].toUpperCase() + text.slice(1) + "." : "";
}

function callDetails(rollout, call, select) {
  const link = (place) =>
    h("button", { type: "button", class: "link call-name", onclick: () => select(place) }, rollout.calls[place].name);
  return h(
    "div",
    null,
    h(
      "h3",
      null,
      h("span", { class: "call-name" }, call.name),
      " ",
      badge(words(call.outcome), "o-" + call.outcome),
      call.verdict ? badge(words(call.verdict), call.verdict === "trained" ? "good" : "warn") : null,
      call.afterGap ? badge("after gap", "warn") : null,
    ),
    h(
      "p",
      null,
      sentence(WORDS.outcomes[call.outcome]),
      " ",
      sentence((WORDS.relations[call.relation] || words(call.relation)) + siblingText(call)),
    ),
    call.detail ? h("p", { class: "detail" }, shown(call.detail)) : null,
    facts([
      [
        "hangs on",
        call.parent === null || call.parent === undefined
          ? null
          : [link(call.parent), call.shared ? ", " + counted(call.shared, "id") + " in common" : null],
      ],
      ["prompt", counted(call.prompt, "id")],
      ["sampled", counted(call.sampled, "id")],
      [
        "trained",
        amount(call.trained) + (call.verdict && call.verdict !== "trained" ? ": " + words(call.verdict) : ""),
      ],
      ["unknown log-probs", call.unknown ? amount(call.unknown) : null],
      ["mean log-prob", call.mean === null ? null : logProbText(call.mean)],
      ["began", call.began === null ? null : "at " + seconds(call.began)],
      ["took", call.took === null ? null : seconds(call.took)],
      ["delivered", call.delivered],
      ["retries", call.retries || null],
      [
        "goes on",
        call.continued ? "a later prompt holds it whole" : call.sampled ? "no later prompt holds it whole" : null,
      ],
      ["model", call.model ? shown(call.model) : null],
      ["finish reason", call.finish ? shown(call.finish) : null],
      ["response id", call.response ? shown(call.response) : null],
      [
        "policy versions",
        call.versions.length
          ? call.versions.map(([version, start, end]) => shown(version) + " at " + start + "\u2013" + end).join(", ")
          : null,
      ],
      ["sampling", call.sampling ? shown(call.sampling) : null],
    ]),
    call.items
      ? h("details", null, h("summary", null, "What was answered"), h("pre", null, shownLines(call.items)))
      : null,
    call.extra ? h("details", null, h("summary", null, "Extra"), h("pre", null, shownLines(call.extra))) : null,
  );
}
