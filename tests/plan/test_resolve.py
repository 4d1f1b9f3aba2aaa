"""Schema, model and machine rules together, with their origins."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.config.loader import load_recipe, write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.problems import InvalidConfigError
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan import resolve as resolving
from grpo_megatron.plan.resolve import resolve, resolve_run
from tests.e2e.family_models import settings_of
from tests.plan.test_model_facts import DENSE as SMALL

DEMO = "demo/gspo-moe-cpu"
DENSE = SMALL | {"head_dim": 32}


def resolve_demo_problems(overrides: list[str]) -> list[str]:
    """Keys of what the demo, which has engines, is refused for with `overrides`."""
    with pytest.raises(InvalidConfigError) as caught:
        resolve(DEMO, overrides)
    return [problem.key for problem in caught.value.problems]


def test_layout_problems_carry_origins():
    with pytest.raises(InvalidConfigError) as caught:
        resolve(DEMO, ["trainer.expert_parallel_size=3"])
    text = str(caught.value)
    assert "8 experts" in text and "must divide num_ranks = 2" in text
    assert "trainer.num_ranks = 2 (recipes/demo/gspo-moe-cpu.toml:" in text
    assert "flag trainer.expert_parallel_size=3" in text


def test_more_replicas_than_prompts():
    with pytest.raises(InvalidConfigError, match="without work"):
        resolve(DEMO, ["rollout.num_replicas=65"])


def test_layout_rules_apply_on_resume(tmp_path):
    write_resolved(tmp_path / "config.json", resolve(DEMO))
    assert resolve_run(tmp_path).config.trainer.num_ranks == 2
    with pytest.raises(InvalidConfigError, match="8 experts"):
        resolve_run(tmp_path, ["trainer.expert_parallel_size=3"])


def test_checkpoint_path(tmp_path):
    flags = ["model.preset=null", f"model.path={tmp_path}"]
    with pytest.raises(InvalidConfigError, match="cannot read the model"):
        resolve(DEMO, flags)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(InvalidConfigError, match="no experts to split"):
        resolve(DEMO, flags)
    assert resolve(DEMO, [*flags, "trainer.expert_parallel_size=1"]).config.model.path == tmp_path
    shifting = [*flags, "trainer.expert_parallel_size=1", "objective.preset=rspo"]
    with pytest.raises(InvalidConfigError, match="no routers that could shift"):
        resolve(DEMO, shifting)
    resolve(DEMO, [*shifting, "objective.router_shift_floor=null"])


def test_heads_for_which_the_cpu_engine_has_no_kernel(tmp_path, monkeypatch):
    """Latent attention takes any, and so does a GPU."""
    flags = ["model.preset=null", f"model.path={tmp_path}", "trainer.expert_parallel_size=1"]
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"head_dim": 48}))
    with pytest.raises(InvalidConfigError, match=r"no attention for heads of 48; it knows 32, 64"):
        resolve(DEMO, flags)
    monkeypatch.setattr("grpo_megatron.plan.resolve.is_cpu_engine", lambda: False)
    assert resolve(DEMO, flags).config.model.path == tmp_path
    monkeypatch.undo()
    (tmp_path / "config.json").write_text(json.dumps(settings_of("moonlight")))
    assert resolve(DEMO, flags).config.model.path == tmp_path


def test_checkpoint_of_another_model_than_the_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    flags = ["model.preset=qwen3-8b", f"model.path={tmp_path}", "trainer.expert_parallel_size=1"]
    with pytest.raises(InvalidConfigError, match="of the preset qwen3-8b qwen3"):
        resolve(DEMO, flags)
    hf = load_preset("qwen3-8b").hf
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert resolve(DEMO, flags).config.model.path == tmp_path


def as_teacher(directory) -> list[str]:
    teacher = f'distillation={{teachers=[{{path="{directory}"}}]}}'
    return ["kind=distil", "cold_start=null", teacher]


def as_reference(directory) -> list[str]:
    return [f"domains.0.reference={directory}", "objective.kl=k3", "objective.kl_beta=0.1"]


@pytest.mark.parametrize(
    ("flags_of", "key"),
    [(as_teacher, "distillation.teachers.0.path"), (as_reference, "domains.0.reference")],
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "hidden_size of its config.json is 96, of the policy 128"),
        ({"num_experts": 4}, "num_experts of its config.json is 4"),
        ({"rope_theta": 5e5}, "its rotary embedding is .*500000"),
        ({"model_type": "nothing"}, "nothing"),
        ({"max_position_embeddings": 99}, None),
    ],
)
def test_teachers_and_references_have_the_policys_architecture(
    tmp_path, flags_of, key, changes, message
):
    other = tmp_path / "other"
    flags = flags_of(other)
    resolve(DEMO, flags)  # it is not there yet
    other.mkdir()
    (other / "config.json").write_text(json.dumps(OF_THE_DEMO | changes))
    if message is None:
        resolve(DEMO, flags)
        return
    with pytest.raises(InvalidConfigError, match=message) as caught:
        resolve(DEMO, flags)
    assert [problem.key for problem in caught.value.problems] == [key]


PPO = "demo/ppo-moe-cpu"
OF_THE_DEMO = load_preset("tiny-qwen3-moe").hf | {"vocab_size": 100}
SCORER = OF_THE_DEMO | {
    "architectures": ["Qwen3MoeForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (DENSE, "model_type of its config.json is .*, of the policy qwen3_moe"),
        (SCORER | {"hidden_size": 96}, "hidden_size of its config.json is 96, of the policy 128"),
        (SCORER | {"num_hidden_layers": 2}, "num_layers of its config.json is 2, of the policy 4"),
        (SCORER | {"rope_theta": 5e5}, "its rotary embedding is .*500000"),
        (SCORER | {"rms_norm_eps": 1e-5}, "layernorm_epsilon of its config.json is 1e-05"),
        (SCORER | {"id2label": {"0": "bad", "1": "good"}}, "its head gives 2 numbers"),
        ({k: v for k, v in SCORER.items() if k != "id2label"}, "its head gives 2 numbers"),
        ({"model_type": "nothing"}, "nothing"),
    ],
)
def test_a_critic_begins_with_the_policys_architecture(tmp_path, hf, message):
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(InvalidConfigError, match=message) as caught:
        resolve(PPO, [f"critic.path={tmp_path}"])
    [problem] = caught.value.problems
    assert problem.key == "critic.path"


@pytest.mark.parametrize("hf", [OF_THE_DEMO, SCORER, SCORER | {"max_position_embeddings": 99}])
def test_a_critic_begins_with_a_model_that_fits(tmp_path, monkeypatch, hf):
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps(hf))
    monkeypatch.chdir(tmp_path)
    config = resolve(PPO, ["critic.path=scorer"]).config
    assert config.critic is not None and config.critic.path == scorer
    assert config.input_paths["critic.path"] == scorer


def test_a_critic_begins_with_what_a_run_is_to_export(tmp_path):
    """Known by the model of that run until then, or not at all."""
    run = tmp_path / "scorer"
    run.mkdir()
    flags = [f"critic.path={run / 'export'}"]
    resolve(PPO, flags)
    write_resolved(run / "config.json", resolve("stages/tiny-reward-model"))
    resolve(PPO, flags)
    write_resolved(run / "config.json", resolve("dense/qwen3-8b"))
    with pytest.raises(InvalidConfigError, match=r"model_type of its .* is qwen3,"):
        resolve(PPO, flags)
    (run / "config.json").write_text('{"config": {"gone": 1}}')  # of another release
    resolve(PPO, flags)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "minimax_m2"}, "normalises queries and keys per head"),
        ({"new_gate": 2}, "llama has no field 'new_gate'"),
    ],
)
def test_models_that_the_trainer_does_not_compute(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | changes))
    with pytest.raises(InvalidConfigError, match=message):
        resolve(DEMO, ["model.preset=null", f"model.path={tmp_path}"])


def test_a_wrong_model_key_does_not_cascade():
    with pytest.raises(InvalidConfigError) as caught:
        resolve(DEMO, ["model.prest=x", "model.preset=null"])
    assert [problem.key for problem in caught.value.problems] == ["model.prest"]


# --- engines on processors

GLM_AIR = (
    "model.preset=glm-4.5-air",
    "trainer.num_ranks=64",
    "trainer.tensor_parallel_size=1",
    "trainer.pipeline_parallel_size=2",
    "trainer.expert_parallel_size=32",
    "trainer.last_stage_layers=null",
    "rollout.data_parallel_size=1",
    "rollout.expert_parallel=false",
    "rollout.tensor_parallel_size=4",
    "rollout.num_replicas=8",
    "placement.trainer_nodes=8",
    "placement.rollout_nodes=4",
)


@pytest.fixture
def on_processors(monkeypatch):
    monkeypatch.setattr(resolving, "is_cpu_engine", lambda: True)


def test_recipes_for_gpus_obey_no_rule_of_processors(on_processors):
    """Wherever they are planned: 10,944 / 4 is no multiple of 32."""
    config = resolve("moe/glm-4.5", GLM_AIR).config
    with pytest.raises(ConfigError, match="a multiple of 32 for vLLM's CPU build") as error:
        resolving.refuse_cpu_engine(config)
    assert "its CPU build" in str(error.value)


def test_recipes_without_gpus_obey_them(on_processors):
    with pytest.raises(ConfigError, match="a multiple of 32 for vLLM's CPU build"):
        resolve("moe/glm-4.5", [*GLM_AIR, "placement.gpus_per_node=0"])


def test_heads_that_processors_do_not_know(on_processors, tmp_path):
    hf = load_preset("qwen3-8b").hf | {"head_dim": 120}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    overrides = ["model.preset=null", f"model.path={tmp_path}"]
    config = resolve("dense/qwen3-8b", overrides).config
    with pytest.raises(ConfigError, match="no attention for heads of 120"):
        resolving.refuse_cpu_engine(config)


@pytest.mark.parametrize("kind", ["preferences", "reward-model"])
def test_kinds_without_engines_obey_no_rule_of_engines(on_processors, tmp_path, kind):
    hf = load_preset("tiny-qwen3-moe").hf | {"head_dim": 16, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = resolve(f"stages/tiny-{kind}", ["model.preset=null", f"model.path={tmp_path}"]).config
    assert config.placement.gpus_per_node == 0 and config.num_replicas == 0


@pytest.mark.parametrize("kind", ["preferences", "reward-model"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.tensor_parallel_size=3"],
        ["rollout.tensor_parallel_size=2", "rollout.data_parallel_size=3"],
        ["rollout.expert_parallel=true", "rollout.data_parallel_size=5"],
        ['rollout.engine_arguments=["--no-such-flag"]'],
        ["rollout.fp8=blockwise"],
    ],
)
def test_settings_of_engines_refuse_no_run_without_engines(kind, overrides):
    assert resolve(f"stages/tiny-{kind}", overrides).config.num_replicas == 0
    of_engines = resolve_demo_problems(overrides)
    assert all(key.startswith("rollout.") for key in of_engines) and of_engines


def test_no_engine_is_asked_for_routes_where_there_is_none():
    routes = "rollout.record_routes=true"
    assert not resolve("stages/tiny-preferences", [routes]).config.records_routes
    assert resolve(DEMO, [routes]).config.records_routes


def test_a_sequence_without_engines_has_no_more_tokens_than_the_model_positions(tmp_path):
    hf = load_preset("tiny-qwen3-moe").hf | {"vocab_size": 97, "max_position_embeddings": 63}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    for recipe in ("stages/tiny-preferences", DEMO):
        with pytest.raises(InvalidConfigError, match="the model has positions for 63 tokens"):
            resolve(recipe, ["model.preset=null", f"model.path={tmp_path}"])


def test_a_model_that_an_earlier_stage_writes_is_left_to_its_stage(on_processors, tmp_path):
    overrides = ["model.preset=null", f"model.path={tmp_path}/none"]
    resolving.refuse_cpu_engine(load_recipe("dense/qwen3-8b", overrides).config)


def test_other_builds_refuse_nothing(monkeypatch):
    monkeypatch.setattr(resolving, "is_cpu_engine", lambda: False)
    resolving.refuse_cpu_engine(resolve("moe/glm-4.5", GLM_AIR).config)
