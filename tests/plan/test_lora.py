"""Which layers [lora] names, and what it is refused with."""

from __future__ import annotations

import pytest

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.problems import InvalidConfigError
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.lora import linear_layers, max_lora_rank
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.plan.resolve import resolve

DEMO = "demo/gspo-moe-cpu"
SLOTS = ['lora.targets=["self_attn"]', "lora.publish=adapter"]


def test_linear_layers_of_a_mixture():
    facts = facts_from_hf(load_preset("tiny-qwen3-moe").hf)
    assert linear_layers(facts) == [
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.experts.gate_proj",
        "mlp.experts.up_proj",
        "mlp.experts.down_proj",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_no_router_and_no_norm_is_a_linear_layer(name):
    layers = linear_layers(facts_from_hf(load_preset(name).hf))
    assert len(layers) == len(set(layers)) >= 7
    assert not any("norm" in layer or layer.endswith(".gate") for layer in layers)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (['lora.targets=["qproj"]'], ["qproj", "q_proj"]),
        (['lora.targets=["mlp.gate_proj"]'], ["names no linear layer"]),
        (["lora.experts=shared", 'lora.targets=["q_proj"]'], ["names no routed experts"]),
        (
            ["lora.publish=adapter"],
            ["lora.publish", "routed experts", "merged", "self_attn.o_proj"],
        ),
        (['lora.targets="q_proj"'], ["must be a list", 'set lora.targets=["q_proj"]']),
        (["lora.targets=q_proj"], ["must be a list", 'set lora.targets=["q_proj"]']),
        ([*SLOTS, "lora.rank=513"], ["lora.rank", "512"]),
        ([*SLOTS, "publish.method=file"], ["publish.method", "auto"]),
    ],
)
def test_refusals(overrides, words):
    with pytest.raises(ConfigError) as caught:
        resolve(DEMO, ["lora.rank=4", *overrides])
    for word in words:
        assert word in str(caught.value)


LATENT = ["model.preset=moonlight-16b-a3b", "cold_start=null", "trainer.expert_parallel_size=1"]


def refused(*overrides):
    with pytest.raises(InvalidConfigError) as caught:
        resolve(DEMO, [*LATENT, "lora.rank=4", *overrides])
    return caught.value.problems


def test_what_a_target_begins_is_nearer_than_what_it_is_like():
    """`kv_b_proj`, which differs in one letter, is another layer."""
    [problem] = refused('lora.targets=["kv_a_proj"]')
    assert problem.nearest[0] == '["kv_a_proj_with_mqa"]'
    assert problem.remedy == 'set lora.targets=["kv_a_proj_with_mqa"]'


def test_targets_that_are_advised_for_slots_have_some():
    """Latent attention has none."""
    of_experts, of_attention = refused("lora.publish=adapter")
    assert "routed experts" in of_experts.message and "latent" in of_attention.message
    _, _, advised = of_experts.remedy.partition("or ")
    assert "mlp.shared_experts.gate_proj" in advised
    resolve(DEMO, [*LATENT, "lora.rank=4", "lora.publish=adapter", advised.replace(" = ", "=")])


@pytest.mark.parametrize(
    "overrides",
    [
        ['lora.targets=["mlp.experts"]'],
        ["trainer.num_ranks=2", "trainer.pipeline_parallel_size=2"],
    ],
)
def test_no_targets_are_advised_where_none_have_slots(overrides):
    """Of latent attention without other targets, and of pipeline stages without the attention."""
    problems = refused("lora.publish=adapter", *overrides)
    assert problems[0].remedy == "set lora.publish=merged"


def test_a_layer_of_latent_attention_is_advised_with_merged_weights():
    pipeline = ["trainer.num_ranks=2", "trainer.pipeline_parallel_size=2"]
    targets = 'lora.targets=["mlp.shared_experts"]'
    problem, *_ = refused("lora.publish=adapter", targets, *pipeline)
    assert problem.remedy.endswith('o_proj, and set lora.publish = "merged"')
    problem, *_ = refused(targets, *pipeline)
    assert problem.remedy.endswith("for example o_proj")


def test_the_plan_says_what_adapters_save():
    config = resolve("moe/qwen3-30b-a3b-lora").config
    plan = plan_of(config)
    assert plan.numbers["trained_parameters"] < 0.001 * plan.numbers["parameters"]
    without = plan_of(config.model_copy(update={"lora": None}), worst_only=True)
    assert plan.numbers["fullest_rank_without_adapters_bytes"] == without.worst.total
    assert plan.worst.total < without.worst.total / 4


