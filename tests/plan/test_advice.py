"""Warnings of unusual values: of which, where they are said, and none for shipped recipes."""

from __future__ import annotations

from typing import get_args

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.config.objective import SETTINGS_OF_CHOICES, ObjectiveConfig
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.plan.advice import advice_for, exports_are_the_newest, nodes_that_train_are_full
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir

RELEASED = "dense/qwen2.5-7b"
AGENT = "demo/agent-calculator-cpu"
SMALL_STEP = ["batch.num_prompts=8", "batch.num_samples_per_prompt=8"]


def keys(recipe: str, *overrides: str) -> list[str]:
    return [unusual.key for unusual in advice_for(resolve(recipe, overrides).config)]


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimizer.lr=1e-7", []),
        ("optimizer.lr=1e-5", []),
        ("optimizer.lr=9e-8", ["optimizer.lr"]),
        ("optimizer.lr=1e-3", ["optimizer.lr"]),
        ("batch.num_samples_per_prompt=2", []),
        ("batch.num_samples_per_prompt=64", []),
        ("batch.num_samples_per_prompt=65", ["batch.num_samples_per_prompt"]),
    ],
)
def test_what_is_unusual(override, wanted):
    assert keys(RELEASED, override) == wanted


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["optimizer.warmup_steps=220"], []),
        (["optimizer.warmup_steps=221"], ["optimizer.warmup_steps"]),
        (["optimizer.warmup_steps=440", "batch.updates_per_rollout=2"], []),
        (["optimizer.warmup_steps=441", "batch.epochs=2"], ["optimizer.warmup_steps"]),
        (["optimizer.warmup_steps=221", "num_steps=0"], []),
    ],
)
def test_warmups_end(overrides, wanted):
    assert keys("demo/gspo-moe-cpu", "num_steps=220", *overrides) == wanted


def test_the_policys_warmup_begins_after_that_of_its_critic():
    run = ["num_steps=220", "critic.warmup_steps=20", "critic.optimizer.warmup_steps=220"]
    assert keys("demo/ppo-moe-cpu", *run, "optimizer.warmup_steps=200") == []
    longer = ["critic.optimizer.warmup_steps=221", "optimizer.warmup_steps=201"]
    wanted = ["optimizer.warmup_steps", "critic.optimizer.warmup_steps"]
    assert keys("demo/ppo-moe-cpu", *run, *longer) == wanted


@pytest.mark.parametrize(
    ("recipe", "overrides", "wanted"),
    [
        ("moe/deepseek-v3", ["trainer.num_ranks=128"], ["placement.trainer_nodes"]),
        ("moe/deepseek-v3", [], []),
        ("moe/deepseek-v3", ["placement.trainer_nodes=34"], ["placement.trainer_nodes"]),
        ("dense/qwen3-8b", [], []),  # engines take what its ranks leave
    ],
)
def test_nodes_that_train_are_full(recipe, overrides, wanted):
    config = resolve(recipe).config
    for override in overrides:
        key, value = override.split("=")
        table, field = key.split(".")
        part = getattr(config, table).model_copy(update={field: int(value)})
        config = config.model_copy(update={table: part})
    found = [unusual for unusual in advice_for(config) if unusual.rule == "idle_gpus"]
    assert [unusual.key for unusual in found] == wanted


def test_the_fewest_nodes_that_share_ranks_evenly_are_advised():
    config = resolve("moe/deepseek-v3").config
    trainer = config.trainer.model_copy(update={"num_ranks": 20})  # not over three nodes of eight
    told = nodes_that_train_are_full(config.model_copy(update={"trainer": trainer}))
    assert told.nearest == (4,)
    assert "236 of the 256 GPUs" in told.message


def test_tiny_models_learn_fast_and_supervision_has_rates_of_its_own():
    assert keys("demo/gspo-moe-cpu", "optimizer.lr=1e-2") == []
    assert keys("demo/gspo-moe-cpu", "optimizer.lr=1e-8") == ["optimizer.lr"]
    assert keys("stages/deepseek-v3-sft", "optimizer.lr=1e-4") == []


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["batch.max_staleness=4", "optimizer.lr=1e-5"], []),
        (["batch.max_staleness=5", "optimizer.lr=1e-5"], ["optimizer.lr"]),
        (["batch.max_staleness=5", "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=2", "batch.updates_per_rollout=4"], ["optimizer.lr"]),
        (["batch.max_staleness=128", "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=129", "optimizer.lr=1e-6"], ["batch.max_staleness"]),
        (["batch.max_staleness=12", *SMALL_STEP, "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=13", *SMALL_STEP, "optimizer.lr=1e-6"], ["batch.num_prompts"]),
    ],
)
def test_what_is_unusual_so_far_ahead(overrides, wanted):
    shape = ["batch.num_prompts=64", "batch.num_samples_per_prompt=16", "optimizer.lr=1e-5"]
    shape.append("objective.off_policy_mask=opsm")
    found = keys(RELEASED, *shape, *overrides)
    assert found == wanted


