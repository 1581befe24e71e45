// The page of one rollout.

class RolloutPage {
  constructor(rollout) {
    this.rollout = rollout;
    this.search = new Search(rollout);
    this.select = (place, position) => this.showCall(place, position);
    this.tree = rollout.calls.length ? new Tree(rollout, (place) => this.showCall(place)) : null;
    this.timeline = rollout.calls.some((call) => call.began !== null)
      ? new Timeline(rollout, (place) => this.showCall(place))
      : null;
    this.strip = rollout.hasTokens && rollout.trajectories.length ? new Strip((token) => this.inspect(token)) : null;
    this.inspector = h("aside", { class: "inspector", "aria-label": "The token in focus" });
    this.details = h("div", { class: "call-details" });
    this.element = this.built();
  }

  built() {
    const { rollout } = this;
    const main = h(
      "div",
      { class: "main" },
      rolloutHead(rollout),
      whySection(rollout, (place) => this.showCall(place)),
    );
    if (this.timeline) {
      main.append(
        section(
          "Timeline",
          { class: "panel", note: this.timeline.told().replace("Timeline: ", "") + ". A click shows the call." },
          this.timeline.element,
        ),
      );
    }
    if (this.strip) main.append(this.stripSection());
    else if (rollout.tokensLeftOut) {
      main.append(
        section(
          "Tokens",
          { class: "panel" },
          h(
            "p",
            null,
            "This rollout has " +
              counted(rollout.distinct, "distinct id") +
              ", more than the " +
              amount(DATA.maxTokens) +
              " that a page may hold. ",
          ),
          command("tokcap report " + quoted(rollout.id) + " --max-tokens " + rollout.distinct),
        ),
      );
    }
    if (rollout.calls.length) main.append(section("Call", { class: "panel call-panel" }, this.details));
    const drift = driftSection(rollout, this.select);
    if (drift) main.append(drift);
    const plots = distributions(rollout);
    if (plots) main.append(plots);
    const side = this.tree
      ? h(
          "nav",
          { class: "side", "aria-label": "Calls" },
          h(
            "div",
            { class: "side-head" },
            h("h2", null, "Calls"),
            h("span", { class: "muted" }, "prompt + sampled ids"),
          ),
          this.tree.element,
        )
      : null;
    return h("div", { class: "rollout" + (side ? "" : " alone") }, side, main);
  }

  stripSection() {
    const { rollout } = this;
    this.chooser = h(
      "select",
      { "aria-label": "Which sequence is shown", onchange: (event) => this.chosen(event.target.value) },
      rollout.trajectories
        .slice(0, 2000)
        .map((one, index) =>
          h(
            "option",
            { value: "t" + index },
            "trajectory " +
              index +
              ": " +
              counted(one.length, "id") +
              ", " +
              amount(one.trained) +
              " trained" +
              (one.flags.length ? " (" + one.flags.map(words).join(", ") + ")" : ""),
          ),
        ),
    );
    const modes = h(
      "div",
      { class: "modes", role: "radiogroup", "aria-label": "How tokens are shown" },
      ["text", "ids", "dense"].map((mode) =>
        h(
          "label",
          null,
          h("input", {
            type: "radio",
            name: "mode-" + rollout.number,
            value: mode,
            onchange: () => this.strip.setMode(mode),
          }),
          h("span", null, mode),
        ),
      ),
    );
    modes.querySelector("input").checked = true;
    this.note = h("p", { class: "note sequence-note" });
    return section(
      "Tokens",
      { class: "panel tokens" },
      h("div", { class: "strip-bar" }, this.chooser, modes, this.note),
      this.strip.barcode.element,
      h("div", { class: "strip-and-inspector" }, this.strip.element, this.inspector),
      legendOf(rollout),
      h(
        "p",
        { class: "note", id: "strip-keys" },
        keys("j", "k"),
        " or arrows: token by token; ",
        keys("a"),
        " next answer, ",
        keys("d"),
        " next drift, ",
        keys("u"),
        " next untrained token (with Shift: back); ",
        keys("/"),
        " search; ",
        keys("?"),
        " all keys",
      ),
    );
  }

  chosen(value) {
    if (value.startsWith("t")) this.showTrajectory(Number(value.slice(1)));
    else this.showCall(Number(value.slice(1)));
  }

