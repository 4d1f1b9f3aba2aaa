"""Methods that `/collective_rpc` reaches in every engine worker (`--worker-extension-cls`)."""

from __future__ import annotations

import torch


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    def received_digests(self) -> dict[str, str]:
        """Digest of every tensor of the last publish, as it arrived in this worker."""
        return self.weight_transfer_engine.received

    def reload_from_path(self, path: str) -> None:
        """Load the Hugging Face checkpoint directory `path` in place.

        vLLM reloads with the loader it started with, and that of a server started with
        `--load-format dummy` reads no files: from here on it is the default one.
        """
        self.vllm_config.load_config.load_format = "auto"
        self.reload_weights(weights_path=path)

    def sabotage_next_update(self, name_contains: str, noise: float, seed: int = 0) -> None:
        """Fault injection for tests: load other values than those received.

        Models an error in what follows the transfer (name mapping, sharding, repacking), which
        digests of the wire cannot see and the canary must.

        Args:
            name_contains: Which tensors.
            noise: Standard deviation of what is added; 0: negate the first element only.
            seed: Of the noise.
        """
        generator = torch.Generator().manual_seed(seed)

        def change(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
            return [
                (name, _changed(tensor, noise, generator) if name_contains in name else tensor)
                for name, tensor in tensors
            ]

        self.weight_transfer_engine.before_load = change


def _changed(tensor: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    changed = tensor.clone()
    if noise:
        return changed + noise * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    changed.view(-1)[0].neg_()
    return changed