def test_prompts_that_are_proposed_are_enough():
    overrides = ["batch.max_staleness=20", "batch.num_samples_per_prompt=24", "optimizer.lr=1e-6"]
    overrides.append("objective.off_policy_mask=opsm")
    config = resolve(RELEASED, [*overrides, "batch.num_prompts=8"]).config
    [unusual] = advice_for(config)
    assert unusual.nearest == (22,)
    assert keys(RELEASED, *overrides, "batch.num_prompts=22") == []


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["objective.mismatch=none"], ["objective.mismatch"]),
        (["objective.mismatch=tis"], []),
        (["objective.mismatch=none", "objective.proximal=rollout"], []),
        (["objective.mismatch=none", "num_steps=0"], []),
        (["objective.mismatch=none", "rollout.fp8=none"], []),
    ],
)
def test_samples_of_rounded_weights_are_corrected(overrides, wanted):
    assert keys("dense/qwen3-8b", "rollout.fp8=blockwise", *overrides) == wanted


def test_tiny_models_learn_fast_ahead_too():
    corrected = "objective.preset=deepseek_v3_2"
    assert keys("demo/gspo-moe-cpu", "batch.max_staleness=8", corrected) == []


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["batch.max_staleness=2"], True),
        (["batch.max_staleness=1"], False),
        (["batch.max_staleness=8", "objective.mismatch=tis"], False),
        (["batch.max_staleness=8", "objective.proximal=rollout"], False),
        (["batch.max_staleness=8", "objective.off_policy_mask=opsm"], False),
        (["batch.max_staleness=8", "objective.preset=vespo"], False),
        (["batch.max_staleness=8", "objective.preset=dapo"], True),
        (["batch.max_staleness=8", "num_steps=0"], False),
    ],
)
def test_stale_samples_are_corrected(overrides, is_told):
    wanted = ["objective.off_policy_mask"] if is_told else []
    assert keys("demo/gspo-moe-cpu", *overrides) == wanted


LEFT_OUT_OF_PLANS = {
    "moe/qwen3-vl-30b-a3b": ["model.path"],
    "systems/vlm_r1": ["model.path"],
}
"""Told of every released model that sees, however usual its recipe is."""


def test_shipped_recipes_are_usual():
    names = assets.names(assets.root() / "recipes")
    trained = [name for name in names if not name.startswith("graphs/")]
    assert len(trained) > 25
    assert {name: keys(name) for name in trained if keys(name)} == LEFT_OUT_OF_PLANS


@pytest.mark.parametrize("command", [["plan"], ["config", "show"], ["config", "show", "--json"]])
def test_a_command_says_it_beside_its_output(capsys, command):
    assert main([*command, RELEASED, "optimizer.lr=1e-3"]) == 0
    found = capsys.readouterr()
    [line] = found.err.splitlines()
    assert line.startswith("warning: optimizer.lr = 0.001: published RL")
    assert "warning" not in found.out
    assert main([*command, RELEASED]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["objective.sapo_tau_positive=0.5"], {"objective.sapo_tau_positive"}),
        (["objective.sapo_tau_positive=1.0"], set()),  # as it is without
        (["objective.preset=sapo", "objective.sapo_tau_positive=0.5"], set()),
        (
            ["objective.advantage=passk", "objective.pkpo_baseline=false"],
            {"objective.pkpo_baseline"},
        ),
        (["objective.gae_lambda=0.9", "kind=sft"], set()),
        (
            ["objective.preset=cispo", "objective.clip_low=0.1", "objective.clip_high=0.3"],
            {"objective.clip_low", "objective.clip_high"},
        ),
        (["objective.preset=dapo", "objective.clip_low=0.1"], set()),
        (
            ["objective.preset=tic_grpo", "objective.clip_low=0.1", "objective.clip_high=0.3"],
            {"objective.clip_low"},
        ),
        (["objective.mismatch=kpop", "objective.mismatch_max=3"], {"objective.mismatch_max"}),
        (["objective.mismatch=tis", "objective.mismatch_max=3"], set()),
        (["objective.subset_size=4"], {"objective.subset_size"}),
        (["objective.subset=shortest", "objective.subset_size=4"], set()),
        (["objective.preference_beta=0.3"], {"objective.preference_beta"}),
        (["objective.preference_beta=0.3", "objective.preference_weight=0.1"], set()),
        (["objective.ess_reference=0.5"], {"objective.ess_reference"}),
        (
            [
                "objective.preset=cispo",
                "domains.0.objective.clip_high=0.3",
                "domains.0.objective.opsm_delta=0.1",
                "domains.0.objective.trm_max=0.1",
                "domains.0.objective.entropy_weight=0.01",
            ],
            {
                "domains.0.objective.clip_high",
                "domains.0.objective.opsm_delta",
                "domains.0.objective.trm_max",
            },
        ),
    ],
)
def test_settings_of_what_is_not_chosen_have_no_effect(overrides, told):
    assert set(keys(RELEASED, *overrides)) == told


