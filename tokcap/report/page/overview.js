// The page of a store: every rollout in one table, and what they come to.

const COLUMN = Object.fromEntries(DATA.columns.map((name, place) => [name, place]));
const TABLE_COLUMNS = [
  ["id", "Rollout"],
  ["state", "State"],
  ["calls", "Calls"],
  ["sampled", "Sampled"],
  ["trained", "Trained"],
  ["lost", "Lost"],
  ["drifted", "Drifted"],
  ["bytes", "Size"],
  ["changed", "Age"],
  ["why", "Why"],
];
const NUMERIC = new Set(["calls", "sampled", "trained", "lost", "drifted", "bytes", "changed"]);

class Overview {
  constructor(open) {
    this.open = open;
    this.order = DATA.table.map((_, index) => index);
    this.sort = ["why", -1];
    this.query = "";
    this.state = "";
    this.suspect = false;
    this.current = -1;
    this.element = this.built();
    this.apply();
  }

  built() {
    const total = DATA.totals,
      main = h("div", { class: "main" });
    const states = total.states.map(([state, count]) => amount(count) + " " + state).join(", ");
    main.append(
      h(
        "header",
        { class: "page-head" },
        h("h1", null, DATA.whole ? "Store" : "Rollouts"),
        h("p", { class: "head-line mono" }, shown(DATA.title)),
        h("p", { class: "verdict" }, total.rollouts ? storeText(total) : "There is no rollout in this store."),
        total.rollouts
          ? h(
              "dl",
              { class: "tiles" },
              tile("rollouts", amount(total.rollouts), states),
              tile("calls", amount(total.calls)),
              tile("sampled ids", amount(total.sampled)),
              tile(
                "trained",
                percent(total.trained, total.sampled),
                counted(total.trained, "id"),
                total.sampled && total.trained === total.sampled ? "good" : total.sampled ? "warn" : "",
              ),
              tile(
                "masked rollouts",
                amount(total.masked),
                total.masked ? percent(total.masked, total.rollouts) : "",
                total.masked ? "bad" : "",
              ),
              tile(
                "drifted calls",
                amount(total.drifted),
                total.drifted ? counted(total.driftLost, "id") + " lost" : "",
                total.drifted ? "drift" : "",
              ),
              tile(
                "damaged, unreadable",
                amount(total.damaged + total.unreadable),
                "",
                total.damaged + total.unreadable ? "bad" : "",
              ),
              tile("on disk", size(total.bytes)),
            )
          : null,
        total.sampled ? categoryBar(total.categories) : null,
      ),
    );
    if (!total.rollouts) return h("div", { class: "rollout alone" }, main);
    main.append(this.table());
    if (total.reasons.length)
      main.append(
        section(
          "Why",
          { class: "panel why", note: "Reasons why something is not trained, by the number of rollouts." },
          h(
            "div",
            { class: "reasons" },
            total.reasons.map(([reason, count]) =>
              advised(
                reason,
                counted(count, "rollout"),
                null,
                h("button", { type: "button", class: "link", onclick: () => this.filterBy(reason) }, "Show them"),
              ),
            ),
          ),
        ),
      );
    const plots = [logProbHistogram([["sampled", "p-answer", total.logProbs]])];
    plots.push(
      lengthHistogram(
        "Rollouts by sampled ids",
        DATA.table.filter((row) => row[COLUMN.sampled]).map((row) => row[COLUMN.sampled]),
        "rollout",
      ),
    );
    main.append(
      section(
        "Distributions",
        { class: "panel" },
        h(
          "div",
          { class: "plots" },
          plots,
          h(
            "div",
            null,
            [
              ["Calls by outcome", total.outcomes.map(outcomePart)],
              ["Sampled ids by policy version", total.versions.map(recordedPart)],
              ["Rollouts by model", total.models.map(recordedPart)],
            ]
              .filter(([, parts]) => parts.length)
              .map(([title, parts]) => [h("h3", null, title), stackedBar(parts.slice(0, 12), title)]),
          ),
        ),
      ),
    );
    return h("div", { class: "rollout alone" }, main);
  }

