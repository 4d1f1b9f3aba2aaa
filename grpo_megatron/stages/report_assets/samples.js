// Best and worst samples, tokens coloured by their advantage. full: the |advantage| of full colour.

/** Advantages of some tokens as a text, one number or two ends; null where there is no token. */
function advantageRange(tokens) {
  if (!tokens.length) return null;
  const advantages = tokens.map(token => token[2]);
  const low = least(advantages);
  const high = most(advantages);
  if (high - low < 1e-9) return signed(low, 4);
  return `${signed(low, 3)} to ${signed(high, 3)}`;
}

/** The line above a sample. */
function sampleHead(sample) {
  const { rank, step, domain } = sample;
  const told = [` step ${step}, ${domain}: reward `, el("b", null, show(sample.reward))];
  const advantage = advantageRange(tokensOf(sample));
  if (advantage !== null) told.push(", advantage ", el("b", null, advantage));
  return el("div", null, el("span", { class: "tag " + rank }, rank), told);
}

/** Prompt and completion of a sample without turns, or of an episode that has left the store. */
function sampleText(sample, full) {
  const completion = sample.tokens ? tokenSpans(sample.tokens, full) : sample.completion;
  const completions = [...(sample.earlier || []), completion];
  const prompt = el("pre", { class: "prompt" }, sample.prompt);
  return [prompt, completions.map(text => el("pre", { class: "completion" }, text))];
}

/** The line below a sample. */
function sampleFacts(sample) {
  const told = [`expected ${sample.answer || "–"}`];
  told.push(`${sample.length} tokens, ended by ${sample.finish_reason}`);
  for (const [name, value] of Object.entries(sample.components)) {
    told.push(`${name} ${show(value)}`);
  }
  return el("div", { class: "muted" }, told.join(" · "));
}

/** One sample as a card. */
function sampleCard(sample, full) {
  let text;
  if (sample.sequences) {
    text = conversationOf(sample, full);
  } else {
    text = sampleText(sample, full);
  }
  const notShown = sample.tokens ? sample.length - sample.tokens.length : 0;
  const more = notShown > 0 ? remark(`… ${notShown} more tokens`) : null;
  const attributes = { class: "card sample" };
  return el("article", attributes, sampleHead(sample), text, more, sampleFacts(sample));
}

/** Cards of samples side by side. */
function sampleCards(samples, full) {
  const cards = samples.map(sample => sampleCard(sample, full));
  return el("div", { class: "pair" }, cards);
}

/** Samples of a step that is in the store. */
function stepSamples(step) {
  const tokens = step.samples.flatMap(tokensOf);
  const full = largest(tokens.map(token => token[2]));
  let note = null;
  if (step.lacks.length) {
    const lacks = step.lacks.join(", ");
    note = remark(
      `The estimator of this run needs ${lacks}, which only the trainer had: coloured by the`
        + " advantages of plain GRPO, (R − mean) / (std of the group + ε).",
    );
  }
  return el("div", null, note, sampleCards(step.samples, full));
}

/** Samples of a run, the newest first. steps: `recorded` of a run; plain: samples without tokens;
 *  weighs: whether the run has advantages. */
function samplesOf(steps, plain, weighs) {
  if (!steps.length && !plain.length) return absence("No sample was recorded.");
  const newestPlain = [...plain].reverse();
  if (!weighs) return sampleCards(newestPlain, 0);
  const how = remark(
    "Tokens with a positive advantage are underlined and blue, with a negative one dashed and"
      + " orange; the darker, the larger. Hover for the number.",
  );
  if (steps.length) {
    const newest = [...steps].reverse();
    return el("div", null, how, newest.map(stepSamples));
  }
  const unknown = remark("No step is in the sample store any more: advantages are not known.");
  return el("div", null, how, unknown, sampleCards(newestPlain, 0));
}
