"""Calls read by vLLM's parsers: every format, malformed ones, the way back into the template."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.tool_calls import call_format, example_of
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.environments.tools import result_message
from grpo_megatron.environments.wire import Act, line
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.rollout.tool_parsers import ToolCallReader
from tests.data.turn_templates import FAMILIES, write_family

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "string"}, "n": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}]
JSON_CALL = '{"name": "search", "arguments": {"x": "é 1", "n": 2}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:3<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)
ARGUMENTS = '{"x": "é 1", "n": 2}'
CALLS = {
    "qwen3": f"I look.\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    "llama3": JSON_CALL.replace("arguments", "parameters"),
    "deepseek_v3": "I look." + DEEPSEEK.replace("{}", f"search<｜tool▁sep｜>{ARGUMENTS}"),
    "glm": "\n<think></think>\nI look.\n<tool_call>search\n<arg_key>x</arg_key>\n"
    "<arg_value>é 1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "kimi": "I look." + KIMI.replace("{}", ARGUMENTS),
    "mistral": f'[TOOL_CALLS][{JSON_CALL[:-1]}, "id": "abcdefghi"}}]',
}
"""One call by family, as its template writes it."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, name) for name in FAMILIES}


def reader_of(directory):
    template = load_tokenizer(directory).chat_template
    return ToolCallReader(call_format("auto", template), directory)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_and_goes_on_in_the_template(directories, name):
    tokenizer = load_tokenizer(directories[name])
    reader = reader_of(directories[name])
    turns = TurnTokens(tokenizer, tokenizer.chat_template, tools=TOOLS)
    state = turns.begin([{"role": "user", "content": "What is é?"}])
    end = FAMILIES[name].ends[-1]
    ids = tokenizer.encode(CALLS[name] + end)
    read = reader.read(turns.reply_text(state, ids), TOOLS, turn=1)
    [call] = read.reply.tool_calls
    assert read.reply.error is None
    assert (call.name, dict(call.arguments)) == ("search", {"x": "é 1", "n": 2})
    again = reader.read(turns.reply_text(state, ids), TOOLS, turn=1)
    assert again == read  # ids too
    assert read.reply.text in CALLS[name]
    assert "search" not in read.reply.text
    result = turns.after(state, ids, read.message, [result_message(call, "a letter")])
    assert result.restart is None
    text = tokenizer.decode_exactly(result.between_ids)
    assert "a letter" in text


