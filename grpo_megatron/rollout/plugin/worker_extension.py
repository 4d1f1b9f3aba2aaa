"""Methods that `/collective_rpc` reaches in every engine worker (`--worker-extension-cls`)."""

import os
from collections.abc import Callable

import torch

NamedTensors = list[tuple[str, torch.Tensor]]
NOISE_VARIABLE = "GRPO_MEGATRON_ENGINE_NOISE"


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    def received_digests(self) -> dict[str, str]:
        """Digest of every tensor of the last publish, as it arrived in this worker."""
        return self.weight_transfer_engine.received

    def reload_from_path(self, path: str) -> None:
        """Load the Hugging Face checkpoint directory `path` in place.

        vLLM reloads with the loader it started with, and that of a server started with
        `--load-format dummy` reads no files: from here on it is the default one."""
        self.vllm_config.load_config.load_format = "auto"
        self.reload_weights(weights_path=path)

    def sabotage_next_update(self, name_contains: str, noise: float, seed: int = 0) -> None:
        """Fault injection for tests: load other values than those received.

        Models an error in what follows the transfer (name mapping, sharding, repacking), which
        digests of the wire cannot see and the canary must. Tensors by name get noise of this
        standard deviation; 0: their first element is negated."""
        self.weight_transfer_engine.before_load = noise_on(name_contains, noise, seed)


def noise_on(name_contains: str, noise: float, seed: int) -> Callable[[NamedTensors], NamedTensors]:
    """Changes tensors by name before they are loaded."""
    generator = torch.Generator().manual_seed(seed)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if noise:
            return tensor + noise * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        negated = tensor.clone()
        negated.view(-1)[0].neg_()
        return negated

    return lambda tensors: [(name, changed(tensor) if name_contains in name else tensor)
                            for name, tensor in tensors]


def noise_of_environment() -> Callable[[NamedTensors], NamedTensors] | None:
    """Fault injection for whole runs: `GRPO_MEGATRON_ENGINE_NOISE=mlp.gate:0.05` adds noise to the
    engine's router weights at every publish, always the same, and to nobody else's."""
    wanted = os.environ.get(NOISE_VARIABLE)
    if not wanted:
        return None
    name, _, noise = wanted.rpartition(":")
    return noise_on(name, float(noise), 0)
