"""`plan` and `plan --search`: predicted time of recipes."""

from __future__ import annotations

import json

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.search import fitting
from grpo_megatron.plan.timing import generation, prediction
from grpo_megatron.plan.timing.constants import shipped_constants
from grpo_megatron.plan.timing.node_split import node_splits, split_points
from grpo_megatron.plan.timing.prediction import LengthOptions, lengths_of, predict_run
from grpo_megatron.plan.timing.tower import TowerAmounts
from grpo_megatron.plan.timing.trainer import Machine, compute_seconds
from grpo_megatron.plan.timing.work import Amounts
from grpo_megatron.plan.weights import sizes_of

SMALL = "dense/qwen3-8b"
CONSTANTS = shipped_constants()


def predicted(recipe: str, *overrides: str, **options: float):
    config = resolve(recipe, overrides).config
    lengths = lengths_of(config, LengthOptions(**options), CONSTANTS)
    return predict_run(config, plan_of(config), "h100-80g", CONSTANTS, lengths)


@pytest.mark.parametrize("recipe", assets.names(assets.root() / "recipes"))
def test_every_recipe_has_a_predicted_step(recipe):
    found = predicted(recipe)
    assert 0 < found.step_s < 1e6
    assert found.tokens_per_s_per_gpu > 0
    assert 0 <= found.step_mfu <= found.mfu < 1
    assert 0 <= found.trainer_utilisation <= 1 and 0 <= found.engine_utilisation <= 1
    assert found.advice
    assert found.gpu_hours_per_step == pytest.approx(found.step_s * found.num_gpus / 3600)


def test_phases_add_up_to_the_step():
    apart = predicted(SMALL, "batch.max_staleness=0")
    beside = predicted(SMALL)
    rest = beside.publish_s + beside.switch_s + beside.overhead_s
    assert beside.step_s == pytest.approx(max(beside.generation_s, beside.trainer_s) + rest)
    rest = apart.publish_s + apart.switch_s + apart.overhead_s
    assert apart.step_s == pytest.approx(apart.generation_s + apart.trainer_s + rest)
    assert 0 < beside.staleness_versions <= 1 and apart.staleness_versions == 0
    assert apart.forecast.step_s == pytest.approx(apart.step_s)


def test_weights_that_come_beside_decoding_pause_engines_less():
    """Where engines are what a step waits for, it is shorter by what they no longer wait."""
    settings = ("batch.max_staleness=2", "publish.pause=keep", "publish.method=gloo")
    recipe = "moe/qwen3-235b-a22b"
    paused = predicted(recipe, *settings)
    beside = predicted(recipe, *settings, "publish.beside_decoding=true")
    assert beside.publish_s == paused.publish_s
    assert paused.generation_s > paused.trainer_s + paused.publish_s
    config = resolve(recipe, settings).config
    load_s = plan_of(config).publish.worker_bytes / CONSTANTS["host_bytes_per_s"]
    assert paused.step_s - beside.step_s == pytest.approx(paused.publish_s - load_s)
    assert load_s < paused.publish_s


def test_several_steps_ahead():
    """Engines that do not wait for the end of a step are faster; tokens are as old as allowed only
    where the trainer is what a step waits for."""
    one, waiting, kept = (
        predicted(
            SMALL,
            "sampling.dynamic=false",
            f"batch.max_staleness={ahead}",
            f"publish.pause={pause}",
        )
        for ahead, pause in ((1, "keep"), (4, "wait"), (4, "keep"))
    )
    assert waiting.generation_s == one.generation_s > kept.generation_s
    for found in (waiting, kept):
        assert found.generation_s >= found.trainer_s
        assert 0 < found.staleness_versions <= found.forecast.max == 1
        assert found.staleness_updates >= found.staleness_versions
    slow = predicted(SMALL, "batch.max_staleness=4", answer_tokens=32)
    assert slow.trainer_s > slow.generation_s and slow.staleness_versions == pytest.approx(4)