  table() {
    const told = DATA.rollouts.length,
      all = DATA.table.length;
    this.head = h(
      "div",
      { class: "table-head", role: "row" },
      TABLE_COLUMNS.map(([name, title]) =>
        h(
          "div",
          { role: "columnheader", class: "cell-" + name, "data-column": name },
          h("button", { type: "button", onclick: () => this.sortBy(name) }, title),
        ),
      ),
    );
    this.body = h("div", { class: "table-body", role: "rowgroup", tabindex: -1 });
    this.rows = new Rows(this.body, 30, (index) => this.row(index));
    this.count = h("span", { class: "muted", role: "status" });
    this.filter = h("input", {
      type: "search",
      placeholder: "id, group, reason",
      spellcheck: "false",
      autocomplete: "off",
      "aria-label": "Filter rollouts",
      oninput: (event) => {
        this.query = event.target.value.trim().toLowerCase();
        this.apply();
      },
    });
    const states = h(
      "select",
      {
        "aria-label": "State",
        onchange: (event) => {
          this.state = event.target.value;
          this.apply();
        },
      },
      h("option", { value: "" }, "every state"),
      DATA.totals.states.map(([state]) => h("option", { value: state }, state)),
    );
    const suspect = h(
      "label",
      { class: "check" },
      h("input", {
        type: "checkbox",
        onchange: (event) => {
          this.suspect = event.target.checked;
          this.apply();
        },
      }),
      "only where something is wrong or drifted",
    );
    this.grid = h(
      "div",
      {
        class: "table",
        role: "grid",
        tabindex: 0,
        "aria-label": "Rollouts: arrows move, Enter opens",
        "aria-rowcount": all + 1,
        onkeydown: (event) => this.key(event),
      },
      h("div", { role: "rowgroup" }, this.head),
      this.body,
    );
    const note =
      told === all
        ? "A click opens a rollout."
        : "The calls and tokens of " +
          amount(told) +
          " of " +
          counted(all, "rollout") +
          " are in this page, those first in which something is masked, lost or drifted. For the others:";
    return section(
      "Rollouts",
      { class: "panel", note },
      told === all ? null : command("tokcap report ROLLOUT... --out FILE"),
      h("div", { class: "table-bar" }, this.filter, states, suspect, this.count),
      this.grid,
    );
  }

  apply() {
    if (!this.rows) return;
    const fits = (row) =>
      (!this.state || row[COLUMN.state] === this.state) &&
      (!this.suspect ||
        row[COLUMN.why].some((why) => why !== "unfinished") ||
        row[COLUMN.reasons].length ||
        row[COLUMN.drifted] ||
        row[COLUMN.lost]) &&
      (!this.query ||
        (
          row[COLUMN.id] +
          "\n" +
          row[COLUMN.group] +
          "\n" +
          row[COLUMN.reasons].join(" ") +
          " " +
          row[COLUMN.why].join(" ")
        )
          .toLowerCase()
          .includes(this.query));
    this.order = DATA.table.map((_, index) => index).filter((index) => fits(DATA.table[index]));
    const [name, direction] = this.sort,
      place = COLUMN[name];
    if (name === "why") this.order.sort((a, b) => direction * (whyWeight(DATA.table[a]) - whyWeight(DATA.table[b])));
    else if (name) {
      this.order.sort((a, b) => {
        const one = DATA.table[a][place],
          other = DATA.table[b][place];
        return direction * (one < other ? -1 : one > other ? 1 : 0);
      });
    }
    for (const cell of this.head.children)
      cell.setAttribute(
        "aria-sort",
        cell.dataset.column !== name ? "none" : direction > 0 ? "ascending" : "descending",
      );
    this.current = -1;
    this.grid.removeAttribute("aria-activedescendant");
    this.count.textContent =
      this.order.length === DATA.table.length
        ? counted(this.order.length, "rollout")
        : amount(this.order.length) + " of " + counted(DATA.table.length, "rollout");
    this.body.scrollTop = 0;
    this.body.style.height = Math.max(1, this.order.length) * this.rows.height + "px";
    this.rows.setCount(this.order.length);
  }

  filterBy(text) {
    this.filter.value = this.query = text;
    this.apply();
    this.filter.scrollIntoView({ block: "center" });
    this.filter.focus({ preventScroll: true });
  }

  sortBy(name) {
    const down = NUMERIC.has(name) || name === "why" ? -1 : 1;
    // An age is the older the smaller its time.
    const first = name === "changed" ? 1 : down;
    this.sort = this.sort[0] === name ? [name, -this.sort[1]] : [name, first];
    this.apply();
  }

