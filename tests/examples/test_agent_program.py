"""The example of an agent program: by itself, and trained through the door by the real command."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments.agent_function import ClientSettings
from grpo_megatron.rollout.agent_command import run_command
from grpo_megatron.rollout.conversation_session import ConversationSession
from grpo_megatron.rollout.door import Door
from grpo_megatron.types import Problem
from tests.e2e import runs
from tests.rollout.scripted import CALL, Policy, limits, require_as_sampled, sampler_of

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = str(EXAMPLES / "agent_program.py")


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["408"], 1.0),
        (["409"], 0.0),
        ([CALL, "408"], 1.1),
        ([CALL.replace("12*34", "12**34"), "so"], 0.1),
        ([CALL], 0.1),  # and never an answer
    ],
)
def test_the_program_plays_episodes(tmp_path, texts, reward):
    write_tiny_model(tmp_path, load_preset("tiny-qwen3-moe-agent"))
    tokenizer = load_tokenizer(tmp_path)
    policy = Policy(tokenizer, *texts)

    async def run():
        session = ConversationSession(policy, sampler_of(tokenizer), limits())
        async with Door("127.0.0.1") as door:
            with door.serving(session) as opened:
                client = ClientSettings(opened.url, opened.key, "policy", 0)
                problem = Problem("12*34", "408")
                found = await run_command(["python", PROGRAM], {}, problem, client, 600)
        return found, session.completion(found)

    found, record = asyncio.run(run())
    assert found == pytest.approx(reward)
    require_as_sampled(policy, record)
    assert len(record.turns) == min(len(policy.asked), 3) and record.earlier == ()


def test_it_knows_nothing_of_this_project():
    source = Path(PROGRAM).read_text()
    assert "import grpo_megatron" not in source and "from grpo_megatron" not in source


FORKING = """
[[domains]]
name = "forks"
source = "reasoning_gym"
dataset = "basic_arithmetic"
arguments = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
num_problems = 200
template = "chat"
rewards = [{ function = "environment" }]
agent = { function = "forking_agent:agent", turn_tokens = 6, concurrency = 8 }
"""


@pytest.mark.engine
@pytest.mark.recipes
def test_it_is_trained_as_it_is_beside_one_that_forks(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((EXAMPLES / "agent_program.toml").read_text() + FORKING)
    done = runs.command(
        "train",
        str(recipe),
        f"runs_dir={tmp_path}",
        "name=run",
        "num_steps=2",
        f"domains.0.agent.command=['python', '{PROGRAM}']",
        "data.num_validation=2",
        "data.num_heldout=2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    steps = runs.metrics(run)
    assert [record["step"] for record in steps] == [0, 1]
    for record in steps:
        assert record["mismatch/k3"] < 1e-8  # trainer and engine see the same tokens
    assert sum(record["grad/norm"] for record in steps) > 0
    num_turns = []
    for step in range(2):
        table = SampleTable(run / f"store/step_{step:06d}")
        for row in np.flatnonzero(table.domain == 1):
            num_turns.append(len(table.turns(int(row))))
        forked = table.episode[table.domain == 1]
        # the first conversation goes on, is forked and edited: three sequences, four turns
        assert (np.bincount(forked)[forked] == 3).all()
    assert sorted(set(num_turns)) == [1, 2] and num_turns.count(1) == 2 * num_turns.count(2)
    assert runs.no_survivors(run)
