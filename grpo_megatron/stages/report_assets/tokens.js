// Tokens as elements, and signs of what they gain or lose.

/** The class of a number's sign: "plus", "minus", or nothing where it is 0 or its size is below
 *  `smallest`. */
function signClass(number, smallest = 0) {
  if (number === 0 || Math.abs(number) < smallest) return "";
  return number > 0 ? "plus" : "minus";
}

/** The text of a token, or its id where it has none of its own; lineEnd: shown for a newline. */
function tokenText(id, text, lineEnd) {
  if (text === "") return el("small", null, `⟨${id}⟩`);
  return text.replaceAll("\n", lineEnd);
}

/** A token [id, text, advantage] coloured by its advantage; full: the |advantage| of full
 *  colour. */
function tokenSpan(token, full) {
  const [id, text, advantage] = token;
  const share = full > 0 ? Math.abs(advantage) / full : 0;
  const sign = signClass(advantage);
  let style = null;
  if (sign) {
    const opacity = (0.08 + 0.42 * share).toFixed(2);
    style = `background: rgb(var(--${sign}) / ${opacity})`;
  }
  const title = `token ${id}, advantage ${signed(advantage, 4)}`;
  const shown = tokenText(id, text, "⏎\n");
  return el("span", { class: "token " + sign, title, style }, shown);
}

/** A list of tokens, each coloured by its advantage; full: see `tokenSpan`. */
function tokenSpans(tokens, full) {
  return tokens.map(token => tokenSpan(token, full));
}
