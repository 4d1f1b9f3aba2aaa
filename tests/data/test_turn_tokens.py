"""Token identity: requests of later turns have the ids of transformers, for every family."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.turn_proof import prove
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.errors import DataError
from tests.data.turn_templates import FAMILIES, reply_message, write_family

NUM_CONVERSATIONS = 200
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]
WORDS = [
    "It is",
    "so",
    " ",
    "\n",
    "\n\n",
    "42",
    "é",
    "日本",
    "👩‍🚀",
    '{"a": 1}',
    "<b>",
    "&",
    "\t",
    "’",
    "e\u0301",
]
THINKS = {"qwen3", "deepseek_r1", "glm"}

EXTENSIONS = {
    "qwen3": (0.4, 0.9),  # thoughts go when the user speaks
    "qwen3_not_thinking": (0.0, 0.0),  # the empty thought of the generation prompt goes
    "llama3": (0.4, 0.9),  # white space goes
    "deepseek_v3": (0.95, 1.0),
    "deepseek_r1": (0.05, 0.5),
    "glm": (0.1, 0.7),
    "kimi": (0.95, 1.0),
    "mistral": (0.4, 0.95),  # tools move
    "plain": (0.2, 0.7),
}
"""Shares of requests that continue the last one."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tokenizer's directory for each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, name) for name in FAMILIES}


class Policy:
    """Our turns of a family, transformers' tokenizer, and a policy that writes as it does."""

    def __init__(self, name, directory):
        from transformers import AutoTokenizer

        self.name = name
        self.theirs = AutoTokenizer.from_pretrained(directory)
        self.tokenizer = load_tokenizer(directory)
        self.arguments = dict(FAMILIES[name].arguments)
        self.ends = FAMILIES[name].ends

    def turns(self, tools=None):
        template = self.tokenizer.chat_template
        return TurnTokens(self.tokenizer, template, arguments=self.arguments, tools=tools)

    def expected_ids(self, messages, tools):
        return self.theirs.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **self.arguments,
        )

    def written(self, state, content, thought, calls):
        """What the policy writes: (text of the reply, content of its message)."""
        opening = ""
        body = content
        if self.name == "glm":
            body = f"\n<think>{thought}</think>"
            if content:
                body += f"\n{content}"
        elif state.text.endswith("<think>\n"):
            opening = "<think>\n"
            body = f"{thought}\n</think>\n\n{content}"
        elif thought:
            body = f"<think>\n{thought}\n</think>\n\n{content}"
        return body + self._written_calls(content, calls), opening + body

    def _written_calls(self, content, calls):
        names = []
        for call in calls:
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            names.append((call["id"], function["name"], arguments))
        if not names:
            return ""
        if self.name.startswith("qwen3"):
            texts = []
            for _, name, arguments in names:
                call = f'{{"name": "{name}", "arguments": {arguments}}}'
                texts.append(f"<tool_call>\n{call}\n</tool_call>")
            start = ""
            if content:
                start = "\n"
            return start + "\n".join(texts)
        if self.name == "llama3":
            [(_, name, arguments)] = names
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        if self.name.startswith("deepseek"):
            text = "<｜tool▁calls▁begin｜>"
            for _, name, arguments in names:
                text += f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
            return text + "<｜tool▁calls▁end｜>"
        if self.name == "glm":
            text = ""
            for _, name, arguments in names:
                text += f"\n<tool_call>{name}"
                for key, value in json.loads(arguments).items():
                    text += f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
                text += "\n</tool_call>"
            return text
        if self.name == "kimi":
            text = "<|tool_calls_section_begin|>"
            for call_id, _, arguments in names:
                text += f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>"
                text += f"{arguments}<|tool_call_end|>"
            return text + "<|tool_calls_section_end|>"
        if self.name == "mistral":
            texts = []
            for call_id, name, arguments in names:
                texts.append(f'{{"name": "{name}", "arguments": {arguments}, "id": "{call_id}"}}')
            return "[TOOL_CALLS][" + ", ".join(texts) + "]"
        text = ""
        for call in calls:
            text += " -> " + json.dumps(call["function"], ensure_ascii=False)
        return text


def any_text(rng, longest=6):
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, longest)))


