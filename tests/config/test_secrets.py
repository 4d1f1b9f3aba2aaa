"""No secret gets into a recipe, nor into what is said of one."""

from __future__ import annotations

import pytest

from grpo_megatron.config.loader import load_recipe
from grpo_megatron.config.problems import InvalidConfigError
from grpo_megatron.config.secret_values import (
    holds_secret,
    is_secret_name,
    with_secrets,
    without_secrets,
)
from grpo_megatron.errors import ConfigError

RECIPE = "demo/gspo-moe-cpu"
KEY = "sk-0123456789abcdefghij"
PROGRAM = ["domains.0.template=chat", "cold_start=null"]


def refusal(*overrides: str) -> str:
    with pytest.raises(InvalidConfigError) as caught:
        load_recipe(RECIPE, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["domains.0.arguments.api_key=plain"], "domains.0.arguments.api_key"),
        ([f"domains.0.arguments.word={KEY}"], "domains.0.arguments.word"),
        (["domains.0.arguments.url='https://me:plain@host'"], "domains.0.arguments.url"),
        (["domains.0.arguments.url='https://host/?token=plain'"], "domains.0.arguments.url"),
        (
            [*PROGRAM, "domains.0.agent={command=['true'], variables={JUDGE_TOKEN='plain'}}"],
            "domains.0.agent.variables.JUDGE_TOKEN",
        ),
        (
            [*PROGRAM, f"domains.0.agent={{command=['true', '--key={KEY}']}}"],
            "domains.0.agent.command",
        ),
        ([f"rollout.engine_arguments=['--served-model-name={KEY}']"], "rollout.engine_arguments"),
    ],
)
def test_secrets_are_refused_and_not_repeated(overrides, key):
    said = refusal(*overrides)
    assert f"{key}: a secret in a recipe" in said
    assert KEY not in said and "plain" not in said


@pytest.mark.parametrize(
    "override",
    [
        f"judge.api_key={KEY}",
        f"domains.0.judge_api_key={KEY}",
        "domains.0.api_key=plain",
        f"num_steps={KEY}",
    ],
)
def test_what_is_wrong_for_another_reason_is_not_repeated_either(override):
    said = refusal(override)
    assert KEY not in said and "plain" not in said


@pytest.mark.parametrize(
    "text", ["http://host:8080/v1", "a = [1, 2]", "step_token = '<x>'", "api_key = '$JUDGE_KEY'"]
)
def test_what_is_no_secret_is_shown(text):
    assert without_secrets(text) == text and not holds_secret(text)


def test_names_of_variables_are_kept_as_they_are():
    agent = "domains.0.agent={command=['true'], variables={JUDGE_TOKEN='$JUDGE_TOKEN'}}"
    resolved = load_recipe(RECIPE, [*PROGRAM, agent])
    assert resolved.config.domains[0].agent.variables["JUDGE_TOKEN"] == "$JUDGE_TOKEN"


def test_references_are_looked_up_where_a_secret_is_meant(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    given = {"api_key": "$A_KEY", "currency": "$A_KEY", "variables": {"X_TOKEN": "$A_KEY"}}
    assert with_secrets(given) == {
        "api_key": "secret",
        "currency": "$A_KEY",
        "variables": {"X_TOKEN": "secret"},
    }
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="the environment variable A_KEY is not set"):
        with_secrets(given)


def test_which_names_are_those_of_secrets():
    secrets = ["api_key", "judge_api_key", "password", "auth_token", "HF_TOKEN", "WANDB_API_KEY"]
    others = [
        "step_token",
        "eos_token",
        "max_tokens",
        "answer_tag",
        "key",
        "keys",
        "TOKENS",
        "token_ids",
    ]
    assert [name for name in secrets + others if is_secret_name(name)] == secrets