@pytest.mark.parametrize(
    ("advantage", "told"),
    [
        ("passk", "it has no effect: advantage passk asks which answers are correct"),
        ("pkpo", "it has no effect: advantage pkpo asks"),
        ("gtpo_entropy", "it has no effect: advantage gtpo_entropy asks"),
        ("grpo_s", "it has no effect: advantage grpo_s asks"),
        ("gagpo", "it bounds the reward of an episode, and advantage gagpo also has those"),
        ("gigpo", "it bounds the reward of an episode, and advantage gigpo also has those"),
        ("group", None),
        ("rloo", None),
    ],
)
def test_a_clip_of_rewards_that_advantages_do_not_take(advantage, told):
    """In runs with an environment, where any advantage may be taken."""
    settings = ["objective.preset=dr_grpo", f"objective.advantage={advantage}"]
    assert keys(AGENT, *settings) == []
    config = resolve(AGENT, [*settings, "domains.0.reward_clip=2"]).config
    found = [(unusual.key, unusual.message) for unusual in advice_for(config)]
    if told is None:
        assert found == []
    else:
        [(key, message)] = found
        assert key == "domains.0.reward_clip" and message.startswith(told)


def test_nobody_minds_a_clip_where_no_advantages_are_made():
    settings = ["objective.preset=grpo_s", "domains.0.reward_clip=2", "kind=sft"]
    assert keys("demo/gspo-moe-cpu", *settings, "cold_start=null") == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.max_new_tokens=9", "rollout.max_model_len=60"], set()),
        (["rollout.startup_timeout_s=9", "rollout.max_attempts=9"], set()),
        (["rollout.tensor_parallel_size=1", "publish.canary=true"], set()),  # as they are without
        (
            ["rollout.tensor_parallel_size=2", "rollout.temperature=0.5", "publish.delta=true"],
            {"rollout.tensor_parallel_size", "rollout.temperature", "publish.delta"},
        ),
    ],
)
@pytest.mark.parametrize("kind", ["preferences", "reward-model"])
def test_settings_of_engines_have_no_effect_without_any(kind, overrides, told):
    assert set(keys(f"stages/tiny-{kind}", *overrides)) == told


def test_settings_of_engines_have_an_effect_where_there_are_some():
    assert keys("demo/gspo-moe-cpu", "rollout.temperature=0.5", "publish.delta=true") == []


def test_the_setting_that_does_it_is_named(capsys):
    """Other libraries call CISPO's bounds clip distances."""
    preset = ["objective.preset=cispo", "objective.clip_high=0.3"]
    assert main(["config", "show", RELEASED, *preset]) == 0
    told = capsys.readouterr().err
    assert "objective.clip_high = 0.3: it has no effect: only clip = ppo or upper or" in told
    assert "clip is cispo, which has objective.ratio_max, the bound itself (1 + clip_high)" in told


def test_a_function_of_ones_own_may_read_any_setting():
    objective = [
        "objective.preset=gspo_token",
        "objective.clip=examples.custom_objective:tanh_clip",
    ]
    assert keys(RELEASED, *objective, "objective.sapo_tau_positive=0.5") == []


def test_settings_belong_to_the_choices_that_their_documentation_begins_with():
    belongs = {
        name: {axis: set(choices)}
        for axis, settings in SETTINGS_OF_CHOICES.items()
        for choices, names in settings.items()
        for name in names
    }
    choices_of = {
        axis: set(get_args(ObjectiveConfig.model_fields[axis].annotation))
        for axis in SETTINGS_OF_CHOICES
    }
    documented = {}
    for name, field in ObjectiveConfig.model_fields.items():
        before_colon, colon, _ = field.description.partition(":")
        named = set(before_colon.split(", "))
        for axis, choices in choices_of.items():
            if colon and named <= choices:
                documented[name] = {axis: named}
    assert len(documented) > 40
    for name, of_documentation in documented.items():
        for axis, choices in of_documentation.items():
            assert choices <= belongs[name][axis]
    assert belongs.keys() - documented.keys() == {"trace_decay", "trace_min_advantage"}


@pytest.mark.parametrize("below", ["export", "export/math", "adapter/math", "other"])
def test_an_export_from_before_a_run_went_on(tmp_path, below):
    """Until it has ended again."""
    run = RunDir(tmp_path / "first")
    path = run.root / below
    path.mkdir(parents=True)
    config = resolve("demo/gspo-moe-cpu").config
    config = config.model_copy(update={"model": ModelConfig(path=path)})
    run.config.touch()
    run.earlier_result.touch()
    found = list(exports_are_the_newest(config))
    expected = [] if below == "other" else ["model.path"]
    assert [violation.key for violation in found] == expected
    assert all("has gone on since it wrote this" in violation.message for violation in found)
    run.result.touch()
    assert exports_are_the_newest(config) == []
