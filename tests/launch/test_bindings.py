"""Rewards are bound before a job is queued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.launch import slurm
from grpo_megatron.launch.bindings import SKIP_REMEDY, refuse_unbound_code
from grpo_megatron.plan.resolve import resolve
from tests.rewards.sandboxes import needs_sandbox

RECIPE = "demo/gspo-moe-cpu"
REWARD = "domains.0.rewards.0.function="
FROM_FILE = [
    "domains.0.source=file",
    "domains.0.path=rows.jsonl",
    "domains.0.dataset=null",
    "domains.0.arguments={}",
    "domains.0.template={question}",
]
CHAT = ["domains.0.template=chat"]
GRAPH = """
name = "one-stage"
[stages.only]
recipe = "demo/gspo-moe-cpu"
settings = ["domains.0.rewards.0.function=not_here:reward"]
"""


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """Names of runs that would have been queued."""
    names = []

    def submit(resolved, site, after):
        names.append(resolved.config.name)
        return "7"

    monkeypatch.setattr(slurm, "submit", submit)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    return names


def submit(reward, *flags):
    return main(["submit", RECIPE, "--site", "bare", f"{REWARD}{reward}", *flags])


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("not_here:reward", "no module 'not_here'"),
        ("grpo_megatron.rewards.functions:exact_mach", "did you mean 'exact_match'"),
        ("grpo_megatron.rewards.functions:soft_overlong", "missing a required"),
    ],
)
def test_a_reward_that_cannot_be_called_is_not_queued(queued, capsys, reward, words):
    assert submit(reward) == 10
    said = capsys.readouterr().err
    assert words in said
    assert "--skip-reward-check" in said
    assert queued == []


def test_a_reward_that_only_the_cluster_has_is_queued_with_a_warning(queued, capsys):
    assert submit("not_here:reward", "--skip-reward-check") == 0
    assert "warning: rewards are not checked" in capsys.readouterr().err
    assert len(queued) == 1


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        (RECIPE, ["objective.advantage=not_here:f", "objective.advantage_std=none"], "not_here"),
        (RECIPE, [f"{REWARD}not_here:f"], "not_here"),
        ("demo/agent-calculator-cpu", ["domains.0.environment.name=not_here:f"], "not_here"),
        (
            "single_gpu/qwen2.5-1.5b-experience",
            ["experience.writer_api_key=$NOT_SET"],
            "NOT_SET",
        ),
    ],
)
def test_what_only_the_cluster_may_have_can_be_left_to_it(monkeypatch, recipe, settings, words):
    monkeypatch.delenv("NOT_SET", raising=False)
    config = resolve(recipe, settings).config
    with pytest.raises(GrpoMegatronError, match=words) as caught:
        refuse_unbound_code(config, remedy=SKIP_REMEDY)
    assert caught.value.remedy.endswith("; if only the cluster has it, give --skip-reward-check")


def test_a_reward_in_the_current_directory_is_queued(queued, tmp_path):
    (tmp_path / "reward_beside_recipe.py").write_text("def one(completion, answer): return 1\n")
    assert submit("reward_beside_recipe:one") == 0
    assert len(queued) == 1


def test_a_graph_whose_stage_has_a_wrong_reward_queues_nothing(queued, tmp_path, capsys):
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH)
    command = ["stages", "submit", str(file), "--site", "bare"]
    assert main(command) == 10
    assert "stage only, [[domains]]" in capsys.readouterr().err
    assert queued == []
    assert main([*command, "--skip-reward-check"]) == 0
    assert len(queued) == 1


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        ([f"{REWARD}not_here:reward"], "no module 'not_here'", 10),
        (["domains.0.dataset=basic_arithmetik"], "basic_arithmetic", 4),
        (["domains.0.arguments.min_trems=2"], "min_terms", 4),
        (["domains.0.template={metadata[expresion]} ="], "expression", 4),
        ([*FROM_FILE, "domains.0.prompt_field=qestion"], "question", 4),
        ([*FROM_FILE, "domains.0.template={metadata[level]}: {question}"], "has no metadata", 4),
        ([*FROM_FILE, "domains.0.arguments.answer_afer=####"], "answer_after", 4),
        ([*FROM_FILE, *CHAT, "domains.0.prompt_field=qestion"], "question", 4),
        ([*FROM_FILE, *CHAT, "domains.0.question_template={metadata[a]}"], "has no metadata", 4),
        ([*FROM_FILE, *CHAT, "domains.0.question_template=Say it."], "uses no field", 2),
        ([*FROM_FILE, "domains.0.template=caht"], 'template = "chat"', 2),
    ],
)
def test_nothing_starts_with_what_cannot_be_read(
    queued, tmp_path, capsys, command, settings, words, code
):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    site = ["--site", "bare"] if command == "submit" else []
    assert main([command, RECIPE, *site, "runs_dir=here", *settings]) == code
    assert words in capsys.readouterr().err
    assert queued == []
    assert not (tmp_path / "here").exists()


TESTS = f"{REWARD}grpo_megatron.rewards.functions:code_tests"


@needs_sandbox
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["domains.0.rewards.0.arguments.timeout_s=1000"], "timeout_s = 1000"),
        (["data.reward_timeout_s=4"], "timeout_s = 4 "),
    ],
)
def test_tests_of_programs_end_before_their_process_does(queued, capsys, settings, words):
    command = ["submit", RECIPE, "--site", "bare", TESTS]
    assert main([*command, *settings]) == 10
    said = capsys.readouterr().err
    assert words in said
    assert "not below data.reward_timeout_s" in said
    assert "[[domains]] addition, reward code_tests" in said
    assert "remedy" in said and queued == []
    assert main([*command, *settings, "data.reward_timeout_s=2000"]) == 0


@pytest.mark.parametrize(
    "function",
    ["judge:judge", "judge:reward_model", "step_rewards:process_reward_model"],
)
def test_judges_answer_before_their_process_ends(queued, capsys, function):
    name = function.partition(":")[2]
    reward = (
        f'domains.0.rewards=[{{ function = "grpo_megatron.rewards.{function}", '
        'arguments = { url = "http://judge:8000", model = "judge" } }]'
    )
    command = ["submit", RECIPE, "--site", "bare", reward, "domains.0.accuracy=null"]
    assert main(command) == 0
    queued.clear()
    of_its_own = "domains.0.rewards.0.arguments.timeout_s="
    assert main([*command, f"{of_its_own}60"]) == 10
    said = capsys.readouterr().err
    assert f"timeout_s = 60 of {name} is not below data.reward_timeout_s (5 s)" in said
    assert f"[[domains]] addition, reward {name}" in said
    assert "data.reward_timeout_s to 120" in said and queued == []
    assert main([*command, f"{of_its_own}60", "data.reward_timeout_s=61"]) == 0
    assert main([*command, f"{of_its_own}4"]) == 0
    assert main([*command, f"{of_its_own}much"]) == 10
    assert "timeout_s = 'much'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ('["{nope}", "{answer}"]', "{nope} is not supported"),
        ('["{nope}"]', "use {answer}, {question} or {metadata[key]}; write literal braces as {{"),
        ('["{answer"]', "expected '}'"),
        ('["{answer}", "{metadata[nope]}"]', "has no metadata 'nope'"),
    ],
)
def test_demonstrated_turns_are_tried_before_anything_starts(
    queued, tmp_path, capsys, command, turns, words
):
    site = ["--site", "bare"] if command == "submit" else []
    setting = f"domains.0.environment.demonstration={turns}"
    assert main([command, "demo/agent-calculator-cpu", *site, "runs_dir=here", setting]) == 4
    said = capsys.readouterr().err
    assert words in said
    assert said.count("domains.0.environment.demonstration") == 1
    assert "remedy" in said
    assert not (tmp_path / "here").exists()


def write_model(directory, template):
    """A tokenizer's files, as far as the check reads them, and the demo's architecture."""
    write_tiny_model(directory, load_preset("tiny-qwen3-moe"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return [f"model.path={directory}", "model.preset=null"]


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no thanks') }}", "(system, user): no thanks"),
        ("{{ messages[-1].content }}", "drops the system message"),
        ("{{ messages[0].content }}{% if %}", "not valid"),
    ],
)
def test_nothing_starts_with_a_chat_template_that_refuses(
    queued, tmp_path, capsys, command, template, words
):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    model = write_model(tmp_path / "model", template)
    site = ["--site", "bare"] if command == "submit" else []
    settings = [*FROM_FILE, *CHAT, *model, "domains.0.system_prompt=Be brief.", "runs_dir=here"]
    assert main([command, RECIPE, *site, *settings]) == 4
    said = capsys.readouterr().err
    assert words in said
    assert "[[domains]] addition" in said
    assert "remedy" in said
    assert queued == []
    assert not (tmp_path / "here").exists()


DISTIL = ("kind=distil", "num_steps=1", "cold_start=null")


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("distillation.teachers.0.path", [*DISTIL, "distillation={teachers=[{path='other'}]}"]),
        ("domains.0.reference", ["objective.kl=k3", "objective.kl_beta=0.1"]),
    ],
)
def test_nothing_starts_with_a_teacher_of_other_tokens(
    queued, tmp_path, capsys, command, key, settings
):
    """Two tokens have changed places."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    model = write_model(tmp_path / "model", None)
    write_tiny_model(tmp_path / "other", load_preset("tiny-qwen3-moe"))
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    site = ["--site", "bare"] if command == "submit" else []
    settings = [*FROM_FILE, *model, *settings, f"{key}=other", "runs_dir=here"]
    assert main([command, RECIPE, *site, *settings]) == 4
    said = capsys.readouterr().err
    assert f"{key}: its tokenizer has the id {vocabulary['a']} for 'a'" in said
    assert queued == []
    assert not (tmp_path / "here").exists()


