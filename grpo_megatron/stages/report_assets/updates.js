// A policy update on one sample: the probability of every token moves from before the step to after.

const PLAY_MS = 1600;

/** Rounded as a percentage that tells small probabilities from 0. */
const percent = p => (p >= 0.0995 ? (p * 100).toFixed(1) : Number((p * 100).toPrecision(2))) + " %";
const total = values => values.reduce((sum, value) => sum + value, 0);

/** A token with its probabilities; moveTo(share) shows it between before (0) and after (1). */
function stepToken([id, text, engine, before, after, advantage]) {
  const from = Math.exp(before), to = Math.exp(after), gain = to - from;
  const sign = Math.abs(gain) < 5e-5 ? "" : gain > 0 ? "plus" : "minus";
  const shown = text === "" ? el("small", null, `⟨${id}⟩`) : text.replaceAll("\n", "⏎");
  const node = el("span", { class: "step-token " + sign,
    title: `token ${id}: ${percent(from)} → ${percent(to)} (engine ${percent(Math.exp(engine))}), advantage ${signed(Number(advantage.toFixed(4)))}` }, shown);
  const moveTo = share => {
    const p = from + gain * share;
    node.style.setProperty("--p", p.toFixed(4));
    node.dataset.probability = p;
  };
  return { node, moveTo };
}

/** samples: `moved` of a run. */
function updateOf(samples) {
  if (!samples.length) {
    return el("p", { class: "absent" }, "No recorded step has log-probs after its optimizer steps: objective.monitor_share is 0, nothing was trained yet, or the steps are of an older version.");
  }
  const text = el("pre", { class: "update" }), prompt = el("pre", { class: "prompt" }), facts = el("p", { class: "muted" });
  const readout = el("span", { role: "status" });
  const slider = el("input", { type: "range", min: 0, max: 1, step: 0.01, "aria-label": "from before the step to after it", input: () => moveTo(Number(slider.value)) });
  let tokens = [], run = 0;

  function moveTo(share) {
    slider.value = share;
    tokens.forEach(token => token.moveTo(share));
    readout.textContent = share <= 0 ? "before the step" : share >= 1 ? "after the step" : `${Math.round(share * 100)} % of the way`;
  }

  /** Once from before to after; at once for whom motion disturbs. */
  function play() {
    const mine = ++run, start = performance.now();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { moveTo(1); return; }
    const frame = now => {
      if (mine !== run) return;
      const share = Math.min((now - start) / PLAY_MS, 1);
      moveTo(Math.max(share, 0));
      if (share < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  function build(sample) {
    run++;
    tokens = sample.tokens.map(stepToken);
    text.replaceChildren(...tokens.map(token => token.node));
    prompt.textContent = sample.prompt;
    const before = total(sample.tokens.map(token => token[3])), after = total(sample.tokens.map(token => token[4]));
    const likelier = sample.tokens.filter(token => token[4] > token[3]).length, more = sample.length - sample.tokens.length;
    facts.textContent = `Reward ${show(sample.reward)}. Log-prob of the ${sample.tokens.length} tokens ${before.toFixed(3)} → ${after.toFixed(3)} (${signed(Number((after - before).toFixed(3)))}); `
      + `${likelier} became likelier.${more > 0 ? ` … ${more} more tokens.` : ""}`;
    moveTo(0);
  }

  const select = el("select", { "aria-label": "sample", change: () => build(samples[Number(select.value)]) },
    samples.map((sample, i) => el("option", { value: i }, `step ${sample.step}, sample ${sample.row} (${sample.domain}, reward ${show(sample.reward)})`)));
  build(samples[0]);
  return el("div", { class: "card step-update" }, el("p", null, select, " ", el("button", { type: "button", click: play }, "Play"), " ", slider, " ", readout),
    prompt, text, facts,
    el("p", { class: "muted" }, "A token is filled to its probability under the trainer's policy; blue becomes likelier in this step, dashed orange less likely. Of the samples that objective.monitor_share measures, those that moved the most."));
}