def test_ids_are_those_that_the_policy_wrote(directories):
    read = reader_of(directories["kimi"]).read(CALLS["kimi"], TOOLS, turn=1)
    assert read.reply.tool_calls[0].id == "functions.search:3"
    read = reader_of(directories["mistral"]).read(CALLS["mistral"], TOOLS, turn=1)
    assert read.reply.tool_calls[0].id == "abcdefghi"
    for wrong in ("abc", "", "abcdefghij"):
        text = CALLS["mistral"].replace("abcdefghi", wrong)
        read = reader_of(directories["mistral"]).read(text, TOOLS, turn=1)
        assert read.reply.tool_calls[0].id == "t0001c000"
    two = "<tool_call>{}</tool_call>".replace("{}", JSON_CALL) * 2
    read = reader_of(directories["qwen3"]).read(two, TOOLS, turn=12)
    assert [call.id for call in read.reply.tool_calls] == ["t0012c000", "t0012c001"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qwen3", '<tool_call>\n{"name": "search", "argum\n</tool_call>', "no whole call"),
        ("qwen3", '<tool_call>{"name": "search"}</tool_call>', "no whole call"),
        ("qwen3", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "no JSON object"),
        ("qwen3", "<tool_call>", "no whole call"),
        ("llama3", '{"name": "search", "parameters": {"x": ', "no whole call"),
        ("deepseek_v3", DEEPSEEK.replace("{}", 'search<｜tool▁sep｜>{"x": '), "no JSON"),
        ("deepseek_v3", DEEPSEEK.replace("{}", "search"), "no whole call"),
        (
            "deepseek_v3",
            DEEPSEEK.replace(
                "{}", "search<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{}"
            ),
            "of 2 calls only",
        ),
        ("glm", "<tool_call>\n</tool_call>", "no whole call"),
        ("kimi", KIMI.replace("{}", '{"x": '), "no JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "search"', "no whole call"),
    ],
)
def test_a_malformed_call_is_a_text_for_the_policy(directories, name, text, words, caplog, capsys):
    reader = reader_of(directories[name])
    read = reader.read(f"It is.{text}"[6 * (name == "llama3") :], TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert words in read.reply.error
    assert read.reply.error.endswith(example_of(reader.format_name))
    assert text in read.message["content"]
    assert "tool_calls" not in read.message
    assert "Traceback" not in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("text", ["", "It is 2.", "the set {1, 2}", "\x00\ufffd", "<tool", "[f()]"])
def test_a_text_without_a_call_is_a_reply(directories, name, text):
    read = reader_of(directories[name]).read(text, TOOLS, turn=1)
    assert read.reply.text == text
    assert read.reply.error is None
    assert read.message == {"role": "assistant", "content": text}


def coder_reader(directories):
    """Qwen3-Coder's calls need no tokens but those of Qwen3."""
    return ToolCallReader("qwen3_coder", directories["qwen3"])


def coder_call(body, name="search"):
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def coder_value(value, key="x"):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def glm_call(value, key="x", name="search"):
    argument = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    return f"<tool_call>{name}\n{argument}</tool_call>"


CODER_CALL = coder_call(coder_value("a long query") + coder_value("2", "n"))
GLM_CALL = glm_call("a long query").replace(
    "</tool_call>", "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)


def test_a_call_that_is_cut_anywhere_is_not_made(directories):
    readers = {
        CODER_CALL: coder_reader(directories),
        GLM_CALL: reader_of(directories["glm"]),
    }
    for whole, reader in readers.items():
        [call] = reader.read(whole, TOOLS, turn=1).reply.tool_calls
        assert call.arguments == {"x": "a long query", "n": 2}
        for length in range(len("<tool_call>"), len(whole)):
            read = reader.read(whole[:length], TOOLS, turn=1)
            assert read.reply.tool_calls == (), whole[:length]
            assert "is not whole" in read.reply.error or "no whole call" in read.reply.error
            assert read.message == {"role": "assistant", "content": whole[:length]}


@pytest.mark.parametrize("value", ["</tool_call>", "</arg_value>"])
def test_a_value_of_glm_with_an_end_in_it_is_not_cut(directories, value):
    reader = reader_of(directories["glm"])
    text = glm_call("a") + "\n" + glm_call(f"a {value} b")
    read = reader.read(text, TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert "call 2 is not whole" in read.reply.error


@pytest.mark.parametrize(
    "value", ["</parameter>", "</function>", "<parameter=y>", "</ parameter >"]
)
def test_a_value_of_coder_with_an_end_in_it_is_not_cut(directories, value):
    text = coder_call("") + "\n" + coder_call(coder_value(f"a {value} b"))
    read = coder_reader(directories).read(text, TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert "call 2 is not whole" in read.reply.error


@pytest.mark.parametrize("end", ["</function>", "</function>\n</tool_call>"])
def test_a_call_of_coder_may_leave_out_its_first_sign(directories, end):
    call = f"<function=search>\n{coder_value('a')}"
    reader = coder_reader(directories)
    read = reader.read(f"I look.\n{call}{end}", TOOLS, turn=1)
    assert [call.arguments for call in read.reply.tool_calls] == [{"x": "a"}]
    assert read.reply.text == read.message["content"] == "I look."
    read = reader.read(f"{call}{end}\n{call}{end}", TOOLS, turn=1)
    assert len(read.reply.tool_calls) == 2
    for length in range(len("<function="), len(call)):
        read = reader.read(call[:length], TOOLS, turn=1)
        assert read.reply.tool_calls == () and read.reply.error


def test_a_call_in_another_format_beside_a_good_one_is_told(directories):
    text = f"{CODER_CALL}\n<tool_call>\n{JSON_CALL}\n</tool_call>"
    read = coder_reader(directories).read(text, TOOLS, turn=1)
    assert "call 2 is not whole" in read.reply.error


@pytest.mark.parametrize(
    "value", ["a < b & c > d", "<b>x</b>", "line 1\n\n  line 2\n", "", "{}", "<arg>", "</x>"]
)
def test_values_with_other_signs_are_whole(directories, value):
    read = reader_of(directories["glm"]).read(glm_call(value), TOOLS, turn=1)
    assert [call.arguments for call in read.reply.tool_calls] == [{"x": value}]
    read = coder_reader(directories).read(coder_call(coder_value(value)), TOOLS, turn=1)
    assert [call.arguments for call in read.reply.tool_calls] == [{"x": value}]


def test_calls_as_models_write_them_are_whole(directories):
    reader = coder_reader(directories)
    two = "I look.\n" + coder_call(coder_value("a")) + "\nand\n" + coder_call(coder_value("b"))
    read = reader.read(f"{two}\nSo.", TOOLS, turn=1)
    assert [call.arguments["x"] for call in read.reply.tool_calls] == ["a", "b"]
    end = "</function>\n</tool_call>"
    in_one_frame = coder_call(coder_value("a")).replace(
        end, f"</function>\n<function=search>\n{coder_value('b')}{end}"
    )
    read = reader.read(in_one_frame, TOOLS, turn=1)
    assert [call.arguments["x"] for call in read.reply.tool_calls] == ["a", "b"]
    assert len(reader.read(coder_call(coder_value("</tool_call>")), TOOLS, turn=1).reply.tool_calls)
    glm = reader_of(directories["glm"])
    for text in ("<tool_call>search</tool_call>", "<tool_call>search\n</tool_call>"):
        assert len(glm.read(text, TOOLS, turn=1).reply.tool_calls) == 1
    in_a_line = "<tool_call>search<arg_key>x</arg_key><arg_value>a</arg_value></tool_call>"
    assert len(glm.read(in_a_line, TOOLS, turn=1).reply.tool_calls) == 1


@pytest.mark.parametrize(
    "text", ['{"answer": 5}', "{1, 2}", '{"name": "Ada", "age": 5}', '{"parameters": 3}', "{"]
)
def test_an_answer_of_llama_may_be_json(directories, text):
    read = reader_of(directories["llama3"]).read(text, TOOLS, turn=1)
    assert (read.reply.text, read.reply.tool_calls, read.reply.error) == (text, (), None)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "function": {"name": "search", "parameters": {}}}',
        '{"name": "search", "arguments": {"x": ',
        "<|python_tag|>search(1)",
    ],
)
def test_a_malformed_call_of_llama_is_told(directories, text):
    read = reader_of(directories["llama3"]).read(text, TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert "no whole call" in read.reply.error


def test_glm_leaves_unknown_tools_to_the_environment(directories):
    reader = reader_of(directories["glm"])
    text = glm_call("2", "n", name="serch") + "\n" + glm_call("2", "n")
    read = reader.read(text, TOOLS, turn=1)
    assert [(call.name, call.arguments) for call in read.reply.tool_calls] == [
        ("serch", {"n": "2"}),
        ("search", {"n": 2}),
    ]
    read = reader.read("<tool_call>serch</tool_call>", TOOLS, turn=1)
    assert [call.name for call in read.reply.tool_calls] == ["serch"]
    for text in (f"<tool_call>{JSON_CALL}</tool_call>", "<tool_call>I search</tool_call>"):
        read = reader.read(text, TOOLS, turn=1)
        assert "no whole call" in read.reply.error


def test_a_thought_has_no_calls(directories):
    reader = reader_of(directories["qwen3"])
    thought = f"<think>\n<tool_call>{JSON_CALL}</tool_call>\n"
    for text in (thought, f"{thought}</think>\n\n2"):
        read = reader.read(text, TOOLS, turn=1)
        assert (read.reply.tool_calls, read.reply.error) == ((), None)
        assert read.reply.text == text
    read = reader.read(f"{thought}</think>\n\n<tool_call>{JSON_CALL}</tool_call>", TOOLS, turn=1)
    assert len(read.reply.tool_calls) == 1
    assert read.message["content"] == f"{thought}</think>\n"


def calls_with(arguments):
    """One call with these arguments (JSON text) by family; in GLM's no value is JSON."""
    call = f'{{"name": "search", "arguments": {arguments}}}'
    return {
        "qwen3": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "deepseek_v3": DEEPSEEK.replace("{}", f"search<｜tool▁sep｜>{arguments}"),
        "kimi": KIMI.replace("{}", arguments),
        "mistral": f"[TOOL_CALLS][{call}]",
    }


@pytest.mark.parametrize("name", calls_with(""))
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (r'{"x": "\ud800"}', "an argument of search has half of a character"),
        (r'{"x": {"\udc00": [1]}}', "an argument of search has half of a character"),
        ('{"m": NaN}', "NaN is no number"),
        ('{"m": [-Infinity]}', "-Infinity is no number"),
    ],
)
def test_what_is_no_json_outside_of_python_is_malformed(directories, name, arguments, words):
    text = calls_with(arguments)[name]
    read = reader_of(directories[name]).read(text, TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert words in read.reply.error
    assert read.message == {"role": "assistant", "content": text}
    line(Act(0, 0, read.reply))


@pytest.mark.parametrize("name", calls_with(""))
def test_a_number_that_is_too_large_is_malformed(directories, name):
    read = reader_of(directories[name]).read(calls_with('{"m": 1e999}')[name], TOOLS, turn=1)
    assert read.reply.tool_calls == ()
    assert "number" in read.reply.error
    read = reader_of(directories[name]).read(calls_with('{"m": 1e99}')[name], TOOLS, turn=1)
    assert read.reply.tool_calls[0].arguments == {"m": 1e99}


@pytest.mark.parametrize("name", calls_with(""))
def test_arguments_that_are_nested_too_deeply_are_malformed(directories, name):
    reader = reader_of(directories[name])
    for depth in (100, 1000, 100_000):
        text = calls_with(f'{{"x": {"[" * depth}{"]" * depth}}}')[name]
        read = reader.read(text, TOOLS, turn=1)
        assert read.reply.tool_calls == ()
        assert "nested too deeply" in read.reply.error or "no whole call" in read.reply.error
    text = calls_with(f'{{"x": {"[" * 99}{"]" * 99}}}')[name]
    assert len(reader.read(text, TOOLS, turn=1).reply.tool_calls) == 1


def test_half_of_a_character_in_a_value_of_a_table_is_malformed(directories):
    schema = {"type": "object", "properties": {"x": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "search", "parameters": schema}}]
    value = r'{"a": "\ud800"}'
    read = reader_of(directories["glm"]).read(glm_call(value), tools, turn=1)
    assert "half of a character" in read.reply.error
    read = coder_reader(directories).read(coder_call(coder_value(value)), tools, turn=1)
    assert "half of a character" in read.reply.error


