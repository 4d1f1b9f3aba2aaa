"""`play`: scripted standard input takes the policy's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.cli.main import main
from grpo_megatron.cli.typed_replies import InputLines, call_text, typed_call
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.dataset_answers import end_of_turn
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.tool_calls import call_format
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.rollout.tool_parsers import ToolCallReader
from tests.data.turn_templates import FAMILIES, write_family

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "played"
[model]
preset = "tiny-qwen3-moe-agent"
[[domains]]
name = "game"
source = "file"
path = "rows.jsonl"
template = "chat"
rewards = [{{ function = "environment" }}]
{table} = {settings}
[[domains]]
name = "sums"
source = "file"
path = "rows.jsonl"
rewards = [{{ function = "grpo_megatron.rewards.functions:exact_match" }}]
template = "{{question}}"
[rollout]
max_new_tokens = 600
max_model_len = 1500
"""
ROWS = [{"question": "What is 3*4?", "answer": "12"}, {"question": "begin", "answer": "1"}]
CALL = {"name": "calculate", "arguments": {"expression": "3*4"}}
WRITTEN = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3*4"}}\n</tool_call>'
GUESS = '{ name = "guess_number", arguments = { largest = 1, invalid_penalty = 0.5 } }'
EXAMPLE = f'{{ command = ["python", "{ROOT}/examples/agent_program.py"] }}'
HOSTILE = '{ name = "tests.environments.hostile:Obedient", max_turns = 3 }'

