"""Whole runs on conversations: the chat template in RL, and from one family's to another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.chat_templates import LLAMA, QWEN
from tests.e2e import runs
from tests.e2e.chat_model import write_chat_model

pytestmark = [pytest.mark.engine, pytest.mark.recipes]

EXACT = "grpo_megatron.rewards.functions:exact_match"
DENSE = (
    "model.preset=null",
    "cold_start=null",
    "trainer.num_ranks=1",
    "trainer.expert_parallel_size=1",
)
SMALL = (
    "batch.num_prompts=8",
    "batch.num_samples_per_prompt=4",
    "data.num_validation=4",
    "data.num_heldout=4",
    "rollout.max_new_tokens=48",
    "rollout.max_model_len=600",
    "trainer.max_tokens_per_microbatch=2400",
    "rollout.kv_cache_gib=0.125",
)


def domain(path: Path, **fields) -> str:
    """`domains=[…]` with one domain of a file of conversations."""
    table = {"name": '"sums"', "source": '"file"', "path": f'"{path}"', "template": '"chat"'}
    table |= {"rewards": f'[{{function="{EXACT}"}}]', **fields}
    return "domains=[{" + ", ".join(f"{key}={value}" for key, value in table.items()) + "}]"


def write_model(directory: Path, template: str) -> Path:
    write_chat_model(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def write_conversations(path: Path) -> None:
    rows = []
    for number in range(40):
        messages = [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": str(number + 1)},
            {"role": "user", "content": "And one more?"},
        ]
        rows.append({"messages": messages, "answer": str(number + 2)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    write_model(root / "qwen", QWEN)
    write_model(root / "llama", LLAMA.replace("bos_token", "pad_token"))
    write_conversations(root / "conversations.jsonl")
    return root


def train(folder: Path, name: str, *settings: str) -> Path:
    common = (f"runs_dir={folder}", f"name={name}", *DENSE, *SMALL)
    done = runs.command("train", "demo/gspo-moe-cpu", *common, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def test_a_run_samples_and_trains_by_the_chat_template(folder):
    own = domain(folder / "conversations.jsonl", template_arguments="{enable_thinking=false}")
    run = train(folder, "rl", f"model.path={folder}/qwen", own, "num_steps=3")
    records = runs.metrics(run)
    assert len(records) == 3
    assert all(record["canary/abs_max"] < 1e-4 for record in records)
    sample = json.loads((run / "samples/step_000002.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<|im_start|>system\nAnswer with a number.<|im_end|>\n")
    assert sample["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_rejection_samples_train_another_family(folder):
    sampled = train(
        folder,
        "sampled",
        f"model.path={folder}/qwen",
        domain(folder / "conversations.jsonl", accuracy_threshold="0.0"),
        "kind=rejection_sample",
        "num_steps=0",
    )
    rows = [json.loads(line) for line in (sampled / "dataset.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert row["messages"][-1]["content"] == row["responses"][0]
        assert row["question"].startswith("<|im_start|>system")

    run = train(
        folder,
        "other-family",
        f"model.path={folder}/llama",
        domain(sampled / "dataset.jsonl"),
        "kind=sft",
        "num_steps=3",
        "batch.num_prompts=2",
        "data.num_validation=1",
        "data.num_heldout=1",
    )
    records = runs.metrics(run)
    assert len(records) == 3
    assert records[0]["loss/nll"] > 0
