// The whole sequence in one bar, above the strip.

/** The whole sequence in one bar: how surprising, what is trained, where it parts; a click goes there. */
class Barcode {
  constructor(strip) {
    this.strip = strip;
    this.from = this.to = 0;
    this.canvas = h("canvas", { class: "barcode", role: "img", "aria-label": "The whole sequence at a glance" });
    this.element = h("div", { class: "barcode-box" }, this.canvas);
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.go(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) this.go(event);
    });
    new ResizeObserver(() => this.again()).observe(this.element);
    THEME_CHANGED.push(() => this.draw());
  }

  go(event) {
    const { sequence } = this.strip;
    if (sequence && sequence.length) this.strip.focus(Math.floor((event.offsetX / this.width) * sequence.length), true);
  }

  /** Per pixel: the mean log-prob of what was sampled there (NaN: nothing known), and of what kind most of it is. */
  again() {
    const { sequence } = this.strip,
      width = Math.floor(this.element.clientWidth);
    if (!sequence || !sequence.length || width < 20) return;
    this.width = width;
    this.means = new Float64Array(width).fill(NaN);
    this.kinds = new Uint8Array(width);
    const sums = new Float64Array(width),
      known = new Int32Array(width),
      tally = [0, 1, 2, 3].map(() => new Int32Array(width));
    for (const span of sequence.spans) {
      for (let position = span.start; position < span.end; position++) {
        const first = Math.floor((position / sequence.length) * width);
        const last = Math.max(first, Math.ceil(((position + 1) / sequence.length) * width) - 1);
        const logProb = sequence.logProbAt(position, span),
          category = sequence.categoryAt(position, span);
        const kind = category === "trained" ? 1 : category === "elsewhere" ? 3 : 2;
        for (let x = first; x <= last && x < width; x++) {
          if (!Number.isNaN(logProb)) {
            sums[x] += Math.max(logProb, -30);
            known[x]++;
          }
          tally[kind][x]++;
        }
      }
    }
    for (let x = 0; x < width; x++) {
      if (known[x]) this.means[x] = sums[x] / known[x];
      // What is not trained is what one looks for: a single id of it is enough.
      this.kinds[x] = tally[2][x] ? 2 : tally[1][x] >= tally[3][x] && tally[1][x] ? 1 : tally[3][x] ? 3 : 0;
    }
    this.soon();
  }

  window(from, to) {
    if (from === this.from && to === this.to) return;
    this.from = from;
    this.to = to;
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
    const { sequence } = this.strip;
    if (!this.means || !sequence || !sequence.length) return;
    const { width } = this,
      tall = 40,
      pen = penOf(this.canvas, width, tall),
      colour = colours();
    const line = { 1: colour.trained, 2: colour.untrained, 3: colour.elsewhere };
    const hatch = hatched(pen, window.devicePixelRatio || 1);
    for (let x = 0; x < width; x++) {
      if (!this.kinds[x]) pen.fillStyle = colour.context;
      else pen.fillStyle = Number.isNaN(this.means[x]) ? hatch : colour.steps[stepOf(this.means[x])];
      pen.fillRect(x, 6, 1, 24);
      if (this.kinds[x]) {
        pen.fillStyle = line[this.kinds[x]];
        pen.fillRect(x, 30, 1, this.kinds[x] === 3 ? 1 : 4);
      }
    }
    const at = (position) => (position / sequence.length) * width;
    pen.fillStyle = colour["match-now"];
    for (const [position] of this.strip.matches) pen.fillRect(at(position), 35, 1.5, 5);
    pen.fillStyle = colour.version;
    for (const [position] of sequence.versions) pen.fillRect(at(position), 2, 1.5, 32);
    pen.fillStyle = colour.drift;
    for (const mark of sequence.drifts) {
      pen.beginPath();
      pen.moveTo(at(mark.at) - 4, 0);
      pen.lineTo(at(mark.at) + 4, 0);
      pen.lineTo(at(mark.at), 7);
      pen.fill();
    }
    pen.strokeStyle = colour.ink;
    pen.lineWidth = 1.5;
    const left = at(this.from);
    pen.strokeRect(Math.max(0.75, left), 4.75, Math.max(3, Math.min(at(this.to), width - 1) - left), 31);
  }
}