def test_passes_that_an_objective_saves_or_costs():
    plain = ["objective.kl=none", "objective.kl_beta=0", "batch.max_staleness=1"]
    recomputed, interpolated = (
        predicted(SMALL, f"objective.proximal={proximal}", *plain)
        for proximal in ("recompute", "interpolated")
    )
    assert recomputed.trainer_s > interpolated.trainer_s
    of_experts = ["objective.preset=rspo", "objective.kl=none", "batch.updates_per_rollout=4"]
    shifting = predicted("demo/gspo-moe-cpu", *of_experts)
    without = predicted("demo/gspo-moe-cpu", *of_experts, "objective.router_shift_floor=null")
    assert shifting.trainer_s > without.trainer_s
    once = ["batch.updates_per_rollout=1", *of_experts[:2]]
    found = predicted("demo/gspo-moe-cpu", *once)
    assert (
        found.trainer_s
        == predicted("demo/gspo-moe-cpu", *once, "objective.router_shift_floor=null").trainer_s
    )


def test_a_critic_costs_its_passes():
    """Its values, and a step like the policy's without the output layer."""
    without = predicted(SMALL, "objective.preset=grpo")
    found = predicted(SMALL, "objective.preset=ppo", "critic.warmup_steps=0")
    assert 1.5 < found.forward_backward_s / without.forward_backward_s < 2
    assert found.logprobs_s > without.logprobs_s
    assert found.optimizer_s > 1.5 * without.optimizer_s
    assert found.trainer_s > without.trainer_s + found.logprobs_s - without.logprobs_s


def test_a_critic_on_the_policys_layers_costs_the_pass_of_the_old_policy():
    on_policy = [SMALL, "batch.updates_per_rollout=1", "batch.max_staleness=0"]
    without = predicted(*on_policy, "objective.preset=grpo", "objective.kl=none")
    shared = ["objective.preset=ppo", "objective.kl=none", "critic.trunk=policy"]
    found = predicted(*on_policy, *shared)
    assert without.logprobs_s == 0 < found.logprobs_s
    assert found.forward_backward_s == without.forward_backward_s


def test_shared_prompts_are_computed_once():
    shared = predicted(SMALL, prompt_tokens=1000, answer_tokens=1000)
    alone = predicted(SMALL, "trainer.share_prefixes=false", prompt_tokens=1000, answer_tokens=1000)
    assert shared.computed_tokens_per_step == pytest.approx(
        shared.tokens_per_step * (1000 / 16 + 1000) / 2000
    )
    assert shared.forward_backward_s < alone.forward_backward_s


