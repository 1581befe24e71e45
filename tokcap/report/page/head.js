// The head of a rollout's page: what it is, and the one sentence that somebody wants to read first.

function tile(name, value, note, kind = "") {
  return h(
    "div",
    { class: "tile " + kind },
    h("dt", null, name),
    h("dd", null, value, note ? h("small", null, note) : null),
  );
}

function rolloutHead(rollout) {
  const metrics = rollout.metrics || {},
    sampled = metrics.sampled || 0,
    trained = metrics.trained || 0;
  const head = h(
    "header",
    { class: "page-head" },
    h("h1", null, shown(rollout.id)),
    h(
      "p",
      { class: "head-line" },
      badge(rollout.state, "s-" + rollout.state),
      rollout.version ? badge("version " + rollout.version) : badge("not frozen"),
      rollout.finished
        ? badge("finished", "good")
        : rollout.state === "retired"
          ? null
          : badge("not finished", "warn", "its owner has not said finish"),
      rollout.incomplete
        ? badge("incomplete", "warn", "a call is lost, open or in conflict, or damage was found")
        : null,
      rollout.damage && rollout.damage.length ? badge("damaged", "bad") : null,
      rollout.error ? badge("unreadable", "bad") : null,
    ),
  );
  head.append(h("p", { class: "verdict" }, verdictText(rollout)));
  if (rollout.metrics) {
    const drifted = metrics.drifted_calls || 0,
      lost = (metrics.lost_calls || 0) + (metrics.open_calls || 0);
    head.append(
      h(
        "dl",
        { class: "tiles" },
        tile("calls", amount(metrics.calls || 0), counted(rollout.conversations || 0, "conversation")),
        tile("sampled ids", amount(sampled), amount(rollout.distinct || 0) + " distinct in all"),
        tile(
          "trained",
          sampled ? percent(trained, sampled) : "\u2013",
          counted(trained, "id"),
          !sampled ? "" : !trained ? "bad" : trained < sampled ? "warn" : "good",
        ),
        tile("trajectories", amount(metrics.trajectories || 0), amount(metrics.trained_trajectories || 0) + " trained"),
        tile(
          "drifted calls",
          amount(drifted),
          drifted ? amount(metrics.drift_lost || 0) + " ids lost" : "",
          drifted ? "drift" : "",
        ),
        tile("lost or open", amount(lost), lost ? "of " + counted(metrics.calls || 0, "call") : "", lost ? "bad" : ""),
      ),
    );
    const parts = WORDS.categories.filter((name) => metrics[name]).map((name) => [name, metrics[name]]);
    if (sampled) head.append(categoryBar(parts));
  }
  head.append(
    h(
      "details",
      { class: "identity" },
      h("summary", null, "Identity, meta, sizes"),
      facts([
        ["snapshot", rollout.snapshot ? h("code", null, rollout.snapshot) : null],
        ["group", rollout.group ? shown(rollout.group) : null],
        ["models trained", rollout.models && rollout.models.length ? rollout.models.map(shown).join(", ") : null],
        ["changed", moment(rollout.changed)],
        ["files", rollout.files ? amount(rollout.files) + ", " + size(rollout.bytes) : null],
        ["log-prob modes", rollout.logProbModes ? shown(rollout.logProbModes) : null],
        ["replay factor", metrics.replay_factor ? metrics.replay_factor.toFixed(2) : null],
        ["meta", rollout.meta ? h("pre", null, shownLines(rollout.meta)) : null],
      ]),
    ),
  );
  return head;
}

/** The one sentence that somebody wants to read first. */
function verdictText(rollout) {
  if (rollout.error) return "It could not be read: " + shown(rollout.error);
  if (rollout.state === "retired") {
    return (
      "Its consumer has it: version " +
      rollout.version +
      " was retired " +
      moment(rollout.changed) +
      ". Only a tombstone is left, its tokens are gone from this store."
    );
  }
  if (rollout.state === "absent") return "The store has nothing under this name.";
  if (!rollout.metrics) return "Its calls are not in this page.";
  const metrics = rollout.metrics,
    sampled = metrics.sampled || 0,
    trained = metrics.trained || 0,
    said = [];
  if (!sampled) said.push("No call has stored ids, so there is nothing to train.");
  else if (trained === sampled)
    said.push(
      (sampled === 1 ? "The one sampled id is" : "All " + amount(sampled) + " sampled ids are") +
        " trained, in " +
        counted(metrics.trained_trajectories, "trajectory", "trajectories") +
        ".",
    );
  else {
    const rest = WORDS.categories
      .filter((name) => name !== "trained" && metrics[name])
      .map((name) => amount(metrics[name]) + " " + words(name));
    said.push(
      (trained ? amount(trained) + " of " + amount(sampled) : "None of " + amount(sampled)) +
        (sampled === 1 ? " sampled id is trained" : " sampled ids are trained") +
        (trained ? "; the others are " : ": ") +
        rest.join(", ") +
        ".",
    );
  }
  if (metrics.drifted_calls) said.push(counted(metrics.drifted_calls, "prompt") + " drifted from what was sampled.");
  if (metrics.lost_calls)
    said.push(counted(metrics.lost_calls, "call") + (metrics.lost_calls === 1 ? " is" : " are") + " lost.");
  if (metrics.open_calls)
    said.push(counted(metrics.open_calls, "call") + (metrics.open_calls === 1 ? " is" : " are") + " still open.");
  return said.join(" ");
}
