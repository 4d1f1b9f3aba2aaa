"""Demonstrated episodes of a cold start, in real environments of processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.demonstrations import Demonstrations, demonstrated
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Observation, Outcome, Step, Unscorable
from grpo_megatron.errors import DataError
from grpo_megatron.types import require_sound

CALL = (
    '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{metadata[expression]}"}}}}'
    "\n</tool_call>"
)


def recipe(demonstration: list[str], **environment) -> RunConfig:
    products = {
        "name": "products",
        "source": "reasoning_gym",
        "dataset": "basic_arithmetic",
        "arguments": {"min_terms": 2, "max_terms": 2, "operators": ["*"]},
        "num_problems": 8,
        "template": "chat",
        "question_template": "{metadata[expression]}",
        "rewards": [{"function": "environment"}],
        "environment": {"name": "calculator", "demonstration": demonstration, **environment},
    }
    plain = {
        "name": "sums",
        "source": "reasoning_gym",
        "dataset": "basic_arithmetic",
        "arguments": {"min_terms": 2, "max_terms": 2, "operators": ["+"]},
        "num_problems": 8,
        "template": "{metadata[expression]}=",
        "rewards": [{"function": "grpo_megatron.rewards.functions:exact_match"}],
    }
    return RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe-agent"},
            "domains": [products, plain],
            "rollout": {"max_new_tokens": 64, "max_model_len": 128, "segment_tokens": 2},
            "cold_start": {},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, load_preset("tiny-qwen3-moe-agent"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def played(config: RunConfig, tokenizer, model, tmp_path, domain: int = 0):
    async def main():
        prompts = load_prompts(config.domains[domain], 0, tokenizer)
        async with EnvironmentHost(config.domains, log_path=tmp_path / "log") as host:
            demonstrations = Demonstrations(config, tokenizer, model, host.environment)
            asked = [demonstrations.completion(prompt) for prompt in prompts]
            return list(zip(prompts, await asyncio.gather(*asked), strict=True))

    return asyncio.run(main())


def test_the_environment_replies_to_demonstrated_turns(tokenizer, model, tmp_path):
    for prompt, found in played(recipe([CALL, "{answer}"]), tokenizer, model, tmp_path):
        require_sound(found, prompt.prompt_id)
        assert found.outcome == 1.0 and len(found.turns) == 2
        said = []
        for turn in found.turns:
            said.append(tokenizer.decode(found.token_ids[turn.start : turn.end].tolist()))
        expression = prompt.metadata["expression"]
        assert said == [
            f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}'
            "\n</tool_call>",
            prompt.answer,
        ]
        result = tokenizer.decode(found.token_ids[~found.policy_mask].tolist())
        assert result == prompt.answer  # of the calculator, between two markers
        assert np.isneginf(found.logprobs[found.policy_mask]).all()


def test_other_domains_have_answers_of_one_turn(tokenizer, model, tmp_path):
    config = recipe([CALL, "{answer}"])
    for prompt, found in played(config, tokenizer, model, tmp_path, domain=1):
        assert found.turns == () and found.text == prompt.answer


@pytest.mark.parametrize(
    ("demonstration", "environment", "message"),
    [
        (["0"], {}, "is worth 0: '0'"),
        ([CALL], {}, "the environment goes on behind the last of 1 demonstrated turns"),
        (
            [CALL, "{answer}"],
            {"turn_tokens": 4},
            "tokens, and 4 are left to it",
        ),
        (["{metadata[expresion]}"], {}, "a problem has no metadata 'expresion'"),
    ],
)
def test_what_is_no_demonstration(tokenizer, model, tmp_path, demonstration, environment, message):
    with pytest.raises(DataError) as caught:
        played(recipe(demonstration, **environment), tokenizer, model, tmp_path)
    assert message in str(caught.value)
    assert "[[domains]] products, environment.demonstration" in str(caught.value)


class Overloaded:
    """Fails as often as `failures` says, then takes any answer."""

    def __init__(self, failures: list[str]):
        self._failures = failures

    async def reset(self, problem, seed):
        return Observation(({"role": "user", "content": problem.question},), (), "", Outcome(0.0))

    async def step(self, reply):
        if self._failures:
            raise Unscorable(self._failures.pop())
        return Step((), 1.0, True, outcome=Outcome(1.0))

    async def close(self):
        pass


@pytest.mark.parametrize("num_failures", [2, 3])
def test_an_episode_that_cannot_be_scored_is_played_again(tokenizer, model, num_failures):
    config = recipe(["{answer}"])
    prompt, *_ = load_prompts(config.domains[0], 0, tokenizer)
    failures = ["it took too long"] * num_failures
    demonstrations = Demonstrations(config, tokenizer, model, lambda _: Overloaded(failures))
    played = demonstrations.completion(prompt)
    if num_failures < 3:
        assert asyncio.run(played).outcome == 1.0
        return
    with pytest.raises(DataError, match="could not be scored, 3 times"):
        asyncio.run(played)


def test_prompts_with_an_empty_answer_are_no_demonstrations(tokenizer, caplog):
    config = recipe([CALL, "{answer}"])
    prompts = {}
    for domain in config.domains:
        prompts[domain.name] = load_prompts(domain, 0, tokenizer)
    [first, *others] = prompts["sums"]
    prompts["sums"] = [replace(first, answer=" "), *others]
    found = demonstrated(config, tokenizer, prompts)
    assert found == {"products": tuple(prompts["products"]), "sums": tuple(others)}
    assert "'sums': 1 of 8 prompts have an empty answer" in caplog.text

    prompts["sums"] = [replace(prompt, answer="") for prompt in prompts["sums"]]
    assert list(demonstrated(config, tokenizer, prompts)) == ["products"]
    del prompts["products"]
    with pytest.raises(DataError, match="the cold start has nothing to train"):
        demonstrated(config, tokenizer, prompts)


def test_answers_of_domains_without_a_weight_are_not_looked_at(tokenizer):
    config = recipe([CALL, "{answer}"])
    evaluated = config.domains[1].model_copy(update={"weight": 0.0})
    config = config.model_copy(update={"domains": (config.domains[0], evaluated)})
    prompts = {}
    for domain in config.domains:
        prompts[domain.name] = load_prompts(domain, 0, tokenizer)
    prompts["sums"] = [replace(prompt, answer="") for prompt in prompts["sums"]]
    assert len(demonstrated(config, tokenizer, prompts)["sums"]) == 8


def test_answers_that_a_cold_start_cuts_are_counted(tokenizer, caplog):
    config = recipe([CALL, "{answer}"])
    prompts = {}
    for domain in config.domains:
        prompts[domain.name] = load_prompts(domain, 0, tokenizer)
    demonstrated(config, tokenizer, prompts)
    assert "without an end" not in caplog.text
    longest = config.rollout.max_model_len
    [first, second, *others] = prompts["sums"]
    digits = tokenizer.encode("1" * 100)
    assert len(digits) == 100  # a token each
    too_long = replace(first, answer="1" * longest)  # and its end
    just_fits = replace(second, answer="1" * (longest - 1))
    prompts["sums"] = [too_long, just_fits, *others]
    demonstrated(config, tokenizer, prompts)
    assert "'sums': of the first 8 prompts, 1 have an answer that is longer" in caplog.text
