"""How much memory the GPUs of this machine have, asked without taking any of it."""

from grpo_megatron.plan.devices import DEFAULT_DEVICE, device_bytes


def gpu_bytes() -> int:
    """Return bytes of the first GPU, as the driver says; those that `plan` assumes where none
    answers."""
    try:
        import pynvml
    except ImportError:  # of vLLM's CUDA build
        return device_bytes(DEFAULT_DEVICE)
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return device_bytes(DEFAULT_DEVICE)