def any_calls(rng, policy):
    num_calls = rng.choice([1, 1, 2])
    if policy.name == "llama3":
        num_calls = 1
    calls = []
    for number in range(num_calls):
        arguments = {"x": any_text(rng, 3)}
        if policy.name.startswith("deepseek"):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": "search", "arguments": arguments}
        calls.append({"id": f"searching{number}"[-9:], "type": "function", "function": function})
    return calls


def any_reply(rng, policy, state, tools):
    """(what the policy writes, its message)"""
    calls = []
    content = any_text(rng)
    if tools and rng.random() < 0.5:
        calls = any_calls(rng, policy)
        content = content.rstrip()
        if policy.name == "llama3":
            content = ""
    thought = ""
    is_open = state.text.endswith("<think>\n")
    if is_open or (policy.name in THINKS and rng.random() < 0.6):
        thought = f"Hm{any_text(rng)}!"
    written, content = policy.written(state, content, thought, calls)
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return written, message


def sampled_ids(rng, policy, state, written):
    """(ids as the tokenizer encodes them behind the request, whether they were cut by length)"""
    if rng.random() < 0.2:
        ids = policy.tokenizer.encode(state.text + written)
        cut = rng.randint(len(state.token_ids), len(ids))
        text = policy.tokenizer.decode_exactly(ids[:cut])
        whole = policy.tokenizer.encode(text) == ids[:cut]
        if whole and tuple(ids[: len(state.token_ids)]) == state.token_ids:
            return ids[len(state.token_ids) : cut], True
    end = rng.choice(policy.ends)
    if policy.name == "plain" and rng.random() < 0.5:
        end = ""  # stopped by a string
    ids = policy.tokenizer.encode(state.text + written + end)
    if tuple(ids[: len(state.token_ids)]) != state.token_ids:
        ids = [*state.token_ids, *policy.tokenizer.encode(written + end)]
    return ids[len(state.token_ids) :], False


def following(rng, message):
    if not message.get("tool_calls"):
        return [{"role": "user", "content": any_text(rng)}]
    results = []
    for call in message["tool_calls"]:
        results.append(
            {"role": "tool", "tool_call_id": call["id"], "name": "search", "content": any_text(rng)}
        )
    return results


def is_canonical(policy, state, ids):
    """Whether the tokenizer would encode the text of request and reply as these ids."""
    text = policy.tokenizer.decode_exactly([*state.token_ids, *ids])
    return policy.tokenizer.encode(text) == [*state.token_ids, *ids]


