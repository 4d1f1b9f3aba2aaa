// Best and worst samples, tokens coloured by their advantage.

function tokenSpan([id, text, advantage], full) {
  const share = full > 0 ? Math.abs(advantage) / full : 0, sign = advantage > 0 ? "plus" : advantage < 0 ? "minus" : "";
  const shown = text === "" ? el("small", null, `⟨${id}⟩`) : text.replaceAll("\n", "⏎\n");
  return el("span", { class: "token " + sign, title: `token ${id}, advantage ${signed(Number(advantage.toFixed(4)))}`,
    style: sign ? `background: rgb(var(--${sign}) / ${(0.08 + 0.42 * share).toFixed(2)})` : null }, shown);
}

/** One sample as a card. full: the |advantage| of full colour. */
function sampleCard(sample, full) {
  const tokens = sample.tokens || null;
  const advantages = tokensOf(sample).map(token => token[2]);
  const low = least(advantages), high = most(advantages);
  const advantage = !advantages.length ? null : high - low < 1e-9 ? signed(Number(low.toFixed(4)))
    : `${signed(Number(low.toFixed(3)))} to ${signed(Number(high.toFixed(3)))}`;
  const more = tokens ? sample.length - tokens.length : 0;
  return el("article", { class: "card sample" },
    el("div", null, el("span", { class: "tag " + sample.rank }, sample.rank), ` step ${sample.step}, ${sample.domain}: reward `,
      el("b", null, show(sample.reward)), advantage === null ? null : [", advantage ", el("b", null, advantage)]),
    sample.sequences ? conversationOf(sample, full) : [el("pre", { class: "prompt" }, sample.prompt),
      (sample.earlier || []).map(text => el("pre", { class: "completion" }, text)),
      el("pre", { class: "completion" }, tokens ? tokens.map(token => tokenSpan(token, full)) : sample.completion)],
    more > 0 ? el("p", { class: "muted" }, `… ${more} more tokens`) : null,
    el("div", { class: "muted" }, [`expected ${sample.answer || "–"}`, `${sample.length} tokens, ended by ${sample.finish_reason}`,
      ...Object.entries(sample.components).map(([name, value]) => `${name} ${show(value)}`)].join(" · ")));
}

/** steps: `recorded` of a run; plain: samples without tokens. weighs: whether the run has advantages. */
function samplesOf(steps, plain, weighs) {
  if (!steps.length && !plain.length) return el("p", { class: "absent" }, "No sample was recorded.");
  const pairs = list => el("div", { class: "pair" }, list);
  if (!weighs) return pairs([...plain].reverse().map(sample => sampleCard(sample, 0)));
  const parts = steps.length ? [...steps].reverse().map(step => {
    const full = most(step.samples.flatMap(s => tokensOf(s).map(t => Math.abs(t[2]))));
    return el("div", null, step.lacks.length ? el("p", { class: "muted" },
      `The estimator of this run needs ${step.lacks.join(", ")}, which only the trainer had: coloured by the advantages of plain GRPO, (R − mean) / (std of the group + ε).`) : null,
    pairs(step.samples.map(sample => sampleCard(sample, full))));
  }) : [el("p", { class: "muted" }, "No step is in the sample store any more: advantages are not known."),
    pairs([...plain].reverse().map(sample => sampleCard(sample, 0)))];
  return el("div", null, el("p", { class: "muted" }, "Tokens with a positive advantage are underlined and blue, with a negative one dashed and orange; the darker, the larger. Hover for the number."), parts);
}
