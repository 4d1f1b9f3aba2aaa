"""What is known of GPUs by name: `devices.toml`."""

from grpo_megatron import assets

DEVICES = assets.tables(__file__, "devices.toml")
DEFAULT_DEVICE = "h100-80g"
_GIB = 2**30


def device_bytes(device: str) -> int:
    """Return the bytes of a GPU's memory. device: a name in `devices.toml`."""
    return int(DEVICES["memory"][device] * _GIB)
