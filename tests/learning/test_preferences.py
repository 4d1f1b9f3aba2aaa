"""The shipped recipe learns a preference that a file shows, and a resumed run is the same run."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.rewards.judge import reward_model
from grpo_megatron.rewards.step_rewards import process_reward_model
from tests.e2e.runs import command, metrics, timeless
from tests.rewards.pooling_server import pooling_server

pytestmark = [pytest.mark.engine, pytest.mark.learning]

END = "<|endoftext|>"


def train(folder, *overrides: str) -> dict:
    done = command("train", "stages/tiny-preferences", f"runs_dir={folder}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "tiny-preferences" / "result.json").read_text())


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "simpo", "orpo"])
def test_held_out_pairs(tmp_path, loss):
    result = train(tmp_path, f"preferences.loss={loss}", "gates=['eval.all.accuracy >= 0.9']")
    assert result["before"] <= 0.7


def test_a_reward_model(tmp_path):
    done = command("train", "stages/tiny-reward-model", f"runs_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "tiny-reward-model" / "result.json").read_text())
    assert result["eval"]["all"]["accuracy"] >= 0.9


def test_a_reward_model_of_two_labels_is_served(tmp_path):
    """Even numbers before odd ones, and short ones before long ones."""
    done = command("train", "stages/tiny-reward-labels", f"runs_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "tiny-reward-labels"
    result = json.loads((run / "result.json").read_text())
    assert result["eval"]["even"]["accuracy"] >= 0.9
    assert result["eval"]["short"]["accuracy"] >= 0.9
    export = run / "export"
    judge = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    assert judge.config.label2id == {"even": 0, "short": 1}
    scores = {}
    with pooling_server(export, {}, tmp_path / "server.log") as url:
        for answer, label in itertools.product(("36", "31", "8", "578"), (0, 1)):
            asked = reward_model(
                answer,
                "",
                prompt="7 + 8 =",
                url=url,
                model="prm",
                label=label,
                end=END,
                timeout_s=120,
            )
            scores[answer, label] = asyncio.run(asked)
    assert scores["36", 0] > scores["31", 0]
    assert scores["8", 1] > scores["578", 1]
    tokenizer = load_tokenizer(export)
    for (answer, label), score in scores.items():
        text = torch.tensor([tokenizer.encode(f"7 + 8 ={answer}{END}")])
        with torch.no_grad():
            expected = judge(text).logits[0, label].item()
        assert score == pytest.approx(expected, abs=1e-4)


def test_a_process_reward_model_is_served(tmp_path):
    done = command("train", "stages/tiny-process-reward-model", f"runs_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "tiny-process-reward-model"
    result = json.loads((run / "result.json").read_text())
    assert result["before"] <= 0.7
    assert result["eval"]["all"]["accuracy"] >= 0.9
    assert result["eval"]["all"]["first_error"] >= 0.9
    export = run / "export"
    mark = Tokenizer.from_file(str(export / "tokenizer.json")).token_to_id(".")
    pooler = {"task": "token_classify", "tok_pooling_type": "STEP", "step_tag_id": mark}
    with pooling_server(export, pooler, tmp_path / "server.log") as url:
        solution = "132\n\n57\n\n 18"
        asked = process_reward_model(
            solution, "", prompt="7 + 8 =", url=url, model="prm", step_token=".", timeout_s=120
        )
        steps = asyncio.run(asked)
    assert [solution[:end].split()[-1] for end, _ in steps] == ["132", "57", "18"]
    text = torch.tensor([load_tokenizer(export).encode("7 + 8 =132.57.18.")])
    judge = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    with torch.no_grad():
        logits = judge.score(judge.model(text).last_hidden_state)[0, text[0] == mark, 0]
    scores = [score for _, score in steps]
    assert scores == pytest.approx(logits.sigmoid().tolist(), abs=1e-5)
    assert scores[0] > 0.5 > scores[1] and scores[2] > 0.5


def test_a_resumed_run_is_the_same(tmp_path):
    whole = tmp_path / "whole"
    train(whole, "num_steps=6")
    cut = tmp_path / "cut"
    train(cut, "num_steps=6", "checkpoint.interval=3")
    run = cut / "tiny-preferences"
    for path in (run / "checkpoints").glob("step_000006"):
        path.rename(run / "lost")
    (run / "result.json").unlink()
    done = command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = timeless(metrics(whole / "tiny-preferences"))
    found = timeless(metrics(run))
    assert [{**one, "seconds": 0} for one in found] == [{**one, "seconds": 0} for one in expected]
