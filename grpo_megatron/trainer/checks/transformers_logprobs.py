"""Log-probs as transformers computes them: `python -m … DIR DTYPE < ids > logprobs` (JSON).

A process of its own: beside `cpu_platform` transformers leaves rotary frequencies uninitialised."""

import json
import sys
from pathlib import Path

import torch


def main(directory: str, dtype: str) -> None:
    """fp32 log-prob of every token but the first; weights are first rounded to `dtype`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from grpo_megatron.weights.transformers_model import load_config, load_model

    tokens = torch.tensor([json.load(sys.stdin)])
    config = load_config(Path(directory))
    kind = AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    model = load_model(kind, Path(directory), config, torch.float32).eval()
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay as they are
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
    print(json.dumps(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
