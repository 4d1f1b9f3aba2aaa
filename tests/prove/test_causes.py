"""What failures say, and what they are taken for."""

from __future__ import annotations

import pytest

from grpo_megatron.prove.causes import likely_cause

SAYINGS = {
    "torch sees no GPU": "is the driver loaded (nvidia-smi), and torch a CUDA build?",
    "the NVIDIA driver is too old": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
    ),
    "a package was built for other GPUs": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ),
    "Transformer Engine was built for another torch": (
        "ImportError: /x/transformer_engine_torch.cpython-312.so: undefined symbol: _ZN3c104cuda"
    ),
    "NCCL was not found": "OSError: libnccl.so.2: cannot open shared object file",
    "/dev/shm is full": "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
    "the GPU's memory did not suffice": "torch.OutOfMemoryError: CUDA out of memory.",
    "two ranks were given the same GPU": "ncclInvalidUsage: Duplicate GPU detected : rank 1",
    "NCCL could not connect": (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, "
        "unhandled system error"
    ),
    "a process could not open another's GPU memory": (
        "ipc: receivers read the sender's GPU memory: 0 of 2 links"
    ),
    "a port was taken": "OSError: [Errno 98] Address already in use",
    "Transformer Engine has no attention kernel": (
        "ValueError: No dot product attention backend is available for the provided inputs"
    ),
    "vLLM's engine ended": "rollout-0 ended with exit code 1",
    "the disk is full": "OSError: [Errno 28] No space left on device: 'x'",
    "a package is missing": "ModuleNotFoundError: No module named 'vllm'",
}


@pytest.mark.parametrize("cause", SAYINGS)
def test_a_saying_has_its_cause(cause):
    found = likely_cause(f"Traceback\n  File x\n{SAYINGS[cause]}\n")
    assert found is not None and found.what.startswith(cause)
    assert found.remedy


def test_what_says_nothing_has_no_cause():
    assert likely_cause("ValueError: 7 is not 8") is None