NO_TOOLS = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endif %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SYSTEM_FIRST = """{% if messages[0].role != 'system' %}
{{- raise_exception('a system message is needed') }}{% endif %}"""


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """Play with this standard input: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def played(typed: str, *arguments: str, environment: str = GUESS, agent: str | None = None):
        table, settings = "environment", environment
        if agent is not None:
            table, settings = "agent", agent
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (tmp_path / "recipe.toml").write_text(RECIPE.format(table=table, settings=settings))
        (tmp_path / "typed").write_text(typed)
        with open(tmp_path / "typed") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = main(["play", "recipe.toml", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return played


def test_a_move_that_is_none_and_one_that_wins(play):
    code, text, _ = play("what?\n\n\nI think\nit is 1\n")
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith("domain game, prompt game-")
    assert "  | <|user|>What is 3*4?" in lines
    assert "[turn 1, at most 600 tokens, state 1-1; an empty line ends the reply]" in lines
    assert "reward of the turn: -0.5" in lines
    assert any(line.startswith("  | <|user|>That is no guess") for line in lines)
    assert lines.count("reward of the turn: 1") == 1
    end = ["", "outcome: 1", "moves: 2", "invalid_moves: 1"]
    assert lines[-5:] == [*end, "ended by the environment, after 2 turns"]


def test_a_call_as_json_is_one_as_the_model_writes_it(play, tmp_path):
    """Both give the same tokens, result, and outcome."""
    environment = '{ name = "calculator" }'
    as_json = play(json.dumps(CALL) + "\n\n12\n", "--tokens", environment=environment)
    as_model = play(WRITTEN + "\n\n12\n", "--tokens", environment=environment)
    assert as_json[0] == as_model[0] == 0
    shown = "as the model writes it:\n" + "".join(f"  | {ln}\n" for ln in WRITTEN.split("\n"))
    assert shown in as_json[1]
    assert as_json[1].replace(shown, "") == as_model[1]
    write_tiny_model(tmp_path / "model", load_preset("tiny-qwen3-moe-agent"))
    tokenizer = load_tokenizer(tmp_path / "model")
    for text in (WRITTEN + "<|end|>", "<|tool|>12<|end|><|assistant|>", "12<|end|>"):
        ids = tokenizer.encode(text)
        assert f"{len(ids)} tokens: {' '.join(map(str, ids))}\n" in as_json[1]
    assert "  | <|tool|>12<|end|><|assistant|>\n" in as_json[1]
    assert as_json[1].endswith(
        "outcome: 1\ntool_calls: 1\ntool_errors: 0\nended by the environment, after 2 turns\n"
    )


def test_the_input_ends_before_the_episode(play):
    code, text, error = play("what?\n\n")
    assert code == 4 and "[turn 2, " in text
    assert "the input ended before the episode did, in turn 2" in error
    assert "where:  standard input" in error and "remedy:" in error


def test_a_limit_ends_the_episode(play):
    code, text, _ = play("a\n\nb\n\nc\n\n", environment=HOSTILE)
    assert code == 0
    assert "[turn 2, at most " in text and ", state a;" in text
    assert text.endswith(
        "outcome: 0.25\nended by a limit: max_turns, or its tokens, after 3 turns\n"
    )


def test_an_episode_without_room_for_a_turn_is_named(play):
    code, text, error = play("1\n", "rollout.max_model_len=30", "rollout.max_new_tokens=8")
    assert code == 12 and "[turn" not in text
    assert "the episode has no turn: its first request has " in error
    assert "(max_model_len)" in error and "another --prompt" in error


@pytest.mark.parametrize("guard", ["", SYSTEM_FIRST])
def test_tools_may_be_described_by_the_recipe(play, tmp_path, guard):
    """For a template that writes none, or wants a system message; there is none without one."""
    write_tiny_model(tmp_path / "model", load_preset("tiny-qwen3-moe-agent"))
    config = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = guard + NO_TOOLS
    config.write_text(json.dumps(settings))
    model = [f"model.path={tmp_path / 'model'}", "model.preset=null"]
    described = [*model, "domains.0.system_prompt=calculate(expression)"]
    typed = json.dumps(CALL) + "\n\n12\n"
    code, text, _ = play(typed, *described, environment='{ name = "calculator" }')
    assert code == 0 and "outcome: 1\ntool_calls: 1\n" in text
    assert "  | <|system|>calculate(expression)<|end|><|user|>" in text
    code, _, error = play(typed, *model, environment='{ name = "calculator" }')
    assert code == 4
    assert ("a system message is needed" if guard else "system_prompt") in error


def test_a_turn_that_is_too_long_is_cut(play):
    environment = GUESS.replace("{ name", "{ turn_tokens = 3, name")
    code, text, _ = play("0000001\n\n1\n", environment=environment)
    assert code == 0
    assert "note: 8 tokens; the turn is cut after 3" in text
    assert "reward of the turn: -0.5" in text and "outcome: 1" in text


def test_what_the_tokenizer_cannot_write_is_asked_again(play):
    code, text, _ = play("é1\n\n1\n")
    assert code == 0
    assert "note: the tokenizer has no token for 'é'" in text and "outcome: 1\n" in text
    assert "after 1 turns" in text


def test_an_environment_that_fails_says_why(play):
    code, text, _ = play("raise on purpose\n", environment=HOSTILE)
    assert code == 0
    assert "the episode cannot be scored: it raised ValueError: on purpose" in text
    assert "  log | ValueError: on purpose" in text
    assert "outcome: none: the episode cannot be scored" in text


def test_one_that_cannot_begin_is_an_error(play, monkeypatch):
    monkeypatch.setitem(ROWS[1], "question", "unscorable no board")
    code, _, error = play("1\n", "--prompt", "2", environment=HOSTILE)
    assert code == 12
    assert "cannot begin the episode: no board" in error and "--prompt" in error


def test_a_prompt_by_its_id_is_the_one_by_its_number(play):
    code, by_number, _ = play("1\n", "--prompt", "2")
    assert code == 0 and "<|user|>begin" in by_number
    prompt_id = by_number.splitlines()[0].split()[-1]
    code, by_id, _ = play("1\n", "--prompt", prompt_id)
    assert code == 0 and by_id == by_number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--domain", "gane"], ["no domain 'gane'", "did you mean 'game'?", "--domain"]),
        (["--domain", "sums"], ["domain 'sums' has no environment", "those with one are: game"]),
        (["--prompt", "game-1"], ["no prompt 'game-1'", "such as game-"]),
        (["--prompt", "3"], ["fewer than 3 prompts"]),
    ],
)
def test_what_is_not_there_is_refused(play, arguments, words):
    code, text, error = play("1\n", *arguments)
    assert code == 2 and text == ""
    assert all(word in error for word in words)


def test_a_recipe_without_an_environment_is_refused(play, monkeypatch):
    first, _, rest = RECIPE.partition("[[domains]]")
    monkeypatch.setattr(f"{__name__}.RECIPE", first + rest[rest.index("[[domains]]") :])
    code, _, error = play("1\n")
    assert code == 2
    assert "no domain of the recipe has an environment" in error and "data show" in error


def test_a_tokenizer_that_is_not_here_is_an_error_of_the_machine(play):
    code, _, error = play("1\n", "model.path=/nowhere/model", "model.preset=null")
    assert code == 3
    assert "tokenizer" in error and "model.path" in error


def test_an_episode_of_a_model_that_sees_is_refused(play):
    code, _, error = play("1\n", "model.preset=tiny-qwen2.5-vl")
    assert code == 2
    assert "an episode knows no images, and the model (qwen2_5_vl) sees them" in error


def test_a_penalty_of_nothing_has_no_sign(play):
    code, text, _ = play("hm\n\n1\n", environment='{ name = "guess_number" }')
    assert code == 4 and "reward of the turn: 0" in text


# --- for an agent program


def program(deed: str, more: str = "") -> str:
    """`[domains.agent]` of a program that does this; a person has more time than it."""
    command = f'["python", "{ROOT}/tests/cli/asking_program.py", "{deed}"]'
    return f"{{ command = {command}, episode_s = 0.001{more} }}"


FUNCTION = '{ function = "tests.cli.asking_program:broken", episode_s = 0.001 }'


def test_a_program_asks_the_person(play):
    """With a tool, which the program runs."""
    code, text, error = play(json.dumps(CALL) + "\n\n12\n", agent=EXAMPLE)
    assert code == 0, error
    lines = text.splitlines()
    assert lines[0].startswith("domain game, prompt game-")
    assert "as the model writes it:" in lines
    offered = "<|tools|>calculate(expression)<|end|>"
    assert f"  | {offered}<|user|>What is 3*4?<|end|><|assistant|>" in lines
    assert "[turn 1, at most 600 tokens; an empty line ends the reply]" in lines
    assert "  | <|tool|>12<|end|><|assistant|>" in lines
    assert lines[-2:] == ["outcome: 1.1", "ended by the program, after 2 turns"]


def test_requests_at_once_are_replied_to_one_after_the_other(play):
    agent = program("together", ", turn_tokens = 20")
    code, text, error = play("go\n\nleft\n\nleft\n", agent=agent)
    assert code == 0, error
    assert "the program does not go on from the turn before; the whole request is now:" in text
    assert text.count("<|user|>one") == text.count("<|user|>two") == 1
    assert "outcome: 1\nended by the program, after 3 turns\n3 sequences: not every" in text


def test_a_program_without_an_outcome_leaves_it_to_rewards(play):
    code, text, _ = play("12\n", agent=program("no-reward"))
    assert code == 0
    assert "outcome: none: the domain's other rewards judge the last reply" in text
    assert "cannot be scored" not in text


@pytest.mark.parametrize("agent", [program("crash"), FUNCTION])
def test_a_program_that_fails_says_why(play, agent):
    code, text, _ = play("12\n", agent=agent)
    assert code == 0
    assert "the episode cannot be scored: " in text
    assert "is broken" in text
    assert "outcome: none: the episode cannot be scored" in text


def test_a_limit_ends_the_episode_of_a_program(play):
    code, text, _ = play("a\n\nb\n\nc\n", agent=program("on", ", max_turns = 2"))
    assert code == 0
    assert "outcome: 0\nended by a limit: max_turns, or its tokens, after 2 turns\n" in text


def test_the_input_ends_before_the_program_does(play):
    code, text, error = play("a\n", agent=program("on"))
    assert code == 4 and "[turn 2, " in text
    assert "the input ended before the episode did, in turn 2" in error


def test_a_program_that_asks_for_nothing_is_an_error(play):
    code, _, error = play("12\n", agent=program("silent"))
    assert code == 12
    assert "the episode has no turn: the program asked for no turn" in error


def test_ctrl_c_ends_it_while_a_reply_is_awaited(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(table="environment", settings=GUESS))
    with subprocess.Popen(
        [sys.executable, "-m", "grpo_megatron.cli.main", "play", "recipe.toml"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:
        shown = ""
        while "ends the reply" not in shown:
            line = running.stdout.readline()
            assert line, running.stderr.read()
            shown += line
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in error


# --- what is typed

LINE = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=8)


def replies_by_hand(lines: list[str]) -> list[str]:
    """Paragraphs of the lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(paragraph) for paragraph in found if paragraph]