def two_files(first: int, second: int) -> list[str]:
    """Write files with so many rows; returns the setting of their domains."""
    domains = []
    for name, count in (("a", first), ("b", second)):
        rows = [json.dumps({"question": f"{name}{row}", "answer": "x"}) for row in range(count)]
        Path(f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        domains.append(
            f'{{name="{name}", source="file", path="{name}.jsonl", template="{{question}}", '
            'rewards=[{function="grpo_megatron.rewards.functions:exact_match"}]}'
        )
    return [f"domains=[{', '.join(domains)}]", "cold_start=null"]


KEPT = ["data.num_heldout=5", "data.num_validation=3"]


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 4), "the domains have 8 row(s), and 5 held-out and 3 validation prompts"),
        ((20, 2), "domain 'b' has 2 row(s), and 1 held-out and 1 validation prompts"),
    ],
)
def test_nothing_starts_with_too_few_rows(queued, tmp_path, capsys, command, sizes, words):
    site = ["--site", "bare"] if command == "submit" else []
    assert main([command, RECIPE, *site, *two_files(*sizes), *KEPT]) == 4
    assert words in capsys.readouterr().err
    assert not queued and not (tmp_path / "runs").exists()


def test_rows_that_may_be_enough_are_left_to_the_run(queued):
    site = ["--site", "bare"]
    for sizes in ((5, 4), (20, 3)):
        settings = [*two_files(*sizes), *KEPT, "batch.num_prompts=2"]
        assert main(["submit", RECIPE, *site, *settings]) == 0
    assert len(queued) == 2


def test_the_check_does_not_import_torch():
    program = "import sys, grpo_megatron.launch.bindings; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_sandbox
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["domains.0.environment.step_s=3"], "timeout_s = 4 is not below step_s (3 s)"),
        (["domains.0.environment.arguments.timeout_s=30"], "timeout_s = 30 is not below step_s"),
    ],
)
def test_programs_of_an_environment_end_before_its_step_does(queued, capsys, settings, words):
    environment = [
        "cold_start=null",
        *CHAT,
        "domains.0.environment.name=python",
        "domains.0.rewards.0.function=environment",
    ]
    assert main(["submit", RECIPE, "--site", "bare", *environment, *settings]) == 12
    said = capsys.readouterr().err
    assert words in said
    assert "[[domains]] addition, environment" in said
    assert queued == []
