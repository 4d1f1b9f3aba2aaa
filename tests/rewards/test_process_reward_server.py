"""A process reward model behind vLLM's own pooling server scores the steps of a solution."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config.presets import load_preset
from grpo_megatron.rehearsal.tiny_family import tiny_config, write_tiny_checkpoint
from grpo_megatron.rewards.step_rewards import process_reward_model
from tests.rewards.pooling_server import pooling_server

pytestmark = [pytest.mark.engine, pytest.mark.recipes]

STEP_TOKEN = "<extra_0>"
PROMPT = "What is 6 * 7?\n"


def write_model(directory: Path) -> None:
    """A random model of Qwen2.5-Math-PRM's architecture: two scores a step, by a head of two
    layers."""
    config = tiny_config(load_preset("qwen2.5-0.5b").hf, num_layers=2)
    write_tiny_checkpoint(directory, config, [STEP_TOKEN], seed=0)
    size = config["hidden_size"]
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer, num_outputs in (("0", size), ("2", 2)):
        weights[f"score.{layer}.weight"] = 0.05 * torch.randn(
            num_outputs, size, generator=generator
        )
        weights[f"score.{layer}.bias"] = torch.zeros(num_outputs)
    save_file(weights, directory / "model.safetensors")
    file = directory / "config.json"
    written = json.loads(file.read_text())
    written["architectures"] = ["Qwen2ForProcessRewardModel"]
    file.write_text(json.dumps(written))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("process-reward-model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    from tokenizers import Tokenizer

    step = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(STEP_TOKEN)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with pooling_server(model, {"step_tag_id": step}, log) as address:
        yield address


def expected_scores(model: Path, text: str) -> list[float]:
    """Probability of "right" at every step token, by transformers and the head by hand."""
    from transformers import AutoTokenizer, Qwen2Model

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    body = Qwen2Model.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    head = load_file(model / "model.safetensors")
    with torch.no_grad():
        hidden = body(ids[None]).last_hidden_state[0]
        hidden = torch.relu(hidden @ head["score.0.weight"].T + head["score.0.bias"])
        scores = (hidden @ head["score.2.weight"].T + head["score.2.bias"]).softmax(-1)
    at_steps = ids == tokenizer.convert_tokens_to_ids(STEP_TOKEN)
    return scores[at_steps, 1].tolist()


def test_steps_are_scored_as_by_transformers(url, model):
    solution = "6 * 7 is 6 * 5 + 6 * 2.\n\nThat is 30 + 12.\n\nSo it is 42."
    rewards = asyncio.run(
        process_reward_model(solution, "42", prompt=PROMPT, url=url, model="prm", timeout_s=120)
    )
    ends = [end for end, _ in rewards]
    assert [solution[:end].rpartition("\n\n")[2] for end in ends] == solution.split("\n\n")
    text = PROMPT + solution.replace("\n\n", STEP_TOKEN) + STEP_TOKEN
    expected = expected_scores(model, text)
    scores = [score for _, score in rewards]
    assert scores == pytest.approx(expected, abs=2e-5)
    assert len(set(scores)) == 3 and all(0.001 < score < 0.999 for score in scores)