def test_a_cold_start_needs_what_weights_do():
    config = resolve("demo/lora-moe-cpu").config
    assert plan_of(config).stages == plan_of(config.model_copy(update={"lora": None})).stages


def test_adapters_for_everything():
    assert resolve(DEMO, ["lora.rank=4"]).config.lora is not None


def test_latent_attention_has_no_slots():
    with pytest.raises(ConfigError, match="latent attention"):
        resolve(DEMO, ["model.preset=moonlight-16b-a3b", "lora.rank=4", *SLOTS])


@pytest.mark.parametrize(
    ("rank", "slots"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)]
)
def test_slots_are_the_narrowest_that_vllm_has(rank, slots):
    assert max_lora_rank(rank) == slots


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_of_an_engine_are_counted(tp):
    """q alone is a target, and with it all of qkv_proj has slots; hidden 128, 4 heads and 2
    groups of 32, 4 layers, float32."""
    overrides = ["lora.rank=3", 'lora.targets=["q_proj", "o_proj"]', "lora.publish=adapter"]
    config = resolve(DEMO, [*overrides, f"rollout.tensor_parallel_size={tp}"]).config
    hf = load_preset("tiny-qwen3-moe").hf
    hidden, width = hf["hidden_size"], hf["head_dim"]
    query = width * hf["num_attention_heads"]
    key = width * hf["num_key_value_heads"]
    qkv = 3 * hidden + (query + 2 * key) // tp
    output = query // tp + hidden
    adapter = 3 * (hidden + query + query + hidden)
    expected = 4 * hf["num_hidden_layers"] * (8 * (qkv + output) + 2 * adapter)
    plan = plan_of(config)
    assert plan.engine["adapters"] == expected
    merged = plan_of(
        config.model_copy(update={"lora": config.lora.model_copy(update={"publish": "merged"})})
    )
    assert "adapters" not in merged.engine
    assert plan.publish.worker_bytes < merged.publish.worker_bytes


def two_domains(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """A run of two domains that share adapters, and one in which each has its own."""
    other = config.domains[0].model_copy(update={"name": "other"})
    shared = config.model_copy(update={"domains": (*config.domains, other)})
    lora = config.lora.model_copy(update={"per_domain": True})
    return shared, shared.model_copy(update={"lora": lora})


def test_adapters_of_every_domain_are_counted():
    """Slots, what a publish sends, what is trained and saved; and on a rank of the trainer a copy
    for each domain, float32, beside the adapters that the model has: attention of 4 layers."""
    overrides = ["lora.rank=4", "cold_start=null", *SLOTS]
    shared, own = two_domains(resolve(DEMO, overrides).config)
    of_all, of_each = plan_of(shared), plan_of(own)
    assert of_each.engine["adapters"] == 2 * of_all.engine["adapters"]
    assert of_each.publish.worker_bytes == 2 * of_all.publish.worker_bytes
    trained = of_all.numbers["trained_parameters"]
    assert of_each.numbers["trained_parameters"] == 2 * trained
    added = of_each.numbers["checkpoint_bytes"] - of_all.numbers["checkpoint_bytes"]
    assert added == (4 + 12) * trained
    assert "adapters" not in of_all.worst.parts
    # tensor ranks share rows or columns, and data-parallel ranks have all
    assert shared.trainer.tensor_parallel_size == shared.trainer.pipeline_parallel_size == 1
    assert of_each.worst.parts["adapters"] == 2 * 4 * trained
    assert of_each.worst.total == of_all.worst.total + 2 * 4 * trained
    assert "adapters_on_a_host_bytes" not in of_each.numbers


def test_hosts_have_the_optimizers_of_all_domains():
    """In bfloat16: float32 weights and moments; here of one rank."""
    shared, own = two_domains(resolve("single_gpu/qwen3-8b-lora", SLOTS).config)
    found = plan_of(own)
    of_rank = found.worst.parts["optimizer"]
    assert found.numbers["adapters_on_a_host_bytes"] == 2 * of_rank
    assert found.worst.parts["adapters"] == 2 * 2 * plan_of(shared).numbers["trained_parameters"]


def test_a_cold_start_of_domains_needs_what_weights_do():
    shared, own = two_domains(resolve("demo/lora-moe-cpu", SLOTS).config)
    assert plan_of(own).stages == plan_of(shared).stages