def converse(rng, policy, kinds):
    """An episode of one to six turns, each request compared with transformers."""
    tools = rng.choice([None, TOOLS])
    turns = policy.turns(tools)
    messages = [{"role": "user", "content": any_text(rng)}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": any_text(rng)})
    state = turns.begin(messages)
    assert list(state.token_ids) == policy.expected_ids(messages, tools)
    for _ in range(rng.randint(1, 6)):
        written, reply = any_reply(rng, policy, state, tools)
        ids, is_cut = sampled_ids(rng, policy, state, written)
        if is_cut:
            reply = reply_message(turns, state, ids)
        elif not reply.get("tool_calls"):
            assert reply_message(turns, state, ids) == reply
        if not is_canonical(policy, state, ids):
            kinds["not canonical"] += 1
            return
        new_messages = following(rng, reply)
        result = turns.after(state, ids, reply, new_messages)
        messages = [*messages, reply, *new_messages]
        expected = policy.expected_ids(messages, tools)
        assert list(result.state.token_ids) == expected
        seen = [*state.token_ids, *ids]
        if result.restart is None:
            kinds["extension"] += 1
            assert expected == [*seen, *result.between_ids]
        else:
            kinds[result.restart.kind] += 1
            num_kept = result.restart.num_kept
            assert expected[:num_kept] == seen[:num_kept]
            assert expected[: len(seen)] != seen  # no restart without need
        state = result.state


@pytest.mark.parametrize("name", FAMILIES)
def test_every_request_has_the_ids_of_transformers(directories, name):
    policy = Policy(name, directories[name])
    rng = random.Random(name)
    kinds = Counter()
    for _ in range(NUM_CONVERSATIONS):
        converse(rng, policy, kinds)
    num_requests = kinds.total()
    low, high = EXTENSIONS[name]
    assert low * num_requests <= kinds["extension"] <= high * num_requests
    assert kinds["not canonical"] < 0.1 * num_requests


def conversation(policy, *turns_of_text, tools=None):
    """An episode whose replies have these texts and are answered with "go on"."""
    turns = policy.turns(tools)
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    results = []
    for text in turns_of_text:
        ids = policy.tokenizer.encode(text)
        reply = reply_message(turns, state, ids)
        results.append(turns.after(state, ids, reply, [{"role": "user", "content": "go on"}]))
        state = results[-1].state
    return results


def test_sampled_ids_are_never_encoded_again(directories):
    policy = Policy("deepseek_v3", directories["deepseek_v3"])
    turns = policy.turns()
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    spelled = [policy.tokenizer.encode(letter)[0] for letter in "answer"]
    assert policy.tokenizer.encode("answer") != spelled
    end = policy.tokenizer.encode("<｜end▁of▁sentence｜>")
    half = policy.tokenizer.encode("é")[:1]  # no UTF-8 by itself
    for sampled in ([*spelled, *end], [*spelled, *half]):
        reply = reply_message(turns, state, sampled)
        result = turns.after(state, sampled, reply, [{"role": "user", "content": "go on"}])
        assert result.restart is None
        before = [*state.token_ids, *sampled]
        assert list(result.state.token_ids[: len(before)]) == before
        assert list(result.between_ids) == list(result.state.token_ids[len(before) :])
        state = result.state


def test_a_restart_keeps_the_ids_in_front_of_what_the_template_rewrites(directories):
    policy = Policy("qwen3", directories["qwen3"])
    turns = policy.turns()
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    spelled = [policy.tokenizer.encode(letter)[0] for letter in "answer"]
    end = policy.tokenizer.encode("<|im_end|>")
    go_on = [{"role": "user", "content": "go on"}]
    first = [*spelled, *end]
    kept = turns.after(state, first, reply_message(turns, state, first), go_on)
    assert kept.restart is None
    second = policy.tokenizer.encode("<think>\nHm.\n</think>\n\n2<|im_end|>")
    state = kept.state
    result = turns.after(state, second, reply_message(turns, state, second), go_on)
    assert result.restart.kind == "reply"
    assert result.restart.turn == 2
    assert "chat_template.jinja, turn 2: the template writes" in result.restart.reason
    assert "'<think>" in result.restart.reason
    assert result.restart.num_kept == len(state.token_ids)
    text = policy.tokenizer.decode_exactly(result.state.token_ids)
    assert "assistant\n2<|im_end|>" in text
    assert "answer" in text
    assert policy.tokenizer.encode(text) != list(result.state.token_ids)  # still as sampled


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [
        ("llama3", " 2<|eot_id|>", "reply", "writes '2<|eot_id|>"),
        ("qwen3_not_thinking", "2<|im_end|>", "earlier text", "saw '<think>"),
        ("glm", "\n<think></think>\n2<|observation|>", "end of turn", "writes '<|user|>"),
        ("plain", "2\n", "seam", "saw the end"),
    ],
)
def test_a_restart_says_why(directories, name, text, kind, words):
    policy = Policy(name, directories[name])
    [result] = conversation(policy, text)
    assert result.restart.kind == kind
    assert words in result.restart.reason
    assert "turn 1: the template writes" in result.restart.reason


def test_a_reply_that_was_cut_ends_as_the_template_ends_it(directories):
    policy = Policy("qwen3", directories["qwen3"])
    [result] = conversation(policy, "2 and")
    text = policy.tokenizer.decode_exactly(result.between_ids)
    assert text.startswith("<|im_end|>\n<|im_start|>user\ngo on")
    [result] = conversation(policy, "2 and so<|im_end|>")
    text = policy.tokenizer.decode_exactly(result.between_ids)
    assert text.startswith("\n<|im_start|>user\ngo on")


def test_a_prefix_of_the_recipe_begins_every_reply(directories):
    policy = Policy("deepseek_v3", directories["deepseek_v3"])
    template = policy.tokenizer.chat_template
    turns = TurnTokens(policy.tokenizer, template, assistant_prefix="Answer:")
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    ids = policy.tokenizer.encode(" 2<｜end▁of▁sentence｜>")
    reply = reply_message(turns, state, ids)
    assert reply["content"] == "Answer: 2"
    result = turns.after(state, ids, reply, [{"role": "user", "content": "go on"}])
    assert result.restart is None
    text = policy.tokenizer.decode_exactly(result.state.token_ids)
    assert text.endswith("Answer: 2<｜end▁of▁sentence｜><｜User｜>go on<｜Assistant｜>Answer:")


