"""The character tokenizer, the wrapper, and prompts of whole recipes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.prompts import load_prompts, load_splits
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer, token_with_another_id
from grpo_megatron.errors import DataError

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
ROOT = Path(__file__).parents[2]
PRESET = load_preset("tiny-qwen3-moe")
ALPHABET = PRESET.tokenizer["alphabet"]
VOCABULARY = 96


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(directory, PRESET)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


@pytest.fixture
def recipe() -> dict:
    text = (ROOT / "recipes" / "demo" / "gspo-moe-cpu.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def test_one_token_per_character_both_ways(tokenizer):
    @settings(max_examples=50, deadline=None)
    @given(st.text(st.sampled_from(ALPHABET), max_size=40))
    def check(text):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) and tokenizer.decode(ids) == text

    check()


def test_special_tokens_and_sizes(tokenizer):
    assert VOCABULARY % PRESET.tokenizer["pad_to_multiple"] == 0
    assert tokenizer.stop_token_ids == (tokenizer.eos_token_id,) == (1,)
    ids = tokenizer.encode("8 5")
    assert tokenizer.decode([0, *ids, tokenizer.eos_token_id]) == "8 5"


def test_a_sampled_filler_shows_in_the_text(tokenizer):
    ids = [*tokenizer.encode("8"), VOCABULARY - 1, *tokenizer.encode("5")]
    assert tokenizer.decode(ids) != "85"


@pytest.mark.parametrize("text", ["37 € 48", "é", "\t", "𝄞"])
def test_unknown_characters_are_errors(tokenizer, text):
    bad = next(c for c in text if c not in ALPHABET)
    for encode in (tokenizer.encode, lambda t: tokenizer.encode_batch(["1", t])):
        with pytest.raises(DataError) as caught:
            encode(text)
        assert repr(bad) in str(caught.value)


def test_a_tokenizer_with_an_unknown_token_never_uses_it(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings_ = {"eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a a") == [1, 1]
    assert tokenizer.stop_token_ids == (2, 7, 9)
    for call in (lambda: tokenizer.encode("a b"), lambda: tokenizer.encode_batch(["a", "b"])):
        with pytest.raises(DataError, match="no token for 'b'"):
            call()


def test_an_unknown_token_that_a_text_has_itself_is_a_token_like_others(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings_ = {"eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a <unk> a") == [1, 0, 1]
    with pytest.raises(DataError, match="no token for 'b'"):
        tokenizer.encode("a <unk> b")


def test_a_row_that_the_tokenizer_cannot_write_is_told(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "1+1", "answer": "2"}, {"question": "1€", "answer": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = DomainConfig(name="sums", source="file", path=file, rewards=REWARDS)
    with pytest.raises(DataError, match="no token for '€'") as caught:
        load_prompts(domain, 0, tokenizer)
    assert caught.value.where == f"{file}:2"


def test_directories_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match="no such checkpoint"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="unreadable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_model_without_tokenizer_files(tiny_model, tmp_path):
    """Of which transformers makes a tokenizer without tokens."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(DataError, match="has no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


@pytest.fixture
def smaller_model(tiny_model, tmp_path):
    """A function: the tiny model's tokenizer, beside a model of fewer tokens."""

    def smaller(vocab_size: int) -> Path:
        for file in tiny_model.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        hf = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(hf | {"vocab_size": vocab_size}))
        return tmp_path

    return smaller


def test_texts_have_tokens_that_the_model_has(tokenizer, smaller_model):
    [known], [beyond] = tokenizer.encode("1"), tokenizer.encode("z")
    smaller = load_tokenizer(smaller_model(beyond))
    assert smaller.encode("1") == [known]  # others may be beyond the model: no text has them
    words = f"the id {beyond} for 'z', and the model has {beyond} tokens"
    for encode in (smaller.encode, smaller.refuse_unwritable):
        with pytest.raises(DataError, match=words) as caught:
            encode("1z", where="rows.jsonl:3")
        assert caught.value.where == "rows.jsonl:3"
    assert load_tokenizer(smaller_model(beyond + 1)).encode("z") == [beyond]


