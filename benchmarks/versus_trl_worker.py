"""TRL's side of `versus_trl.py`: `python versus_trl_worker.py CASE_DIR MODEL_DIR OPTIONS_JSON`.

Each line `N` on standard input is answered, after N optimizer steps of TRL's own
`GRPOTrainer.train` loop, by one JSON line: seconds of every step, and seconds by phase.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what TRL prints is no answer
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
warnings.simplefilter("ignore")

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    TrainerCallback,
)
from versus_trl_workload import read_case, share_of_digits  # noqa: E402


class ForcedLengths(LogitsProcessor):
    """Row r ends (with the end token) at exactly `lengths[r]` tokens."""

    def __init__(self, lengths: list[int], num_prompt_tokens: int, eos_token_id: int):
        self.lengths = torch.tensor(lengths)
        self.start, self.eos = num_prompt_tokens, eos_token_id

    def __call__(self, input_ids, scores):
        last = self.lengths == input_ids.size(1) - self.start + 1
        scores[:, self.eos] = -torch.inf
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos] = 0.0
        return scores


class StepsOnDemand(TrainerCallback):
    """Times steps; waits for the next request where the last one is done."""

    def __init__(self, phases: dict[str, float]):
        self.phases, self.left, self.seconds = phases, 0, []

    def on_step_begin(self, args, state, control, **_):
        if not self.left:
            line = sys.stdin.readline()
            if not line.strip():
                os._exit(0)
            self.left, self.seconds = int(line), []
            self.phases.clear()
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.started)
        self.left -= 1
        if not self.left:
            answers.write(json.dumps({"seconds": self.seconds, "phases": dict(self.phases)}) + "\n")


def timed(phases: dict[str, float], name: str, function):
    """`function`, adding its seconds to `phases[name]`."""

    def call(*args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            phases[name] += time.perf_counter() - started

    return call


def make_trainer(directory: Path, model_path: str, options: dict):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    case, prompts = read_case(directory)
    phases: dict[str, float] = defaultdict(float)
    count = case.num_prompts * case.num_samples
    settings = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=count,
        gradient_accumulation_steps=1,
        num_generations=case.num_samples,
        max_completion_length=case.longest,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=1_000_000,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        dataloader_num_workers=0,
    )
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, experts_implementation=options["experts"]
    )
    generate, step = model.generate, -1

    def generate_with_lengths(*args, input_ids, **kwargs):
        nonlocal step
        step += 1
        forced = ForcedLengths(case.lengths(step), input_ids.size(1), tokenizer.eos_token_id)
        return generate(*args, input_ids=input_ids, logits_processor=[forced], **kwargs)

    def reward(completions, **_):
        return [share_of_digits(completion, "") for completion in completions]

    model.generate = timed(phases, "generate", generate_with_lengths)
    trainer = GRPOTrainer(
        model,
        reward,
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[StepsOnDemand(phases)],
    )
    trainer._generate_and_score_completions = timed(
        phases, "generate and score", trainer._generate_and_score_completions
    )
    trainer.training_step = timed(phases, "training step", trainer.training_step)
    return trainer


def main() -> None:
    options = json.loads(sys.argv[3])
    torch.set_num_threads(options["threads"])
    logging.disable(logging.INFO)
    trainer = make_trainer(Path(sys.argv[1]), sys.argv[2], options)
    answers.write(json.dumps({"ready": True}) + "\n")
    trainer.train()


if __name__ == "__main__":
    main()