def test_what_the_template_refuses_is_told_with_its_turn(directories):
    policy = Policy("llama3", directories["llama3"])
    turns = policy.turns(TOOLS)
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    calls = [{"type": "function", "function": {"name": "search", "arguments": {}}}] * 2
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(DataError, match="one call at once") as caught:
        turns.after(state, policy.tokenizer.encode("2"), reply, [])
    assert caught.value.where.endswith("chat_template.jinja, turn 1")
    with pytest.raises(DataError, match="has no content"):
        turns.after(state, [], reply_message(turns, state, []), [{"role": "tool"}])


def test_results_of_tools_name_their_call(directories):
    policy = Policy("kimi", directories["kimi"])
    turns = policy.turns(TOOLS)
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    ids = policy.tokenizer.encode("2<|im_end|>")
    said = [{"role": "tool", "content": "error: no whole call"}]
    result = turns.after(state, ids, reply_message(turns, state, ids), said)
    assert "## Return of malformed\nerror: no whole call" in result.state.text
    calls = []
    for number in range(2):
        function = {"name": "search", "arguments": "{}"}
        calls.append({"type": "function", "id": f"functions.search:{number}", "function": function})
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    said = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    result = turns.after(state, ids, reply, said)
    assert "## Return of functions.search:0\na" in result.state.text
    assert "## Return of functions.search:1\nb" in result.state.text


def test_what_is_wrong_with_a_call_is_said_by_the_user_where_tools_must_not(directories):
    policy = Policy("llama3", directories["llama3"])
    old = "{%- elif m.role == 'tool' %}"
    new = old + "{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('why?') }}"
    turns = broken(policy, old, new + "{%- endif %}")
    prove(turns)
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    ids = policy.tokenizer.encode("{2<|eot_id|>")
    said = [{"role": "tool", "content": "error"}]
    result = turns.after(state, ids, reply_message(turns, state, ids), said)
    assert result.restart is None
    text = policy.tokenizer.decode_exactly(result.between_ids)
    assert text.startswith("<|start_header_id|>user<|end_header_id|>\n\nerror<|eot_id|>")


def test_results_behind_a_later_reply_are_not_of_this_one(directories):
    policy = Policy("llama3", directories["llama3"])
    old = "{%- elif m.role == 'tool' %}"
    new = old + "{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('why?') }}"
    turns = broken(policy, old, new + "{%- endif %}")
    state = turns.begin([{"role": "user", "content": "1 + 1?"}])
    ids = policy.tokenizer.encode("2<|eot_id|>")
    function = {"name": "search", "arguments": {"x": "1"}}
    call = {"type": "function", "id": "a", "function": function}
    said = [
        {"role": "tool", "content": "error"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "found"},
    ]
    result = turns.after(state, ids, reply_message(turns, state, ids), said)
    end = "<|eot_id|><|start_header_id|>"
    assert f"{end}user<|end_header_id|>\n\nerror{end}assistant" in result.state.text
    assert f'{end}ipython<|end_header_id|>\n\n"found"{end}assistant' in result.state.text


