"""Run a module on pretended devices: `python -m grpo_megatron.pretended_cuda -m MODULE ...`."""

import runpy
import sys

from grpo_megatron import pretended_cuda
from grpo_megatron.errors import GrpoMegatronError


def main(arguments: list[str]) -> None:
    """Install the devices, then run a module as `python -m` does.

    Raises SetupError where they cannot be installed."""
    if len(arguments) < 2 or arguments[0] != "-m":
        sys.exit("usage: python -m grpo_megatron.pretended_cuda -m MODULE [ARGUMENT ...]")
    pretended_cuda.install()
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GrpoMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