  showTrajectory(index, position) {
    if (!this.strip) return;
    const sequence = this.rollout.trajectory(index),
      one = this.rollout.trajectories[index];
    const first = sequence.spans.find((span) => span.here) || sequence.spans[0];
    if (this.strip.sequence !== sequence)
      this.strip.show(sequence, position === undefined && first ? first.start : position);
    else if (position !== undefined) this.strip.focus(position, true);
    if (this.extra) this.extra.remove();
    this.chooser.value = "t" + index;
    this.note.replaceChildren(
      one.prefixOf === null || one.prefixOf === undefined
        ? ""
        : "its first " + counted(one.shared, "id") + " are those of trajectory " + one.prefixOf,
    );
    this.element.dataset.trajectory = index;
    this.strip.element.setAttribute("aria-label", "Tokens of trajectory " + index);
  }

  showCall(place, position) {
    const call = this.rollout.calls[place];
    if (!call) return;
    if (this.tree) this.tree.show(place);
    if (this.timeline) this.timeline.show(place);
    this.details.replaceChildren(callDetails(this.rollout, call, this.select));
    if (!this.strip || call.endVertex === undefined) return;
    const owner = call.source === place ? call.owner : null,
      at = position === undefined ? call.prompt : position;
    // In the trajectory that trains it, if there is one: there it stands among what came before and after.
    if (owner !== null && owner !== undefined && position === undefined) return this.showTrajectory(owner, at);
    const sequence = this.rollout.call(place);
    if (!this.extra) this.extra = h("option");
    this.extra.value = "c" + place;
    this.extra.textContent =
      "call " + call.name + ": " + counted(call.prompt, "id") + " of prompt, " + amount(call.sampled) + " sampled";
    this.chooser.prepend(this.extra);
    this.chooser.value = "c" + place;
    this.note.replaceChildren();
    if (this.strip.sequence !== sequence) this.strip.show(sequence, at);
    this.strip.focus(Math.min(at, sequence.length - 1), true);
    this.element.dataset.trajectory = "";
  }

  inspect(token) {
    if (this.timeline && token.callPlace !== null && this.timeline.current !== token.callPlace)
      this.timeline.show(token.callPlace);
    if (this.tree && token.callPlace !== null) this.tree.show(token.callPlace);
    if (token.callPlace !== null && this.detailed !== token.callPlace) {
      this.detailed = token.callPlace;
      this.details.replaceChildren(callDetails(this.rollout, this.rollout.calls[token.callPlace], this.select));
    }
    this.inspector.replaceChildren(inspected(this.strip.sequence, token));
    announce(
      "position " +
        token.position +
        ", " +
        (token.text === null ? "" : shown(token.text) + ", ") +
        "id " +
        token.id +
        ", " +
        (token.category === "prompt"
          ? "prompt"
          : "log-prob " + logProbText(token.logProb) + ", " + words(token.category)),
    );
  }

  find(query) {
    this.search.run(query);
    return this.go(1);
  }

  go(by) {
    const found = this.search.step(by);
    if (found && found.call !== undefined) this.showCall(found.call);
    else if (found) {
      this.showTrajectory(found.trajectory, found.start);
      this.strip.focus(found.start, true);
      const here = this.search.found.filter((one) => one.trajectory === found.trajectory);
      this.strip.showMatches(
        here.map((one) => [one.start, one.end]),
        here.indexOf(found),
      );
    }
    if (this.strip && !this.search.found.length) this.strip.showMatches([], -1);
    return this.search.told();
  }

  /** What has a scroll bar of its own. */
  scrolling() {
    return [this.tree, this.strip].filter(Boolean).map((one) => one.element);
  }

  /** Once it is in the document. */
  opened(place) {
    if (this.tree) this.tree.rows.draw();
    if (place !== undefined && this.rollout.calls[place]) this.showCall(place);
    else if (this.strip && !this.strip.sequence) this.showTrajectory(0);
    else if (this.tree && this.tree.current < 0) this.showCall(0);
  }
}

function keys(...names) {
  return names.map((name, place) => [place ? " / " : "", h("kbd", null, name)]);
}

function command(text) {
  return h("code", { class: "command" }, text);
}

/** A name as a shell takes it. */
function quoted(name) {
  return /^[\w.:@%+=,-]+$/.test(name) ? name : "'" + shown(name).replace(/'/g, "'\\''") + "'";
}
