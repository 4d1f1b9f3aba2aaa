"""What a failure most likely comes from, by what it said, and what to do about it."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause: `pattern` is searched in the last lines of what failed, in any case."""

    pattern: str
    what: str
    remedy: str


CAUSES = (
    Cause(
        r"is the driver loaded",
        "torch sees no GPU",
        "`nvidia-smi` has to list GPUs (containers: --gpus all, Apptainer: --nv), torch to be a "
        "CUDA build, CUDA_VISIBLE_DEVICES must not be empty; without a GPU there is --pretend",
    ),
    Cause(
        r"driver[^.\n]* is (too old|insufficient)|forward compatibility was attempted",
        "the NVIDIA driver is too old for this build of torch",
        "update the driver, or install a build of torch for the CUDA version that `nvidia-smi` "
        "prints at the top",
    ),
    Cause(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "a package was built for other GPUs than these",
        "install builds for this compute capability (torch.cuda.get_device_capability())",
    ),
    Cause(
        r"transformer_engine.*(undefined symbol|cannot open shared object)"
        r"|undefined symbol.*transformer_engine|transformer_engine_torch",
        "Transformer Engine was built for another torch, CUDA or C++ ABI",
        "build it against this torch (make setup-gpu does), or remove it: the trainer then uses "
        "torch's layers",
    ),
    Cause(
        r"libnccl[\w.]*: cannot open|Distributed package doesn't have NCCL",
        "NCCL was not found",
        "install a CUDA build of torch (it brings NCCL), and take other libnccl.so out of "
        "LD_LIBRARY_PATH",
    ),
    Cause(
        r"undefined symbol|libcud(nn|art)[\w.]*: cannot open|cannot open shared object file",
        "a compiled package does not fit the installed torch or CUDA",
        "reinstall the package that the message names, built for this torch; look at "
        "LD_LIBRARY_PATH for libraries of another CUDA",
    ),
    Cause(
        r"No space left on device.*(/dev/shm|shm)|(/dev/shm|shm_open|shared memory).*"
        r"(No space|failed|insufficient|Error)|unable to open shared memory|bus error|SIGBUS"
        r"|signal 7\b",
        "/dev/shm is full or too small",
        "start the container with --shm-size=8g, or remove what others left in /dev/shm",
    ),
    Cause(
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|less than desired GPU memory utilization|No available memory for the cache blocks",
        "the GPU's memory did not suffice",
        "`nvidia-smi` says who else uses it; ask for an idle GPU",
    ),
    Cause(
        r"Duplicate GPU detected",
        "two ranks were given the same GPU",
        "let CUDA_VISIBLE_DEVICES name as many different GPUs as there are ranks",
    ),
    Cause(
        r"NCCL (error|WARN)|ncclUnhandledCudaError|ncclSystemError|ncclInternalError"
        r"|ProcessGroupNCCL.*(timed? ?out|Timeout)|Watchdog caught collective operation timeout",
        "NCCL could not connect the ranks, or one of them did not come",
        "run again with NCCL_DEBUG=INFO; name the network with NCCL_SOCKET_IFNAME and "
        "NCCL_IB_HCA; in containers try NCCL_P2P_DISABLE=1 to see whether peer access is the "
        "matter",
    ),
    Cause(
        r"receivers read the sender's GPU memory|invalid resource handle"
        r"|peer access is not supported between these two devices",
        "a process could not open another's GPU memory (CUDA IPC)",
        "let containers share namespaces (--ipc=host --pid=host); else weights go through "
        "host memory, which is slower",
    ),
    Cause(
        r"Address already in use|EADDRINUSE",
        "a port was taken by somebody else",
        "run again; if it stays, end the processes of an earlier run (`ss -ltnp` lists ports)",
    ),
    Cause(
        r"No dot product attention (backend|support)",
        "Transformer Engine has no attention kernel for this precision and shape",
        "install flash-attn, or a newer cuDNN; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why each "
        "was turned down",
    ),
    Cause(
        r"CUDA error: an illegal memory access|device-side assert|misaligned address",
        "a kernel read or wrote where it may not",
        "run this part alone with CUDA_LAUNCH_BLOCKING=1: the traceback then ends at that kernel",
    ),
    Cause(
        r"CUDA error: (uncorrectable ECC|unspecified launch)|Xid|fallen off the bus",
        "the GPU has a hardware fault",
        "`dmesg | grep -i xid` names it; take the node out of service",
    ),
    Cause(
        r"CUDA error|cudaError|CUBLAS_STATUS|CUDNN_STATUS",
        "an operation of CUDA failed",
        "run this part alone with CUDA_LAUNCH_BLOCKING=1 and read its log",
    ),
    Cause(
        r"Failed to (find|compile).*(triton|C compiler)|gcc.*not found|no C\+?\+? compiler",
        "Triton or torch's compiler found no C compiler",
        "install gcc (and the headers of Python), or set CC",
    ),
    Cause(
        r"rollout-\d+ ended with exit code|Engine core initialization failed|EngineDeadError"
        r"|EngineCore.*failed",
        "vLLM's engine ended",
        "its last lines are in the log; `grpo-megatron doctor` says whether vLLM and torch fit",
    ),
    Cause(
        r"disagree|MismatchError|mismatch: ",
        "trainer and engine do not agree",
        "`grpo-megatron mismatch RUN@STEP` splits the difference by cause and layer",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "give --to on a disk with room",
    ),
    Cause(
        r"ModuleNotFoundError|ImportError",
        "a package is missing or broken",
        "`grpo-megatron doctor` lists what is missing and how to get it",
    ),
)
"""In the order in which they are tried: what says more comes first."""

KILLED = Cause(
    "",
    "the process was killed from outside, most often by the kernel because the machine ran out of "
    "memory, or by the limits of a container or a job",
    "`dmesg | grep -i kill` says so; ask for more memory",
)
HUNG = Cause(
    "",
    "it did not end in its time: ranks wait for each other, or the machine is very slow",
    "its log says what was done last; NCCL_DEBUG=INFO shows whether the ranks found each other",
)
UNKNOWN = Cause("", "not known", "read its log")


def likely_cause(text: str) -> Cause | None:
    """Find the first cause whose pattern is in `text`; None where none is."""
    for cause in CAUSES:
        if re.search(cause.pattern, text, re.IGNORECASE):
            return cause
    return None