def test_a_model_has_the_token_that_ends_a_text(tokenizer, smaller_model):
    end = tokenizer.eos_token_id
    with pytest.raises(DataError, match=f"the id {end} for "):
        load_tokenizer(smaller_model(end))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"kind": "characters", "alphabet": "aba"}, "'a' more than once"),
        ({"kind": "characters"}, "tokenizer.alphabet"),
        ({}, "tokenizer.kind"),
    ],
)
def test_presets_without_a_usable_tokenizer(tmp_path, table, words):
    with pytest.raises(DataError, match=words):
        write_tiny_model(tmp_path, replace(PRESET, tokenizer=table))


def test_the_demo_recipe_has_its_prompts(recipe, tokenizer):
    recipe["domains"][0]["num_problems"] = 3000
    config = RunConfig.model_validate(recipe)
    splits = load_splits(config, tokenizer)
    assert (len(splits.heldout), len(splits.validation)) == (1024, 512)
    prompt = splits.train["addition"][0]
    assert prompt.text.endswith(" =") and tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.prompt_id.startswith("addition-")
    ids = [p.prompt_id for p in load_prompts(config.domains[0], config.seed, tokenizer)]
    assert prompt.prompt_id in ids


def test_prompts_too_long_are_dropped_or_refused(recipe, tokenizer, caplog):
    domain = recipe["domains"][0]
    domain.update(num_problems=300, arguments={"min_terms": 2, "max_terms": 4, "max_digits": 2})
    recipe["data"] = {"num_validation": 0, "num_heldout": 0}
    recipe["rollout"] = {"max_new_tokens": 6, "max_model_len": 6 + 12}
    splits = load_splits(RunConfig.model_validate(recipe), tokenizer)
    assert all(len(p.token_ids) <= 12 for p in splits.train["addition"])
    assert "longer than 12 tokens" in caplog.text
    recipe["rollout"]["max_model_len"] = 7
    with pytest.raises(DataError, match="300 of 300 prompts"):
        load_splits(RunConfig.model_validate(recipe), tokenizer)


def test_transformers_reads_the_tiny_model(tiny_model, tokenizer):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = (tiny_model / "config.json").read_bytes()
    init_weights(tiny_model, seed=3)
    rows = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"].norm(dim=1)
    assert rows.min() > 0.1 * rows.max()  # a zero row makes RMSNorm's gradient explode
    weights = load_file(tiny_model / "model.safetensors")
    expert = "model.layers.3.mlp.experts.7.down_proj.weight"
    assert weights[expert].shape == (128, 128)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in weights.values())
    assert (tiny_model / "config.json").read_bytes() == before
    assert not list(tiny_model.glob(".*"))

    state = torch.random.get_rng_state()
    init_weights(tiny_model, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    again = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    init_weights(tiny_model, seed=4)
    assert not torch.equal(load_file(tiny_model / "model.safetensors")[expert], weights[expert])

    other = AutoTokenizer.from_pretrained(tiny_model)
    text = 'Yes: 37 + 48 = 85?\n"[]"'
    assert other(text)["input_ids"] == tokenizer.encode(text)
    assert other.decode(tokenizer.encode(text)) == text
    assert (other.eos_token_id, len(other)) == (tokenizer.eos_token_id, VOCABULARY)
    ids = other.apply_chat_template([{"role": "user", "content": "1+1"}])["input_ids"]
    assert ids == tokenizer.encode("1+1")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    logits = model(torch.tensor([tokenizer.encode("1+1=")])).logits
    assert logits.shape == (1, 4, VOCABULARY)


def test_tokens_are_compared_by_their_ids(tmp_path):
    """A tokenizer that lacks a token of the other one, or reserves others, and a missing one differ
    in nothing."""
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    for directory in (ours, theirs):
        write_tiny_model(directory, load_preset("tiny-qwen3-moe"))
    assert token_with_another_id(theirs, ours) is None
    file = theirs / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    del vocabulary[last]
    file.write_text(json.dumps(tokenizer))
    assert token_with_another_id(theirs, ours) is None
    of_ours = json.loads((ours / "tokenizer.json").read_text())
    for changed, number in ((tokenizer, 500), (of_ours, 501)):
        changed["model"]["vocab"]["<|reserved_7|>"] = number
    file.write_text(json.dumps(tokenizer))
    (ours / "tokenizer.json").write_text(json.dumps(of_ours))
    assert token_with_another_id(theirs, ours) is None
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    token, their_id, our_id = token_with_another_id(theirs, ours)
    assert token in "ab" and their_id == vocabulary[token] != our_id
    file.unlink()
    assert token_with_another_id(theirs, ours) is None
