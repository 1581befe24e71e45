// Search: token text (also across tokens), token ids, call ids. A prefix that trajectories share is searched once.

const MOST_MATCHES = 10000;
/** One more is looked for, to say that there are more. */
const BORDER = 64;
/** Tokens before the end of a shared prefix that are searched again, for a match that runs across it. */

class Search {
  constructor(rollout) {
    this.rollout = rollout;
    this.found = [];
    this.current = -1;
    this.query = "";
    this.more = false;
    this.texts = new Map();
  }

  run(query) {
    this.query = query;
    this.found = [];
    this.current = -1;
    this.more = false;
    if (query === "") return;
    const folded = query === query.toLowerCase();
    const fits = (text) => (folded ? text.toLowerCase() : text).includes(query);
    for (const call of this.rollout.calls)
      if (fits(call.name) || fits(call.response || "")) this.found.push({ call: call.place });
    if (!this.rollout.hasTokens) return;
    const number = /^#?\d+$/.test(query) ? Number(query.replace("#", "")) : null;
    const starting = this.rollout.trajectories.map((_, index) => index);
    for (const index of starting) {
      const places = [
        ...(number === null ? [] : this.ids(index, number)),
        ...(query.startsWith("#") && number !== null ? [] : this.text(index, query, folded)),
      ];
      places.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      let before = [-1, -1];
      for (const [start, end] of places) {
        // Found as an id and as its text: that is one place, too.
        if (start === before[0] && end === before[1]) continue;
        before = [start, end];
        if (this.found.length >= MOST_MATCHES) {
          this.more = true;
          return;
        }
        this.found.push({ trajectory: index, start, end });
      }
    }
  }

  ids(index, number) {
    const { ids } = this.rollout.trajectory(index),
      found = [];
    for (let at = this.rollout.trajectories[index].shared; at < ids.length && found.length <= MOST_MATCHES; at++)
      if (ids[at] === number) found.push([at, at + 1]);
    return found;
  }

  text(index, query, folded) {
    const { joined, offsets, first } = this.joined(index, folded),
      shared = this.rollout.trajectories[index].shared,
      found = [];
    let before = [-1, -1];
    for (let at = joined.indexOf(query); at >= 0 && found.length <= MOST_MATCHES; at = joined.indexOf(query, at + 1)) {
      const start = first + tokenOf(offsets, at),
        end = first + tokenOf(offsets, at + query.length - 1) + 1;
      // Twice in the text of one token is one place.
      if (end <= shared || (start === before[0] && end === before[1])) continue;
      before = [start, end];
      found.push(before);
    }
    return found;
  }

  /** The text of a trajectory behind what it shares, and where each token begins in it. */
  joined(index, folded) {
    const name = index + (folded ? "f" : "");
    let made = this.texts.get(name);
    if (!made) {
      const sequence = this.rollout.trajectory(index),
        first = Math.max(0, this.rollout.trajectories[index].shared - BORDER);
      const pieces = [],
        offsets = new Int32Array(sequence.length - first);
      let at = 0,
        span = null;
      for (let position = first; position < sequence.length; position++) {
        if (span === null || position >= span.end) span = sequence.spanAt(position);
        const text = sequence.textAt(position, span);
        const piece = text === undefined ? "\ufffc" : folded ? text.toLowerCase() : text;
        offsets[position - first] = at;
        at += piece.length;
        pieces.push(piece);
      }
      made = { joined: pieces.join(""), offsets, first };
      this.texts.set(name, made);
    }
    return made;
  }

  step(by) {
    if (!this.found.length) return null;
    this.current = (this.current + by + this.found.length) % this.found.length;
    return this.found[this.current];
  }

  told() {
    if (this.query === "") return "";
    if (!this.found.length) return "no match";
    return amount(this.current + 1) + " of " + amount(this.found.length) + (this.more ? "+" : "");
  }
}

/** The last token that begins at or before a character. */
function tokenOf(offsets, at) {
  let low = 0,
    high = offsets.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (offsets[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}
