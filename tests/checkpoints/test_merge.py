"""Weighted means of checkpoints, tensor by tensor."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from grpo_megatron.checkpoints.merge import merge_checkpoints
from grpo_megatron.config.presets import load_preset
from grpo_megatron.errors import CheckpointError, ConfigError, MismatchError
from grpo_megatron.plan.hf_config import flattened
from grpo_megatron.plan.reward_labels import PROBABILITIES, SCALARS
from tests.trainer.vision import PROCESSOR, VISION

QWEN = dict(load_preset("tiny-qwen3-moe").hf)
LLAMA = dict(load_preset("llama-3.1-8b").hf)
DEEPSEEK = dict(load_preset("moonlight-16b-a3b").hf)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def checkpoint(path, hf=None, tokens=("a", "b"), **tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf or {"model_type": "x"}))
    (path / "generation_config.json").write_text(path.name)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(path / "tokenizer.json"))
    save_file(tensors, path / "model.safetensors")
    return path


def merged(tmp_path, *parts, weights=None, dtype=None):
    """The tensors of a merge of equal parts."""
    weights = weights or [1.0] * len(parts)
    merge_checkpoints(dict(zip(parts, weights, strict=True)), tmp_path / "out", dtype)
    return load_file(tmp_path / "out" / "model.safetensors")


def refused(tmp_path, *parts, kind=CheckpointError, dtype=None):
    """What a merge is refused with; nothing is there under its name."""
    with pytest.raises(kind) as caught:
        merged(tmp_path, *parts, dtype=dtype)
    assert not (tmp_path / "out").exists()
    return caught.value


def test_a_weighted_mean(tmp_path):
    torch.manual_seed(0)
    one, two = ({"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16()} for _ in range(2))
    parts = {checkpoint(tmp_path / "one", **one): 3.0, checkpoint(tmp_path / "two", **two): 1.0}
    merge_checkpoints(parts, tmp_path / "out", shard_bytes=40)
    found = {}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    for name in one:
        expected = (0.75 * one[name].double() + 0.25 * two[name].double()).to(one[name].dtype)
        assert torch.equal(found[name], expected)
    assert (tmp_path / "out" / "generation_config.json").read_text() == "one"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out.partial").exists()


def test_one_checkpoint_in_another_dtype(tmp_path):
    weights = torch.randn(4, 3)
    merge_checkpoints({checkpoint(tmp_path / "one", a=weights): 1.0}, tmp_path / "out", "bfloat16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], weights.bfloat16())


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_config_says_the_dtype_that_was_wanted(tmp_path, field):
    """Where transformers of any version keeps it, also of a model that sees."""
    parts = {field: "float32", "text_config": {field: "float32"}, "vision_config": {"depth": 2}}
    unsaid = {name: value for name, value in QWEN.items() if name != "torch_dtype"}
    one = checkpoint(tmp_path / "one", unsaid | parts, w=torch.ones(4))
    (one / "preprocessor_config.json").write_text("{}")
    merged(tmp_path, one, dtype="bfloat16")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    halves = {field: "bfloat16", "text_config": {field: "bfloat16"}, "vision_config": {"depth": 2}}
    assert found == unsaid | halves
    merged(tmp_path, one)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == unsaid | parts


@pytest.mark.parametrize("other", [{"a": torch.ones(3, 3)}, {"b": torch.ones(4, 3)}])
def test_checkpoints_of_other_models_are_refused(tmp_path, other):
    parts = {
        checkpoint(tmp_path / "one", a=torch.ones(4, 3)): 1.0,
        checkpoint(tmp_path / "two", **other): 1.0,
    }
    with pytest.raises(
        CheckpointError,
        match=r"of the model in .*one:\n  1 (of another|missing)",
    ) as caught:
        merge_checkpoints(parts, tmp_path / "out")
    assert caught.value.remedy == "merge models of one shape"
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 7e5}, "its rotary embedding is"),
        ({"rms_norm_eps": 1e-3}, "layernorm_epsilon of its config.json is 0.001"),
        ({"num_experts_per_tok": 3}, "moe_router_topk of its config.json is 3"),
    ],
)
def test_models_that_compute_something_else_are_refused(tmp_path, change, words):
    """Their tensors have the same names and shapes."""
    one = checkpoint(tmp_path / "one", QWEN, w=torch.ones(4, 3))
    two = checkpoint(tmp_path / "two", QWEN | change, w=torch.ones(4, 3))
    error = refused(tmp_path, one, two)
    assert words in error.message and f"of the model in {one}" in error.message
    assert error.where == str(two / "config.json") and error.remedy


SEEING = flattened(VISION)


def seeing(path, tower=(), processor=(), **fields):
    """The checkpoint of a model that sees."""
    hf = SEEING | fields | {"vision_config": SEEING["vision_config"] | dict(tower)}
    found = checkpoint(path, hf, w=torch.ones(4))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | dict(processor)))
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tower": {"fullatt_block_indexes": [0]}}, "vision_config.fullatt_block_indexes of its"),
        ({"tower": {"window_size": 56}}, "vision_config.window_size of its config.json is 56"),
        ({"tower": {"num_heads": 8}}, "vision_config.num_heads of its config.json is 8"),
        ({"processor": {"image_mean": [0.5, 0.5, 0.5]}}, "mean of its images is (0.5, 0.5, 0.5)"),
        ({"processor": {"rescale_factor": 1.0}}, "rescale_factor of its images is 1.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings of its config.json is True"),
    ],
)
def test_models_that_see_something_else_are_refused(tmp_path, change, words):
    error = refused(tmp_path, seeing(tmp_path / "one"), seeing(tmp_path / "two", **change))
    assert words in error.message and f"of the model in {tmp_path / 'one'}" in error.message


def test_limits_of_images_and_defaults_of_a_tower_may_differ(tmp_path):
    one = seeing(tmp_path / "one", {"window_size": 112})
    two = seeing(tmp_path / "two", {"window_size": None}, {"max_pixels": 28 * 28 * 16})
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.ones(4))


@pytest.mark.parametrize("without", [["one"], ["two"], ["one", "two"]])
@pytest.mark.parametrize("fields", [{}, {"transformers_version": "5.0.0"}])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_models_that_see_may_have_been_saved_without_their_processor(
    tmp_path, without, fields, dtype
):
    """Which is then that of the first part, or whoever loads the result adds it."""
    parts = [seeing(tmp_path / "one"), seeing(tmp_path / "two", **fields)]
    for name in without:
        (tmp_path / name / "preprocessor_config.json").unlink()
    assert torch.equal(merged(tmp_path, *parts, dtype=dtype)["w"].float(), torch.ones(4))
    told = (tmp_path / "out" / "preprocessor_config.json").exists()
    assert told == ("one" not in without)


def test_a_model_without_its_processor_is_compared_by_its_config(tmp_path):
    parts = [seeing(tmp_path / "one"), seeing(tmp_path / "two", {"window_size": 56})]
    (tmp_path / "two" / "preprocessor_config.json").unlink()
    assert "vision_config.window_size" in refused(tmp_path, *parts).message


def test_reward_models_have_no_embeddings_to_tie(tmp_path):
    parts = []
    for tied in (True, False):
        hf = QWEN | {
            "architectures": ["Qwen3MoeForSequenceClassification"],
            "tie_word_embeddings": tied,
        }
        parts.append(checkpoint(tmp_path / str(tied), hf, w=torch.ones(4)))
    assert torch.equal(merged(tmp_path, *parts)["w"], torch.ones(4))


def test_numbers_without_dimensions_are_merged(tmp_path):
    one = checkpoint(tmp_path / "one", logit_scale=torch.tensor(1.0))
    two = checkpoint(tmp_path / "two", logit_scale=torch.tensor(2.0))
    assert torch.equal(merged(tmp_path, one, two)["logit_scale"], torch.tensor(1.5))


def test_an_index_without_a_tensor_of_its_files_is_refused(tmp_path):
    """The merged model would be without it."""
    parts = []
    for name in ("one", "two"):
        part = checkpoint(tmp_path / name, a=torch.ones(4), b=torch.ones(4))
        index = {"weight_map": {"a": "model.safetensors"}}
        (part / "model.safetensors.index.json").write_text(json.dumps(index))
        parts.append(part)
    assert "the index disagree about ['b']" in refused(tmp_path, *parts).message


def test_what_is_no_weight_is_refused_in_every_part(tmp_path):
    one = checkpoint(tmp_path / "one", a=torch.ones(4))
    two = checkpoint(tmp_path / "two", a=torch.arange(4))
    error = refused(tmp_path, one, two)
    assert "tensor 'a' is I64" in error.message and error.where == str(two)
    assert not (tmp_path / "out.partial").exists()


def test_fields_without_influence_may_differ(tmp_path):
    one = checkpoint(tmp_path / "one", QWEN, w=torch.zeros(4))
    other = QWEN | {"transformers_version": "5", "torch_dtype": "float16"}
    two = checkpoint(tmp_path / "two", other, w=torch.ones(4))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.full((4,), 0.5))


def test_dtypes_of_nested_tables_may_differ(tmp_path):
    """As in what was merged at another dtype, which is merged again."""
    parts = []
    for name, dtype in (("one", "float32"), ("two", "bfloat16")):
        tower = {"depth": 2, "torch_dtype": dtype, "dtype": dtype}
        hf = {"model_type": "x", "torch_dtype": dtype, "audio_config": tower}
        parts.append(checkpoint(tmp_path / name, hf, w=torch.ones(4)))
    hf = {"model_type": "x", "audio_config": {"depth": 3, "dtype": "float32"}}
    deeper = checkpoint(tmp_path / "three", hf, w=torch.ones(4))
    assert "audio_config of its config.json" in refused(tmp_path, parts[0], deeper).message
    assert torch.equal(merged(tmp_path, *parts)["w"], torch.ones(4))


def test_fields_of_a_family_that_is_not_known_are_compared(tmp_path):
    one = checkpoint(tmp_path / "one", {"model_type": "x", "width": 3}, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", {"model_type": "x", "width": 4}, w=torch.zeros(4))
    assert "width of its config.json is 4, of the model" in refused(tmp_path, one, two).message


def test_reward_models_with_other_scalars_are_refused(tmp_path):
    parts = []
    for labels in (["maths", "code"], ["code", "maths"]):
        named = {str(number): label for number, label in enumerate(labels)}
        hf = QWEN | {"architectures": ["Qwen3MoeForSequenceClassification"], "id2label": named}
        parts.append(checkpoint(tmp_path / labels[0], hf, w=torch.ones(2, 4)))
    assert "the scalars of its head are ['code', 'maths']" in refused(tmp_path, *parts).message


def reward_model(path, **fields):
    hf = QWEN | {"architectures": ["Qwen3MoeForSequenceClassification"], "num_labels": 1}
    return checkpoint(path, hf | fields, w=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SCALARS, PROBABILITIES), (PROBABILITIES, SCALARS), (SCALARS, "single_label_classification")],
)
def test_reward_models_of_other_kinds_are_refused(tmp_path, ours, theirs):
    """A mean of a score of answers and of what says which steps are right is neither."""
    one = reward_model(tmp_path / "one", problem_type=ours)
    two = reward_model(tmp_path / "two", problem_type=theirs)
    error = refused(tmp_path, one, two)
    assert "the scalars of its head are " in error.message and "problem_type" in error.message
    assert ours in error.message and theirs in error.message


def test_process_reward_models_that_score_at_other_tokens_are_refused(tmp_path):
    fields = {"problem_type": PROBABILITIES}
    one = reward_model(tmp_path / "one", **fields, step_token="<extra_0>")
    two = reward_model(tmp_path / "two", **fields, step_token="<|step|>")
    words = f"it scores steps at '<|step|>', the model in {one} at '<extra_0>'"
    assert words in refused(tmp_path, one, two).message
    other = reward_model(tmp_path / "other", **fields)
    assert torch.equal(merged(tmp_path, one, other)["w"], torch.ones(2, 4))


def test_a_reward_model_may_not_say_its_kind(tmp_path):
    """As other trainers write them."""
    one = reward_model(tmp_path / "one", problem_type=SCALARS)
    two = reward_model(tmp_path / "two", problem_type=None)
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.ones(2, 4))


V3 = DEEPSEEK | {"unheard_of": 1}
"""Of a known family, with a field for which the trainer refuses it."""
MIXTRAL = {"model_type": "mixtral", "unheard_of": 1}
MISTRAL = {"model_type": "mistral", "unheard_of": 1}
QWEN2 = {"model_type": "qwen2", "unheard_of": 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"model_type": "x"}, {"model_type": "y"}, "model_type of its config.json is 'y'"),
        (V3, V3 | {"model_type": "deepseek_v2"}, "model_type of its config.json is 'deepseek_v2'"),
        (DEEPSEEK, V3 | {"rope_interleave": False}, "rope_interleave of its config.json is False"),
        (V3 | {"rope_interleave": False}, DEEPSEEK, "its config.json has no rope_interleave"),
        (
            MIXTRAL,
            MIXTRAL | {"sliding_window": 4096},
            "sliding_window of its config.json is 4096",
        ),
        (QWEN2, QWEN2 | {"layer_types": ["full_attention", "other"]}, "layer_types of its"),
        (V3, V3 | {"tie_word_embeddings": True}, "tie_word_embeddings of its config.json is True"),
    ],
)
def test_what_cannot_be_trained_is_compared_by_what_is_known_of_its_family(
    tmp_path, ours, theirs, words
):
    ours = {name: value for name, value in ours.items() if name != "tie_word_embeddings"}
    one = checkpoint(tmp_path / "one", ours, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", theirs, w=torch.ones(4))
    assert words in refused(tmp_path, one, two).message


@pytest.mark.parametrize(
    "change",
    [
        {"rope_interleave": True},
        {"tie_word_embeddings": False},
        {"attention_bias": False},
        {"model_type": "kimi_k2"},
    ],
)
def test_defaults_that_one_part_spells_out_are_none_of_another_model(tmp_path, change):
    ours = {name: value for name, value in V3.items() if name not in change}
    ours["model_type"] = "deepseek_v3"
    one = checkpoint(tmp_path / "one", ours, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", ours | change, w=torch.ones(4))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.full((4,), 0.5))


@pytest.mark.parametrize(
    ("ours", "change"),
    [
        (QWEN2, {"layer_types": ["full_attention", "full_attention"]}),
        (MISTRAL, {"sliding_window": 4096}),  # which transformers takes where it is missing
    ],
)
def test_fields_that_transformers_writes_out_are_none_of_another_model(tmp_path, ours, change):
    one = checkpoint(tmp_path / "one", ours, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", ours | change, w=torch.ones(4))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.full((4,), 0.5))


@pytest.mark.parametrize("weight", [math.inf, math.nan, 0.0, -1.0])
def test_weights_are_numbers_above_zero(tmp_path, weight):
    one = checkpoint(tmp_path / "one", w=torch.ones(4))
    two = checkpoint(tmp_path / "two", w=torch.ones(4))
    with pytest.raises(ConfigError, match="cannot weigh") as error:
        merged(tmp_path, one, two, weights=[1.0, weight])
    assert error.value.where == str(two) and not (tmp_path / "out").exists()


def test_a_merge_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="of no checkpoints"):
        merge_checkpoints({}, tmp_path / "out")


def tied(path, head=None):
    tensors = {"model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3)}
    if head is not None:
        tensors["lm_head.weight"] = head
    return checkpoint(path, QWEN | {"tie_word_embeddings": True}, **tensors)


@pytest.mark.parametrize("order", [1, -1])
def test_tied_embeddings_may_be_there_twice(tmp_path, order):
    """As some programs save them."""
    table = torch.arange(12.0).reshape(4, 3)
    parts = [tied(tmp_path / "one"), tied(tmp_path / "two", table)][::order]
    found = merged(tmp_path, *parts)
    assert list(found) == ["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], table)


def test_an_output_layer_that_is_not_the_embeddings_is_not_left_out(tmp_path):
    other = tied(tmp_path / "two", torch.ones(4, 3))
    error = refused(tmp_path, tied(tmp_path / "one"), other)
    assert "lm_head.weight is another matrix than model.embed_tokens" in error.message
    assert error.where == str(other)


def test_models_with_other_tokens_are_refused(tmp_path):
    one = checkpoint(tmp_path / "one", QWEN, w=torch.ones(4))
    two = checkpoint(tmp_path / "two", QWEN, tokens=("b", "a"), w=torch.ones(4))
    error = refused(tmp_path, one, two)
    assert f"has the id 1 for 'a', that of the model in {one} 0" in error.message
    assert error.where == str(two / "tokenizer.json")


def test_a_tokenizer_may_be_laid_out_otherwise(tmp_path):
    one = checkpoint(tmp_path / "one", QWEN, w=torch.ones(4))
    two = checkpoint(tmp_path / "two", QWEN, w=torch.ones(4))
    file = two / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.ones(4))


def test_a_tokenizer_may_have_further_tokens(tmp_path):
    one = checkpoint(tmp_path / "one", QWEN, w=torch.ones(4))
    two = checkpoint(tmp_path / "two", QWEN, tokens=("a", "b", "<pad>"), w=torch.ones(4))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.ones(4))


GEMMA = {"model_type": "gemma2", "hidden_size": 8, "rope_theta": 1e4, "head_dim": 4}
"""Of a family that the trainer does not know."""
GEMMA_BY_TRANSFORMERS_5 = {
    "model_type": "gemma2",
    "hidden_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "layer_types": ["full_attention"],
    "head_dim": 4,
    "attention_dropout": 0.0,
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(
            LLAMA,
            LLAMA | {"unsloth_version": "2026.1", "_attn_implementation": "sdpa"},
            id="written by another trainer",
        ),
        pytest.param(
            LLAMA | {"sliding_window": 4096, "torch_dtype": "float32"},
            LLAMA | {"sliding_window": 4096, "torch_dtype": "bfloat16"},
            id="alike in what is not trained here",
        ),
        pytest.param(GEMMA, GEMMA_BY_TRANSFORMERS_5, id="saved again by transformers 5"),
    ],
)
def test_fine_tunes_of_one_model_are_merged_and_exported(tmp_path, ours, theirs):
    one = checkpoint(tmp_path / "one", ours, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", theirs, w=torch.ones(4))
    assert torch.equal(merged(tmp_path, one, two)["w"], torch.full((4,), 0.5))
    shutil.rmtree(tmp_path / "out")
    assert torch.equal(merged(tmp_path, two, dtype="bfloat16")["w"], torch.ones(4).bfloat16())


def test_another_theta_of_a_family_that_is_not_known_is_seen_in_either_form(tmp_path):
    one = checkpoint(tmp_path / "one", GEMMA | {"rope_theta": 5e5}, w=torch.zeros(4))
    two = checkpoint(tmp_path / "two", GEMMA_BY_TRANSFORMERS_5, w=torch.ones(4))
    assert "rope_parameters of its config.json" in refused(tmp_path, one, two).message


def test_what_chooses_experts_keeps_its_dtype(tmp_path):
    """As in a conversion: a rounded bias would choose other experts."""
    bias = torch.randn(64)
    carried = f"model.layers.{DEEPSEEK['num_hidden_layers'] - 1}.self_attn.rotary_emb.inv_freq"
    tensors = {BIAS: bias, carried: bias.clone(), "model.norm.weight": bias.clone()}
    found = merged(tmp_path, checkpoint(tmp_path / "one", DEEPSEEK, **tensors), dtype="bfloat16")
    assert torch.equal(found[BIAS], bias) and torch.equal(found[carried], bias)
    assert torch.equal(found["model.norm.weight"], bias.bfloat16())


def test_numbers_that_a_dtype_cannot_hold_are_named(tmp_path):
    large = torch.ones(64)
    large[7] = -1e6
    one = checkpoint(tmp_path / "one", w=large)
    error = refused(tmp_path, one, dtype="float16")
    assert "w has numbers up to 1e+06, which torch.float16 cannot hold" in error.message
    assert error.remedy == "choose bfloat16 or float32"
    assert torch.equal(merged(tmp_path, one, dtype="bfloat16")["w"], large.bfloat16())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, wrong):
    damaged = torch.ones(4, 3)
    damaged[2, 1] = wrong
    one = checkpoint(tmp_path / "one", w=torch.ones(4, 3))
    two = checkpoint(tmp_path / "two", w=damaged)
    error = refused(tmp_path, one, two)
    assert error.message == "1 numbers of w are not finite" and error.where == str(two)


def test_a_part_that_is_not_what_was_written_is_refused(tmp_path):
    """By the digests that a conversion, or an earlier merge, has recorded."""
    part = checkpoint(tmp_path / "part", a=torch.ones(2))
    merge_checkpoints({part: 1.0}, tmp_path / "converted")
    save_file({"a": torch.tensor([1.0, 2.0])}, tmp_path / "converted" / "model.safetensors")
    error = refused(tmp_path, part, tmp_path / "converted", kind=MismatchError)
    assert error.message == "tensor 'a' is not what was written, by conversion.json"
    assert error.where == str(tmp_path / "converted")
    (tmp_path / "converted" / "conversion.json").unlink()
    assert merged(tmp_path, part, tmp_path / "converted")["a"].tolist() == [1.0, 1.5]


@pytest.mark.parametrize("weight", [1e308, 5e-324])
def test_weights_whose_sum_is_no_number(tmp_path, weight):
    one = checkpoint(tmp_path / "one", w=torch.full((4,), 2.0))
    two = checkpoint(tmp_path / "two", w=torch.full((4,), 4.0))
    found = merged(tmp_path, one, two, weights=[weight, weight])
    assert torch.equal(found["w"], torch.full((4,), 3.0))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("text", [None, "[]", "null", "{"])
def test_a_part_without_a_readable_config_is_refused(tmp_path, place, text):
    parts = [checkpoint(tmp_path / name, w=torch.ones(4)) for name in ("one", "two")]
    file = parts[place] / "config.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    error = refused(tmp_path, *parts, kind=ConfigError)
    assert error.where == str(file) and error.remedy


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path):
    one = checkpoint(tmp_path / "one", w=torch.ones(4))
    file = one / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert torch.equal(merged(tmp_path, one)["w"], torch.ones(4))
    assert (tmp_path / "out" / "config.json").read_bytes() == file.read_bytes()