def test_half_of_a_character_in_a_name_or_an_id_is_malformed(directories):
    text = JSON_CALL.replace("search", r"\ud800")
    read = reader_of(directories["qwen3"]).read(f"<tool_call>{text}</tool_call>", TOOLS, turn=1)
    assert "the name of a call has half of a character" in read.reply.error
    line(Act(0, 0, read.reply))
    text = CALLS["mistral"].replace("abcdefghi", r"abcdefgh\ud800")
    read = reader_of(directories["mistral"]).read(text, TOOLS, turn=1)
    assert "the id of search has half of a character" in read.reply.error


def test_whole_characters_written_as_halves_are_read(directories):
    text = JSON_CALL.replace("é 1", r"\ud83d\ude00")
    read = reader_of(directories["qwen3"]).read(f"<tool_call>{text}</tool_call>", TOOLS, turn=1)
    assert read.reply.tool_calls[0].arguments["x"] == "\U0001f600"


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek_v3", "kimi", "mistral"])
@pytest.mark.parametrize("thought", ["", "<think>\nI look.\n</think>\n\n", "I look.</think>"])
def test_the_end_of_a_thought_may_stand_in_an_argument(directories, name, thought):
    text = thought + calls_with('{"x": "what does </think> mean"}')[name]
    read = reader_of(directories[name]).read(text, TOOLS, turn=1)
    assert [call.arguments["x"] for call in read.reply.tool_calls] == ["what does </think> mean"]
    assert read.message["content"].rstrip() == thought.rstrip()