@settings(deadline=None, max_examples=60)
@given(st.lists(LINE, max_size=8), st.integers(1, 7), st.booleans())
def test_replies_are_paragraphs_however_they_arrive(lines, size, ends_with_newline):
    data = "\n".join(lines).encode()
    if ends_with_newline:
        data += b"\n"
    source, sink = os.pipe()

    def write() -> None:
        for start in range(0, len(data), size):
            os.write(sink, data[start : start + size])
        os.close(sink)

    async def read() -> list[str]:
        typed = InputLines(source)
        found = []
        while (reply := await typed.next_reply()) is not None:
            found.append(reply)
        return found

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert asyncio.run(read()) == replies_by_hand(lines)
    finally:
        writer.join()
        os.close(source)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.text(), st.dictionaries(st.text(), JSON, max_size=3))
def test_a_typed_call_is_what_it_says(name, arguments):
    call = {"name": name, "arguments": arguments}
    assert typed_call(json.dumps(call)) == call
    assert typed_call(json.dumps({**call, "more": 1})) is None
    assert typed_call(json.dumps([call])) is None


def test_what_is_nested_too_deeply_is_no_typed_call():
    assert typed_call("[" * 100_000) is None


@pytest.mark.parametrize("text", ["12", "{", '{"name": "f"}', '{"name": 1, "arguments": {}}', ""])
def test_other_texts_are_no_calls(text):
    assert typed_call(text) is None


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "plain"])
def test_a_typed_call_is_read_as_the_family_reads_it(tmp_path, name):
    directory = write_family(tmp_path / name, name)
    tokenizer = load_tokenizer(directory)
    template = tokenizer.chat_template
    domain = DomainConfig.model_validate(
        {
            "name": "d",
            "source": "file",
            "path": "rows.jsonl",
            "template": "chat",
            "template_arguments": dict(FAMILIES[name].arguments),
            "rewards": [{"function": "environment"}],
            "environment": {"name": "calculator"},
        }
    )
    properties = {"x": {"type": "string"}, "n": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "search", "parameters": parameters}}]
    call = {"name": "search", "arguments": {"x": "e 1", "n": 2}}
    end_text = tokenizer.decode_exactly(end_of_turn(domain, tokenizer))
    written = call_text(call, domain, template, tools, end_text)
    reader = ToolCallReader(call_format("auto", template), directory)
    turns = TurnTokens(tokenizer, template, tools=tools, arguments=domain.template_arguments)
    state = turns.begin([{"role": "user", "content": "What is it?"}])
    text = turns.reply_text(state, tokenizer.encode(written + end_text))
    [read] = reader.read(text, tools, turn=0).reply.tool_calls
    assert (read.name, dict(read.arguments)) == (call["name"], call["arguments"])
