"""The controller process: `python -m grpo_megatron.controller.main RUN_DIR ENGINE_URL…`."""

import asyncio
import logging
import os
import sys
import traceback
from pathlib import Path

from grpo_megatron.controller.display import claim_stdout, show


def main(run_path: str, engine_urls: list[str]) -> int:
    """Run to the end, or until told to stop; returns the exit code."""
    claim_stdout()  # before any library can print
    from grpo_megatron.config.loader import read_resolved
    from grpo_megatron.controller.run import run
    from grpo_megatron.errors import INTERRUPTED_EXIT_CODE, GrpoMegatronError
    from grpo_megatron.rundir import RunDir

    logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = RunDir(Path(run_path))
    try:
        config = read_resolved(run_dir.config).config
        finished = asyncio.run(run(config, run_dir, engine_urls))
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, GrpoMegatronError)
        show("failure", text=str(error) if known else f"{type(error).__name__}: {error}")
        return error.exit_code if known else 1
    return 0 if finished else INTERRUPTED_EXIT_CODE


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)  # libraries' threads must not delay the end of a run
