// Colours: from the style sheet, so that light and dark are said in one place.

const LOG_PROB_STEPS = [-0.01, -0.1, -0.5, -1, -2, -4, -8];
/** Step 0 is nearly certain; the last one is below all of these. */

function stepOf(logProb) {
  for (let step = 0; step < LOG_PROB_STEPS.length; step++) if (logProb >= LOG_PROB_STEPS[step]) return step;
  return LOG_PROB_STEPS.length;
}

let COLOURS = null;

function colours() {
  if (COLOURS) return COLOURS;
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue("--" + name).trim();
  COLOURS = {
    steps: [0, 1, 2, 3, 4, 5, 6, 7].map((step) => value("step-" + step)),
    stepInks: [0, 1, 2, 3, 4, 5, 6, 7].map((step) => value("step-ink-" + step)),
  };
  for (const name of [
    "ink",
    "muted",
    "faint",
    "line",
    "panel",
    "ground",
    "accent",
    "trained",
    "untrained",
    "elsewhere",
    "match",
    "match-now",
    "drift",
    "hatch",
    "context",
    "context-ink",
    "version",
  ])
    COLOURS[name] = value(name);
  for (const name of Object.keys(OUTCOME_COLOURS)) COLOURS["outcome-" + name] = value("outcome-" + name);
  return COLOURS;
}

const OUTCOME_COLOURS = { recorded: 1, no_generation: 1, aborted: 1, lost: 1, conflict: 1, open: 1 };

/** A fill that stands for what is unknown. */
function hatched(context, ratio) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(6 * ratio);
  const pen = tile.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = colours().panel;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colours().hatch;
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

const THEME_CHANGED = [];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  COLOURS = null;
  for (const draw of THEME_CHANGED) draw();
}

/** A canvas that is as sharp as the screen; returns its pen, scaled to CSS pixels and cleared. */
function penOf(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const across = Math.round(width * ratio),
    down = Math.round(height * ratio);
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

const MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
