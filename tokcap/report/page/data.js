// What is in the page: facts as JSON, tokens as arrays that are decoded when a rollout is looked at.

const DATA = JSON.parse(document.getElementById("data").textContent);
const WORDS = DATA.words;
const ARRAYS = { int32: Int32Array, float32: Float32Array, float64: Float64Array, uint8: Uint8Array };
const VOCABULARY = new Map(
  DATA.vocabulary.map(([model, ids, texts]) => {
    return [model, new Map(ids.map((id, place) => [id, texts[place]]))];
  }),
);
const NO_VOCABULARY = new Map();

function decoded(name) {
  const element = document.getElementById(name);
  if (element === null) return null;
  const text = atob(element.textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[element.dataset.dtype](bytes.buffer);
}

/** A rollout whose calls are in the page. */
class Rollout {
  constructor(told, number) {
    Object.assign(this, told);
    this.number = number;
    this.calls.forEach((call, place) => {
      call.place = place;
      call.name = shown(call.id || "(unnamed)") + (call.choice ? "#" + call.choice : "");
      call.own = call.pieces ? new Map(call.pieces) : null;
    });
    this.hasTokens = document.getElementById("ids-" + number) !== null;
    this._made = new Map();
  }

  get arrays() {
    if (!this._arrays && this.hasTokens) {
      const part = (name) => decoded(name + "-" + this.number);
      this._arrays = {
        parents: part("parents"),
        starts: part("starts"),
        ids: part("ids"),
        logProbs: part("logProbs"),
        mask: part("mask"),
      };
    }
    return this._arrays;
  }

  /** The ids of the sequence that a vertex stands for. */
  idsTo(vertex) {
    const { parents, starts, ids } = this.arrays;
    const way = [];
    let length = 0;
    for (let v = vertex; v > 0; v = parents[v]) {
      way.push(v);
      length += starts[v + 1] - starts[v];
    }
    const joined = new Int32Array(length);
    for (let at = 0, i = way.length - 1; i >= 0; i--) {
      const edge = ids.subarray(starts[way[i]], starts[way[i] + 1]);
      joined.set(edge, at);
      at += edge.length;
    }
    return joined;
  }

  logProb(call, offset) {
    return this.arrays.logProbs[call.first + offset];
  }

  isTrained(call, offset) {
    const bit = call.first + offset;
    return ((this.arrays.mask[bit >> 3] >> (bit & 7)) & 1) === 1;
  }

  trajectory(index) {
    return this._sequence("t" + index, () => new Sequence(this, this.calls[this.trajectories[index].end], index));
  }

  call(place) {
    return this._sequence("c" + place, () => new Sequence(this, this.calls[place], null));
  }

  _sequence(name, make) {
    let found = this._made.get(name);
    if (!found) {
      if (this._made.size > 8) this._made.delete(this._made.keys().next().value);
      found = make();
      this._made.set(name, found);
    }
    return found;
  }
}

/** Prompt and answer of a call, with the answers that its prompt holds; as a trajectory, or by itself. */
class Sequence {
  constructor(rollout, call, trajectory) {
    this.rollout = rollout;
    this.end = call;
    this.trajectory = trajectory;
    this.ids = rollout.hasTokens && call.endVertex !== undefined ? rollout.idsTo(call.endVertex) : new Int32Array(0);
    this.length = this.ids.length;
    this.vocabulary = VOCABULARY.get(call.model) || NO_VOCABULARY;
    const owned = trajectory === null ? null : new Set(rollout.trajectories[trajectory].owned);
    const spans = [];
    for (
      let one = call;
      one;
      one = one.continues === null || one.continues === undefined ? null : rollout.calls[one.continues]
    ) {
      const source = one === call ? one : rollout.calls[one.source];
      if (source.first !== undefined && source.sampled) {
        spans.push({
          call: source,
          start: one.prompt,
          end: one.prompt + source.sampled,
          here: owned === null || owned.has(source.place),
        });
      }
    }
    this.spans = spans.reverse();
    this.drifts = this._chain()
      .filter((one) => one.relation === "drifted")
      .map((one) => ({ call: one, at: one.drift.index }))
      .filter((mark) => mark.at <= this.length);
    this.versions = this._versions();
  }

  _chain() {
    const chain = this.spans.map((span) => span.call);
    return chain.includes(this.end) ? chain : [...chain, this.end];
  }

  /** [position, version] wherever another version of the weights begins to sample. */
  _versions() {
    const found = [];
    let last = null;
    for (const span of this.spans) {
      for (const [version, start] of span.call.versions) {
        if (start >= span.call.sampled) continue; // an engine may tell of more than it sampled
        if (version !== last) found.push([span.start + start, version]);
        last = version;
      }
    }
    return found;
  }

  spanAt(position) {
    let low = 0,
      high = this.spans.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1,
        span = this.spans[middle];
      if (position < span.start) high = middle - 1;
      else if (position >= span.end) low = middle + 1;
      else return span;
    }
    return null;
  }

  /** NaN if it is unknown, or nothing was sampled there. */
  logProbAt(position, span = this.spanAt(position)) {
    return span === null ? NaN : this.rollout.logProb(span.call, position - span.start);
  }

  textAt(position, span = this.spanAt(position)) {
    const own = span !== null && span.call.own ? span.call.own.get(position - span.start) : undefined;
    return own !== undefined ? own : this.vocabulary.get(this.ids[position]);
  }

  /** prompt, trained, elsewhere (it belongs to another trajectory), or why it is not trained. */
  categoryAt(position, span = this.spanAt(position)) {
    if (span === null) return "prompt";
    if (!span.here) return "elsewhere";
    if (this.rollout.isTrained(span.call, position - span.start)) return "trained";
    return span.call.verdict === "trained" ? "unknown" : span.call.verdict || "unknown";
  }

  versionAt(position, span = this.spanAt(position)) {
    if (span === null) return null;
    const offset = position - span.start;
    const found = span.call.versions.find(([, start, end]) => start <= offset && offset < end);
    return found ? found[0] : null;
  }

  /** Everything about one token, as plain values. */
  tokenAt(position) {
    if (!(position >= 0 && position < this.length)) return null;
    const span = this.spanAt(position),
      text = this.textAt(position, span),
      logProb = this.logProbAt(position, span);
    const known = span !== null && !Number.isNaN(logProb);
    const category = this.categoryAt(position, span);
    return {
      position,
      id: this.ids[position],
      text: text === undefined ? null : text,
      logProb: known ? logProb : null,
      probability: known ? Math.exp(logProb) : null,
      call: span === null ? null : span.call.id,
      choice: span === null ? null : span.call.choice,
      callPlace: span === null ? null : span.call.place,
      trained: category === "trained",
      category,
      why: whyText(category, span),
      version: this.versionAt(position, span),
    };
  }
}

const ROLLOUTS = DATA.rollouts.map((told, number) => new Rollout(told, number));

/** Why a token is trained or not, in words. */
function whyText(category, span) {
  if (category === "prompt") return "prompt: the policy did not sample it here, so there is nothing to train";
  if (category === "trained") return "sampled by the policy, and trained here";
  if (category === "elsewhere") {
    const owner = span.call.owner;
    return (
      "sampled by the policy; context here" +
      (owner === null || owner === undefined ? "" : ", it belongs to trajectory " + owner)
    );
  }
  return WORDS.metrics[category] ? words(category) + ": " + WORDS.metrics[category] : words(category);
}
