"""Asks for pretended devices after Megatron has looked for a GPU: a script to be run."""

from grpo_megatron import pretended_cuda
from grpo_megatron.errors import SetupError
from grpo_megatron.trainer.megatron import platform  # noqa: F401

if __name__ == "__main__":
    try:
        pretended_cuda.install()
    except SetupError as error:
        print(error)
