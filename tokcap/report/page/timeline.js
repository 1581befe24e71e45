// The timeline: one bar a call, overlapping ones in lanes.

class Timeline {
  constructor(rollout, select) {
    this.rollout = rollout;
    this.select = select;
    this.current = null;
    this.timed = rollout.calls.filter((call) => call.began !== null);
    this.until = largest(this.timed.map((call) => call.began + (call.took || 0))) || 1e-6;
    this.lanes = this.placed();
    // However many were at work at once, it is no taller than this.
    this.lane = Math.min(16, 240 / this.lanes);
    this.bar = this.lane > 4 ? this.lane - 2 : this.lane;
    this.canvas = h("canvas", {
      class: "timeline",
      role: "img",
      "aria-label": this.told(),
      onmousemove: (event) => this.hover(event),
      onmouseleave: () => hideTip(),
      onclick: (event) => this.click(event),
    });
    const without = rollout.calls.length - this.timed.length;
    const outcomes = [...new Set(rollout.calls.map((call) => call.outcome))];
    this.element = h(
      "div",
      { class: "timeline-box" },
      this.canvas,
      h(
        "ul",
        { class: "legend" },
        outcomes.map((outcome) =>
          h(
            "li",
            { title: WORDS.outcomes[outcome] },
            h("span", { class: "swatch o-" + outcome, "aria-hidden": "true" }),
            words(outcome),
            h("b", null, amount(rollout.calls.filter((call) => call.outcome === outcome).length)),
          ),
        ),
        without ? h("li", { class: "muted" }, counted(without, "call") + " without a comparable time") : null,
      ),
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
    THEME_CHANGED.push(() => this.draw());
  }

  told() {
    return (
      "Timeline: " +
      counted(this.timed.length, "call") +
      " in " +
      seconds(this.until) +
      ", at most " +
      this.lanes +
      " at the same time"
    );
  }

  /** Each call in the first lane that is free when it begins; how many lanes that takes. */
  placed() {
    const ends = [];
    for (const call of [...this.timed].sort((a, b) => a.began - b.began)) {
      let lane = ends.findIndex((end) => end <= call.began);
      if (lane < 0) lane = ends.length;
      ends[lane] = call.took === null ? Infinity : call.began + call.took;
      call.lane = lane;
    }
    return Math.max(1, ends.length);
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    this.width = width;
    const tall = this.lanes * this.lane,
      pen = penOf(this.canvas, width, tall + 20),
      colour = colours();
    pen.strokeStyle = colour.line;
    pen.fillStyle = colour.muted;
    pen.font = "10.5px " + SANS;
    pen.textBaseline = "alphabetic";
    const ticks = Math.max(2, Math.min(8, Math.floor(width / 110)));
    for (let i = 0; i <= ticks; i++) {
      const x = Math.round((i / ticks) * (width - 1)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, tall + 4);
      pen.stroke();
      pen.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
      pen.fillText(i === 0 ? "0" : seconds((this.until * i) / ticks), x, tall + 16);
    }
    for (const call of this.timed) {
      const [x, wide] = this.box(call),
        y = call.lane * this.lane + (this.lane - this.bar) / 2;
      pen.fillStyle = colour["outcome-" + call.outcome];
      pen.fillRect(x, y, wide, this.bar);
      if (call.outcome === "lost" || call.outcome === "open") {
        pen.fillStyle = hatched(pen, window.devicePixelRatio || 1);
        pen.globalAlpha = 0.45;
        pen.fillRect(x, y, wide, this.bar);
        pen.globalAlpha = 1;
      }
      if (call.relation === "drifted") {
        pen.fillStyle = colour.drift;
        pen.fillRect(x, y, 2, this.bar);
      }
      if (this.current === call.place) {
        pen.strokeStyle = colour.ink;
        pen.lineWidth = 1.5;
        pen.strokeRect(x - 0.5, y - 0.5, wide + 1, this.bar + 1);
        pen.lineWidth = 1;
      }
    }
  }

  box(call) {
    const x = (call.began / this.until) * this.width;
    const end = call.took === null ? this.width : ((call.began + call.took) / this.until) * this.width;
    return [Math.min(x, this.width - 2), Math.max(2, end - x - 0.5)];
  }

  at(event) {
    const lane = Math.floor(event.offsetY / this.lane);
    const near = this.timed.filter((call) => call.lane === lane);
    return near.find((call) => {
      const [x, wide] = this.box(call);
      return event.offsetX >= x - 2 && event.offsetX <= x + wide + 2;
    });
  }

  hover(event) {
    const call = this.at(event);
    this.canvas.classList.toggle("pointing", Boolean(call));
    if (!call) return hideTip();
    showTip(event.clientX, event.clientY, [
      call.name,
      words(call.outcome) + ", began " + seconds(call.began) + ", took " + seconds(call.took),
      relationText(call),
    ]);
  }

  click(event) {
    const call = this.at(event);
    if (call) this.select(call.place);
  }

  show(place) {
    this.current = place;
    this.draw();
  }
}
