// The token strip: a canvas as large as what is in view, under a scroll bar as long as the sequence.

class Strip {
  constructor(focused) {
    this.focused = focused;
    this.mode = "text";
    this.sequence = null;
    this.layout = null;
    this.position = -1;
    this.hovered = -1;
    this.matches = [];
    this.match = -1;
    this.frames = 0;
    this.canvas = h("canvas", { class: "strip-canvas", "aria-hidden": "true" });
    this.spacer = h("div", { class: "spacer" }, this.canvas);
    this.element = h(
      "div",
      {
        class: "strip",
        role: "application",
        "aria-roledescription": "token strip",
        tabindex: 0,
        "aria-label": "Tokens",
        "aria-describedby": "strip-keys",
        onkeydown: (event) => this.key(event),
      },
      this.spacer,
    );
    this.barcode = new Barcode(this);
    this.element.addEventListener("scroll", () => this.soon(), { passive: true });
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => {
      this.hovered = -1;
      hideTip();
      this.soon();
    });
    this.canvas.addEventListener("mousedown", (event) => this.press(event));
    new ResizeObserver(() => this.again()).observe(this.element);
    THEME_CHANGED.push(() => this.draw());
  }

  show(sequence, position) {
    this.sequence = sequence;
    this.matches = [];
    this.match = -1;
    this.position = -1;
    this.element.scrollTop = 0;
    this.layout = null;
    this.again();
    this.barcode.again();
    if (sequence.length) this.focus(Math.max(0, Math.min(position || 0, sequence.length - 1)), true);
  }

  setMode(mode) {
    this.mode = mode;
    this.layout = null;
    this.again();
    if (this.position >= 0) this.reveal(this.position, true);
  }

  /** Lay out again if that is due. */
  again() {
    const width = this.element.clientWidth - 2 * STRIP_INSET;
    if (!this.sequence || width < 40) return;
    if (!this.layout || this.layout.width !== width) {
      const pen = this.canvas.getContext("2d");
      pen.font = "12.5px " + MONO;
      this.layout = new Layout(this.sequence, this.mode, width, (text) => pen.measureText(text).width);
      this.element.style.height = this.layout.total + 18 + "px";
      this.spacer.style.height = Math.max(this.layout.total + 12, this.element.clientHeight) + "px";
    }
    this.soon();
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const { layout } = this;
    if (!layout) return;
    const width = this.element.clientWidth,
      tall = this.element.clientHeight,
      top = this.element.scrollTop;
    const pen = penOf(this.canvas, width, tall);
    const hatch = hatched(pen, window.devicePixelRatio || 1),
      first = Math.max(0, Math.floor((top - 6) / layout.height));
    const end = Math.min(layout.rows, Math.ceil((top + tall) / layout.height) + 1);
    for (let row = first; row < end; row++) {
      const y = row * layout.height - top + 6;
      if (layout.headings[row]) this.heading(pen, layout.headings[row], y, width);
      else this.tokens(pen, row, y, hatch);
    }
    this.marks(pen, first, end, top);
    this.frames++;
    this.element.dataset.frames = this.frames;
    this.element.dataset.rows = first + "-" + end;
    this.barcode.window(layout.firsts[first] || 0, end > 0 ? layout.ends[end - 1] : 0);
  }

  heading(pen, part, y, width) {
    const colour = colours(),
      { span } = part,
      count = part.end - part.start;
    const small = this.mode === "dense";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.font = (small ? "9.5px " : "600 11px ") + SANS;
    const middle = y + this.layout.height / 2 + (small ? 0 : 1);
    let told, kind;
    if (span === null) {
      told = "prompt";
      kind = colour.muted;
    } else {
      const trained = span.here && span.call.trained > 0;
      told = "answer of " + span.call.name;
      kind = !span.here ? colour.elsewhere : trained ? colour.trained : colour.untrained;
    }
    pen.fillStyle = kind;
    pen.fillText(told, STRIP_INSET, middle);
    let x = STRIP_INSET + pen.measureText(told).width + 8;
    pen.font = (small ? "9.5px " : "11px ") + SANS;
    pen.fillStyle = colour.muted;
    const rest = counted(count, "id") + (span === null ? "" : ", " + this.verdictOf(span)) + this.partsIn(part);
    pen.fillText(rest, x, middle);
    x += pen.measureText(rest).width + 10;
    pen.strokeStyle = colour.line;
    pen.beginPath();
    pen.moveTo(x, Math.round(middle) + 0.5);
    pen.lineTo(width - STRIP_INSET, Math.round(middle) + 0.5);
    pen.stroke();
  }

  /** Which weights sampled a section, and which prompts part in it. */
  partsIn(part) {
    const versions = part.span === null ? [] : [...new Set(part.span.call.versions.map(([version]) => version))];
    const told = versions.length
      ? [
          (versions.length > 1 ? "policy versions " : "policy version ") +
            versions.map((version) => beginning(shown(version), 40)).join(", "),
        ]
      : [];
    for (const { at, call } of this.sequence.drifts) {
      if (at < part.start || at >= part.end) continue;
      told.push(
        call.name +
          " parts at " +
          amount(at) +
          (call.drift.nearest === null ? "" : " from " + this.sequence.rollout.calls[call.drift.nearest].name),
      );
    }
    return told.map((one) => ", " + one).join("");
  }

  verdictOf(span) {
    if (!span.here)
      return (
        "context here" +
        (span.call.owner === null || span.call.owner === undefined ? "" : ", belongs to trajectory " + span.call.owner)
      );
    if (span.call.verdict === "trained") {
      return span.call.trained === span.call.sampled ? "trained" : amount(span.call.trained) + " trained";
    }
    return "not trained: " + words(span.call.verdict || "unknown");
  }

  tokens(pen, row, y, hatch) {
    const { layout, sequence } = this,
      colour = colours(),
      dense = this.mode === "dense";
    const start = layout.firsts[row],
      end = layout.ends[row],
      span = sequence.spanAt(start);
    const gap = MODES[this.mode].gap,
      pad = MODES[this.mode].pad,
      tall = layout.height - (dense ? 2 : 4);
    let x = STRIP_INSET,
      match = this.matchFrom(start);
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.font = "12.5px " + MONO;
    for (let position = start; position < end; position++) {
      const wide = layout.widthAt(position, span),
        box = wide - gap,
        top = y + (dense ? 1 : 2);
      let ink = colour["context-ink"];
      if (span === null) {
        pen.fillStyle = colour.context;
        pen.fillRect(x, top, box, tall);
      } else {
        const logProb = sequence.logProbAt(position, span),
          known = !Number.isNaN(logProb),
          step = known ? stepOf(logProb) : 0;
        pen.fillStyle = known ? colour.steps[step] : hatch;
        pen.fillRect(x, top, box, tall);
        if (known) ink = colour.stepInks[step];
        else ink = colour.ink;
        const category = sequence.categoryAt(position, span),
          line = dense ? 2 : 3;
        pen.fillStyle =
          category === "trained" ? colour.trained : category === "elsewhere" ? colour.elsewhere : colour.untrained;
        if (category === "trained") pen.fillRect(x, top + tall - line, box, line);
        else if (category === "elsewhere") pen.fillRect(x, top + tall - 1, box, 1);
        else
          for (let dash = 0; dash < box; dash += 5)
            pen.fillRect(x + dash, top + tall - line, Math.min(3, box - dash), line);
      }
      while (match < this.matches.length && this.matches[match][1] <= position) match++;
      const found = match < this.matches.length && this.matches[match][0] <= position;
      if (found) {
        pen.strokeStyle = match === this.match ? colour["match-now"] : colour.match;
        pen.lineWidth = 2;
        pen.strokeRect(x + 0.5, top + 0.5, box - 1, tall - 1);
      }
      if (!dense) {
        pen.fillStyle = ink;
        const room = layout.width - 8;
        if (wide >= room) {
          pen.save();
          pen.beginPath();
          pen.rect(x, top, box, tall);
          pen.clip();
          pen.fillText(layout.labelAt(position, span), x + pad, top + tall / 2);
          pen.restore();
        } else pen.fillText(layout.labelAt(position, span), x + pad, top + tall / 2);
      }
      if (position === this.position || position === this.hovered) {
        pen.strokeStyle = position === this.position ? colour.accent : colour.muted;
        pen.lineWidth = position === this.position ? 2.5 : 1.5;
        pen.strokeRect(x - 0.5, top - 0.5, box + 1, tall + 1);
      }
      x += wide;
    }
  }

  /** The first match that ends behind a position. */
  matchFrom(position) {
    let low = 0,
      high = this.matches.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.matches[middle][1] <= position) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Where prompts part, and where other weights begin to sample. */
  marks(pen, first, end, top) {
    const { layout, sequence } = this,
      colour = colours();
    const from = layout.firsts[first] || 0,
      to = end > 0 ? layout.ends[end - 1] : 0;
    for (const { at, call } of sequence.drifts) {
      if (at < from || at > to || at >= sequence.length) continue;
      this.flag(pen, at, top, colour.drift);
    }
    for (const [at] of sequence.versions) {
      if (at >= from && at < to) this.flag(pen, at, top, colour.version);
    }
  }

  flag(pen, position, top, colour) {
    const { layout } = this,
      x = STRIP_INSET + layout.xOf(position) - 1.5,
      y = layout.rowOf(position) * layout.height - top + 6;
    pen.fillStyle = colour;
    pen.fillRect(x - 0.5, y - 1, 2.5, layout.height);
    pen.beginPath();
    pen.moveTo(x - 3.5, y - 2);
    pen.lineTo(x + 5, y - 2);
    pen.lineTo(x + 0.75, y + 4);
    pen.fill();
  }

  hover(event) {
    const position = this.layout
      ? this.layout.at(event.offsetX - STRIP_INSET, event.offsetY + this.element.scrollTop - 6)
      : -1;
    if (position !== this.hovered) {
      this.hovered = position;
      this.soon();
    }
    if (position < 0) return hideTip();
    showTip(event.clientX, event.clientY, tokenLines(this.sequence.tokenAt(position)));
  }

  press(event) {
    const position = this.layout
      ? this.layout.at(event.offsetX - STRIP_INSET, event.offsetY + this.element.scrollTop - 6)
      : -1;
    if (position >= 0) this.focus(position);
  }

  focus(position, centre = false) {
    if (!this.sequence || !this.sequence.length) return;
    this.position = Math.max(0, Math.min(position, this.sequence.length - 1));
    this.reveal(this.position, centre);
    const token = this.sequence.tokenAt(this.position),
      data = this.element.dataset;
    data.position = token.position;
    data.id = token.id;
    data.text = token.text === null ? "" : shown(token.text);
    data.logProb = token.logProb === null ? "" : String(token.logProb);
    data.call = token.call === null ? "" : token.call;
    data.category = token.category;
    this.focused(token);
    this.soon();
  }

  reveal(position, centre) {
    if (!this.layout) return;
    const view = this.element,
      y = this.layout.rowOf(position) * this.layout.height,
      tall = this.layout.height;
    if (centre) view.scrollTop = y - view.clientHeight / 3;
    else if (y - 20 < view.scrollTop) view.scrollTop = y - 26;
    else if (y + tall + 8 > view.scrollTop + view.clientHeight) view.scrollTop = y + tall + 14 - view.clientHeight;
  }

  showMatches(matches, current) {
    this.matches = matches;
    this.match = current;
    this.soon();
    this.barcode.soon();
  }

  /** The next position for which holds(position, before) is true, or -1. */
  find(step, holds) {
    for (let at = this.position + step; at >= 0 && at < this.sequence.length; at += step) if (holds(at)) return at;
    return -1;
  }

  jump(step, kind) {
    const { sequence } = this;
    const starts =
      kind === "answer"
        ? sequence.spans.map((span) => span.start)
        : kind === "drift"
          ? sequence.drifts.map((mark) => mark.at)
          : null;
    let to;
    if (starts) {
      const ahead = starts.filter((at) => (step > 0 ? at > this.position : at < this.position)).sort((a, b) => a - b);
      to = step > 0 ? ahead[0] : ahead[ahead.length - 1];
    } else to = this.find(step, (at) => !["prompt", "trained", "elsewhere"].includes(sequence.categoryAt(at)));
    if (to === undefined || to < 0)
      announce(
        "no other " +
          (kind === "untrained" ? "untrained token" : kind) +
          (step > 0 ? " behind" : " before") +
          " this token",
      );
    else this.focus(to, true);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.layout) return;
    const at = this.position,
      { layout } = this;
    const row = layout.rowOf(Math.max(at, 0)),
      x = at >= 0 ? layout.xOf(at) : 0;
    const vertical = (rows) => {
      let to = row,
        left = Math.abs(rows);
      while (left > 0) {
        let next = to + Math.sign(rows);
        while (next >= 0 && next < layout.rows && layout.headings[next]) next += Math.sign(rows);
        if (next < 0 || next >= layout.rows) break;
        to = next;
        left--;
      }
      this.focus(layout.inRow(to, x + 1, true));
    };
    const page = Math.max(1, Math.floor(this.element.clientHeight / layout.height) - 1);
    const moves = {
      j: () => this.focus(at + 1),
      ArrowRight: () => this.focus(at + 1),
      k: () => this.focus(at - 1),
      ArrowLeft: () => this.focus(at - 1),
      ArrowDown: () => vertical(1),
      ArrowUp: () => vertical(-1),
      PageDown: () => vertical(page),
      PageUp: () => vertical(-page),
      Home: () => this.focus(0),
      End: () => this.focus(this.sequence.length - 1),
      a: () => this.jump(1, "answer"),
      A: () => this.jump(-1, "answer"),
      d: () => this.jump(1, "drift"),
      D: () => this.jump(-1, "drift"),
      u: () => this.jump(1, "untrained"),
      U: () => this.jump(-1, "untrained"),
    };
    if (!Object.hasOwn(moves, event.key)) return;
    moves[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }
}

const STRIP_INSET = 12;

/** What a tooltip says of a token. */
function tokenLines(token) {
  const first = token.text === null ? "id " + token.id : "\u201c" + shown(token.text) + "\u201d";
  return [
    first,
    "id " + token.id + ", position " + amount(token.position),
    token.category === "prompt"
      ? null
      : "log-prob " + logProbText(token.logProb) + ", " + probabilityText(token.logProb),
    token.call === null
      ? null
      : "call " +
        shown(token.call) +
        (token.choice ? "#" + token.choice : "") +
        (token.version === null ? "" : ", policy version " + shown(token.version)),
    token.why,
  ];
}
