// An episode as a conversation: turns of the policy and what its environment said, sequence by sequence.

/** Tokens of a sample that have an advantage. */
function tokensOf(sample) {
  if (!sample.sequences) return sample.tokens || [];
  return sample.sequences.flatMap(sequence => sequence.parts.flatMap(part => part.tokens || []));
}

const folded = (kind, summary, content) => el("details", { class: "fold " + kind }, el("summary", null, summary), content);
const inOneLine = text => text.trim().replace(/\s+/g, " ");
const shortened = (text, longest) => (text.length > longest ? text.slice(0, longest - 1) + "…" : text);

/** What a turn was worth, and in which state it began. */
function turnFacts(part) {
  return el("div", { class: "turn-facts muted" }, `turn ${part.turn + 1}`,
    isNumber(part.reward) ? [" · reward ", el("b", null, show(part.reward))] : null,
    part.state ? [" · state ", el("code", { title: part.state }, shortened(inOneLine(part.state), 40))] : null,
    part.spoilt ? " · spoilt: no loss" : null);
}

function turnPart(part, full) {
  const spans = tokens => tokens.map(token => tokenSpan(token, full));
  const begin = part.call === null ? part.tokens.length : part.call;
  const said = part.tokens.slice(0, begin), call = part.tokens.slice(begin), more = part.length - part.tokens.length;
  return el("div", { class: "turn" }, turnFacts(part),
    said.length ? el("pre", { class: "completion" }, spans(said)) : null,
    call.length ? folded("call", "calls " + shortened(inOneLine(call.map(token => token[1]).join("")), 80), el("pre", { class: "completion" }, spans(call))) : null,
    more > 0 ? el("p", { class: "muted" }, `… ${more} more tokens of this turn`) : null);
}

/** isResult: of a call, and folded. */
function environmentPart(part, isResult) {
  const text = el("pre", { class: "environment" }, part.text);
  return isResult ? folded("result", "result " + shortened(inOneLine(part.text), 80), text) : text;
}

function sequencePart(sequence, number, count, full) {
  const parts = sequence.parts.map((part, i) => {
    const before = sequence.parts[i - 1];
    return part.tokens ? turnPart(part, full) : environmentPart(part, Boolean(before && before.tokens && before.call !== null));
  });
  const prompt = el("pre", { class: "prompt" }, sequence.prompt);
  return el("div", { class: "sequence" }, count > 1 ? el("h4", null, `Sequence ${number + 1} of ${count}`) : null,
    number > 0 ? folded("history", `the history as the chat template has rewritten it, ${sequence.prompt_length} tokens`, prompt) : prompt, parts);
}

/** The sequences of an episode, one after the other, and its outcome. full: the |advantage| of full colour. */
function conversationOf(sample, full) {
  const counted = Object.entries(sample.outcome_metrics || {}).map(([name, value]) => `${name} ${show(value)}`);
  return el("div", { class: "conversation" },
    sample.sequences.map((sequence, i) => sequencePart(sequence, i, sample.sequences.length, full)),
    el("p", { class: "outcome" }, "outcome ", el("b", null, show(sample.outcome)), counted.length ? " · " + counted.join(" · ") : null));
}
