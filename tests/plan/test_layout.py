"""Every layout rule, the sizes of valid layouts, and the nearest valid values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron import assets
from grpo_megatron.config.engine_words import given_options
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.network import Endpoint
from grpo_megatron.plan import engine_arguments, layout
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.model_facts import ModelFacts, facts_from_hf
from grpo_megatron.rollout import replica
from grpo_megatron.rollout.replica import multi_node_arguments

MOE = facts_from_hf(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "intermediate_size": 768,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    }
)
DENSE = replace(MOE, model_type="qwen3", num_experts=0, moe_layers=(), moe_intermediate_size=0)
DEEP = replace(DENSE, model_type="qwen3_vl", sees_images=True, num_deep_layers=3)
SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "ranks": "num_ranks",
    "sp": "sequence_parallel",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
}


def trainer(**sizes) -> TrainerConfig:
    return TrainerConfig(**{SHORT[name]: value for name, value in sizes.items()})


def check(facts: ModelFacts = MOE, rollout: dict | None = None, *, cpu: bool = True, **sizes):
    return check_layout(Case(trainer(**sizes), facts, RolloutConfig(**(rollout or {})), cpu))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"ranks": 2, "ep": 2},
        {"ranks": 2, "tp": 2},
        {"ranks": 2, "pp": 2},
        {"ranks": 3},
        {"ranks": 4, "tp": 2, "ep": 2},
        {"ranks": 4, "tp": 2, "etp": 1, "ep": 4},
        {"ranks": 4, "tp": 2, "etp": 1},
        {"ranks": 4, "pp": 2, "vpp": 2, "ep": 2},
        {"ranks": 8, "tp": 2, "pp": 2, "ep": 2},
        {"ranks": 2, "etp": 2},
        {"ranks": 3, "pp": 3, "first": 2},
        {"ranks": 3, "pp": 3, "first": 2, "last": 2},
        {"ranks": 2, "pp": 2, "vpp": 2, "first": 6},
        {"ranks": 2, "pp": 2, "last": 1},
    ],
)
def test_valid_layouts(sizes):
    assert check(**sizes) == []


@pytest.mark.parametrize(
    ("rule", "key", "nearest", "sizes"),
    [
        ("attention_world", "num_ranks", (2, 4), {"ranks": 3, "tp": 2}),
        ("attention_world", "num_ranks", (4,), {"ranks": 2, "tp": 2, "pp": 2}),
        ("expert_world", "ep", (1,), {"ranks": 2, "tp": 2, "ep": 2}),
        ("expert_world", "etp", (2, 4), {"ranks": 4, "etp": 3}),
        ("experts_divide", "ep", (2, 4), {"ranks": 12, "ep": 3}),
        ("experts_divide", "ep", (8,), {"ranks": 16, "ep": 16}),
        ("expert_width", "etp", (1,), {"ranks": 6, "etp": 3, "ep": 2}),
        ("heads_divide", "tp", (4,), {"ranks": 8, "tp": 8}),
        ("layers_divide", "pp", (2,), {"ranks": 6, "pp": 3}),
        ("layers_divide", "first", (2, 4), {"ranks": 3, "pp": 3, "first": 3}),
        ("layers_divide", "first", (1, 3), {"ranks": 4, "pp": 4, "first": 2, "last": 3}),
        ("layers_divide", "last", (2, 4), {"ranks": 3, "pp": 3, "last": 3}),
        ("layers_divide", "first", (), {"ranks": 1, "first": 3}),
        ("layers_divide", "vpp", (2, 4), {"ranks": 2, "pp": 2, "vpp": 3}),
        ("virtual_pipeline", "vpp", (), {"vpp": 2}),
        ("sequence_parallel", "sp", (False,), {"sp": True}),
        ("sequence_parallel", "sp", (True,), {"ranks": 2, "tp": 2, "sp": False}),
        ("attention_world", "num_ranks", (2, 4), {"ranks": 3, "cp": 2}),
        ("attention_world", "num_ranks", (8, 16), {"ranks": 12, "cp": 4, "tp": 2}),
    ],
)
def test_each_rule(rule, key, nearest, sizes):
    found = {violation.rule: violation for violation in check(**sizes)}
    assert rule in found
    violation = found[rule]
    assert violation.key == "trainer." + SHORT.get(key, key)
    if nearest:
        assert violation.nearest[: len(nearest)] == nearest
    assert violation.nearest or violation.remedy
    value = getattr(
        trainer(**{name: size for name, size in sizes.items() if name in SHORT}),
        SHORT.get(key, key),
    )
    assert violation.value == value


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"ranks": 2, "pp": 2},
        {"ranks": 4, "pp": 4, "first": 5},
        {"ranks": 2, "pp": 2, "vpp": 2, "first": 6},
        {"ranks": 8, "pp": 2, "tp": 2, "cp": 2},
    ],
)
def test_first_stages_with_the_layers_of_deep_features(sizes):
    assert check(DEEP, **sizes) == []


@pytest.mark.parametrize(
    ("key", "nearest", "sizes"),
    [
        ("pp", (2,), {"ranks": 4, "pp": 4}),
        ("vpp", (1,), {"ranks": 2, "pp": 2, "vpp": 2}),
        ("first", (4,), {"ranks": 3, "pp": 3, "first": 2}),
    ],
)
def test_first_stages_without_a_layer_of_deep_features(key, nearest, sizes):
    (violation,) = check(DEEP, **sizes)
    assert violation.rule == "deep_features"
    assert violation.key == f"trainer.{SHORT[key]}"
    assert violation.nearest[:1] == nearest
    assert "features for the first 3 layers" in violation.message
    assert "has 2 layers in its first part" in violation.message
    assert check(DENSE, **sizes) == []


def test_messages_name_both_numbers():
    text = {violation.rule: violation.message for violation in check(ranks=12, tp=3, ep=3)}
    assert "8 experts" in text["experts_divide"] and "EP = 3" in text["experts_divide"]
    assert "8 attention heads and 4 key-value heads" in text["heads_divide"]
    assert "TP = 3" in text["heads_divide"]


def test_expert_world_offers_unsplit_experts():
    (violation,) = check(ranks=2, tp=2, ep=2)
    assert "expert_tensor_parallel_size=1" in violation.remedy
    assert check(ranks=2, tp=2, ep=2, etp=1) == []


@pytest.mark.parametrize("sizes", [{"ranks": 2, "ep": 2}, {"ranks": 2, "etp": 2}])
def test_dense_models_have_no_experts_to_split(sizes):
    (violation,) = check(DENSE, **sizes)
    assert violation.rule == "experts_needed" and violation.nearest == (1,)


def test_dense_models_may_go_without_sequence_parallelism():
    assert check(DENSE, ranks=2, tp=2, sp=False) == []


def test_latent_attention_needs_sequence_parallelism_with_tp():
    latent = replace(DENSE, is_mla=True)
    assert [v.rule for v in check(latent, ranks=2, tp=2, sp=False)] == ["sequence_parallel"]
    assert check(latent, ranks=2, tp=2) == []


@pytest.mark.parametrize(
    ("rule", "facts", "rollout"),
    [
        ("rollout_heads", MOE, {"tensor_parallel_size": 3}),
        ("rollout_width", replace(MOE, moe_intermediate_size=129), {"tensor_parallel_size": 2}),
        ("cpu_multiples", replace(MOE, hidden_size=500), {}),
        ("cpu_multiples", replace(MOE, moe_intermediate_size=32), {"tensor_parallel_size": 2}),
        ("rollout_width", replace(MOE, moe_intermediate_size=130), {"data_parallel_size": 4}),
        ("rollout_experts", DENSE, {"expert_parallel": True}),
        ("rollout_experts", MOE, {"expert_parallel": True, "data_parallel_size": 7}),
        ("engine_arguments", MOE, {"engine_arguments": ("--data-parallel-size", "2")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--tensor_parallel_size=2",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("-tp=2",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--api-key", "secret")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--quantization", "fp8")}),
        ("engine_arguments", MOE, {"engine_arguments": ("-pp", "2")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--pipeline_parallel_size=2",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("-pcp=2",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--nnodes", "2")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--tensor-parallel=2",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--no-such-flag",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("-qfp8",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--config", "x.yaml")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--no-enable-expert-parallel",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu-memory-utilization=abc",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu-memory-utilization=nan",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu_memory_utilization", "1.5")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu-memory-utilization=0",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu-memory-utilization",)}),
        ("engine_arguments", MOE, {"engine_arguments": ("--gpu-memory-utilization", "-O3")}),
        ("engine_arguments", MOE, {"engine_arguments": ("--device-memory-utilization=abc",)}),
        ("record_routes", DENSE, {"record_routes": True}),
        ("truncation_bound", replace(MOE, vocab_size=1025), {"top_p": 0.9}),
        ("truncation_bound", replace(MOE, vocab_size=1025), {"min_p": 0.1}),
        ("truncation_bound", replace(MOE, vocab_size=93), {"top_k": 69}),
    ],
)
def test_rollout_rules(rule, facts, rollout):
    violations = check(facts, rollout)
    assert rule in [violation.rule for violation in violations]
    assert all(violation.nearest or violation.remedy for violation in violations)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu_memory_utilization=0.5", "--enforce-eager"),
        ("--gpu-memory-utilization", "1"),
        ("--kv-cache-dtype", "auto", "-O3", "--max_num_batched_tokens=4096"),
        ("--compilation-config.level", "3", "--speculative_config", '{"model": "-x"}'),
    ],
)
def test_arguments_that_vllm_takes(arguments):
    assert check(MOE, {"engine_arguments": arguments}) == []


def test_an_abbreviation_and_a_mistyped_argument_are_told_with_what_is_meant():
    [found] = check(MOE, {"engine_arguments": ("--gpu-memory-util=0.5",)})
    assert "has no option --gpu-memory-util" in found.message
    assert "write --gpu-memory-utilization" in found.remedy
    [found] = check(MOE, {"engine_arguments": ("--enforce-eagre",)})
    assert "write --enforce-eager" in found.remedy


@pytest.mark.parametrize("argument", ["--", "-"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_dashes_alone_are_no_abbreviation(monkeypatch, argument, is_recorded):
    monkeypatch.setattr(engine_arguments, "has_recorded_options", lambda: is_recorded)
    found = check(MOE, {"engine_arguments": (argument,)})
    assert len(found) == is_recorded
    assert not any("write" in violation.remedy for violation in found)


@pytest.mark.parametrize(
    "argument", ["--enable-expert-parallel", "-ep", "--no_enable_expert_parallel"]
)
def test_what_a_field_says_is_told_with_the_field(argument):
    [found] = check(MOE, {"engine_arguments": (argument,)})
    assert "a field of the recipe says this" in found.message
    assert found.remedy == "set rollout.expert_parallel instead"


OF_THE_LAUNCHER = [
    *(
        "--nnodes=2",
        "-n",
        "--node-rank=1",
        "-r",
        "--headless",
        "--master-addr=a",
        "--master-port=1",
    ),
    *("--data-parallel-rank=1", "-dpn", "--data-parallel-start-rank=1", "-dpr"),
    *("--data-parallel-address=a", "-dpa", "--data-parallel-rpc-port=1", "-dpp"),
    *("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph"),
    *("--data-parallel-multi-port-external-lb", "-dpm", "--device-ids=0,1", "--port=1"),
    *("-dpb=ray", "--host=a", "--uds=/s", "--grpc", "--ssl-keyfile=k"),
]


@pytest.mark.parametrize("argument", OF_THE_LAUNCHER)
def test_where_workers_are_is_what_the_launcher_says(argument):
    [found] = check(MOE, {"engine_arguments": (argument,)})
    assert "the launcher sets this" in found.message and found.remedy == "leave it out"


@pytest.mark.parametrize(
    "argument",
    [
        "--logprobs-mode=raw_logprobs",
        "--no_enable_scale_out",
        "--load-format=auto",
        "--max-loras=9",
    ],
)
def test_what_a_run_relies_on_is_what_it_says_itself(argument):
    [found] = check(MOE, {"engine_arguments": (argument,)})
    assert "the run sets this, and relies on it" in found.message


def test_everything_that_a_run_sets_and_reads_back_is_refused_as_an_argument():
    """Of `engine.toml`: what servers are started with, but for what only makes them faster."""
    may_differ = {
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details",
        "--middleware",
    }
    tables = assets.tables(replica.__file__, "engine.toml")
    of_every_run = [*tables["always"]["arguments"], *tables["samples"]["arguments"]]
    names = {word for word in of_every_run if word.startswith("--")}
    for name in sorted(names - may_differ):
        assert check(MOE, {"engine_arguments": (name,)}), name


def test_what_the_launcher_adds_for_several_nodes_is_refused_as_an_argument():
    head = Endpoint("host", 1)
    added = set()
    for sizes in ({"tensor_parallel_size": 8}, {"data_parallel_size": 8}):
        words = multi_node_arguments(RolloutConfig(**sizes), 2, 1, head)
        added |= {option.name for option in given_options(words)}
    assert "--headless" in added
    for name in sorted(added):
        assert check(MOE, {"engine_arguments": (name,)}), name


@pytest.mark.parametrize("argument", ["--help", "-h", "--help=all"])
def test_a_server_is_not_asked_for_help(argument):
    [found] = check(MOE, {"engine_arguments": (argument,)})
    assert "no option of a server" in found.message


@pytest.mark.parametrize(
    ("argument", "refused"),
    [("--of-another-version", False), ("--pipeline-parallel=2", True), ("--api-ke=x", True)],
)
def test_of_another_version_only_what_adds_workers_is_known(monkeypatch, argument, refused):
    monkeypatch.setattr(engine_arguments, "has_recorded_options", lambda: False)
    assert bool(check(MOE, {"engine_arguments": (argument,)})) == refused


@pytest.mark.parametrize("rollout", [{"top_k": 68}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_kept_ids_are_bounded(rollout):
    assert check(replace(MOE, vocab_size=93), rollout) == []


def test_whole_experts_are_not_split():
    narrow = replace(MOE, moe_intermediate_size=32)
    assert check(narrow, {"data_parallel_size": 2}) != []
    assert check(narrow, {"data_parallel_size": 2, "expert_parallel": True}) == []


def test_multiples_of_32_matter_on_the_cpu_only():
    assert check(replace(MOE, hidden_size=500), cpu=False) == []


def test_vllm_repeats_key_value_heads():
    assert check(rollout={"tensor_parallel_size": 8}) == []


_SIZES = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 64),
        "tp": st.integers(1, 8),
        "pp": st.integers(1, 8),
        "cp": st.integers(1, 4),
        "ep": st.integers(1, 8),
        "etp": st.one_of(st.none(), st.integers(1, 8)),
        "vpp": st.one_of(st.none(), st.integers(2, 4)),
    }
)


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([None, 1, 2, 4]),
    multiple=st.integers(1, 4),
)
def test_accepted_layouts_use_every_rank_exactly_once(tp, cp, pp, ep, etp, multiple):
    ranks = multiple * math.lcm(tp * cp * pp, (etp or tp) * ep * pp)
    sizes = {"ranks": ranks, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    config = trainer(**sizes)
    assert check(**sizes) == []
    assert (
        config.tensor_parallel_size
        * config.pipeline_parallel_size
        * config.context_parallel_size
        * config.dp
    ) == config.num_ranks
    assert config.num_ranks % ((etp or tp) * ep * pp) == 0
    assert config.expert_ranks == (etp or tp) * ep * pp
    assert config.sp == (config.tensor_parallel_size > 1)


@given(_SIZES)
@settings(max_examples=30)
def test_nearest_values_keep_the_rule(sizes):
    for violation in check(**sizes):
        name = violation.key.removeprefix("trainer.")
        for value in violation.nearest:
            changed = trainer(**sizes).model_copy(update={name: value})
            again = check_layout(Case(changed, MOE, cpu=True))
            assert violation.rule not in [other.rule for other in again]


@pytest.mark.parametrize("name", ["ep", "pp"])
def test_sizes_beyond_any_layout_are_answered_without_trying_all(monkeypatch, name):
    tried = []
    broken_rules = layout._broken_rules
    monkeypatch.setattr(layout, "_broken_rules", lambda case: tried.append(1) or broken_rules(case))
    found = check(ranks=8, **{name: 10**6})
    assert found and len(tried) < 10_000


def test_more_layers_in_a_stage_than_the_model_has():
    layers = TrainerConfig(num_ranks=8, pipeline_parallel_size=2, first_stage_layers=1000)
    found = check_layout(Case(layers, MOE))
    assert any("layers only" in violation.message for violation in found)
