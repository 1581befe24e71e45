// Plots: small drawings with their numbers beside them. Each is one image with a description.

const CATEGORY_CLASS = {
  trained: "c-trained",
  abandoned: "c-1",
  ambiguous: "c-2",
  aborted: "c-3",
  unknown: "c-4",
  conflict: "c-5",
  other_model: "c-6",
  after_final: "c-7",
  masked: "c-8",
};

/** One bar in parts, with a legend. parts: [name as it is shown, count, class, title]. */
function stackedBar(parts, what) {
  const whole = parts.reduce((sum, part) => sum + part[1], 0);
  const told = parts.map(([name, count]) => name + " " + amount(count)).join(", ");
  const bar = h(
    "div",
    { class: "bar", role: "img", "aria-label": what + ": " + (told || "none") },
    parts.map(([name, count, kind]) => {
      const piece = h("span", { class: "bar-part " + kind, title: name + ": " + amount(count) });
      piece.style.flexGrow = String(count);
      return piece;
    }),
  );
  return h(
    "div",
    { class: "stacked" },
    bar,
    h(
      "ul",
      { class: "legend" },
      parts.map(([name, count, kind, title]) =>
        h(
          "li",
          { title },
          h("span", { class: "swatch " + kind, "aria-hidden": "true" }),
          h("span", { class: "legend-name" }, name),
          h("b", null, amount(count)),
          h("span", { class: "muted" }, percent(count, whole)),
        ),
      ),
    ),
  );
}

function categoryBar(pairs) {
  const order = WORDS.categories;
  const parts = [...pairs]
    .sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]))
    .map(([name, count]) => [words(name), count, CATEGORY_CLASS[name] || "c-8", WORDS.metrics[name]]);
  return stackedBar(parts, "Sampled ids");
}

function plot(title, description, drawing, note = null) {
  return h(
    "figure",
    { class: "plot" },
    h("figcaption", null, title, note ? h("span", { class: "muted" }, note) : null),
    s(
      "svg",
      { viewBox: "0 0 360 150", role: "img", "aria-label": title + ". " + description, focusable: "false" },
      drawing,
    ),
  );
}

function edgeLabel(edge) {
  return edge === null ? "\u2212\u221e" : String(edge).replace("-", "\u2212");
}

function binOf(value) {
  const edges = WORDS.edges;
  for (let bin = edges.length - 1; bin > 0; bin--) if (value >= edges[bin]) return bin;
  return 0;
}

/** series: [name, class, counts per bin of the log-prob edges], drawn on top of each other; null if all are empty. */
function logProbHistogram(series) {
  const edges = WORDS.edges,
    bins = edges.length;
  const sums = edges.map((_, bin) => series.reduce((sum, one) => sum + (one[2][bin] || 0), 0));
  const highest = largest(sums, 1),
    whole = sums.reduce((a, b) => a + b, 0);
  if (!whole) return null;
  const left = 8,
    width = 344 / bins,
    bottom = 122,
    tall = 108;
  const drawn = [];
  edges.forEach((edge, bin) => {
    let base = bottom;
    for (const [name, kind, counts] of series) {
      const up = (tall * (counts[bin] || 0)) / highest;
      if (up > 0) {
        const box = s("rect", {
          class: kind,
          x: left + bin * width + 1,
          y: base - Math.max(up, 0.8),
          width: width - 2,
          height: Math.max(up, 0.8),
        });
        box.append(s("title", null, name + ", from " + edgeLabel(edge) + ": " + amount(counts[bin])));
        drawn.push(box);
        base -= up;
      }
    }
    if (sums[bin])
      drawn.push(
        s(
          "text",
          { class: "tick", x: left + (bin + 0.5) * width, y: base - 3, "text-anchor": "middle" },
          shortAmount(sums[bin]),
        ),
      );
    if (bin % 2)
      drawn.push(s("text", { class: "tick", x: left + bin * width, y: 134, "text-anchor": "middle" }, edgeLabel(edge)));
  });
  drawn.push(s("line", { class: "axis", x1: left, x2: left + bins * width, y1: bottom, y2: bottom }));
  drawn.push(
    s(
      "text",
      { class: "tick", x: 180, y: 147, "text-anchor": "middle" },
      "natural log, from this edge on; the last bin is exactly 0",
    ),
  );
  const told = series.map(([name, , counts]) => name + " " + amount(counts.reduce((a, b) => a + b, 0))).join(", ");
  return plot("Log-probs of sampled ids", told + ".", drawn, " " + amount(whole) + " known");
}

function shortAmount(count) {
  if (count < 10000) return String(count);
  return count < 1e6 ? Math.round(count / 1000) + "k" : (count / 1e6).toFixed(1) + "M";
}

