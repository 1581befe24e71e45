// Elements. Everything textual becomes a text node; no attribute that could run or load anything can be set.

const SVG = "http://www.w3.org/2000/svg";
const ATTRIBUTES = new Set([
  "class",
  "id",
  "role",
  "tabindex",
  "type",
  "title",
  "for",
  "placeholder",
  "spellcheck",
  "autocomplete",
  "scope",
  "colspan",
  "name",
  "value",
  "open",
  "disabled",
  // of drawings
  "viewBox",
  "d",
  "x",
  "y",
  "x1",
  "x2",
  "y1",
  "y2",
  "cx",
  "cy",
  "r",
  "width",
  "height",
  "points",
  "text-anchor",
  "preserveAspectRatio",
  "focusable",
  "stroke-width",
  "fill",
  "patternUnits",
  "patternTransform",
]);

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) {
    element.setAttribute(name, value === true ? "" : String(value));
  } else throw new Error("an attribute that this page doesn't set: " + name);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) set(element, name, value);
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** An element with attributes, listeners (`onclick: function`), and children, of which strings are text. */
function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** A list of names and values; pairs without a value are left out. */
function facts(pairs, attributes = { class: "facts" }) {
  const kept = pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined && pair[1] !== "");
  return h(
    "dl",
    attributes,
    kept.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );
}

function section(title, attributes, ...children) {
  const id = "s-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
  const { note, ...others } = attributes || {};
  return h(
    "section",
    { "aria-labelledby": id, ...others },
    h("div", { class: "section-head" }, h("h2", { id }, title), note ? h("p", { class: "note" }, note) : null),
    children,
  );
}

function badge(text, kind = "", title = null) {
  return h("span", { class: "badge " + kind, title }, text);
}