@pytest.mark.parametrize("name", ["deepseek_v3", "glm", "kimi", "mistral", "qwen3"])
@pytest.mark.parametrize("is_table", [False, True])
def test_calls_of_a_history_are_written_as_the_template_wants_them(directories, name, is_table):
    policy = Policy(name, directories[name])
    turns = policy.turns(TOOLS)
    arguments = {"x": "1"}
    if not is_table:
        arguments = json.dumps(arguments)
    function = {"name": "search", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    asked = {"role": "user", "content": "1 + 1?"}
    history = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "found"},
    ]
    begun = turns.begin(history)
    assert "search" in begun.text and begun.text.count("found") == 1
    state = turns.begin([asked])
    ids = policy.tokenizer.encode("2" + policy.ends[0])
    result = turns.after(state, ids, reply_message(turns, state, ids), history)
    assert result.state.text.count("found") == 1


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "search", "arguments": '{"x":1.50, "x":1e400}'}},
        {"type": "function", "function": {"name": "search", "arguments": {"x": "1"}}},
        {"type": "function", "function": {"name": "search"}},
        {"name": "search", "arguments": {"x": "1"}},
        {"name": "search", "arguments": '{"x":1.50}'},
    ],
)
def test_calls_of_a_row_are_written_as_in_a_prompt_of_one_turn(directories, call):
    policy = Policy("qwen3", directories["qwen3"])
    old = "{%- for call in m.tool_calls or [] %}"
    new = old + "{%- if not call.function %}{% set call = {'function': call} %}{% endif %}"
    turns = broken(policy, old, new)
    asked = {"role": "user", "content": "1 + 1?"}
    history = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history += [{"role": "tool", "content": "found"}, {"role": "user", "content": "go on"}]
    if "arguments" not in call.get("function", call):
        turns = broken(policy, "call.function.arguments is string", "not call.function.arguments")
    expected = turns.template.render(history, {"tools": TOOLS})
    begun = turns.begin(history)
    assert begun.text == expected
    # an environment may say such a message later, too
    state = turns.begin([asked])
    ids = policy.tokenizer.encode("2<|im_end|>")
    result = turns.after(state, ids, reply_message(turns, state, ids), history)
    assert result.state.text.endswith(expected[expected.index("<|im_start|>user") :])


# --- the proof before a run


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proved(directories, name):
    policy = Policy(name, directories[name])
    for tools in (None, TOOLS):
        proof = prove(policy.turns(tools))
        assert len(proof.transitions) >= 6
        assert proof.refused == ()
        kinds = {step.restart.kind for step in proof.restarts}
        if name in ("deepseek_v3", "kimi"):
            assert kinds == set()
        if name == "qwen3_not_thinking":
            assert kinds == {"earlier text"}
            assert len(proof.restarts) == len(proof.transitions)


def broken(policy, old, new):
    """Turns by the template of a family with a part of it changed."""
    template = policy.tokenizer.chat_template
    source = FAMILIES[policy.name].template
    assert old in source
    changed = ChatTemplate(source.replace(old, new), {"eos_token": policy.ends[0]}, template.where)
    return TurnTokens(policy.tokenizer, changed, tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("qwen3", "(tool | tojson)", "''", "does not write the tool 'search'"),
        ("qwen3", "m.role == 'tool'", "m.role == 'result'", "drops what the tool says"),
        ("mistral", "'[TOOL_RESULTS]", "raise_exception('no tools') + '[TOOL_RESULTS]", "no tools"),
        ("deepseek_v3", "{{- content }}", "", "drops what the policy says"),
        ("mistral", "+ eos_token", "+ ", "not valid"),
    ],
)
def test_templates_that_cannot_be_proved_are_refused(directories, name, old, new, words):
    policy = Policy(name, directories[name])
    with pytest.raises(DataError, match=words) as caught:
        prove(broken(policy, old, new))
    assert "chat_template.jinja" in caught.value.where
    assert caught.value.remedy


def test_tools_may_be_described_by_the_first_conversation(directories):
    policy = Policy("qwen3", directories["qwen3"])
    turns = broken(policy, "(tool | tojson)", "''")
    described = {"role": "system", "content": "Call search(x)."}
    assert prove(turns, [described, {"role": "user", "content": "1 + 1?"}]).refused == ()


def test_a_question_with_the_name_of_a_tool_describes_none(directories):
    policy = Policy("qwen3", directories["qwen3"])
    turns = broken(policy, "(tool | tojson)", "''")
    question = {"role": "user", "content": "Which search engine?"}
    for opening in ([question], [{"role": "system", "content": "Be brief."}, question]):
        with pytest.raises(DataError, match="does not write the tool 'search'"):
            prove(turns, opening)


def test_ids_that_are_not_those_of_the_whole_text_are_refused(directories, monkeypatch):
    policy = Policy("kimi", directories["kimi"])
    turns = policy.turns()
    after = turns.after

    def off_by_one(*arguments):
        result = after(*arguments)
        token_ids = (*result.state.token_ids[:-2], 5, result.state.token_ids[-1])
        return replace(result, state=replace(result.state, token_ids=token_ids))

    monkeypatch.setattr(turns, "after", off_by_one)
    with pytest.raises(DataError, match="is encoded where the whole text has") as caught:
        prove(turns)
    assert caught.value.where.endswith("chat_template.jinja, turn 1")
