"""How far two routings agree, and how the load spreads: sums that add up over ranks.

Shape legend: n tokens, K experts per token, E experts, L MoE layers of the whole model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_megatron.device_copies import to_host

AGREEMENT = ("slot_flip_rate", "token_flip_rate", "jaccard")


def agreement(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two routings of the same tokens in one layer.

    a, b: expert ids [n, K], no two the same of a token. Returns fp32 [n]: the share of `a`'s slots
    that `b` lacks; the Jaccard index of the two sets."""
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

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.load = zeros(len(layers), num_experts)
        """How often each expert was chosen, [L, E]."""
        self.entropy = zeros(len(layers), 2)
        """Sum of the routers' entropies, tokens; [L, 2]."""
        self.compared = zeros(len(comparisons), len(layers), 4)
        """Sums of flipped slots, flipped tokens, Jaccard indices; tokens. [comparisons, L, 4]"""
        self.any_layer = zeros(len(comparisons), 2)
        """Tokens with a flip in any layer, tokens compared; [comparisons, 2]."""

    def add_load(self, row: int, chosen: Tensor, entropy: Tensor, weights: Tensor) -> None:
        """Count what a layer's router did. row: of the layer, here.

        chosen: [n, K]; entropy: [n] of the live router; weights: [n], how often a token counts."""
        ids = chosen.flatten()
        counts = weights.to(self.load)
        # torch.bincount asks for the largest id, for which the host would wait
        self.load[row].scatter_add_(0, ids, counts.repeat_interleave(chosen.size(1)))
        self.entropy[row, 0] += (entropy * weights).sum()
        self.entropy[row, 1] += counts.sum()

    def add_comparison(
        self, name: str, row: int, flips: Tensor, jaccard: Tensor, weights: Tensor
    ) -> None:
        """Count what `agreement` found in a layer. row: of the layer, here; flips, jaccard: [n];
        weights: [n], how often a token counts; 0 where it has no route."""
        found = torch.stack([flips, flips > 0, jaccard, torch.ones_like(flips)]).double()
        sums = (found * weights).sum(1)
        self.compared[self.comparisons.index(name), row] += sums

    def move_to_host(self) -> None:
        """Copy all sums to the host, where `result` reads them one by one."""
        sums = to_host([self.load, self.entropy, self.compared, self.any_layer])
        self.load, self.entropy, self.compared, self.any_layer = sums

    def result(self) -> dict[str, float]:
        """Return metrics of all layers together and, as `name/layer_N`, of each."""
        self.move_to_host()
        out: dict[str, float] = {}
        for name, sums, tokens in zip(self.comparisons, self.compared, self.any_layer, strict=True):
            for i, quantity in enumerate(AGREEMENT):
                self._put(out, f"routing/{name}_{quantity}", sums[:, i], sums[:, 3])
            if tokens[1] > 0:
                out[f"routing/{name}_any_layer_flip_rate"] = float(tokens[0] / tokens[1])
        self._put(out, "routing/entropy", self.entropy[:, 0], self.entropy[:, 1])
        mean = self.load.mean(1)
        largest = self.load.amax(1)
        was_used = mean > 0
        num_dead = (self.load == 0).sum(1)
        deviation = self.load.std(1, correction=0)
        self._put(out, "routing/load_cv", deviation, mean, by_layer=True)
        self._put(out, "routing/load_max_ratio", largest, mean, by_layer=True)
        self._put(out, "routing/dead_experts", num_dead.double(), was_used.double(), by_layer=True)
        if bool(was_used.any()):
            out["routing/load_max_ratio"] = float((largest / mean)[was_used].max())
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
        """Put `totals / counts` ([L] both) of every layer into `out`, and that of all together:
        the mean over what was counted, or over layers. Layers without a count are left out."""
        has_count = counts > 0
        if not bool(has_count.any()):
            return
        values = totals / counts.clamp_min(1e-30)
        of_all = totals.sum() / counts.sum()
        if by_layer:
            of_all = values[has_count].mean()
        out[name] = float(of_all)
        for row, layer in enumerate(self.layers):
            if has_count[row]:
                out[f"{name}/layer_{layer}"] = float(values[row])
