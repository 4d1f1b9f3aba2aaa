"""From a row's fields to a problem: rows of question and answer, conversations, and the rows of
MATH, AIME, GPQA and LiveCodeBench as they are published."""

import base64
import hashlib
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.templates import CHAT
from grpo_megatron.data.conversation import (
    MESSAGES,
    RESPONSES,
    Message,
    are_responses,
    is_conversation,
    last_question,
    read_conversation,
    replies_of,
    split_reply,
    untold_fields,
    without_json,
)
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.types import Problem

_DEFAULT_FIELD: str = DomainConfig.model_fields["prompt_field"].default
_DEFAULT_ANSWER: str = DomainConfig.model_fields["answer_field"].default
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
_PRELUDE_MODULES = (
    "typing",
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
"""What LiveCodeBench imports, by star and by name, before each program; of equal names the last."""
_INCORRECT = ("incorrect_answer_1", "incorrect_answer_2", "incorrect_answer_3")


def problem_of(where: str, fields: Mapping[str, Any], domain: DomainConfig) -> Problem:
    """Return the problem of a row. `prompt_field` and `answer_field` are looked at first, then the
    formats of benchmarks, unless the recipe names another field than theirs. DataError names the
    row, what it lacks and what it has."""
    has_own_fields = domain.prompt_field in fields and domain.answer_field in fields
    if has_own_fields:
        return _of_own_fields(where, fields, domain)
    names = {_plain_name(name) for name in fields}
    if names >= {"question", "correct_answer", *_INCORRECT} and _asks(domain, "question"):
        return _of_gpqa(where, _by_plain_name(where, fields), domain)
    if names >= {"question_content", "public_test_cases"} and _asks(domain, "question_content"):
        return _of_live_code_bench(where, _by_plain_name(where, fields), domain)
    has_solution = "answer" in names or "solution" in names
    if "problem" in names and has_solution and _asks(domain, "problem"):
        return _of_math(where, _by_plain_name(where, fields), domain)
    return _of_own_fields(where, fields, domain)


def _names_prompt(domain: DomainConfig) -> bool:
    """Whether a recipe says where the rows of a domain have their prompt."""
    return domain.prompt_field != _DEFAULT_FIELD


def _asks(domain: DomainConfig, field: str) -> bool:
    """Whether a benchmark's field is the one that a domain asks: it names it, or none."""
    return _plain_name(domain.prompt_field) in (_DEFAULT_FIELD, field)


def _plain_name(name: str) -> str:
    """Return the name of a benchmark's field, which is published as `Correct Answer` or so."""
    return name.lower().replace(" ", "_")


def _by_plain_name(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields by their plain names. Raises DataError where two have the same."""
    written: dict[str, str] = {}
    named = {}
    for name, value in fields.items():
        plain = _plain_name(name)
        if plain in written:
            raise DataError(
                f"the fields {written[plain]!r} and {name!r} have the same name but for its "
                "letter case and blanks",
                where=where,
                remedy="rename or remove one of them",
            )
        written[plain] = name
        named[plain] = value
    return named


def text_of(where: str, fields: Mapping[str, Any], name: str, setting: str) -> str:
    """Return the text or finite number in a field. Raises DataError where there is none. setting:
    what names the field in the recipe."""
    if name not in fields:
        raise _no_field(where, fields, name, setting)
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"field {name!r} is {type(value).__name__}, expected text or a number", where=where
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(
            f"field {name!r} is {value}, expected text or a finite number",
            where=where,
            remedy="write it as text, or leave the row out",
        )
    return str(value)


def question_of(where: str, fields: Mapping[str, Any], name: str) -> str:
    """Return the question in a field of a row, as `text_of`. Raises DataError where it is empty."""
    question = text_of(where, fields, name, "prompt_field")
    if not question.strip():
        raise DataError(f"field {name!r} is empty", where=where, remedy="leave the row out")
    return question


def question_in(where: str, conversation: Sequence[Message]) -> str:
    """Return what the user of a conversation has said last. Raises DataError where that is
    empty."""
    question = last_question(conversation)
    if not question.strip():
        raise DataError(
            "the last message of the user is empty", where=where, remedy="leave the row out"
        )
    return question


def _no_field(where: str, fields: Mapping[str, Any], name: str, setting: str) -> DataError:
    remedy = f"set {setting} of the domain, or rename the field"
    close = " or ".join(map(repr, nearest(name, fields)))
    if close:
        remedy = f"did you mean {close}? Then {remedy}"
    return DataError(
        f"no field {name!r}; the row has: {', '.join(fields) or 'nothing'}",
        where=where,
        remedy=remedy,
    )


# --- rows of question and answer, and conversations


def _of_own_fields(where: str, fields: Mapping[str, Any], domain: DomainConfig) -> Problem:
    field = prompt_field_of(where, fields, domain)
    if is_conversation(without_json(fields[field])):
        answer = None
        if fields.get(domain.answer_field) is not None:
            answer = text_of(where, fields, domain.answer_field, "answer_field")
        return _of_conversation(where, fields, field, domain, answer)
    question = question_of(where, fields, field)
    answer = text_of(where, fields, domain.answer_field, "answer_field")
    metadata = _without_conversation(fields, domain)
    del metadata[domain.answer_field]
    return Problem(question, answer, metadata)


def _without_conversation(fields: Mapping[str, Any], domain: DomainConfig) -> dict[str, Any]:
    """Return the fields as metadata of a question, without a conversation that the chat template
    would render in its place."""
    metadata = dict(fields)
    if domain.template == CHAT:
        metadata.pop(MESSAGES, None)
    return metadata


def prompt_field_of(where: str, fields: Mapping[str, Any], domain: DomainConfig) -> str:
    """Return where the row has its prompt: in the field that the recipe names, else in the first
    usual one that says something. With a chat template a conversation comes before a question that
    was made of it."""
    usual = [domain.prompt_field]
    if not _names_prompt(domain):
        usual = [_DEFAULT_FIELD, "prompt", MESSAGES]
        if domain.template == CHAT:
            usual = [MESSAGES, _DEFAULT_FIELD, "prompt"]
    found = [name for name in usual if name in fields]
    if not found:
        raise _no_field(where, fields, domain.prompt_field, "prompt_field")
    for name in found:
        if _is_prompt(name, fields[name]):
            return name
    if found[0] == MESSAGES and isinstance(fields[MESSAGES], str) and not _names_prompt(domain):
        raise DataError(
            f"field {MESSAGES!r} is text, and no JSON of a list of messages",
            where=where,
            remedy='write it as a list of {"role": "user", "content": "…"}, or name the field with '
            "the question (prompt_field of the domain)",
        )
    return found[0]


def _is_prompt(name: str, value: Any) -> bool:
    """Whether a field says something, and as a field of its name does: `messages` that are text are
    none."""
    if isinstance(value, str):
        return bool(value.strip()) and (name != MESSAGES or is_conversation(without_json(value)))
    return value is not None and value != [] and value != {}


def conversation_in_field(
    where: str, fields: Mapping[str, Any], field: str, domain: DomainConfig
) -> list[Message]:
    """Read the conversation in a field of a row. Raises DataError where the domain's template
    cannot render one, or it is no conversation."""
    if domain.template != CHAT:
        raise DataError(
            f"field {field!r} is a conversation, which no template of one question can render",
            where=where,
            remedy='set template = "chat" of the domain',
        )
    return read_conversation(fields[field], where=where, field=field)


def _of_conversation(
    where: str,
    fields: Mapping[str, Any],
    field: str,
    domain: DomainConfig,
    answer: str | None,
) -> Problem:
    """Make a problem of a conversation. An assistant's last turn is the row's answer, unless it has
    a field for that; where responses are trained, it is a response, and one of several if the row
    has more. Without others a `response_template` makes the response. What the turn says beside
    its content is named in `untold`.

    answer: what the row's fields say, None: nothing."""
    messages = conversation_in_field(where, fields, field, domain)
    conversation, reply = split_reply(messages)
    metadata = dict(fields)
    del metadata[field]
    metadata[MESSAGES] = conversation
    responses = fields.get(RESPONSES)
    is_made = domain.response_template is not None and not responses
    if reply is not None and not is_made and are_responses(responses):  # else the row's own
        metadata[RESPONSES] = replies_of(reply, responses)
    untold: tuple[str, ...] = ()
    if reply is not None:
        untold = untold_fields(messages[-1])
    if answer is not None:
        metadata.pop(domain.answer_field, None)
    elif reply is not None:
        answer = reply
    else:
        answer = text_of(where, fields, domain.answer_field, "answer_field")
    return Problem(question_in(where, conversation), answer, metadata, untold=untold)


# --- benchmarks


def _of_math(where: str, named: Mapping[str, Any], domain: DomainConfig) -> Problem:
    """MATH (https://github.com/hendrycks/math): what the solution boxes last is the answer. AIME
    and MATH-500 have a field for it. With a chat template, a conversation that the row has beside
    them (OpenR1-Math, NuminaMath) is the prompt, as of other rows."""
    metadata = _without_conversation(named, domain)
    field = _DEFAULT_ANSWER
    if _plain_name(domain.answer_field) in named:
        field = _plain_name(domain.answer_field)
    if field in named:
        answer = text_of(where, named, field, "answer_field")
        del metadata[field]
    else:
        found = last_boxed(text_of(where, named, "solution", "answer_field"))
        if found is None:
            raise DataError(
                "the solution has no \\boxed{…}, so that the row has no answer",
                where=where,
                remedy="set answer_field of the domain, or leave the row out",
            )
        answer = found
    has_conversation = is_conversation(without_json(named.get(MESSAGES)))
    if domain.template == CHAT and has_conversation and not _names_prompt(domain):
        metadata[MESSAGES] = named[MESSAGES]
        return _of_conversation(where, metadata, MESSAGES, domain, answer)
    return Problem(question_of(where, named, "problem"), answer, metadata)


def last_boxed(solution: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}` (or `\boxed 5`); None where there is none."""
    boxes = list(_BOXED.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        word = re.match(r"[^\s$.,]+", rest)
        if word is None:
            return None
        return word[0]
    depth = 0
    for place, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return rest[1:place].strip()
    return None


def _of_gpqa(where: str, named: Mapping[str, Any], domain: DomainConfig) -> Problem:
    """GPQA (arXiv:2311.12022): four choices in an order that the row itself decides; the answer is
    a letter."""
    question = question_of(where, named, "question")
    correct = text_of(where, named, "correct_answer", "answer_field").strip()
    wrong = [text_of(where, named, name, "answer_field").strip() for name in _INCORRECT]
    if correct in wrong:
        raise DataError(
            f"field {_INCORRECT[wrong.index(correct)]!r} is the correct answer, {correct!r}",
            where=where,
            remedy="leave the row out: two letters would be right",
        )
    choices = _shuffled([correct, *wrong], seed=question)
    lines = [question.strip(), ""]
    for letter, choice in zip("ABCD", choices, strict=True):
        lines.append(f"{letter}) {choice}")
    metadata = _without_conversation(named, domain)
    for name in ("correct_answer", *_INCORRECT):
        del metadata[name]
    metadata["choices"] = choices
    return Problem("\n".join(lines), "ABCD"[choices.index(correct)], metadata)


def _shuffled(choices: Sequence[str], *, seed: str) -> list[str]:
    """Return the choices in an order that depends on the texts and the seed alone."""

    def key(choice: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{choice}".encode()).digest()

    return sorted(choices, key=key)


def _of_live_code_bench(where: str, named: Mapping[str, Any], domain: DomainConfig) -> Problem:
    """LiveCodeBench (arXiv:2403.07974): the answer is all tests, as `code_tests` reads them."""
    question = question_of(where, named, "question_content")
    starter = named.get("starter_code")
    if starter:
        question += f"\n\nBegin with this code:\n```python\n{starter}\n```"
    cases = _test_cases(where, named, "public_test_cases")
    if named.get("private_test_cases"):
        cases += _test_cases(where, named, "private_test_cases")
    metadata = _without_conversation(named, domain)
    for name in ("public_test_cases", "private_test_cases"):
        metadata.pop(name, None)
    with raised_as(
        DataError,
        "the row's tests cannot be read",
        (ValueError, KeyError, TypeError, AttributeError, RecursionError),
        where=where,
        remedy="leave the row out",
    ):
        answer = _program_tests(cases, named.get("metadata"))
    return Problem(question, answer, metadata)


def _test_cases(where: str, named: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    """JSON, or JSON that was pickled, compressed and written in base 64: a list of tables."""
    text = named[field]
    with raised_as(  # of any kind: a damaged pickle raises whatever its opcodes do
        DataError,
        f"field {field!r} holds no tests",
        where=where,
        remedy="leave the row out",
    ):
        if isinstance(text, str) and not text.lstrip().startswith("["):
            pickled = zlib.decompress(base64.b64decode(text))
            text = _TextUnpickler(io.BytesIO(pickled)).load()
        if isinstance(text, str):
            text = json.loads(text)
        cases = list(text)
        for number, case in enumerate(cases, start=1):
            if not isinstance(case, Mapping):
                raise ValueError(
                    f"test {number} is {type(case).__name__}, expected a table of input and output"
                )
        return cases


class _TextUnpickler(pickle.Unpickler):
    """Reads plain data only: a pickle from elsewhere may not name anything to be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _program_tests(cases: Sequence[Mapping[str, Any]], details: Any) -> str:
    """Return tests of programs that read and print, or of a method of `Solution` (`func_name`)."""
    if not cases:
        raise ValueError("there are none")
    if cases[0].get("testtype") != "functional":
        inputs = []
        outputs = []
        for case in cases:
            inputs.append(case["input"])
            outputs.append(case["output"])
        return json.dumps({"inputs": inputs, "outputs": outputs, "prelude": _prelude()})
    if isinstance(details, str):
        details = json.loads(details)
    function = details["func_name"]
    asserts = []
    for case in cases:
        arguments = [repr(json.loads(line)) for line in case["input"].splitlines()]
        expected = json.loads(case["output"])
        call = f"Solution().{function}({', '.join(arguments)})"
        # By JSON, in which the tests are written: a tuple is a list there.
        asserts.append(f"assert json.loads(json.dumps({call})) == {expected!r}")
    return json.dumps({"asserts": asserts, "setup": "", "prelude": _prelude()})


def _prelude() -> str:
    """Return the imports that LiveCodeBench puts before a program: the code to begin with has names
    of theirs, such as `List`."""
    lines = [f"from {module} import *" for module in _PRELUDE_MODULES]
    lines.append("from builtins import *")  # modules have names of them: `open`, `pow`, `compile`
    lines += [f"import {module}" for module in _PRELUDE_MODULES]
    return "\n".join(lines)
