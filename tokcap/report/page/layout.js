// Where each token of a strip lies: rows of one height, each the heading of a section or a run of tokens.

const MODES = {
  text: { row: 24, gap: 2, pad: 4 },
  ids: { row: 24, gap: 2, pad: 4 },
  dense: { row: 14, gap: 1, pad: 0 },
};
const DENSE_CELL = 9;
const LONGEST_SHOWN = 48;
const MARKS = { "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d" };

/** The text of a token as it stands in a strip. */
function stripText(text) {
  let one = text.replace(/[\n\t\r]/g, (char) => MARKS[char]);
  if (one.length > LONGEST_SHOWN) one = beginning(one, LONGEST_SHOWN) + "\u2026";
  return shown(one) || "\u2205";
}

class Layout {
  /** measure(text): its width in pixels. */
  constructor(sequence, mode, width, measure) {
    this.sequence = sequence;
    this.mode = mode;
    this.height = MODES[mode].row;
    this.width = width;
    this.measure = measure;
    this.widths = new Map();
    this.texts = new Map();
    this.sections = this.sectioned();
    this.firsts = [];
    this.ends = [];
    this.headings = [];
    for (const part of this.sections) this.place(part);
    this.rows = this.firsts.length;
  }

  /** Prompts and answers by turns. */
  sectioned() {
    const parts = [],
      { spans, length } = this.sequence;
    let at = 0;
    for (const span of spans) {
      if (span.start > at) parts.push({ start: at, end: span.start, span: null });
      parts.push({ start: span.start, end: span.end, span });
      at = span.end;
    }
    if (at < length) parts.push({ start: at, end: length, span: null });
    return parts;
  }

  place(part) {
    this.firsts.push(part.start);
    this.ends.push(part.start);
    this.headings.push(part);
    const { span } = part,
      breaks = this.mode === "text";
    let first = part.start,
      x = 0;
    for (let position = part.start; position < part.end; position++) {
      const wide = this.widthAt(position, span);
      if (x + wide > this.width && position > first) {
        this.push(first, position);
        first = position;
        x = 0;
      }
      x += wide;
      if (breaks && this.breaksAt(position, span)) {
        this.push(first, position + 1);
        first = position + 1;
        x = 0;
      }
    }
    if (first < part.end) this.push(first, part.end);
  }

  push(first, end) {
    this.firsts.push(first);
    this.ends.push(end);
    this.headings.push(null);
  }

  breaksAt(position, span) {
    const text = this.sequence.textAt(position, span);
    return text !== undefined && text.includes("\n");
  }

  labelAt(position, span) {
    if (this.mode === "ids") return String(this.sequence.ids[position]);
    const text = this.sequence.textAt(position, span);
    if (text === undefined) return String(this.sequence.ids[position]);
    let label = this.texts.get(text);
    if (label === undefined) this.texts.set(text, (label = stripText(text)));
    return label;
  }

  widthAt(position, span) {
    if (this.mode === "dense") return DENSE_CELL;
    const label = this.labelAt(position, span);
    let wide = this.widths.get(label);
    if (wide === undefined) {
      wide =
        Math.min(Math.ceil(this.measure(label)), this.width - 12) + 2 * MODES[this.mode].pad + MODES[this.mode].gap;
      this.widths.set(label, wide);
    }
    return wide;
  }

  get total() {
    return this.rows * this.height;
  }

  /** The row of tokens that holds a position. */
  rowOf(position) {
    let low = 0,
      high = this.rows - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.firsts[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Where a position lies in its row. */
  xOf(position) {
    const row = this.rowOf(position),
      span = this.sequence.spanAt(position);
    let x = 0;
    for (let one = this.firsts[row]; one < position; one++) x += this.widthAt(one, span);
    return x;
  }

  /** The position at a point, -1 where there is no token. */
  at(x, y) {
    const row = Math.floor(y / this.height);
    if (row < 0 || row >= this.rows || this.headings[row]) return -1;
    return this.inRow(row, x, false);
  }

  inRow(row, x, nearest) {
    const span = this.sequence.spanAt(this.firsts[row]);
    let left = 0;
    for (let position = this.firsts[row]; position < this.ends[row]; position++) {
      left += this.widthAt(position, span);
      if (x < left) return position;
    }
    return nearest ? this.ends[row] - 1 : -1;
  }
}
