"""Chat templates: the ids of transformers, and what is refused before anything starts."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.chat_template import read_chat_template
from grpo_megatron.data.prompt_text import PromptRenderer
from grpo_megatron.data.prompts import tokenised
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem
from tests.data.chat_templates import TEMPLATES, write_tokenizer

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
SYSTEM = {"role": "system", "content": "Answer with a number."}
QUESTION = {"role": "user", "content": "What is 2 + 3?\n"}
TURNS = [
    QUESTION,
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n5"},
    {"role": "user", "content": "And plus <b>4</b> & “5”?"},
]
CONVERSATIONS = {
    "one question": [QUESTION],
    "several turns": TURNS,
    "system": [SYSTEM, QUESTION],
    "system and several turns": [SYSTEM, *TURNS],
}
WITHOUT_SYSTEM = ("drops_system", "refuses_system")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tokenizer's directory for each template."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, name) for name in TEMPLATES}


def chat(**fields) -> DomainConfig:
    fields = {"name": "sums", "source": "file", "path": "x.jsonl", "template": "chat", **fields}
    return DomainConfig(rewards=REWARDS, **fields)


def prompt_of(directory, messages, **fields):
    problem = Problem("", "5", {"messages": messages})
    return tokenised(chat(**fields), [problem], load_tokenizer(directory))[0]


def expected_ids(directory, messages, **arguments):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, **arguments
    )


def accepted():
    """Names of templates with names of conversations that they render."""
    for name in TEMPLATES:
        for conversation in CONVERSATIONS:
            if name not in WITHOUT_SYSTEM or "system" not in conversation:
                yield name, conversation


@pytest.mark.parametrize(("name", "conversation"), list(accepted()))
def test_ids_are_those_of_transformers(directories, name, conversation):
    messages = CONVERSATIONS[conversation]
    prompt = prompt_of(directories[name], messages)
    assert list(prompt.token_ids) == expected_ids(directories[name], messages)
    assert prompt.metadata["messages"] == messages


@pytest.mark.parametrize(
    ("name", "arguments", "ending"),
    [
        ("qwen", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("qwen", {"enable_thinking": True}, "assistant\n"),
        ("llama", {"date_string": "1 Jan 2026"}, "assistant<|end_header_id|>\n\n"),
    ],
)
def test_arguments_reach_the_template(directories, name, arguments, ending):
    prompt = prompt_of(directories[name], TURNS, template_arguments=arguments)
    assert list(prompt.token_ids) == expected_ids(directories[name], TURNS, **arguments)
    assert prompt.text.endswith(ending)
    assert arguments.get("date_string", "") in prompt.text


@pytest.mark.parametrize("name", ["qwen", "llama", "deepseek"])
def test_any_text_has_the_ids_of_transformers(directories, name):
    from transformers import AutoTokenizer

    ours = load_tokenizer(directories[name])
    theirs = AutoTokenizer.from_pretrained(directories[name])
    renderer = PromptRenderer(chat(), ours.chat_template)
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
    marks = st.sampled_from(["<|im_end|>", "<|begin|>", "</think>", "{{ x }}", " \n"])

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(text, marks), min_size=1, max_size=5), st.booleans())
    def check(contents, with_system):
        messages = []
        for number, content in enumerate(contents):
            messages.append({"role": ["user", "assistant"][number % 2], "content": content})
        if with_system:
            messages.insert(0, SYSTEM)
        rendered = renderer.render(Problem("", "", {"messages": messages}))
        expected = theirs.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode(rendered.text) == expected

    check()


def test_bos_is_written_once(directories):
    prompt = prompt_of(directories["llama"], [QUESTION])
    tokenizer = load_tokenizer(directories["llama"])
    tokens = [tokenizer.token_text(token) for token in prompt.token_ids]
    assert tokens.count("<|begin|>") == 1
    assert tokens[0] == "<|begin|>"


def test_a_question_becomes_a_users_message(directories):
    domain = chat(
        system_prompt="Be brief.",
        question_template="{question} ({metadata[level]})",
        assistant_prefix="<think>\n",
    )
    tokenizer = load_tokenizer(directories["qwen"])
    [prompt] = tokenised(domain, [Problem("2 + 3?", "5", {"level": "easy"})], tokenizer)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3? (easy)"},
    ]
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    prefix = tokenizer.encode("<think>\n")
    assert list(prompt.token_ids) == expected_ids(directories["qwen"], messages) + prefix
    assert prompt.metadata["messages"] == messages


def test_a_conversation_keeps_its_own_system_message(directories):
    renderer = PromptRenderer(
        chat(system_prompt="Be brief."), read_chat_template(directories["qwen"])
    )
    own = renderer.render(Problem("", "", {"messages": [SYSTEM, QUESTION]}))
    assert "Be brief" not in own.text
    without = renderer.render(Problem("", "", {"messages": [QUESTION]}))
    assert "Be brief" in without.text


# --- refusals


def refused(directory, problem=None, **fields) -> DataError:
    """What rendering a problem raises; without one, what making the renderer raises."""
    with pytest.raises(DataError) as caught:
        renderer = PromptRenderer(chat(**fields), read_chat_template(directory))
        assert problem is not None, "nothing was refused"
        renderer.render(problem)
    assert "[[domains]] sums" in caught.value.where
    assert caught.value.remedy
    return caught.value


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    error = refused(write_tokenizer(tmp_path, None))
    assert "has no chat template" in str(error)
    assert "chat_template.jinja" in error.remedy


def test_a_dropped_system_message_is_refused(directories):
    directory = directories["drops_system"]
    asked = Problem("", "", {"messages": [SYSTEM, QUESTION]})
    assert "drops the system message" in str(refused(directory, asked))
    error = refused(directory, system_prompt="Be brief.")  # before any row is read
    assert "question_template" in error.remedy
    assert "chat_template.jinja" in error.where
    prompt_of(directory, [QUESTION])  # nothing to drop


def test_what_a_template_raises_is_told(directories):
    asked = Problem("", "", {"messages": [SYSTEM, QUESTION]})
    error = refused(directories["refuses_system"], asked)
    assert "System role not supported" in str(error)
    tool = Problem("", "", {"messages": [QUESTION, {"role": "tool", "content": "7"}]})
    error = refused(directories["llama"], tool)
    assert "refuses the conversation (user, tool): unknown role tool" in str(error)


def test_todays_date_is_refused_and_a_day_is_written(directories):
    asked = Problem("2 + 3?", "5")
    dated = {"dated": True}
    error = refused(directories["llama"], asked, template_arguments=dated)
    assert "today's date" in str(error)
    assert "template_date" in error.remedy
    domain = chat(template_arguments=dated, template_date=datetime.date(2026, 1, 31))
    renderer = PromptRenderer(domain, read_chat_template(directories["llama"]))
    assert "Today Date: 31 Jan 2026" in renderer.render(asked).text


def test_an_answer_that_begins_twice_is_refused(directories):
    error = refused(directories["deepseek"], Problem("2 + 3?", "5"), assistant_prefix="<think>\n")
    assert "already begins every answer with '<think>'" in str(error)
    assert error.remedy == "remove assistant_prefix of the domain"


def test_a_broken_template_is_refused_with_its_line(tmp_path):
    directory = write_tokenizer(tmp_path, "qwen")
    (directory / "chat_template.jinja").write_text("{{ bos_token }}\n{% if x %}")
    error = refused(directory, Problem("2 + 3?", "5"))
    assert "not valid" in str(error)
    assert "line 2" in error.where


# --- where the template is


def test_the_file_comes_before_the_config(tmp_path):
    settings_ = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    assert read_chat_template(tmp_path).render([QUESTION], {}) == "<s>config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path).render([QUESTION], {}) == "file"


def test_of_named_templates_the_default_counts(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path).render([QUESTION], {}) == "plain"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    assert read_chat_template(tmp_path) is None


DEFAULT = "{{ messages[0].content }}"
TOOL_USE = "{{ tools[0].function.name }}: {{ messages[0].content }}{# <tool_call> #}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def write_named(directory, place):
    """A tokenizer with two templates, in its configuration, in files, or in both."""
    settings_ = json.loads((directory / "tokenizer_config.json").read_text())
    settings_["chat_template"] = DEFAULT
    if place == "config":
        settings_["chat_template"] = [
            {"name": "tool_use", "template": TOOL_USE},
            {"name": "default", "template": DEFAULT},
        ]
    else:
        more = directory / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(TOOL_USE)
        (more / "rag.jinja").write_text("something else")
        (directory / "chat_template.jinja").write_text(DEFAULT)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings_))


@pytest.mark.parametrize("place", ["config", "files"])
def test_conversations_with_tools_have_the_template_of_that_name(tmp_path, place):
    directory = write_tokenizer(tmp_path / "t", "qwen")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    write_named(directory, place)
    tokenizer = load_tokenizer(directory)
    template = tokenizer.chat_template
    for tools in (TOOLS, None):
        text = template.render([QUESTION], {"tools": tools})
        expected = expected_ids(directory, [QUESTION], tools=tools)
        assert list(tokenizer.encode(text)) == list(expected)
        assert text.startswith("add: ") == (tools is not None)
    assert template.mentions("<tool_call>")


def test_the_file_comes_before_all_templates_of_the_config(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path).render([QUESTION], {"tools": TOOLS}) == "file"


def test_a_broken_template_for_tools_is_refused_by_its_file(tmp_path):
    directory = write_tokenizer(tmp_path, "qwen")
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{% if x %}")
    template = read_chat_template(directory)
    assert template.render([QUESTION], {})
    with pytest.raises(DataError, match="not valid") as caught:
        template.render([QUESTION], {"tools": TOOLS})
    assert str(more / "tool_use.jinja") in caught.value.where


# --- ends of answers


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen", "<|im_end|>"),
        ("llama", "<|eot_id|>"),
        ("deepseek", "<｜end▁of▁sentence｜>"),
        ("no_generation_prompt", "<|im_end|>"),  # the template writes no end: the tokenizer's
    ],
)
def test_answers_end_as_the_template_ends_them(directories, name, end):
    tokenizer = load_tokenizer(directories[name])
    after = tokenizer.chat_template.after_answer({})
    ids = tokenizer.end_of_turn(after)
    assert [tokenizer.token_text(token) for token in ids] == [end]


def test_a_missing_generation_prompt_is_known(directories):
    for name in TEMPLATES:
        template = read_chat_template(directories[name])
        found = template.writes_generation_prompt([QUESTION], {})
        assert found == (name != "no_generation_prompt")


@pytest.mark.parametrize("kind", ["one question", "system and several turns"])
def test_a_rephrased_question_takes_the_place_of_what_the_user_said_last(directories, kind):
    messages = CONVERSATIONS[kind]
    prompt = prompt_of(directories["qwen"], messages)
    renderer = PromptRenderer(chat(), read_chat_template(directories["qwen"]))
    text = renderer.rephrased(prompt, lambda question: f"1 + 1 = 2\n{question}")
    changed = [*messages[:-1], {"role": "user", "content": f"1 + 1 = 2\n{messages[-1]['content']}"}]
    assert text == renderer.render(Problem("", "", {"messages": changed})).text
    assert messages == CONVERSATIONS[kind]  # not changed in place


def test_a_rephrased_question_goes_through_the_plain_template(directories):
    domain = chat(template="<q>{question}</q> {metadata[unit]}:")
    problem = Problem("2 + 3?", "5", {"unit": "cm"})
    prompt = tokenised(domain, [problem], load_tokenizer(directories["qwen"]))[0]
    text = PromptRenderer(domain, None).rephrased(prompt, lambda question: f"see: {question}")
    assert text == "<q>see: 2 + 3?</q> cm:"


WRITES_TOOLS = """
{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
"""


def tools_prompt(directory, tools, **fields):
    (directory / "chat_template.jinja").write_text(WRITES_TOOLS)
    problem = Problem("", "5", {"messages": [QUESTION], "tools": tools})
    tokenizer = load_tokenizer(directory)
    return tokenizer, tokenised(chat(**fields), [problem], tokenizer)[0]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
def test_tools_of_a_row_reach_the_template(tmp_path, tools):
    directory = write_tokenizer(tmp_path, "qwen")
    tokenizer, prompt = tools_prompt(directory, tools)
    assert list(prompt.token_ids) == expected_ids(directory, [QUESTION], tools=TOOLS)
    assert '"name": "add"' in prompt.text
    renderer = PromptRenderer(chat(), tokenizer.chat_template)
    assert '"name": "add"' in renderer.rephrased(prompt, str.upper)


def test_fields_of_tools_without_a_value_are_left_out(tmp_path):
    """Parquet has the parameters of all tools in each."""
    parameters = {"properties": {"a": {"type": "number", "enum": None}, "city": None}}
    tools = [{"name": "add", "parameters": parameters}, {"name": "now", "parameters": None}]
    _, prompt = tools_prompt(write_tokenizer(tmp_path, "qwen"), tools)
    assert "null" not in prompt.text and "city" not in prompt.text
    assert '"a": {"type": "number"}' in prompt.text
    _, prompt = tools_prompt(write_tokenizer(tmp_path, "qwen"), json.dumps(tools))
    assert '"city": null' in prompt.text


def test_tools_of_a_row_take_the_place_of_those_of_its_domain(tmp_path):
    directory = write_tokenizer(tmp_path, "qwen")
    of_domain = {"template_arguments": {"tools": [{"name": "other"}]}}
    _, prompt = tools_prompt(directory, TOOLS, **of_domain)
    assert '"name": "add"' in prompt.text and "other" not in prompt.text
    for nothing in (None, [], "hammer, saw", ["hammer"]):
        _, prompt = tools_prompt(directory, nothing, **of_domain)
        assert "other" in prompt.text and "hammer" not in prompt.text


def test_an_environment_has_its_own_tools(tmp_path):
    directory = write_tokenizer(tmp_path, "qwen")
    _, prompt = tools_prompt(directory, TOOLS, environment={"name": "tools"})
    assert "add" not in prompt.text


def test_special_tokens_of_a_models_own_reach_the_template(tmp_path):
    directory = write_tokenizer(tmp_path, "qwen")
    file = directory / "tokenizer_config.json"
    settings_ = json.loads(file.read_text())
    settings_["extra_special_tokens"] = {"image_token": "<|im_start|>"}
    settings_["audio_token"] = "<|im_end|>"
    file.write_text(json.dumps(settings_))
    (directory / "chat_template.jinja").write_text("{{ image_token }}{{ audio_token }}")
    prompt = prompt_of(directory, [QUESTION])
    assert prompt.text == "<|im_start|><|im_end|>"
    assert list(prompt.token_ids) == expected_ids(directory, [QUESTION])


MISTRAL = """
{{- '[INST] ' + messages[0].content + ' [/INST]' }}
{%- if messages[1] %}{{ ' ' + messages[1].content + eos_token }}{% endif %}
"""


@pytest.mark.parametrize(
    ("source", "before"),
    [
        (MISTRAL, " "),
        (TEMPLATES["llama"], ""),
        (TEMPLATES["deepseek"], ""),
    ],
    ids=["mistral", "llama", "deepseek"],
)
def test_what_a_template_writes_before_an_answer(tmp_path, source, before):
    directory = write_tokenizer(tmp_path, "qwen")
    (directory / "chat_template.jinja").write_text(source)
    assert read_chat_template(directory).before_answer({}) == before
