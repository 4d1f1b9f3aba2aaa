"""The controller process: `python -m grpo_megatron.controller.main RUN_DIR ENGINE_URL…`."""

from grpo_megatron.controller.display import claim_stdout, show

claim_stdout()  # before any library can print

import asyncio  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from grpo_megatron.config.loader import read_resolved  # noqa: E402
from grpo_megatron.controller.run import run  # noqa: E402
from grpo_megatron.errors import INTERRUPTED_EXIT_CODE, GrpoMegatronError  # noqa: E402
from grpo_megatron.rundir import RunDir  # noqa: E402


def main(run_path: str, engine_urls: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = RunDir(Path(run_path))
    config = read_resolved(run_dir.config).config
    try:
        finished = asyncio.run(run(config, run_dir, engine_urls, _stop_on_sigterm))
    except GrpoMegatronError as error:
        traceback.print_exc()
        show("failure", text=str(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        show("failure", text=f"{type(error).__name__}: {error}")
        return 1
    return 0 if finished else INTERRUPTED_EXIT_CODE


def _stop_on_sigterm(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)  # libraries' threads must not delay the end of a run