@pytest.mark.parametrize("sign", ["</think>", "<tool_call>", "<think>"])
def test_signs_of_a_format_may_stand_in_values(directories, sign):
    value = f"what does {sign} mean"
    found = [
        reader_of(directories["qwen3"]).read(
            f"<tool_call>{JSON_CALL.replace('é 1', value)}</tool_call>", TOOLS, turn=1
        ),
        reader_of(directories["glm"]).read(glm_call(value), TOOLS, turn=1),
        coder_reader(directories).read(coder_call(coder_value(value)), TOOLS, turn=1),
    ]
    for read in found:
        assert [call.arguments["x"] for call in read.reply.tool_calls] == [value]


def test_a_call_behind_one_that_names_its_sign_is_counted(directories):
    one = f"<tool_call>{JSON_CALL.replace('é 1', '<tool_call>')}</tool_call>"
    reader = reader_of(directories["qwen3"])
    assert len(reader.read(one + one, TOOLS, turn=1).reply.tool_calls) == 2
    read = reader.read(f"{one}<tool_call>", TOOLS, turn=1)
    assert read.reply.tool_calls == () and read.reply.error


def test_arguments_have_the_types_of_the_schema(directories):
    read = reader_of(directories["glm"]).read(CALLS["glm"], TOOLS, turn=1)
    arguments = json.loads(read.message["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"x": "é 1", "n": 2}


def test_formats_that_cannot_be_read_are_refused(directories):
    with pytest.raises(ConfigError, match="no format 'hermse'") as caught:
        ToolCallReader("hermse", directories["qwen3"])
    assert "'hermes'" in caught.value.remedy
    with pytest.raises(DataError, match="does not know calls in the format 'deepseek_v31'"):
        ToolCallReader("deepseek_v31", directories["qwen3"])
    reader = reader_of(directories["qwen3"])
    with pytest.raises(DataError, match="schema is not valid"):
        reader.read("2", [{"type": "function"}], turn=1)