  row(index) {
    const row = DATA.table[this.order[index]],
      value = (name) => row[COLUMN[name]],
      page = value("page");
    const share = h("span", { class: "share" + (value("sampled") ? "" : " none"), "aria-hidden": "true" }, h("span"));
    share.firstChild.style.width = value("sampled") ? (100 * value("trained")) / value("sampled") + "%" : "0";
    const number = (name) => (value(name) ? amount(value(name)) : h("span", { class: "muted" }, "0"));
    const name = shown(value("id"));
    const cells = {
      id:
        page === null
          ? h("span", { class: "muted", title: "not in this page: tokcap report " + quoted(value("id")) }, name)
          : h("a", { tabindex: -1, title: name }, name),
      state: badge(value("state"), "s-" + value("state")),
      calls: number("calls"),
      sampled: number("sampled"),
      trained: [value("sampled") ? percent(value("trained"), value("sampled")) : "", share],
      lost: number("lost"),
      drifted: number("drifted"),
      bytes: size(value("bytes")),
      changed: value("changed") ? age(DATA.madeAt - value("changed")) : "\u2013",
      why: [
        value("why").map((why) =>
          badge(words(why), why === "unfinished" || why === "torn" ? "" : why === "incomplete" ? "warn" : "bad"),
        ),
        value("reasons").map((reason) => badge(words(reason), "warn", WORDS.reasons[reason])),
      ],
    };
    if (page !== null) cells.id.setAttribute("href", "#r" + page);
    return h(
      "div",
      {
        role: "row",
        class: "table-row" + (index === this.current ? " current" : "") + (page === null ? "" : " there"),
        id: "row-" + index,
        "aria-rowindex": index + 2,
        "aria-selected": index === this.current ? "true" : null,
        "data-rollout": name,
        onclick: () => {
          if (page !== null) this.open(page);
        },
      },
      TABLE_COLUMNS.map(([column]) => h("div", { role: "gridcell", class: "cell-" + column }, cells[column])),
    );
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("button")) return;
    const to = {
      ArrowDown: this.current + 1,
      j: this.current + 1,
      ArrowUp: this.current - 1,
      k: this.current - 1,
      Home: 0,
      End: this.order.length - 1,
      PageDown: this.current + 10,
      PageUp: this.current - 10,
    }[event.key];
    if (to !== undefined) {
      this.current = Math.max(0, Math.min(to, this.order.length - 1));
      this.rows.reveal(this.current);
      this.rows.again();
      this.grid.setAttribute("aria-activedescendant", "row-" + this.current);
    } else if (event.key === "Enter" && this.current >= 0) {
      const page = DATA.table[this.order[this.current]][COLUMN.page];
      if (page !== null) this.open(page);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** What has a scroll bar of its own. */
  scrolling() {
    return this.body ? [this.body] : [];
  }

  opened() {
    if (this.rows) this.rows.draw();
  }
}

function outcomePart([name, count]) {
  return [words(name), count, "o-" + name, WORDS.outcomes[name]];
}

/** Of a name from a record, which may be any: it is no key of ours, and stays as it is written. */
function recordedPart([name, count], place) {
  return [shown(name) || "not told", count, "v-" + (place % 6), shown(name)];
}

function whyWeight(row) {
  return 10 * row[COLUMN.why].filter((why) => why !== "unfinished").length + row[COLUMN.reasons].length;
}

function storeText(total) {
  const said = [];
  if (!total.sampled) said.push("Nothing that was sampled is stored.");
  else if (total.trained === total.sampled)
    said.push(
      total.sampled === 1
        ? "The one sampled id is trained."
        : "All " + amount(total.sampled) + " sampled ids are trained.",
    );
  else
    said.push(
      percent(total.trained, total.sampled) +
        " of " +
        counted(total.sampled, "sampled id") +
        (total.sampled === 1 ? " is" : " are") +
        " trained.",
    );
  if (total.masked)
    said.push(counted(total.masked, "rollout") + (total.masked === 1 ? " delivers" : " deliver") + " nothing.");
  if (total.damaged)
    said.push(counted(total.damaged, "rollout") + (total.damaged === 1 ? " is" : " are") + " damaged.");
  if (total.unreadable) said.push(counted(total.unreadable, "rollout") + " can't be read.");
  if (total.drifted) said.push(counted(total.drifted, "prompt") + " drifted.");
  return said.join(" ");
}
