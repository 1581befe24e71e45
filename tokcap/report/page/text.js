// Text. What a model wrote is shown with everything escaped that a reader, or a browser, could take for something else.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function escaped(char) {
  if (NAMED[char]) return NAMED[char];
  const code = char.codePointAt(0);
  if (code < 0x100) return "\\x" + code.toString(16).padStart(2, "0");
  return code < 0x10000 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
}

/** The first characters of a text, none of them halved. */
function beginning(text, most) {
  return text.length <= most
    ? text
    : Array.from(text.slice(0, 2 * most))
        .slice(0, most)
        .join("");
}

/** One line of text from a record. */
function shown(text) {
  return String(text).replace(HIDDEN, escaped);
}

/** Text from a record in which line breaks may stay. */
function shownLines(text) {
  return String(text).replace(HIDDEN, (char) => (char === "\n" ? char : escaped(char)));
}

const WHOLE = new Intl.NumberFormat("en");

function amount(number) {
  return WHOLE.format(number);
}

function counted(number, one, many = one + "s") {
  return amount(number) + " " + (number === 1 ? one : many);
}

/** The largest of numbers, however many: as arguments of one call they may be more than a browser takes. */
function largest(numbers, least = 0) {
  return numbers.reduce((most, number) => (number > most ? number : most), least);
}

function percent(part, whole) {
  if (!whole) return "0%";
  const value = (100 * part) / whole;
  if (part && value < 0.1) return "<0.1%";
  if (part < whole && value > 99.9) return ">99.9%";
  return (value < 10 || value > 99 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(0)) + "%";
}

function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return (unit === "B" || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + unit;
    value /= 1024;
  }
  return value.toFixed(1) + " TiB";
}

function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " \u00b5s";
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(value < 10 ? 2 : 1) + " s";
  if (value < 7200) return (value / 60).toFixed(1) + " min";
  return (value / 3600).toFixed(1) + " h";
}

function age(value) {
  for (const [limit, unit, per] of [
    [120, "s", 1],
    [7200, "m", 60],
    [172800, "h", 3600],
  ]) {
    if (value < limit) return Math.round(Math.max(value, 0) / per) + unit;
  }
  return Math.round(value / 86400) + "d";
}

function moment(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  // A clock, or a file, may tell what is no date.
  if (!unixSeconds || Number.isNaN(date.getTime())) return "\u2013";
  return date
    .toISOString()
    .replace("T", " ")
    .replace(/\.\d+Z$/, " UTC");
}

function logProbText(value) {
  if (value === null || Number.isNaN(value)) return "unknown";
  if (!Number.isFinite(value)) return value > 0 ? "+infinite" : "\u2212infinite";
  return (value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(Math.abs(value) < 0.01 ? 5 : 3);
}

function probabilityText(value) {
  if (value === null || Number.isNaN(value)) return "unknown";
  const probability = Math.exp(value) * 100;
  if (probability > 0 && probability < 0.01) return probability.toExponential(1) + "%";
  return probability.toFixed(probability > 99.9 && probability < 100 ? 3 : 2) + "%";
}

/** A code such as `re_tokenised` as words. */
function words(code) {
  return String(code).replace(/_/g, " ");
}
