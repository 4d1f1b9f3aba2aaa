"""vLLM's pooling server over a checkpoint, as `slurm/serve.sbatch` starts one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.orphans import die_with_parent

START_S = 1200
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def pooling_server(model: Path, pooler_config: dict[str, Any], log: Path) -> Iterator[str]:
    """Yield the address of a server whose model is called `prm`; its output goes to `log`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "prm"]
    command += ["--runner", "pooling", "--pooler-config", json.dumps(pooler_config)]
    command += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(1 << 25)]
    executor = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    command += ["--distributed-executor-backend", executor]
    with open(log, "w") as file:
        server = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),  # of a session that is ended
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(log.read_text()[-3000:])
