"""`data show`: what a recipe's prompts are, before anything is started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import pytest

from grpo_megatron.cli.data_show import _reads_answer
from grpo_megatron.cli.main import main
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import DataError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rewards import functions
from tests.data.chat_templates import TEMPLATES, write_tokenizer
from tests.rewards.sandboxes import needs_sandbox
from tests.trainer.vision import png

REWARDS = "grpo_megatron.rewards.functions"
RECIPE = """
name = "shown"
[model]
path = "model"
[[domains]]
name = "sums"
source = "file"
path = "rows.jsonl"
template = "chat"
rewards = [{{ function = "{rewards}:exact_match" }}]
[rollout]
max_model_len = 600
{more}
"""
USER = {"role": "user", "content": "What is 2 + 3?"}
ROWS = [{"messages": [USER], "answer": "5"}, {"question": "2 + 4?", "answer": "6"}]


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """Write a model with a chat template, rows and a recipe, and show them: (exit code, text)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def shown(*settings, template="qwen", rows=ROWS, more=""):
        if template is not None:
            write_tokenizer(tmp_path / "model", template)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "recipe.toml").write_text(RECIPE.format(rewards=REWARDS, more=more))
        code = main(["data", "show", "recipe.toml", *settings])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return shown


def test_a_prompt_is_shown_as_text_and_tokens(show):
    code, text = show("domains.0.system_prompt=Be brief.")
    assert code == 0
    assert re.search("chat template: .*/model/chat_template.jinja\n", text)
    assert "an answer ends with: <|im_end|>" in text
    assert "  | <|im_start|>system\n  | Be brief.<|im_end|>\n" in text
    assert "  | What is 2 + 3?<|im_end|>\n  | <|im_start|>assistant\n" in text
    assert "special tokens: <|im_start|> (3), <|im_end|> (2)" in text
    assert " tokens: 2" in text and " … " in text
    assert "prompt 2" in text and "2 + 4?" in text
    assert text.count("reward exact_match of the answer: 1") == 2
    assert "note:" not in text


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "drops_system"])
def test_every_template_is_shown(show, template):
    code, text = show(template=template)
    assert code == 0
    assert "What is 2 + 3?" in text
    assert ("writes no generation prompt" in text) == (template == "no_generation_prompt")


def test_what_a_template_drops_is_an_error_of_data(show):
    code, text = show("domains.0.system_prompt=Be brief.", template="drops_system")
    assert code == 4
    assert "drops the system message" in text
    assert "[[domains]] sums" in text
    assert "remedy" in text


def test_an_end_that_engines_do_not_know_is_told(show, tmp_path):
    show()
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|eot_id|>"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    code, text = show(template=None)
    assert code == 0
    assert "add it to eos_token_id" in text


def test_what_the_template_writes_before_a_trained_answer_is_told(show, tmp_path):
    show()
    template = "{% for message in messages %}{{ ' ' + message.content }}<|im_end|>{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = ROWS[1:]
    code, text = show("kind=sft", template=None, rows=rows)
    assert code == 0
    assert "between prompt and answer the template itself writes ' '" in text
    _, text = show(template=None, rows=rows)
    assert "between prompt and answer" not in text


def test_a_format_that_the_chat_template_does_not_write_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = "demo/agent-calculator-cpu"
    assert main(["data", "show", recipe, "domains.0.environment.tool_format=glm45"]) == 0
    assert 'note: tool_format is "glm45", and it writes calls in the' in capsys.readouterr().out
    assert main(["data", "show", recipe]) == 0
    assert "tool_format" not in capsys.readouterr().out


def test_without_the_model_there_is_text_only(show):
    code, text = show("domains.0.system_prompt=Be brief.", template=None)
    assert code == 0
    assert "is not on this machine" in text
    assert "  | system: Be brief.\n  | user: What is 2 + 3?\n" in text
    assert "tokens:" not in text
    assert "reward exact_match of the answer: 1" in text
    code, text = show("domains.0.template={question}", template=None, rows=ROWS[1:])
    assert code == 0
    assert "  | 2 + 4?\n" in text


