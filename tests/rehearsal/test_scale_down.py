"""Every shipped recipe scales down to one machine, without losing what it is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.config.environment import AgentConfig, EnvironmentConfig
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.data.preferences import read_preferences
from grpo_megatron.data.sources import load_problems
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.plan.advice import advice_for
from grpo_megatron.plan.fp8_weights import FP8_RULES
from grpo_megatron.plan.hf_config import as_transformers_reads, model_fields
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf, read_config
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rehearsal.coin import COMPONENT, coin
from grpo_megatron.rehearsal.made_up_rows import (
    missing_corpora,
    missing_files,
    refuse_unbound_environments_here,
    special_tokens_of,
    write_corpus,
    write_rows,
)
from grpo_megatron.rehearsal.scale_down import (
    MAX_EPISODE_TOKENS,
    MAX_MODEL_LEN,
    MAX_NEW_TOKENS,
    MAX_SAMPLED_TOP_K,
    MAX_TOP_K,
    MAX_TURN_TOKENS,
    MAX_TURNS,
    StandIns,
    num_layers_of,
    scale_down,
)
from grpo_megatron.rehearsal.stand_ins import StandInWriter
from grpo_megatron.rehearsal.teacher_servers import TeacherServers
from grpo_megatron.rehearsal.tiny_family import tiny_config, write_tiny_checkpoint
from grpo_megatron.rewards.boxes import box_iou
from grpo_megatron.types import Problem

RECIPES = assets.names(assets.root() / "recipes")
LAYOUT = (
    ("trainer", "tensor_parallel_size"),
    ("trainer", "pipeline_parallel_size"),
    ("trainer", "expert_parallel_size"),
    ("rollout", "num_replicas"),
    ("rollout", "tensor_parallel_size"),
    ("batch", "updates_per_rollout"),
)


def stand_ins(config, folder: Path, num_layers: int | None = None) -> StandIns:
    """Rows and the config.json of a tiny model, without weights: enough to resolve a recipe."""
    num_layers = num_layers or num_layers_of(config.trainer)
    hf, _ = configuration_of(config.model)
    sees_images = "vision_config" in hf
    preset = load_preset(config.model.preset) if config.model.preset else None
    if sees_images and not preset.checkpoint:
        write_tiny_model(folder, preset)
    else:
        fills_blocks = config.rollout.fp8 != "none"
        tiny = tiny_config(hf, num_layers, fills_blocks=fills_blocks)
        tiny["vocab_size"] = 320
        processor = tiny.pop("image_processor", None)
        (folder / "config.json").write_text(json.dumps(as_transformers_reads(tiny)))
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    data = {}
    for number in missing_files(config):
        data[number] = folder / f"{number}{config.domains[number].path.suffix}"
        write_rows(data[number], config, number, sees_images=sees_images)
    return StandIns(folder, folder, data, "http://127.0.0.1:1")


def scaled(name: str, folder: Path, *overrides: str):
    config = resolve(name, overrides).config
    changes = scale_down(config, stand_ins(config, folder))
    return config, resolve(name, [*overrides, *(change.override for change in changes)]).config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_what_it_has_more_than_one_of(name, tmp_path):
    before, after = scaled(name, tmp_path)
    for table, field in LAYOUT:
        was = getattr(getattr(before, table), field)
        now = getattr(getattr(after, table), field)
        assert now == min(was, 2), f"{table}.{field}"
    assert after.trainer.num_ranks <= 8
    assert after.batch.max_staleness == before.batch.max_staleness
    assert after.placement.mode == before.placement.mode
    longest = MAX_NEW_TOKENS
    if before.domains_with_episodes:
        longest = MAX_EPISODE_TOKENS
    assert after.rollout.max_new_tokens <= longest


@pytest.mark.parametrize("name", ["stages/tiny-preferences", "stages/tiny-process-reward-model"])
def test_a_recipe_without_engines_gets_none_of_their_settings(name, tmp_path):
    before, after = scaled(name, tmp_path)
    assert before.num_replicas == 0
    assert after.rollout.max_num_seqs == before.rollout.max_num_seqs
    assert [advice.key for advice in advice_for(after) if advice.key.startswith("rollout.")] == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_method(name, tmp_path):
    """Only lengths of an objective change; filters, routing, precision and checks stay."""
    before, after = scaled(name, tmp_path)
    lengths = {"aggregation_length"}
    assert after.objective.model_dump(exclude=lengths) == before.objective.model_dump(
        exclude=lengths
    )
    assert after.sampling == before.sampling
    assert after.routing == before.routing
    assert after.optimizer == before.optimizer
    assert after.trainer.precision == before.trainer.precision
    assert after.publish.pause == before.publish.pause
    assert after.rollout.fp8 == before.rollout.fp8
    for was, now in zip(before.domains, after.domains, strict=True):
        functions = [reward.function for reward in was.rewards]
        assert [reward.function for reward in now.rewards][: len(functions)] == functions
        if not before.trains_preferences:
            assert now.accuracy_component == COMPONENT
        assert now.template == was.template


def problems_of(config, number: int) -> list[Problem]:
    domain = config.domains[number]
    if config.trains_preferences:
        rows = read_preferences(domain, config.preferences)
        return [row.problem for row in rows]
    return load_problems(domain, seed=0)


@pytest.mark.parametrize("name", RECIPES)
def test_made_up_rows_are_read_as_the_recipe_reads_its_own(name, tmp_path):
    before, after = scaled(name, tmp_path)
    asked = []
    for number in missing_files(before):
        problems = problems_of(after, number)
        questions = {problem.question for problem in problems}
        assert len(questions) > 40
        asked += questions
    assert len(set(asked)) == len(asked)  # domains with equal templates have prompts of their own


def test_made_up_rows_of_a_folder_have_no_splits(tmp_path):
    arguments = '{ split = "train", answer_after = "####" }'
    settings = ["domains.0.path=data/gsm8k", f"domains.0.arguments={arguments}"]
    _, after = scaled("stages/tulu3-8b-rlvr", tmp_path, *settings)
    assert after.domains[0].arguments == {"answer_after": "####"}


@pytest.mark.parametrize("name", [n for n in preset_names() if load_preset(n).checkpoint])
@pytest.mark.parametrize("num_layers", [4, 6, 8])
def test_a_tiny_model_keeps_the_parts_of_its_family(name, num_layers):
    released = load_preset(name).hf
    tiny = tiny_config(released, num_layers) | {"vocab_size": 320}
    before = model_fields(released)
    after = model_fields(tiny)  # refuses what the trainer does not compute
    facts = facts_from_hf(tiny)
    assert facts.num_layers == num_layers
    assert facts.is_moe == facts_from_hf(released).is_moe
    assert facts.is_mla == facts_from_hf(released).is_mla
    assert facts.has_dense_layers == facts_from_hf(released).has_dense_layers
    assert after["rope"]["type"] == before["rope"]["type"]
    for field in ("n_group", "q_lora_rank", "shared_expert_intermediate_size", "attention_bias"):
        assert bool(after.get(field)) == bool(before.get(field)), field
    assert after.get("tie_word_embeddings") == before.get("tie_word_embeddings")
    assert facts.hidden_size <= 320


@pytest.mark.parametrize("name", [n for n in preset_names() if load_preset(n).checkpoint])
def test_a_tiny_model_for_fp8_divides_into_blocks(name):
    """Those of two ranks and two workers, whatever its attention and experts are."""
    released = load_preset(name).hf
    if "vision_config" in released:
        return  # `rollout.fp8` refuses it
    tiny = tiny_config(released, 4, fills_blocks=True) | {"vocab_size": 320}
    model_fields(tiny)
    facts = facts_from_hf(tiny)
    run = resolve("dense/qwen3-8b").config
    trainer = run.trainer.model_copy(update={"tensor_parallel_size": 2, "num_ranks": 2})
    rollout = run.rollout.model_copy(update={"tensor_parallel_size": 2})
    run = run.model_copy(update={"trainer": trainer, "rollout": rollout})
    assert list(FP8_RULES.violations(run, facts, config=run)) == []
    narrow = facts_from_hf(tiny_config(released, 4) | {"vocab_size": 320})
    assert list(FP8_RULES.violations(run, narrow, config=run)) != []


def test_a_tiny_model_that_sees_keeps_its_tower(tmp_path):
    released = load_preset("qwen2.5-vl-3b").hf
    write_tiny_checkpoint(tmp_path, tiny_config(released, 4), ["<|im_start|>"], 0)
    hf = read_config(tmp_path)
    assert hf["vision_config"]["out_hidden_size"] == hf["hidden_size"]
    assert hf["rope_scaling"]["mrope_section"] == [4, 6, 6]
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.token_text(hf["image_token_id"]) == "<|image_pad|>"
    settings = ImageSettings.of_model(hf)
    assert settings.tokens_of(2000, 1000) == (2, 5)  # of at most 16 tokens


def test_a_tiny_model_with_a_deep_tower_keeps_it(tmp_path):
    released = load_preset("qwen3-vl-8b").hf
    write_tiny_checkpoint(tmp_path, tiny_config(released, 4), ["<|im_start|>"], 0)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["text_config"]["num_hidden_layers"] == 4 and "hidden_size" not in written
    hf = read_config(tmp_path)
    assert facts_from_hf(hf).num_deep_layers == 1
    assert hf["rope_scaling"]["mrope_section"] == [6, 5, 5]
    assert tiny_config(written | {"image_processor": hf["image_processor"]}, 4).keys() == hf.keys()
    assert ImageSettings.of_model(hf).tokens_of(2000, 1000) == (2, 5)  # of at most 16 tokens


def test_pictures_are_made_up_for_a_model_that_sees(tmp_path):
    before, after = scaled("systems/vlm_r1", tmp_path)
    assert before.domains[0].image_field == "image"
    (problem, *others) = problems_of(after, 0)
    assert problem.metadata["image"][0].startswith("data:image/png;base64,")
    assert len({other.metadata["image"][0] for other in others}) == len(others)
    assert problem.metadata["width"] == problem.metadata["height"] == 56
    reward = after.domains[0].rewards[0]
    limits = ImageSettings.of_model(read_config(tmp_path)).limits
    assert limits["max_pixels"] == 16 * 28 * 28
    assert {name: reward.arguments[name] for name in limits} == limits
    assert box_iou(
        f"<answer>{problem.answer}</answer>",
        problem.answer,
        metadata=problem.metadata,
        answer_tag="answer",
        size_fields=("width", "height"),
    ) == pytest.approx(1)


def test_unequal_stages_stay_unequal(tmp_path):
    before, after = scaled("moe/deepseek-v3", tmp_path)
    assert before.trainer.last_stage_layers
    assert after.trainer.last_stage_layers == 2
    assert num_layers_of(before.trainer) == 6


def test_virtual_stages_stay_virtual(tmp_path):
    _, after = scaled("dense/llama-3.3-70b", tmp_path, "trainer.virtual_pipeline_parallel_size=4")
    assert after.trainer.virtual_pipeline_parallel_size == 2


UNEQUAL = "moe/qwen3-235b-a22b"
EQUAL_LAST = "trainer.last_stage_layers=null"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [EQUAL_LAST, "trainer.first_stage_layers=10"],
        ["trainer.first_stage_layers=12"],
    ],
    ids=["last", "first", "both"],
)
@pytest.mark.parametrize("vpp", ["null", "2"])
def test_unequal_stages_may_be_virtual(tmp_path, overrides, vpp):
    virtual = f"trainer.virtual_pipeline_parallel_size={vpp}"
    before, after = scaled(UNEQUAL, tmp_path, virtual, *overrides)
    trainer = after.trainer
    assert (trainer.virtual_pipeline_parallel_size is None) == (vpp == "null")
    num_layers = num_layers_of(before.trainer)
    given = trainer.first_stage_layers or trainer.last_stage_layers
    assert given is not None and given != num_layers - given


def test_a_model_of_a_graph_fits_the_pipelines_of_all_its_stages(tmp_path):
    equal = [EQUAL_LAST, "trainer.pipeline_parallel_size=2"]
    layouts = [[], equal, [*equal, "trainer.num_ranks=64"]]
    num_layers = max(num_layers_of(resolve(UNEQUAL, layout).config.trainer) for layout in layouts)
    for layout in layouts:
        config = resolve(UNEQUAL, layout).config
        inputs = stand_ins(config, tmp_path, num_layers)
        changes = scale_down(config, inputs)
        resolve(UNEQUAL, [*layout, *(change.override for change in changes)])


def test_what_needs_a_gpu_is_set_otherwise(tmp_path):
    """The trainer refuses these where it has none; IPC goes through host memory there."""
    settings = ["trainer.fp8=blockwise", "trainer.attention=transformer_engine"]
    settings += ["trainer.moe_dispatcher=deepep", "publish.method=nccl"]
    _, after = scaled("moe/qwen3-30b-a3b", tmp_path, *settings)
    assert after.trainer.fp8 == "none"
    assert after.trainer.attention == "auto"
    assert after.trainer.moe_dispatcher == "auto"
    assert after.publish.method == after.publish_carrier == "gloo"
    for kept in ("ipc", "gloo", "file"):
        _, after = scaled("dense/qwen2.5-7b", tmp_path, f"publish.method={kept}")
        assert after.publish.method == kept


def test_sampling_keeps_no_more_ids_than_the_tiny_model_has(tmp_path):
    _, after = scaled("dense/qwen2.5-7b", tmp_path, "rollout.top_k=1000")
    assert after.rollout.top_k == MAX_SAMPLED_TOP_K
    _, after = scaled("dense/qwen2.5-7b", tmp_path, "rollout.top_k=40")
    assert after.rollout.top_k == 40


def test_an_override_that_is_small_already_is_kept(tmp_path):
    _, after = scaled("moe/qwen3-30b-a3b", tmp_path, "rollout.num_replicas=1")
    assert after.rollout.num_replicas == 1


def test_lengths_in_rewards_shrink_with_the_completions(tmp_path):
    before, after = scaled("dense/qwen3-8b", tmp_path)
    share = before.domains[0].rewards[1].arguments["buffer"] / before.rollout.max_new_tokens
    buffer = after.domains[0].rewards[1].arguments["buffer"]
    assert buffer == int(share * MAX_NEW_TOKENS)


def test_judges_are_asked_at_the_local_server(tmp_path):
    before, after = scaled("stages/deepseek-v3-domains", tmp_path)
    assert before.domains[2].rewards[0].arguments["url"] == "http://judge:8000"
    assert after.domains[2].rewards[0].arguments["url"] == "http://127.0.0.1:1"


SERVED = (
    "distillation.mode=topk_tail",
    "distillation.teachers=[{url='http://big:8000', model='math'}]",
    "rollout.max_model_len=2048",
)


def test_a_critic_begins_with_a_model_as_large_as_the_policy(tmp_path):
    flags = ["critic.path=/cluster/scorer"]
    config = resolve("demo/ppo-moe-cpu", flags).config
    inputs = replace(stand_ins(config, tmp_path), model=Path("/tiny/model"))
    assert {change.key: change.after for change in scale_down(config, inputs)}["critic.path"] == (
        "/tiny/model"
    )
    model = config.model.model_copy(update={"path": tmp_path})  # it is on this machine, and stays
    here = config.model_copy(update={"model": model})
    assert {change.key: change.after for change in scale_down(here, inputs)}["critic.path"] == (
        str(tmp_path)
    )


def test_teachers_behind_servers_are_asked_at_a_local_one(tmp_path):
    config = resolve("stages/tiny-distil", SERVED).config
    inputs = replace(stand_ins(config, tmp_path), teacher_server="http://127.0.0.1:2")
    changes = scale_down(config, inputs)
    overrides = [*SERVED, *(change.override for change in changes)]
    after = resolve("stages/tiny-distil", overrides).config
    assert after.distillation is not None
    [teacher] = after.distillation.teachers
    assert teacher.url == "http://127.0.0.1:2" and teacher.path is None and teacher.model is None
    assert after.distillation.mode == "topk_tail"
    assert after.distillation.top_k == MAX_TOP_K
    # its server takes one token more than the run's engines
    assert after.rollout.max_model_len == MAX_MODEL_LEN - 1
    of_teachers = [change.key for change in changes if "teachers" in change.key]
    assert of_teachers == ["distillation.teachers.0.url", "distillation.teachers.0.model"]


@pytest.mark.parametrize("mode", ["full", "sampled", "topk_tail"])
def test_the_likeliest_tokens_are_few_where_a_mode_has_some(tmp_path, mode):
    _, after = scaled("stages/tiny-distil", tmp_path, f"distillation.mode={mode}")
    assert (after.distillation.top_k == MAX_TOP_K) == (mode == "topk_tail")


def test_a_teacher_has_the_tokenizer_of_the_model_that_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "grpo_megatron.rehearsal.tiny_family.init_weights", lambda directory, seed: None
    )
    given = tmp_path / "given"
    config = resolve("stages/tiny-distil", SERVED).config
    hf, _ = configuration_of(config.model)
    write_tiny_checkpoint(given, tiny_config(hf, 7), ["<|only_here|>"], seed=0)
    (given / "model.safetensors").touch()
    (given / "model.safetensors.index.json").touch()
    with TeacherServers(tmp_path) as servers:
        writer = StandInWriter(
            tmp_path / "inputs", "http://127.0.0.1:1", servers, 4, [], given_model=given
        )
        inputs = writer.write(config, config)
        again = writer.write(config, config)
        assert len(servers) == 1
    assert inputs.teacher_server == again.teacher_server
    [teacher] = (tmp_path / "inputs").glob("teacher-*")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (teacher / name).read_bytes() == (given / name).read_bytes()
    assert not list(teacher.glob("*safetensors*"))
    assert json.loads((teacher / "config.json").read_text())["num_hidden_layers"] == 4


def test_made_up_rows_of_a_domain_are_a_file_whatever_it_is_called(tmp_path):
    config = resolve("stages/tiny-gsm8k", ["domains.0.name=code/c++"]).config
    with TeacherServers(tmp_path) as servers:
        writer = StandInWriter(tmp_path, "http://127.0.0.1:1", servers, 4, [])
        [file] = writer.write(config, config).data.values()
    assert file.parent == tmp_path and file.read_text()


def test_control_tokens_of_templates_become_tokens():
    config = resolve("moe/deepseek-v3").config
    assert "<｜User｜>" in special_tokens_of(config)
    config = resolve("dense/llama-3.3-70b").config
    assert "<|eot_id|>" in special_tokens_of(config)


def test_a_model_that_is_here_is_kept_unless_another_is_chosen(tmp_path):
    model = ModelConfig(path=tmp_path)
    config = resolve("demo/gspo-moe-cpu").config
    with_model = config.model_copy(update={"model": model})
    inputs = StandIns(Path("tiny"), Path("tiny"), {}, "http://127.0.0.1:1")
    keys = [change.key for change in scale_down(with_model, inputs)]
    assert "model.path" not in keys
    chosen = replace(inputs, model_is_given=True)
    changes = {change.key: change.after for change in scale_down(with_model, chosen)}
    assert changes["model.path"] == "tiny"


@pytest.mark.parametrize("is_here", [True, False])
def test_adapters_of_another_model_begin_anew(tmp_path, is_here):
    """A tiny model of random weights cannot have those of the real one, whether they are here."""
    adapters = tmp_path / "adapters"
    if is_here:
        adapters.mkdir()
    config = resolve("moe/qwen3-30b-a3b-lora").config
    lora = config.lora.model_copy(update={"path": adapters})
    config = config.model_copy(update={"lora": lora})
    tiny = StandIns(Path("tiny"), Path("tiny"), {}, "http://127.0.0.1:1")
    changes = {change.key: change.after for change in scale_down(config, tiny)}
    assert changes["lora.path"] is None
    here = config.model_copy(update={"model": ModelConfig(path=tmp_path)})
    keys = [change.key for change in scale_down(here, tiny)]
    assert ("lora.path" in keys) == (not is_here)


def test_the_coin_is_right_half_of_the_time_and_always_the_same():
    tossed = [coin("", "", prompt="p", token_ids=(token,)) for token in range(400)]
    assert set(tossed) == {0.0, 1.0}
    assert 120 < sum(tossed) < 280
    assert tossed == [coin("", "", prompt="p", token_ids=(token,)) for token in range(400)]


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], (2, 4, 5)),
        (["objective.subset=shortest", "objective.subset_size=3"], (3, 6, 7)),
        (["objective.passk_k=4"], (4, 5, 6)),
    ],
)
def test_prompts_have_fewer_samples_but_still_differ(tmp_path, overrides, sizes):
    _, small = scaled("systems/xrpo", tmp_path, *overrides)
    base, mean, most = sizes
    assert small.allocation.base_samples_per_prompt == base
    assert small.batch.num_samples_per_prompt == mean
    assert small.largest_group == most
    assert small.seeding is not None


def test_an_agents_turns_are_few_and_its_documents_made_up(tmp_path):
    config = resolve("demo/agent-calculator-cpu").config
    domain = config.domains[0]
    environment = EnvironmentConfig(
        name="search",
        arguments={"corpus": "no/such.jsonl", "index": str(tmp_path / "my.fts5")},
        max_turns=20,
        processes=4,
        servers=8,
    )
    searching = config.model_copy(
        update={
            "cold_start": None,
            "domains": (domain.model_copy(update={"environment": environment}),),
        }
    )
    assert missing_corpora(searching) == [0]
    refuse_unbound_environments_here(searching)
    assert not (tmp_path / "my.fts5").exists()  # the index of other documents
    write_corpus(tmp_path / "documents.jsonl")
    inputs = replace(stand_ins(config, tmp_path), corpora={0: tmp_path / "documents.jsonl"})
    changes = {change.key: change.after for change in scale_down(searching, inputs)}
    key = "domains.0.environment"
    assert changes[f"{key}.max_turns"] == MAX_TURNS and changes[f"{key}.processes"] == 1
    assert changes[f"{key}.turn_tokens"] == MAX_TURN_TOKENS
    assert changes[f"{key}.arguments.corpus"] == str(tmp_path / "documents.jsonl")
    assert changes[f"{key}.arguments.index"] == str(tmp_path / "documents.jsonl.fts5")
    assert changes[f"{key}.servers"] == 2
    assert "rollout.max_model_len" not in changes  # 128
    plain = stand_ins(config, tmp_path)
    demonstrating = {change.key: change.after for change in scale_down(config, plain)}
    assert demonstrating["rollout.max_new_tokens"] == MAX_EPISODE_TOKENS
    assert demonstrating["rollout.max_model_len"] == MAX_MODEL_LEN
    assert f"{key}.turn_tokens" not in demonstrating


def test_episodes_of_a_program_are_short_too(tmp_path):
    config = resolve("demo/agent-calculator-cpu").config
    agent = AgentConfig(
        command=("python", "agent.py"), max_turns=20, turn_tokens=512, episode_tokens=4096
    )
    domain = config.domains[0].model_copy(update={"environment": None, "agent": agent})
    driven = config.model_copy(update={"cold_start": None, "domains": (domain,)})
    changes = {}
    for change in scale_down(driven, stand_ins(config, tmp_path)):
        changes[change.key] = change.after
    key = "domains.0.agent"
    assert changes[f"{key}.max_turns"] == MAX_TURNS
    assert changes[f"{key}.turn_tokens"] == MAX_TURN_TOKENS
    assert changes[f"{key}.episode_tokens"] == MAX_EPISODE_TOKENS
