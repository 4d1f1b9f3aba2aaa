"""A server of an environment, as a role of a run: `python -m grpo_megatron.environments.server
RUN_DIR ATTEMPT NUMBER`.

Rollout workers play their episodes there (`served.py`). NUMBER counts the servers of all domains
(`RunConfig.environment_servers`)."""

import asyncio
import sys
from pathlib import Path

from grpo_megatron import progress
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.environments.serve import serve
from grpo_megatron.environments.served import server_role
from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.network import own_address
from grpo_megatron.rundir import RunDir

_BEAT_S = 5.0


async def serve_in_run(config: RunConfig, run_dir: RunDir, number: int) -> None:
    """Serve the environment of server `number` until cancelled. EpisodeError where it cannot."""
    name = config.environment_servers[number]
    [domain] = [domain for domain in config.domains if domain.name == name]
    environment = domain.environment
    assert environment is not None  # it has servers
    rollout = config.rollout
    role = server_role(number)
    serving = serve(
        environment,
        address=own_address(),
        endpoint=run_dir.endpoints / f"{role}.json",
        # an episode whose worker has died is asked nothing any more
        idle_s=environment.episode_s + rollout.request_timeout_s * rollout.max_attempts,
        log_path=run_dir.logs / f"{role}-processes.log",
        said=lambda where: progress.enter(progress.SERVING, f"{domain.name}: {where}"),
    )
    beating = asyncio.create_task(_beat())
    try:
        await serving
    finally:
        beating.cancel()


async def _beat() -> None:
    """Say that the event loop runs, on which all episodes wait."""
    while True:
        await asyncio.sleep(_BEAT_S)
        progress.advance()


def main(run_path: str, attempt: str, number: int) -> None:
    """Serve as server `number` until the supervisor ends this process."""
    run_dir = RunDir(Path(run_path), attempt)
    role = server_role(number)
    progress.start_progress(run_dir.role_progress(role), role)
    config = read_resolved(run_dir.config).config
    try:
        asyncio.run(serve_in_run(config, run_dir, number))
    except GrpoMegatronError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