def test_a_run_shows_its_own_model(tmp_path, capsys):
    write_tiny_model(tmp_path / "demo" / "model", load_preset("tiny-qwen3-moe"))
    assert main(["data", "show", "demo/gspo-moe-cpu", f"runs_dir={tmp_path}", "name=demo"]) == 0
    text = capsys.readouterr().out
    assert text.count("reward exact_match of the answer: 1") == 3
    assert "special tokens: none" in text


def _show_seen(tmp_path, rows, *settings) -> int:
    """Show rows of a file to a tiny model that sees. Returns the exit code."""
    path = tmp_path / "seen.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["domains.0.source=file", f"domains.0.path={path}", "domains.0.arguments={}"]
    flags += ["domains.0.num_problems=null", f"runs_dir={tmp_path}", "cold_start=null"]
    return main(["data", "show", "demo/vision-count-cpu", *flags, *settings])


def test_rows_without_images_are_told_where_the_model_sees(tmp_path, capsys):
    rows = [{"question": "How many?", "answer": "1", "image": "a.png"}]
    assert _show_seen(tmp_path, rows) == 0
    assert "warning: no row of domain 'count' has images" in capsys.readouterr().out
    assert _show_seen(tmp_path, rows, "domains.0.image_field=imgae") == 4
    assert "did you mean 'image'?" in capsys.readouterr().err


def test_rows_with_bad_images_are_left_out_and_three_others_shown(tmp_path, capsys):
    (tmp_path / "small.png").write_bytes(png(60, 30, 0))
    bad = [{"question": f"Is it {n}?", "answer": "1", "images": "absent.png"} for n in range(4)]
    good = {"question": "How many?", "answer": "1", "images": "small.png"}
    assert _show_seen(tmp_path, [*bad, good]) == 0
    text = capsys.readouterr().out
    assert f"left out: {tmp_path / 'seen.jsonl'}:1: no image at" in text
    assert "left out: 1 more rows" in text
    assert "How many?" in text and "1 x 2 tokens" in text
    assert _show_seen(tmp_path, bad) == 4


def test_a_way_to_prepare_images_that_a_run_refuses_is_refused(tmp_path, capsys):
    write_tiny_model(tmp_path / "model", load_preset("tiny-qwen2.5-vl"))
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))
    rows = [{"question": "How many?", "answer": "1"}]
    model = ("model.preset=null", f"model.path={tmp_path / 'model'}")
    assert _show_seen(tmp_path, rows, *model) == 2
    assert "do_resize = False, expected True" in capsys.readouterr().err


def test_a_preset_is_named_in_the_place_of_a_temporary_folder(capsys):
    recipe = "demo/agent-calculator-cpu"
    assert main(["data", "show", recipe, "runs_dir=absent"]) == 0
    said = capsys.readouterr().out
    assert "chat template: preset tiny-qwen3-moe-agent/tokenizer_config.json" in said
    assert tempfile.gettempdir() not in said
    model = resolve(recipe, []).config.model
    with pytest.raises(DataError) as caught, tokenizer_directory(model) as directory:
        raise DataError("no end", where=f"{directory}/config.json")
    assert caught.value.where == "preset tiny-qwen3-moe-agent/config.json"


@pytest.mark.parametrize(
    ("settings", "rows", "words"),
    [
        (("kind=sft",), [{"question": "1?", "answer": " "}], "note: a run leaves it out: empty"),
        (
            ("kind=sft",),
            [{"question": "1?", "answer": "1", "responses": ["2", ""]}],
            "note: a run leaves 1 of its answers out: empty",
        ),
        (
            ("kind=sft", "rollout.max_new_tokens=4"),
            [{"question": "1?", "answer": "one two three four five"}],
            "note: a run cuts 1 of its answers: longer than max_new_tokens (4) with the end",
        ),
    ],
)
def test_answers_that_are_not_trained_are_marked(show, settings, rows, words):
    code, text = show(*settings, rows=[*rows, {"question": "2?", "answer": "2"}])
    assert code == 0
    assert words in text
    assert text.count("note: a run") == 1


