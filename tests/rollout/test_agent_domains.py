"""Programs that drive episodes: what they are given, and what they and their failures come to."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError

from grpo_megatron.config.environment import AgentConfig
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments import failures as failures_module
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import ConfigError, EngineError, EpisodeError
from grpo_megatron.launch.bindings import refuse_unbound_environments
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.agent_domains import AgentDomain
from grpo_megatron.rollout.door import Door
from grpo_megatron.rollout.episode_domains import agent_domains, domain_metrics
from grpo_megatron.rollout.episodes import EpisodeSeeds
from grpo_megatron.types import Prompt, RolloutGroup, require_sound
from tests.rollout.engines import make_config
from tests.rollout.scripted import Policy, limits, require_as_sampled, sampler_of

PROGRAM = str(Path(__file__).parent / "programs.py")
FUNCTION = "tests.rollout.agent_functions:agent"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, load_preset("tiny-qwen3-moe-agent"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def config_of(rewards=("environment",), **agent):
    domain = {
        "name": "d",
        "source": "file",
        "path": "rows.jsonl",
        "template": "chat",
        "rewards": [{"function": function} for function in rewards],
        "agent": {"episode_s": 60, **agent},
    }
    config = make_config(max_new_tokens=200)
    domains = (DomainConfig.model_validate(domain),)
    return config.model_copy(update={"domains": domains, "cold_start": None})


def command(deed, **settings):
    return config_of(command=["python", PROGRAM, deed], **settings)


def played(directory, tokenizer, config, *questions, policy=None, answer="408", later=None):
    """Records of an episode for each question, one after the other. later: settings of all but the
    first one, whose processes are the same."""
    policy = policy or Policy(tokenizer, "408")

    async def run():
        records = []
        async with EnvironmentHost(config.domains) as host, Door("127.0.0.1") as door:

            def domains_of(settings):
                return agent_domains(
                    settings, tokenizer, directory, host.environment, door, Path("log")
                )

            domains = domains_of(config)
            for number, question in enumerate(questions or ("12*34",)):
                if number == 1 and later is not None:
                    domains = domains_of(later)
                prompt = Prompt(f"p{number}", "d", "", (5,), answer, {"kind": "test"}, question)
                records.append(await domains["d"].play(policy, prompt, EpisodeSeeds(7, 3), 200))
        return records

    records = asyncio.run(run())
    for record in records:
        require_sound(record, "p")
    return records


def rewards_of(config, prompt, record):
    async def score():
        async with RewardPool(config.domains, timeout_s=60) as pool:
            [scored] = await pool.score([RolloutGroup(prompt, (record,), 0)])
            return scored

    return asyncio.run(score())


def test_a_command_plays_an_episode(directory, tokenizer, tmp_path, monkeypatch):
    policy = Policy(tokenizer, "408")
    told = tmp_path / "told.json"
    monkeypatch.setenv("SECRET_KEY", "secret")
    config = command("told", variables={"TOLD": str(told), "PROGRAM_KEY": "$SECRET_KEY"})
    [record] = played(directory, tokenizer, config, policy=policy)
    require_as_sampled(policy, record)
    assert record.outcome == 0.5 and len(record.turns) == 1 and record.text == "408"
    told = json.loads(told.read_text())
    assert told["problem"] == {
        "question": "12*34",
        "answer": "408",
        "metadata": {"kind": "test"},
        "seed": 7,
    }
    assert told["key"] == "secret"
    # a directory of its own, gone with it
    assert told["files"] == [] and not os.path.exists(told["directory"])


@pytest.mark.parametrize(
    ("deed", "outcome", "is_spoilt"),
    [
        ("reward", 1.0, False),
        ("flood", 0.25, False),
        ("no-reward", math.nan, False),
        ("null", math.nan, False),
        ("crash", math.nan, True),
        ("garbage", math.nan, True),
        ("infinite", math.nan, True),
        ("nan", math.nan, True),
        ("transcript", 1.0, False),
        ("long-transcript", math.nan, True),
    ],
)
def test_what_a_command_comes_to(directory, tokenizer, deed, outcome, is_spoilt):
    config = command(deed, rewards=["environment", "grpo_megatron.rewards.functions:exact_match"])
    [record] = played(directory, tokenizer, config)
    np.testing.assert_equal(record.outcome, outcome)
    assert [turn.spoilt for turn in record.turns] == [is_spoilt]
    # rewards of the text judge the last reply, and never an episode whose program failed
    prompt = Prompt("p", "d", "", record.answered_ids, "408")
    scored = rewards_of(config, prompt, record)
    expected = np.nan if is_spoilt else np.nansum([outcome, 1.0])
    np.testing.assert_equal(scored.rewards, [expected])


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("nan", "reward is no finite number"),
        ("long-transcript", "the last line that the program prints has more than 8 MiB"),
    ],
)
def test_an_outcome_that_is_none_is_told(directory, tokenizer, caplog, deed, words):
    played(directory, tokenizer, command(deed))
    assert words in caplog.text


def counted(directory, tokenizer, config, *questions):
    """Metrics of these episodes, as a rollout worker has them."""
    policy = Policy(tokenizer, "408")

    async def run():
        async with EnvironmentHost(config.domains) as host, Door("127.0.0.1") as door:
            domains = agent_domains(
                config, tokenizer, directory, host.environment, door, Path("log")
            )
            for question in questions:
                prompt = Prompt("p", "d", "", (5,), "408", {"kind": "test"}, question)
                await domains["d"].play(policy, prompt, EpisodeSeeds(7, 3), 200)
            return domain_metrics(host.take_metrics(), {}, domains)

    found = asyncio.run(run())
    return {name.removeprefix("environment/d/"): count for name, count in found.items()}


@pytest.mark.parametrize(
    ("questions", "expected"),
    [
        (("ok", "12*34"), {"episodes": 2}),
        (("on",), {"episodes": 1}),  # refused a turn by a limit, of which the host knows nothing
        (("silent",), {"spoilt": 1}),
        (("nan", "crash", "garbage", "cancelled"), {"spoilt": 4}),
        (("ok", "exit"), {"episodes": 1, "lost": 1, "ends": 1}),
    ],
)
def test_how_episodes_of_a_function_are_counted(directory, tokenizer, questions, expected):
    config = config_of(function=FUNCTION, max_turns=2)
    counts = counted(directory, tokenizer, config, *questions)
    assert counts == {"episodes": 0, "spoilt": 0, "lost": 0, "ends": 0} | expected


def test_how_episodes_of_a_command_are_counted(directory, tokenizer):
    counts = counted(directory, tokenizer, command("nan"), "12*34")
    assert counts == {"episodes": 0, "spoilt": 1, "lost": 0, "ends": 0}


def test_rewards_of_nan_stop_the_run(directory, tokenizer, monkeypatch):
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 3)
    config = config_of(function=FUNCTION)
    with pytest.raises(EpisodeError, match=r"spoilt 3 episodes .* no finite number"):
        played(directory, tokenizer, config, *["nan"] * 4)


def test_a_program_that_asks_for_no_turn_cannot_be_scored(directory, tokenizer):
    [record] = played(directory, tokenizer, command("silent"))
    assert math.isnan(record.outcome) and record.turns[0].spoilt and record.num_tokens == 1
    [record] = played(directory, tokenizer, config_of(function=FUNCTION), "silent")
    assert math.isnan(record.outcome) and record.turns[0].spoilt


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_a_program_that_hangs_is_killed_with_what_it_started(directory, tokenizer, tmp_path):
    told = tmp_path / "pids.json"
    config = command("hang", variables={"TOLD": str(told)}, episode_s=15)
    [record] = played(directory, tokenizer, config)
    assert math.isnan(record.outcome) and record.turns[0].spoilt
    wait_until_gone(json.loads(told.read_text()))


def test_what_holds_the_output_of_a_program_holds_up_nobody(directory, tokenizer, tmp_path):
    told = tmp_path / "pids.json"
    config = command("leave", variables={"TOLD": str(told)})
    [record] = played(directory, tokenizer, config)
    assert record.outcome == 0.25
    for pid in json.loads(told.read_text()):  # it left the program's session: nobody knows it
        os.kill(pid, signal.SIGKILL)


def test_programs_end_with_their_worker(tmp_path):
    told = tmp_path / "pids.json"
    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio, sys\n"
        "from grpo_megatron.environments.agent_function import ClientSettings\n"
        "from grpo_megatron.rollout.agent_command import run_command\n"
        "from grpo_megatron.types import Problem\n"
        "client = ClientSettings('http://127.0.0.1:1/v1', 'k', 'm', 0)\n"
        "program = ['sh', '-c', 'echo [$$] > ' + sys.argv[1] + '; exec sleep 1000']\n"
        "asyncio.run(run_command(program, {}, Problem('', ''), client, 600))\n"
    )
    worker = subprocess.Popen([sys.executable, str(script), str(told)])
    deadline = time.monotonic() + 120
    while not (told.exists() and told.read_text().endswith("\n")):
        assert worker.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    wait_until_gone(json.loads(told.read_text()))


def test_a_limit_that_ends_a_program_is_worth_nothing(directory, tokenizer):
    policy = Policy(tokenizer, "no")
    [record] = played(directory, tokenizer, command("on", max_turns=3), policy=policy)
    require_as_sampled(policy, record)
    assert record.outcome == 0.0 and record.truncated and len(record.turns) == 3
    assert not record.turns[-1].spoilt


def test_a_function_plays_episodes(directory, tokenizer):
    config = config_of(function=FUNCTION, arguments={"worth": 0.5})
    records = played(directory, tokenizer, config, "12*34", "no reward", "crash", "garbage", "ok")
    outcomes = [record.outcome for record in records]
    np.testing.assert_equal(outcomes, [0.5, math.nan, math.nan, math.nan, 0.5])
    spoilt = [record.turns[-1].spoilt for record in records]
    assert spoilt == [False, False, True, True, False]


@pytest.mark.parametrize(("question", "episode_s"), [("exit", 600), ("block", 8), ("wait", 8)])
def test_a_function_that_takes_its_process_with_it_costs_an_episode(
    directory, tokenizer, question, episode_s
):
    config = config_of(function=FUNCTION, episode_s=episode_s)
    patient = config_of(function=FUNCTION, episode_s=600)
    first, second = played(directory, tokenizer, config, question, "12*34", later=patient)
    assert math.isnan(first.outcome) and first.turns[-1].spoilt
    assert second.outcome == 1.0


def test_an_engine_that_fails_ends_the_run_and_the_program(directory, tokenizer):
    async def failing(*_, **__):
        raise EngineError("no engine is alive")

    for config in (command("reward"), config_of(function=FUNCTION)):
        with pytest.raises(EngineError, match="no engine is alive"):
            played(directory, tokenizer, config, policy=failing)


def test_programs_that_never_work_stop_the_run(directory, tokenizer, monkeypatch):
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 5)
    config = config_of(command=["sh", "-c", "echo broken >&2; exit 3"])
    with pytest.raises(EpisodeError, match="spoilt 5 episodes") as caught:
        played(directory, tokenizer, config, *["12*34"] * 6)
    assert "exit code 3: broken" in caught.value.message and "[[domains]] d" in caught.value.where


def test_episodes_of_a_function_that_a_limit_ends_stop_no_run(directory, tokenizer, monkeypatch):
    """It raises when it is refused a turn."""
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 2)
    config = config_of(function=FUNCTION, max_turns=1)
    records = played(directory, tokenizer, config, *["on"] * 3)
    assert [record.outcome for record in records] == [0.0] * 3


@pytest.mark.parametrize("fails", [True, False])
def test_an_episode_that_a_limit_ends_has_ended_well(tokenizer, monkeypatch, fails):
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 2)
    policy = Policy(tokenizer, "408")

    async def program(problem, client):
        if problem.question == "bad":
            raise Unscorable("it does not work")
        async with AsyncOpenAI(
            base_url=client.base_url, api_key=client.api_key, max_retries=0
        ) as openai:
            messages = [{"role": "user", "content": "1"}]
            await openai.chat.completions.create(model="x", messages=messages)
            with pytest.raises(BadRequestError):
                await openai.chat.completions.create(model="x", messages=messages)
        if fails:
            raise Unscorable("it was refused a turn")
        return None

    async def run():
        failures = failures_module.Failures("d", "agent x", Path("log"))
        async with Door("127.0.0.1") as door:
            domain = AgentDomain(
                command("reward").domains[0].agent,
                sampler_of(tokenizer),
                door,
                run=program,
                limits=lambda _: limits(max_turns=1),
                failures=failures,
            )
            for question in ("bad", "good", "bad", "good"):
                prompt = Prompt("p", "d", "", (5,), "408", {}, question)
                await domain.play(policy, prompt, EpisodeSeeds(7, 3), 200)
        return domain.take_metrics()

    metrics = asyncio.run(run())
    assert metrics["environment/d/episodes"] == metrics["environment/d/spoilt"] == 2


def test_only_so_many_programs_run_at_a_time(directory, tokenizer):
    policy = Policy(tokenizer, "408", delays=[0.3] * 6)
    config = config_of(function=FUNCTION, concurrency=2)

    async def run():
        async with EnvironmentHost(config.domains) as host, Door("127.0.0.1") as door:
            [domain] = agent_domains(
                config, tokenizer, directory, host.environment, door, Path("log")
            ).values()
            prompt = Prompt("p", "d", "", (5,), "408", {"kind": "test"}, "12*34")
            plays = [domain.play(policy, prompt, EpisodeSeeds(7, n), 200) for n in range(6)]
            return await asyncio.gather(*plays)

    records = asyncio.run(run())
    assert policy.most_running == 2
    assert [record.outcome for record in records] == [1.0] * 6


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"function": "tests.rollout.agent_functions:agnet"}, "did you mean 'agent'"),
        ({"function": "tests.rollout.agent_functions:not_async"}, "no `async def`"),
        ({"function": FUNCTION, "arguments": {"wroth": 1}}, "unexpected keyword argument 'wroth'"),
    ],
)
def test_a_program_that_is_not_there_is_refused_before_the_run(agent, words):
    with pytest.raises(EpisodeError) as caught:
        refuse_unbound_environments(config_of(**agent))
    assert words in str(caught.value) and caught.value.where == "[[domains]] d, agent"


def test_a_key_that_is_not_set_is_refused_before_the_run(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="variable NO_SUCH_KEY is not set") as caught:
        refuse_unbound_environments(
            config_of(command=("true",), variables={"PROGRAM_KEY": "$NO_SUCH_KEY"})
        )
    assert caught.value.where == "[[domains]] d, agent"


def test_files_of_a_command_are_found_from_everywhere(tmp_path, monkeypatch):
    (tmp_path / "agent.py").touch()
    (tmp_path / "python").touch()
    monkeypatch.chdir(tmp_path)
    found = AgentConfig(command=("python", "agent.py", "--flag")).command
    assert found == ("python", str(tmp_path / "agent.py"), "--flag")
    assert AgentConfig(command=("./python",)).command == (str(tmp_path / "python"),)


def test_the_hosted_function_is_an_environment():
    hosted = config_of(function=FUNCTION).domains[0].hosted
    assert bind(hosted.name, hosted.arguments).network
    assert config_of(command=["true"]).domains[0].hosted is None
