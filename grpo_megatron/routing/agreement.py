"""How far two routings agree, and how the load spreads: sums that add up over ranks.

Shape legend: n tokens, K experts per token, E experts, L MoE layers of the whole model."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

AGREEMENT = ("slot_flip_rate", "token_flip_rate", "jaccard")


def agreement(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n]: the share of `a`'s slots that `b` lacks; Jaccard index. a, b: unlike ids [n, K]."""
    common = (a[:, :, None] == b[:, None, :]).any(-1).sum(-1).float()
    size = a.size(-1)
    return 1 - common / size, common / (2 * size - common)


class RoutingSums:
    """Sums to be added up over ranks, a row per MoE layer; ranks that lack one leave it at zero.
    `layers` are the model's, `comparisons` names what the applied routing is compared with."""

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        comparisons: Sequence[str],
        device: torch.device,
    ):
        self.layers = layers
        self.comparisons = tuple(comparisons)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.load, self.entropy = zeros(len(layers), num_experts), zeros(len(layers), 2)
        self.compared = zeros(len(comparisons), len(layers), 4)
        self.any_layer = zeros(len(comparisons), 2)
        """Per comparison: tokens with a flip in any layer, tokens compared."""

    def add_load(self, row: int, chosen: Tensor, entropy: Tensor) -> None:
        """chosen: [n, K] of real tokens; entropy: [n] of the live router."""
        self.load[row] += torch.bincount(chosen.flatten(), minlength=self.load.size(1))
        self.entropy[row, 0] += entropy.sum()
        self.entropy[row, 1] += len(entropy)

    def add_comparison(self, name: str, row: int, flips: Tensor, jaccard: Tensor) -> None:
        """flips, jaccard: what `agreement` found, [n]."""
        sums = torch.stack([flips, flips > 0, jaccard, torch.ones_like(flips)])
        self.compared[self.comparisons.index(name), row] += sums.double().sum(1)

    def result(self) -> dict[str, float]:
        """Metrics of all layers together and, as `name/layer_N`, of each."""
        out: dict[str, float] = {}
        for name, sums, tokens in zip(self.comparisons, self.compared, self.any_layer, strict=True):
            for i, quantity in enumerate(AGREEMENT):
                self._put(out, f"routing/{name}_{quantity}", sums[:, i], sums[:, 3])
            if tokens[1] > 0:
                out[f"routing/{name}_any_layer_flip_rate"] = float(tokens[0] / tokens[1])
        self._put(out, "routing/entropy", self.entropy[:, 0], self.entropy[:, 1])
        mean = self.load.mean(1)
        seen = mean > 0
        dead = (self.load == 0).sum(1) * seen
        for name, values, per in (
            ("load_cv", self.load.std(1, correction=0), mean),
            ("load_max_ratio", self.load.amax(1), mean),
            ("dead_experts", dead.double(), seen.double()),
        ):
            self._put(out, f"routing/{name}", values, per, by_layer=True)
        if bool(seen.any()):
            out["routing/load_max_ratio"] = float((self.load.amax(1) / mean)[seen].max())
        return out

    def _put(
        self,
        out: dict[str, float],
        name: str,
        totals: Tensor,
        counts: Tensor,
        *,
        by_layer: bool = False,
    ) -> None:
        """Of every layer, and of all: the mean over what was counted, or over layers."""
        seen = counts > 0
        if not bool(seen.any()):
            return
        values = totals / counts.clamp_min(1e-30)
        out[name] = float(values[seen].mean() if by_layer else totals.sum() / counts.sum())
        out |= {
            f"{name}/layer_{layer}": float(value)
            for layer, value, has in zip(self.layers, values, seen, strict=True)
            if has
        }