/** One dot for each call that has a mean, in the order of calls; a single path, however many there are. */
function meanDots(calls) {
  const known = calls
    .map((call, place) => [place, call.mean])
    .filter(([, mean]) => mean !== null && mean !== undefined);
  if (!known.length) return null;
  const lowest = -largest(
    known.map(([, mean]) => -mean),
    0.1,
  );
  const x = (place) => 34 + (316 * (place + 0.5)) / Math.max(calls.length, 1),
    y = (mean) => 12 + (108 * mean) / lowest;
  const drawn = [0, 0.5, 1].flatMap((part) => [
    s("line", { class: "grid", x1: 34, x2: 350, y1: y(lowest * part), y2: y(lowest * part) }),
    s(
      "text",
      { class: "tick", x: 30, y: y(lowest * part) + 3, "text-anchor": "end" },
      (lowest * part).toFixed(2).replace("-", "\u2212"),
    ),
  ]);
  drawn.push(
    s("path", {
      class: "dots",
      d: known.map(([place, mean]) => "M" + x(place).toFixed(1) + " " + y(mean).toFixed(1) + "h0").join(""),
    }),
  );
  drawn.push(
    s("text", { class: "tick", x: 192, y: 140, "text-anchor": "middle" }, "calls in the order in which they began"),
  );
  return plot("Mean log-prob per call", counted(known.length, "call") + ", lowest " + lowest.toFixed(3) + ".", drawn);
}

/** Prompt and answer of every call, in two paths. */
function lengthBars(calls) {
  const recorded = calls.filter((call) => call.prompt + call.sampled > 0);
  if (!recorded.length) return null;
  const longest = largest(recorded.map((call) => call.prompt + call.sampled));
  const step = 316 / recorded.length,
    wide = Math.max(0.6, Math.min(step - 1, 14)),
    bottom = 122;
  const up = (count) => (108 * count) / longest;
  let prompts = "",
    answers = "";
  recorded.forEach((call, place) => {
    const x = (40 + step * place + (step - wide) / 2).toFixed(1),
      a = up(call.prompt),
      b = up(call.sampled);
    prompts += "M" + x + " " + bottom + "v" + (-a).toFixed(1) + "h" + wide.toFixed(1) + "v" + a.toFixed(1) + "z";
    answers +=
      "M" +
      x +
      " " +
      (bottom - a).toFixed(1) +
      "v" +
      (-b).toFixed(1) +
      "h" +
      wide.toFixed(1) +
      "v" +
      b.toFixed(1) +
      "z";
  });
  const drawn = [0, 0.5, 1].flatMap((part) => [
    s("line", { class: "grid", x1: 40, x2: 356, y1: bottom - 108 * part, y2: bottom - 108 * part }),
    s(
      "text",
      { class: "tick", x: 36, y: bottom - 108 * part + 3, "text-anchor": "end" },
      shortAmount(Math.round(longest * part)),
    ),
  ]);
  drawn.push(s("path", { class: "p-prompt", d: prompts }), s("path", { class: "p-answer", d: answers }));
  drawn.push(
    s("text", { class: "tick", x: 198, y: 140, "text-anchor": "middle" }, "calls in the order in which they began"),
  );
  return plot(
    "Length per call",
    counted(recorded.length, "call") + ", the longest has " + counted(longest, "id") + ".",
    drawn,
    " prompt (grey), sampled (blue)",
  );
}

/** How many have how many sampled ids, in eight bins. */
function lengthHistogram(title, lengths, one) {
  if (lengths.length < 2) return null;
  const longest = largest(lengths),
    step = Math.max(1, Math.ceil((longest + 1) / 8)),
    counts = new Array(8).fill(0);
  for (const length of lengths) counts[Math.floor(length / step)]++;
  const highest = largest(counts),
    drawn = [];
  counts.forEach((count, bin) => {
    const x = 8 + bin * 43,
      up = (108 * count) / highest;
    drawn.push(s("rect", { class: "p-answer", x: x + 1, y: 122 - up, width: 41, height: up }));
    if (count)
      drawn.push(s("text", { class: "tick", x: x + 21, y: 119 - up, "text-anchor": "middle" }, shortAmount(count)));
    drawn.push(
      s("text", { class: "tick", x, y: 134, "text-anchor": bin ? "middle" : "start" }, shortAmount(bin * step)),
    );
  });
  drawn.push(s("line", { class: "axis", x1: 8, x2: 352, y1: 122, y2: 122 }));
  drawn.push(s("text", { class: "tick", x: 180, y: 147, "text-anchor": "middle" }, "sampled ids, from this number on"));
  return plot(title, counted(lengths.length, one) + ", the longest has " + counted(longest, "id") + ".", drawn);
}
