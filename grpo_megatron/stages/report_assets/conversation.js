// An episode as a conversation: turns of the policy and what its environment said, sequence by
// sequence. full: the |advantage| of full colour.

const LONGEST_STATE = 40; // characters
const LONGEST_SUMMARY = 80;

/** Tokens of a sample that have an advantage. */
function tokensOf(sample) {
  if (!sample.sequences) return sample.tokens || [];
  const parts = sample.sequences.flatMap(sequence => sequence.parts);
  return parts.flatMap(part => part.tokens || []);
}

/** Content that a click unfolds. */
function folded(kind, summary, content) {
  return el("details", { class: "fold " + kind }, el("summary", null, summary), content);
}

/** The beginning of a text, in one line of at most `longest` characters. */
function summaryOf(text, longest) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= longest) return line;
  return line.slice(0, longest - 1) + "…";
}

/** What a turn was worth, and in which state it began. */
function turnFacts(part) {
  const told = [`turn ${part.turn + 1}`];
  if (isNumber(part.reward)) {
    told.push(" · reward ", el("b", null, show(part.reward)));
  }
  if (part.state) {
    const brief = summaryOf(part.state, LONGEST_STATE);
    told.push(" · state ", el("code", { title: part.state }, brief));
  }
  if (part.spoilt) told.push(" · spoilt: no loss");
  return el("div", { class: "turn-facts muted" }, told);
}

/** What the policy said in a turn; a call of a tool, with which it may end, is folded. */
function turnPart(part, full) {
  const begin = part.call === null ? part.tokens.length : part.call;
  const said = part.tokens.slice(0, begin);
  const call = part.tokens.slice(begin);
  const notShown = part.length - part.tokens.length;
  const shown = [turnFacts(part)];
  if (said.length) {
    shown.push(el("pre", { class: "completion" }, tokenSpans(said, full)));
  }
  if (call.length) {
    const text = call.map(token => token[1]).join("");
    const summary = "calls " + summaryOf(text, LONGEST_SUMMARY);
    const content = el("pre", { class: "completion" }, tokenSpans(call, full));
    shown.push(folded("call", summary, content));
  }
  if (notShown > 0) shown.push(remark(`… ${notShown} more tokens of this turn`));
  return el("div", { class: "turn" }, shown);
}

/** What the environment said; isResult: of a call, and folded. */
function environmentPart(part, isResult) {
  const text = el("pre", { class: "environment" }, part.text);
  if (!isResult) return text;
  return folded("result", "result " + summaryOf(part.text, LONGEST_SUMMARY), text);
}

/** The parts of a sequence, one after the other. */
function sequenceParts(parts, full) {
  return parts.map((part, i) => {
    if (part.tokens) return turnPart(part, full);
    const before = parts[i - 1];
    const isResult = Boolean(before && before.tokens && before.call !== null);
    return environmentPart(part, isResult);
  });
}

/** A sequence with what it begins with; number: of the sequence among `count`, from 0. */
function sequencePart(sequence, number, count, full) {
  let title = null;
  if (count > 1) title = el("h4", null, `Sequence ${number + 1} of ${count}`);
  let beginning = el("pre", { class: "prompt" }, sequence.prompt);
  if (number > 0) {
    const length = `${sequence.prompt_length} tokens`;
    const summary = `the history as the chat template has rewritten it, ${length}`;
    beginning = folded("history", summary, beginning);
  }
  const parts = sequenceParts(sequence.parts, full);
  return el("div", { class: "sequence" }, title, beginning, parts);
}

/** What an episode came to, and what its environment counted. */
function outcomeOf(sample) {
  const told = [el("b", null, show(sample.outcome))];
  for (const [name, value] of Object.entries(sample.outcome_metrics || {})) {
    told.push(` · ${name} ${show(value)}`);
  }
  return el("p", { class: "outcome" }, "outcome ", told);
}

/** The sequences of an episode, one after the other, and its outcome. */
function conversationOf(sample, full) {
  const { sequences } = sample;
  const parts = sequences.map((sequence, i) => sequencePart(sequence, i, sequences.length, full));
  return el("div", { class: "conversation" }, parts, outcomeOf(sample));
}