def test_answers_that_a_cold_start_leaves_out_are_marked(show):
    settings = "cold_start={target_accuracy=0.5}"
    rows = [{"question": "1?", "answer": ""}, {"question": "2?", "answer": "2"}]
    code, text = show(settings, "data.num_validation=2", rows=rows)
    assert code == 0
    assert "answer: (empty)\nnote: the cold start leaves it out: its answer is empty" in text
    assert text.count("note: the cold start") == 1


def test_a_box_of_the_file_is_no_completion(show):
    """The model's is in pixels of the scaled image."""
    row = {"question": "Where?", "answer": "[100, 100, 500, 500]", "width": 1000, "height": 800}
    box_iou = 'function = "grpo_megatron.rewards.boxes:box_iou"'
    sizes = 'arguments = {size_fields = ["width", "height"]}'
    code, text = show(f"domains.0.rewards=[{{{box_iou}, {sizes}}}]", rows=[row])
    assert code == 0
    assert "reward box_iou of the answer: cannot be judged without a completion" in text
    code, text = show(f"domains.0.rewards=[{{{box_iou}}}]", rows=[row])
    assert "reward box_iou of the answer: 1\n" in text


def test_long_prompts_are_told(show):
    code, text = show("rollout.max_model_len=20", "rollout.max_new_tokens=4")
    assert code == 0
    assert "a run drops it: 16 tokens leave room" in text


# --- rewards


def test_each_component_says_what_it_can_of_the_answer(show):
    rewards = [
        f'{{function="{REWARDS}:math_verify", arguments={{answer_tag="answer"}}}}',
        f'{{function="{REWARDS}:numeric_match"}}',
        f'{{function="{REWARDS}:format_tags"}}',
        f'{{function="{REWARDS}:soft_overlong", arguments={{buffer=4}}}}',
    ]
    rows = [{"question": "2 + 4?", "answer": "6"}, {"question": "What?", "answer": "no number"}]
    code, text = show(f"domains.0.rewards=[{', '.join(rewards)}]", rows=rows)
    assert code == 0
    first, second = text.split("prompt 2")
    assert "reward math_verify of the answer: 1" in first
    assert "reward numeric_match of the answer: 1" in first
    for name in ("format_tags", "soft_overlong"):
        assert f"reward {name} of the answer: cannot be judged without a completion" in first
    assert "reward numeric_match of the answer: none: it cannot score this answer" in second


def test_an_answer_that_scores_nothing_in_a_box_is_told(show):
    rows = [
        {"question": "2 / 4?", "answer": "\\frac{1}{2"},
        {"question": "Factors?", "answer": "3, 5, 7"},
    ]
    reward = f'{{function="{REWARDS}:math_verify", arguments={{think_tag="think"}}}}'
    code, text = show(f"domains.0.rewards=[{reward}]", rows=rows)
    assert code == 0
    first, second = text.split("prompt 2")
    assert "reward math_verify of the answer: 1\nnote: as \\boxed{…} it gets 0" in first
    assert "reward math_verify of the answer: 1\n" in second
    assert "note:" not in second


def test_tests_of_programs_are_no_answers(show, tmp_path):
    (tmp_path / "own_reward.py").write_text("def tests(completion, answer): return len(answer)\n")
    rows = [{"question": "Write it.", "answer": '{"inputs": ["1"], "outputs": ["2"]}'}]
    code, text = show('domains.0.rewards=[{function="own_reward:tests"}]', rows=rows)
    assert code == 0
    assert "reward tests of the answer: cannot be judged without a completion" in text


