// The plots of a rollout.

function distributions(rollout) {
  const plots = [],
    bins = WORDS.edges.length;
  if (rollout.hasTokens) {
    const trained = new Array(bins).fill(0),
      others = new Array(bins).fill(0);
    for (const call of rollout.calls) {
      if (call.first === undefined) continue;
      for (let offset = 0; offset < call.sampled; offset++) {
        const logProb = rollout.logProb(call, offset);
        if (!Number.isNaN(logProb)) (rollout.isTrained(call, offset) ? trained : others)[binOf(logProb)]++;
      }
    }
    plots.push(
      logProbHistogram([
        ["trained", "p-answer", trained],
        ["not trained", "p-untrained", others],
      ]),
    );
  } else if (rollout.logProbBins && rollout.logProbBins.length)
    plots.push(logProbHistogram([["sampled", "p-answer", rollout.logProbBins]]));
  plots.push(
    meanDots(rollout.calls),
    lengthBars(rollout.calls),
    lengthHistogram(
      "Answers by length",
      rollout.calls.filter((call) => call.sampled).map((call) => call.sampled),
      "answer",
    ),
  );
  const kept = plots.filter(Boolean);
  return kept.length && rollout.calls.length
    ? section("Distributions", { class: "panel" }, h("div", { class: "plots" }, kept))
    : null;
}