def test_json_has_the_staleness_and_who_waits(capsys):
    assert main(["plan", SMALL, "batch.max_staleness=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["time"]["forecast"]
    assert 0 < found["mean"] <= found["max"] <= 2
    assert 0 <= found["sample_mean"] <= found["max"]
    assert found["too_old_fraction"] == 0
    assert 0 <= found["trainer_idle"] <= 1 and 0 <= found["engine_idle"] <= 1
    assert main(["plan", "stages/deepseek-v3-sft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["forecast"] is None


def test_json_has_a_source_for_every_constant(capsys):
    assert main(["plan", SMALL, "--json", "--constant", "decode_efficiency=0.5"]) == 0
    found = json.loads(capsys.readouterr().out)["time"]
    for name, constant in found["constants"].items():
        assert constant["source"] and constant["kind"], name
        assert "unit" in constant or name.startswith("devices.")
    assert found["constants"]["decode_efficiency"]["value"] == 0.5
    assert found["constants"]["decode_efficiency"]["kind"] == "given"


def test_adapters_take_less_time_than_weights():
    """On one GPU; no gradients of frozen weights, no optimizer of theirs; decoding is the same."""
    recipe = "single_gpu/qwen3-8b-lora"
    adapters, weights = predicted(recipe), predicted(recipe, "lora=null")
    assert adapters.forward_backward_s < weights.forward_backward_s
    assert adapters.generation_s == weights.generation_s
    trained = []
    for overrides in ([], ["lora=null"]):
        numbers = plan_of(resolve(recipe, overrides).config).numbers
        trained.append(numbers["trained_parameters"])
    share = trained[0] / trained[1]
    assert adapters.optimizer_s == pytest.approx(share * weights.optimizer_s)


def test_gradients_of_adapters_are_reduced_and_no_others():
    recipe = "moe/qwen3-30b-a3b-lora"
    assert predicted(recipe).gradient_sync_s < predicted(recipe, "lora=null").gradient_sync_s / 5


def test_adapters_are_predicted_as_they_are_after_a_cold_start():
    recipe = "demo/lora-moe-cpu"
    assert predicted(recipe) == predicted(recipe, "cold_start=null")


@pytest.mark.parametrize("name", CONSTANTS.constants)
def test_a_plan_is_made_with_every_valid_bound_of_a_constant(capsys, name):
    constant = CONSTANTS.constants[name]
    for bound in (constant.above, constant.least, constant.most):
        if bound is None:
            continue
        is_valid = constant.allows(bound)
        code = main(["plan", SMALL, "--json", "--constant", f"{name}={bound}"])
        assert code == (0 if is_valid else 2)
        out = capsys.readouterr().out
        if is_valid:
            assert 0 < json.loads(out)["time"]["step_s"] < float("inf")


def test_text_has_phases_and_what_to_enlarge(capsys):
    assert main(["plan", SMALL]) == 0
    out = capsys.readouterr().out
    for word in ("generation\t", "step\t", "tokens per second per GPU", "MFU", "largest phase"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--constant", "decode_eficiency=0.5"], "decode_efficiency"),
        (["--constant", "decode_efficiency=fast"], "NAME=VALUE"),
        (["--constant", "decode_efficiency=nan"], "NAME=VALUE"),
        (["--constant", "step_overhead_s=inf"], "NAME=VALUE"),
        (["--constant", "decode_efficiency=1.5"], "above 0 and at most 1 (share of the memory"),
        (["--constant", "decode_efficiency=1.5"], "for example --constant decode_efficiency=1\n"),
        (["--constant", "decode_efficiency=0"], "for example --constant decode_efficiency=0.771"),
        (["--constant", "exposed_gradient_share=-0.1"], "--constant exposed_gradient_share=0\n"),
        (["--constant", "dynamic_sampling_rounds=0.5"], "expected a number at least 1 (groups"),
        (["--constant", "host_bytes_per_s=0"], "host_bytes_per_s = 0, expected a number above 0"),
        (["--lengths", "missing.txt"], "missing.txt"),
        (["--answer-tokens", "-1"], "--answer-tokens"),
        (["--answer-tokens", "10", "--lengths", "x"], "exclude each other"),
        (["--answer-tokens", "nan"], "nan tokens"),
        (["--prompt-tokens", "inf"], "inf tokens"),
        (
            ["--answer-tokens", "1e6"],
            "1e+06 tokens of answers on the mean, and the longest",
        ),
        (["--prompt-tokens", "1e6"], "a run leaves longer ones out (rollout.max_model_len"),
        (["--compare", "ppo", "--device", "h200"], "--compare and --device exclude each other"),
    ],
)
def test_wrong_arguments_are_told(capsys, arguments, message):
    assert main(["plan", SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "shape"),
    [
        ("dense/llama-3.3-70b", [], "2x8"),
        ("dense/llama-3.3-70b", [], "3x2"),
        ("dense/llama-3.3-70b", ["lora.rank=8"], "2x2"),
        ("moe/qwen3-30b-a3b", [], "3x2"),
    ],
)
def test_too_few_gpus_for_a_split_are_told_a_size_that_fits(capsys, recipe, overrides, shape):
    assert main(["plan", recipe, *overrides, "--search", shape]) == 2
    error = capsys.readouterr().err
    assert f"no split of {shape} fits" in error
    size = error.split("--search ")[-1].partition(",")[0]
    assert main(["plan", recipe, *overrides, "--search", size]) == 0


def test_where_no_number_of_nodes_fits_none_is_told(capsys):
    assert main(["plan", "moe/deepseek-v3", "--search", "2x1"]) == 2
    error = capsys.readouterr().err
    assert "no number of nodes of 1 GPU(s) that was tried fits" in error


def test_splits_of_powers_of_two_and_the_own_one_are_tried():
    assert split_points(3, 1) == [1, 2]
    assert split_points(24, 13) == [1, 2, 3, 4, 6, 8, 9, 12, 13, 15, 16, 18, 20, 21, 22, 23]
    assert split_points(2, 8) == [1]


def test_engines_that_only_fit_as_the_recipe_has_them_are_split_off(capsys):
    """Data parallel, over several nodes."""
    assert main(["plan", "moe/deepseek-v3", "--search", "40x8", "--json"]) == 0
    [split] = json.loads(capsys.readouterr().out)
    assert (split["trainer_nodes"], split["rollout_nodes"]) == (32, 8)


def test_search_finds_the_split_that_brute_force_finds():
    config = resolve(SMALL, ["placement.rollout_nodes=1"]).config
    lengths = lengths_of(config, LengthOptions(answer_tokens=2000), CONSTANTS)
    found = node_splits(config, 3, 4, "h100-80g", CONSTANTS, lengths)
    fastest_s = {}
    for trainer_nodes in (1, 2):
        seconds = []
        for size in (1, 2, 4):
            replicas = (3 - trainer_nodes) * 4 // size
            rollout = config.rollout.model_copy(
                update={"tensor_parallel_size": size, "num_replicas": replicas}
            )
            placement = config.placement.model_copy(update={"rollout_nodes": 3 - trainer_nodes})
            tried = config.model_copy(update={"rollout": rollout, "placement": placement})
            for changed, plan in fitting(tried, trainer_nodes, 4, "h100-80g"):
                step = predict_run(changed, plan, "h100-80g", CONSTANTS, lengths)
                seconds.append(step.step_s)
        fastest_s[trainer_nodes] = min(seconds)
    assert [split.prediction.step_s for split in found] == pytest.approx(sorted(fastest_s.values()))
    assert found[0].trainer_nodes == min(fastest_s, key=lambda nodes: fastest_s[nodes])


def test_a_tower_takes_time(monkeypatch):
    """In every pass over a prompt's image, of which a group has one; in engines before they answer;
    more where it is trained, and in FP8 as much as before."""
    recipe = "systems/vlm_r1"
    kept = "trainer.vision_tower=frozen"
    trained = predicted(recipe, prompt_tokens=1000)
    frozen = predicted(recipe, kept, prompt_tokens=1000)
    apart = predicted(recipe, kept, "trainer.share_prefixes=false", prompt_tokens=1000)
    monkeypatch.setattr(prediction, "images_per_sample", lambda config: 0.0)
    no_amounts = TowerAmounts(0.0, 0.0, 0.0, 0.0, 0)
    monkeypatch.setattr(generation, "tower_amounts", lambda sizes, images: no_amounts)
    blind = predicted(recipe, kept, prompt_tokens=1000)
    blind_apart = predicted(recipe, kept, "trainer.share_prefixes=false", prompt_tokens=1000)
    assert blind.logprobs_s < frozen.logprobs_s == trained.logprobs_s
    assert blind.forward_backward_s < frozen.forward_backward_s < trained.forward_backward_s
    assert blind.generation_s < frozen.generation_s
    once = frozen.logprobs_s - blind.logprobs_s
    each = apart.logprobs_s - blind_apart.logprobs_s
    assert each > 4 * once  # 8 samples a prompt


def test_a_frozen_tower_has_no_gradients_to_reduce():
    trained = predicted("systems/vlm_r1")
    frozen = predicted("systems/vlm_r1", "trainer.vision_tower=frozen")
    assert frozen.gradient_sync_s < trained.gradient_sync_s
    assert frozen.optimizer_s < trained.optimizer_s


def test_fp8_makes_no_tower_faster():
    sizes = {}
    for fp8 in ("none", "blockwise"):
        config = resolve("systems/vlm_r1", [f"trainer.fp8={fp8}"]).config
        hf, _ = configuration_of(config.model)
        sizes[fp8] = sizes_of(hf, hf["vocab_size"], config.trainer)
    machine = Machine(CONSTANTS, CONSTANTS.device("h100-80g"), 8)
    of_tower = Amounts(tower_flops=1e15)
    of_text = Amounts(matrix_flops=1e15)
    plain, rounded = (compute_seconds(s, of_tower, machine, is_sft=False) for s in sizes.values())
    assert plain == rounded
    plain, rounded = (compute_seconds(s, of_text, machine, is_sft=False) for s in sizes.values())
    assert rounded < plain


def test_prompts_of_a_model_that_sees_are_as_long_as_they_may_be():
    """As its memory is planned; a text's are as usual."""
    assert predicted("systems/vlm_r1").lengths.prompt == 3584 - 2048
    assert predicted("systems/vlm_r1", prompt_tokens=300).lengths.prompt == 300
    assert predicted(SMALL).lengths.prompt == CONSTANTS["prompt_tokens"]