def test_rewards_judge_a_completion_that_is_given(show):
    rewards = [
        f'{{function="{REWARDS}:numeric_match"}}',
        f'{{function="{REWARDS}:length_penalty"}}',
        f'{{function="{REWARDS}:environment"}}',
    ]
    rows = [{"question": "2 + 4?", "answer": "6"}, {"question": "2 + 5?", "answer": "7"}]
    setting = f"domains.0.rewards=[{', '.join(rewards)}]"
    code, text = show(setting, "--completion", "It is 7.", rows=rows)
    assert code == 0
    first, second = text.split("prompt 2")
    assert "reward numeric_match of the completion: 0\n" in first
    assert "reward numeric_match of the completion: 1\n" in second
    assert re.search(r"reward length_penalty of the completion: -?0\.\d+\n", first)  # it has tokens
    assert "reward environment of the completion: none: it cannot score this answer" in first


PICKY = """
def picky(completion, answer):
    if answer == "7":
        return {}["seven"]
    return 1.0

def text(completion, answer):
    return answer
"""


def test_what_a_reward_raises_is_told_without_a_traceback(show, tmp_path):
    (tmp_path / "picky_reward.py").write_text(PICKY)
    rows = [{"question": "2 + 4?", "answer": "6"}, {"question": "2 + 5?", "answer": "7"}]
    code, text = show('domains.0.rewards=[{function="picky_reward:picky"}]', rows=rows)
    first, second = text.split("prompt 2")
    assert code == 0 and "reward picky of the answer: 1\n" in first
    assert "none: it raised KeyError: 'seven'" in second and "picky_reward.py:4, in picky" in second
    assert "Traceback" not in text
    code, text = show('domains.0.rewards=[{function="picky_reward:picky"}]', rows=rows[1:])
    assert code == 10 and "KeyError: 'seven'" in text and "picky_reward.py:4" in text
    assert "Traceback" not in text and "remedy:" in text
    code, text = show('domains.0.rewards=[{function="picky_reward:text"}]', rows=rows)
    assert code == 10 and "must return a number or None, not str '6'" in text
    assert "registry.py" not in text


@needs_sandbox
def test_tests_that_a_run_refuses_are_refused(show):
    """And not run, to be told as a broken function when their process is ended."""
    rewards = (
        f'domains.0.rewards=[{{function="{REWARDS}:code_tests", arguments={{timeout_s=30.0}}}}]'
    )
    rows = [{"question": "Add.", "answer": '{"inputs": ["1 2"], "outputs": ["3"]}'}]
    for completion in ([], ["--completion", "```python\nwhile True: pass\n```"]):
        code, text = show(rewards, *completion, rows=rows)
        assert code == 10
        assert "timeout_s = 30 of code_tests is not below data.reward_timeout_s (5 s)" in text
        assert "[[domains]] sums, reward code_tests" in text and "timed out" not in text


def test_a_reward_that_is_not_there_is_an_error_of_rewards(show):
    code, text = show(f'domains.0.rewards=[{{function="{REWARDS}:exact_mach"}}]')
    assert code == 10
    assert "did you mean 'exact_match'" in text


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (functions.exact_match, True),
        (functions.math_verify, True),
        (functions.format_tags, False),
        (functions.language_consistency, False),
        (functions.repetition, False),
        (lambda completion, answer: [answer for _ in completion], True),
        (lambda answer, completion: len(completion), False),
        (lambda *, completion, answer: len(completion), False),
        (lambda *, completion, answer: completion == answer, True),
        (max, True),
    ],
)
def test_rewards_that_read_the_answer(function, reads):
    assert _reads_answer(function) == reads


# --- benchmarks as they are published


@pytest.mark.parametrize(
    ("row", "shown", "reward"),
    [
        (
            {"problem": "Find $x$.", "level": "1", "type": "A", "solution": "$\\boxed{(1,2)}$"},
            "answer: (1,2)",
            "math_verify",
        ),
        ({"problem": "Find it.", "answer": 204}, "answer: 204", "numeric_match"),
        (
            {
                "Question": "Which?",
                "Correct Answer": "yes",
                "Incorrect Answer 1": "no",
                "Incorrect Answer 2": "never",
                "Incorrect Answer 3": "maybe",
            },
            ") never",
            "exact_match",
        ),
    ],
)
def test_benchmarks_are_judged_right(show, row, shown, reward):
    code, text = show(f'domains.0.rewards=[{{function="{REWARDS}:{reward}"}}]', rows=[row])
    assert code == 0
    assert shown in text
    assert f"reward {reward} of the answer: 1" in text


