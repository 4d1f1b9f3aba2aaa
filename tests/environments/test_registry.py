"""Environments by name, and what is refused before anything starts."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import EntryPoint

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.environments import registry
from grpo_megatron.environments.registry import SHIPPED, bind, known_names, reference_of, traits
from grpo_megatron.errors import EpisodeError

HERE = "tests.environments.test_registry"
RECIPE = "demo/gspo-moe-cpu"


class Silent:
    """The least that an environment is, with an argument."""

    def __init__(self, *, words: int):
        self.words = words

    async def reset(self, problem, seed):
        raise NotImplementedError

    async def step(self, reply):
        raise NotImplementedError

    async def close(self):
        raise NotImplementedError


@traits(network=True)
def made_by_a_function(words: int = 2):
    return Silent(words=words)


@traits(needs=("no_such_module",))
class NeedsMore(Silent):
    pass


class WithoutClose:
    async def reset(self, problem, seed):
        raise NotImplementedError

    async def step(self, reply):
        raise NotImplementedError


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_environments_have_the_three_methods(name):
    module, _, attribute = SHIPPED[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    for method in ("reset", "step", "close"):
        assert inspect.iscoroutinefunction(getattr(factory, method))
    assert name in known_names()


@pytest.mark.parametrize("name", ["calculator", "lights_out", "guess_number"])
def test_a_name_makes_an_environment(name):
    bound = bind(name, {})
    first = bound.make()
    assert type(first).__module__ == SHIPPED[name].split(":")[0]
    assert bound.make() is not first
    assert not bound.network


def test_one_of_ones_own():
    assert bind(f"{HERE}:Silent", {"words": 3}).make().words == 3
    bound = bind(f"{HERE}:made_by_a_function", {})
    assert bound.make().words == 2
    assert bound.network


@pytest.fixture
def points(monkeypatch):
    """Entry points of other packages."""
    found = []

    def entry_points(*, group, name=None):
        assert group == "grpo_megatron.environments"
        return [point for point in found if name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return found


def test_a_package_registers_one(points):
    points.append(EntryPoint("silent", f"{HERE}:Silent", registry.GROUP))
    assert bind("silent", {"words": 1}).reference == f"{HERE}:Silent"
    assert "silent" in known_names()


def test_two_packages_with_one_name(points):
    for module in ("a:A", "b:B"):
        points.append(EntryPoint("silent", module, registry.GROUP))
    with pytest.raises(EpisodeError, match="two packages register an environment 'silent': a:A"):
        reference_of("silent")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("calculater", {}, "did you mean 'calculator'"),
        ("nothing_like_it_at_all", {}, "there are: .*calculator"),
        ("not_here:Thing", {}, "no module 'not_here'"),
        (f"{HERE}:Silnt", {}, "no class or function 'Silnt'(.|\n)*did you mean 'Silent'"),
        (f"{HERE}:DomainConfg", {}, "did you mean 'DomainConfig'"),  # which it imports
        (f"{HERE}:Silent", {}, "missing a required keyword-only argument: 'words'"),
        (f"{HERE}:Silent", {"wrods": 1, "words": 1}, "did you mean 'words'"),
        (f"{HERE}:NeedsMore", {"words": 1}, "needs no_such_module"),
        (f"{HERE}:WithoutClose", {}, "has no `async def close`"),
        ("calculator", {"reward": "not_here:reward"}, "no module 'not_here'"),
        (
            "calculator",
            {"reward": "grpo_megatron.rewards.functions:length_penalty"},
            "missing a required|asks for num_tokens",
        ),
        ("calculator", {"rewrad": "x"}, "did you mean 'reward'"),
        ("lights_out", {"size": 0}, "size = 0"),
        ("lights_out", {"size": "3"}, "size = '3'"),
        ("lights_out", {"num_presses": 10}, "10 of a board with 9 lights"),
        ("guess_number", {"largest": True}, "largest = True"),
        ("guess_number", {"largest": 10**12}, "more than nine digits"),
        ("guess_number", {"invalid_penalty": -1}, "invalid_penalty = -1"),
        ("guess_number", {"invalid_penalty": float("nan")}, "invalid_penalty = nan"),
        ("lights_out", {"invalid_penalty": "x"}, "invalid_penalty = 'x'"),
        ("calculator", {"reward": 5}, "reward 5 is not `module:function`"),
        ("calculator", {"reward": "numeric_mach"}, "did you mean .*functions:numeric_match"),
        ("calculator", {"reward_arguments": 5}, "are 5, not a table"),
        ("calculator", {"reward_arguments": 0}, "are 0, not a table"),
        ("calculator", {"reward_arguments": {"tolerance": -1}}, "tolerance = -1"),
        ("remote", {"url": 5}, "url = 5 is not the address of a server"),
        ("search", {"corpus": 5}, "cannot work with its arguments: TypeError"),
    ],
)
def test_each_refusal_is_one_message(name, arguments, words):
    with pytest.raises(EpisodeError, match=words) as caught:
        bind(name, arguments)
    assert caught.value.remedy


@pytest.mark.parametrize("command", ["train", "submit"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("name=calculater", "did you mean 'calculator'"),
        ('arguments={rewrad="x"}', "did you mean 'reward'"),
        ("arguments={reward=5}", "reward 5 is not `module:function`"),
        ("arguments={reward_arguments=5}", "are 5, not a table"),
    ],
)
def test_nothing_starts_with_an_environment_that_cannot_be_made(
    command, setting, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("VENV", "PARTITION"):
        monkeypatch.setenv(name, "x")
    site = ["--site", "bare"] if command == "submit" else []
    settings = [
        "cold_start=null",
        "domains.0.template=chat",
        "domains.0.environment.name=calculator",
        f"domains.0.environment.{setting}",
        "domains.0.rewards.0.function=environment",
        "runs_dir=here",
    ]
    assert main([command, RECIPE, *site, *settings]) == EpisodeError.exit_code
    said = capsys.readouterr().err
    assert words in said and "[[domains]] addition, environment" in said
    assert not (tmp_path / "here").exists()


def test_an_environment_is_a_table_of_its_domain():
    domain = DomainConfig.model_validate(
        {
            "name": "sums",
            "source": "file",
            "path": "rows.jsonl",
            "rewards": [{"function": "environment"}],
            "environment": {"name": "calculator", "max_turns": 3},
        }
    )
    assert domain.environment.max_turns == 3
    assert domain.accuracy_component == "environment"
