// A policy update on one sample: the probability of every token moves from before the step to
// after.

const PLAY_MS = 1600;
/** A probability that moves by less is drawn as one that stays. */
const LEAST_GAIN = 5e-5;

/** A token [id, text, log-prob of the engine, before and after the step, advantage] as {node,
 *  moveTo}; moveTo(share) shows it between before (0) and after (1). */
function stepToken(token) {
  const [id, text, engine, before, after, advantage] = token;
  const from = Math.exp(before);
  const to = Math.exp(after);
  const gain = to - from;
  const movement = `${percent(from)} → ${percent(to)} (engine ${percent(Math.exp(engine))})`;
  const attributes = {
    class: "step-token " + signClass(gain, LEAST_GAIN),
    title: `token ${id}: ${movement}, advantage ${signed(advantage, 4)}`,
  };
  const node = el("span", attributes, tokenText(id, text, "⏎"));
  const moveTo = share => {
    const probability = from + gain * share;
    node.style.setProperty("--p", probability.toFixed(4));
    node.dataset.probability = probability;
  };
  return { node, moveTo };
}

/** What the step did to a sample, in words. */
function movementOf(sample) {
  const { tokens } = sample;
  const before = sumOf(tokens.map(token => token[3]));
  const after = sumOf(tokens.map(token => token[4]));
  const gain = signed(after - before, 3);
  const likelier = tokens.filter(token => token[4] > token[3]).length;
  const notShown = sample.length - tokens.length;
  const logprobs = `${before.toFixed(3)} → ${after.toFixed(3)} (${gain})`;
  const told = [
    `Reward ${show(sample.reward)}.`,
    `Log-prob of the ${tokens.length} tokens ${logprobs}; ${likelier} became likelier.`,
  ];
  if (notShown > 0) told.push(`… ${notShown} more tokens.`);
  return told.join(" ");
}

/** The words for a share of the way from before the step to after it. */
function shareWords(share) {
  if (share <= 0) return "before the step";
  if (share >= 1) return "after the step";
  return `${Math.round(share * 100)} % of the way`;
}

/** A sample whose tokens move by a slider, or by themselves. samples: `moved` of a run. */
class UpdatePlayer {
  constructor(samples) {
    this.samples = samples;
    this.text = el("pre", { class: "update" });
    this.prompt = el("pre", { class: "prompt" });
    this.movement = el("p", { class: "muted" });
    this.readout = el("span", { role: "status" });
    this.slider = el("input", {
      type: "range",
      min: 0,
      max: 1,
      step: 0.01,
      "aria-label": "from before the step to after it",
      input: () => this.moveTo(Number(this.slider.value)),
    });
    this.tokens = [];
    this.playing = 0; // number of the newest play; an older one ends
    this.choose(samples[0]);
  }

  /** Shows a sample before the step. */
  choose(sample) {
    this.playing++;
    this.tokens = sample.tokens.map(stepToken);
    this.text.replaceChildren(...this.tokens.map(token => token.node));
    this.prompt.textContent = sample.prompt;
    this.movement.textContent = movementOf(sample);
    this.moveTo(0);
  }

  /** Shows all tokens at a share of the way from before the step to after it. */
  moveTo(share) {
    this.slider.value = share;
    this.tokens.forEach(token => token.moveTo(share));
    this.readout.textContent = shareWords(share);
  }

  /** Moves once from before to after; at once for whom motion disturbs. */
  play() {
    this.playing++;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.moveTo(1);
      return;
    }
    const mine = this.playing;
    const start = performance.now();
    const frame = now => {
      if (this.playing !== mine) return;
      const share = clamped((now - start) / PLAY_MS, 0, 1);
      this.moveTo(share);
      if (share < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** The choice of the sample. */
  choice() {
    const options = this.samples.map((sample, i) => {
      const { step, row, domain, reward } = sample;
      const name = `step ${step}, sample ${row} (${domain}, reward ${show(reward)})`;
      return el("option", { value: i }, name);
    });
    const change = () => this.choose(this.samples[Number(select.value)]);
    const select = el("select", { "aria-label": "sample", change }, options);
    return select;
  }

  /** The player as a card. */
  card() {
    const play = el("button", { type: "button", click: () => this.play() }, "Play");
    const controls = el("p", null, spaced([this.choice(), play, this.slider, this.readout]));
    const how = remark(
      "A token is filled to its probability under the trainer's policy; blue becomes likelier in"
        + " this step, dashed orange less likely. Of the samples that objective.monitor_share"
        + " measures, those that moved the most.",
    );
    const attributes = { class: "card step-update" };
    return el("div", attributes, controls, this.prompt, this.text, this.movement, how);
  }
}

/** A policy update on samples, of which one can be chosen. samples: `moved` of a run. */
function updateOf(samples) {
  if (!samples.length) {
    return absence(
      "No recorded step has log-probs after its optimizer steps: objective.monitor_share is 0,"
        + " nothing was trained yet, or the steps are of an older version.",
    );
  }
  return new UpdatePlayer(samples).card();
}