def test_missing_fields_are_told_with_file_and_row(show):
    code, text = show(rows=[*ROWS, {"task": "3 + 3?", "answer": "6"}])
    assert code == 4
    assert "no field 'question'; the row has: task, answer" in text
    assert "rows.jsonl:3" in text
    assert "set prompt_field" in text


def test_the_command_does_not_import_torch():
    program = "import sys, grpo_megatron.cli.data_show; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- preferences


def shown_preferences(folder, capsys, rows: list[dict], *settings: str) -> tuple[int, str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "show", "stages/tiny-preferences", f"domains.0.path={folder}/rows.jsonl"]
    code = main([*words, *settings])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_answers_of_preferences_are_shown(tmp_path, capsys):
    rows = [{"prompt": "1 + 1 =", "chosen": "2", "rejected": "31"}]
    code, text = shown_preferences(tmp_path, capsys, rows)
    assert code == 0
    assert "  | 1 + 1 =\n" in text and "chosen: 2\nrejected: 31\n" in text
    assert "tokens of the answers: 2, 3, with their ends" in text
    code, text = shown_preferences(tmp_path, capsys, rows, "preferences.loss=kto")
    assert code == 0 and "desirable: 2\nundesirable: 31\n" in text
    code, text = shown_preferences(tmp_path, capsys, rows, "--completion", "2")
    assert code == 2 and "no rewards that could judge" in text


def test_answers_that_a_run_leaves_out_are_told(tmp_path, capsys):
    rows = [
        {"prompt": "1 + 1 =", "chosen": "2", "rejected": "2"},
        {"prompt": "1 + 1 =", "chosen": "2" * 60, "rejected": "3"},
    ]
    code, text = shown_preferences(tmp_path, capsys, rows)
    assert code == 0
    assert "note: a run leaves it out: with equal answers" in text
    assert "note: a run leaves it out: it is longer than 64 tokens" in text


def test_steps_are_shown_with_their_labels(tmp_path, capsys):
    of_steps = ["kind=reward_model", "preferences.loss=stepwise", "preferences.step_token=."]
    rows = [{"prompt": "1 + 1 =", "completions": ["2", " 3 "], "labels": [True, 0.25]}]
    code, text = shown_preferences(tmp_path, capsys, rows, *of_steps)
    assert code == 0
    assert "step 1, label 1: 2.\nstep 2, label 0.25: 3.\n" in text
    assert "tokens of the answers: 4, with their ends" in text


def test_rows_with_a_step_token_of_their_own_are_told(tmp_path, capsys):
    of_steps = ["kind=reward_model", "preferences.loss=stepwise", "preferences.step_token=."]
    rows = [
        {"prompt": "1 + 1 =", "completions": ["2.8"], "labels": [True]},
        {"prompt": "1.5 + 1 =", "completions": ["2."], "labels": [True]},
    ]
    code, text = shown_preferences(tmp_path, capsys, rows, *of_steps)
    assert code == 0
    assert "note: a run leaves it out: with the step token '.' inside of a step" in text
    assert "note: a run leaves it out: with the step token '.' in the prompt" in text
    assert "step 1, label 1: 2.8.\n" in text and "step 1, label 1: 2.\n" in text
    assert "tokens of the answers" not in text


def test_prompts_that_an_earlier_domain_has_are_told(show):
    again = f"""
[[domains]]
name = "again"
source = "file"
path = "rows.jsonl"
template = "chat"
rewards = [{{ function = "{REWARDS}:exact_match" }}]
"""
    code, text = show(more=again)
    assert code == 0
    assert "2 of these 2 prompts of domain again are prompts of sums too" in text
    code, text = show("domains.1.system_prompt=Be brief.", more=again)
    assert code == 0 and "warning" not in text
