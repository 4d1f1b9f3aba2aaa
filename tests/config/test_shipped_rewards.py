"""What shipped recipes name in Python exists, fits, and is asked for by their templates."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.config.templates import CHAT, PromptTemplate
from grpo_megatron.launch.bindings import refuse_unbound_rewards
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rehearsal.made_up_rows import refuse_unbound_environments_here
from grpo_megatron.rewards.pool import components_of
from grpo_megatron.stages.loading import load_graph

RECIPES = assets.names(assets.root() / "recipes")
GRAPHS = assets.names(assets.root() / "recipes" / "graphs")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Binding the environment `search` builds the index of its documents, below `runs/`."""
    monkeypatch.chdir(tmp_path)


class AnyMetadata(dict):
    """Has every key, as a row of a data set that fits the template would."""

    def __missing__(self, key):
        return f"value of {key}"


def tags_scored(reward):
    """Tags without which this reward cannot be earned."""
    arguments = reward.arguments
    tags = {arguments["answer_tag"]} if arguments.get("answer_tag") else set()
    if reward.component in ("format_tags", "format_box"):
        tags |= {arguments.get("think_tag", "think"), arguments.get("answer_tag", "answer")}
    if reward.component == "format_think":
        tags.add(arguments.get("think_tag", "think"))
    return tags


def opened_by_the_chat_template(domain, reward):
    """Tags that no setting writes, because the model's own template does."""
    if domain.template == CHAT and reward.arguments.get("opened"):
        return {reward.arguments.get("think_tag", "think")}
    return set()


def text_of_a_prompt(domain):
    template = domain.template
    if template == CHAT:
        template = domain.question_template
    return PromptTemplate(template).render("2 + 2?", AnyMetadata()) + domain.assistant_prefix


def check_domains(config):
    refuse_unbound_environments_here(config)
    refuse_unbound_rewards(config)
    for domain in config.domains:
        if config.trains_preferences:
            continue  # nothing is rewarded
        assert components_of(domain, config.max_new_tokens_of(domain.name))
        prompt = text_of_a_prompt(domain)
        assert prompt.strip()
        for reward in domain.rewards:
            wanted = tags_scored(reward) - opened_by_the_chat_template(domain, reward)
            missing = [tag for tag in wanted if f"<{tag}>" not in prompt]
            assert not missing, f"{domain.name}: {reward.component} scores {missing}"


@pytest.mark.parametrize("name", RECIPES)
def test_rewards_of_a_recipe_bind_and_its_templates_ask_for_the_tags_that_are_scored(name):
    check_domains(resolve(name).config)


@pytest.mark.parametrize("name", GRAPHS)
def test_rewards_of_every_stage_bind_and_templates_ask_for_the_tags_that_are_scored(name):
    graph = load_graph(name)
    for stage in graph.order:
        if graph.table.stages[stage].recipe is not None:
            check_domains(graph.resolve(stage).config)


@pytest.mark.parametrize("name", ["dense/qwen3-8b", "dense/qwen3-32b"])
def test_the_overlong_penalty_of_dapo_ends_at_the_length_budget(name):
    config = resolve(name).config
    [domain] = config.domains
    budget = config.max_new_tokens_of(domain.name)
    [overlong] = [c for c in components_of(domain, budget) if c.name == "soft_overlong"]
    assert overlong.reward.arguments["max_tokens"] == budget
