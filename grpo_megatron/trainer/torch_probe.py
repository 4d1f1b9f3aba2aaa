"""What a build of torch can do here, as JSON: `python -m grpo_megatron.trainer.torch_probe`.

A program of its own, which `doctor` starts, so that a broken build ends this process only."""

import json

import torch


def main() -> None:
    """Print version, CUDA version, number of GPUs, and whether gloo and NCCL are built in."""
    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
