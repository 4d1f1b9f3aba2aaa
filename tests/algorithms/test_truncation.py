"""Truncated sampling: the ratio is over what was kept, KL and entropy over the vocabulary."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.algorithms.batch import LossBatch
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.config.loader import load_objective

COLUMNS = ("logprobs", "old_logprobs", "rollout_logprobs", "untruncated_logprobs", "ref_logprobs")


def loss_of(kl: str, unusable: int | None = None) -> tuple[float, torch.Tensor, torch.Tensor, dict]:
    """Loss, its gradients by both log-probs, and the columns. 4 tokens in 2 samples."""
    generator = torch.Generator().manual_seed(3)
    columns = {n: -torch.rand(4, generator=generator, dtype=torch.float64) for n in COLUMNS}
    columns["untruncated_logprobs"] = columns["logprobs"] - 0.3
    if unusable is not None:
        columns["rollout_logprobs"][unusable] = -torch.inf
    leaves = [columns[name].requires_grad_() for name in ("logprobs", "untruncated_logprobs")]
    settings = [] if kl == "none" else [f"kl={kl}", "kl_beta=0.5"]
    objective = Objective(load_objective("grpo", settings)[0])
    loss, stats = policy_loss(
        objective,
        LossBatch(
            **columns,
            entropies=torch.ones(4).double(),
            advantages=torch.tensor([1.0, 1, -1, -1]),
            weights=torch.full((4,), 0.25).double(),
            sample=torch.tensor([0, 0, 1, 1]),
            token_counts=torch.tensor([2, 2]),
            domain=torch.tensor([0, 0]),
        ),
    )
    loss.backward()
    return float(loss.detach()), leaves[0].grad, leaves[1].grad, columns | stats.result()


@pytest.mark.parametrize("kl", ["k2", "k3", "is_k3"])
def test_kl_is_over_the_vocabulary(kl):
    _, by_kept, by_all, columns = loss_of(kl)
    _, surrogate, _, _ = loss_of("none")
    full = columns["untruncated_logprobs"].detach().clone().requires_grad_()
    kept = columns["logprobs"].detach().clone().requires_grad_()
    d = columns["ref_logprobs"].detach() - full
    value = d**2 / 2 if kl == "k2" else d.exp() - d - 1
    if kl == "is_k3":
        value = (kept - columns["old_logprobs"].detach()).exp() * value
    (0.25 * 0.5 * value).sum().backward()
    torch.testing.assert_close(by_all, full.grad)
    ratio = torch.zeros(4).double() if kept.grad is None else kept.grad
    torch.testing.assert_close(by_kept - surrogate, ratio)
    assert (ratio != 0).any() == (kl == "is_k3")


def test_a_token_without_a_set_takes_no_part():
    loss, by_kept, by_all, metrics = loss_of("is_k3", unusable=2)
    whole = loss_of("is_k3")
    assert by_kept[2] == by_all[2] == 0 and loss != whole[0]
    rest = torch.tensor([0, 1, 3])
    torch.testing.assert_close(by_kept[rest], whole[1][rest])
    torch.testing.assert_close(by_all[rest], whole[2][rest])
    assert metrics["tokens/infinite_fraction"] == 0.25
