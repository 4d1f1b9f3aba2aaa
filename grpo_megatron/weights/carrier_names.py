"""Names of what carries weights, for those who do not import torch."""

from typing import Literal

Carrier = Literal["gloo", "nccl", "ipc"]
"""Of a whole stream."""
LinkKind = Literal["nccl", "gpu memory", "host memory"]
"""Of a link between two members, see `links`."""
