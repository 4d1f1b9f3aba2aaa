"""Values, gradients, metrics and replayed masks of the loss of one micro-batch, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_megatron.algorithms import ratios
from grpo_megatron.algorithms.batch import ClipInputs, LossBatch, MismatchInputs
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.terms import (
    CLIPS,
    KL,
    clip_status,
    follows_recorded_clips,
    gmpo_clip,
    unclipped,
)
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import ObjectiveConfig

LN2 = math.log(2.0)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def micro_batch(
    ratio: list[float], advantages: list[float], counts: list[int] | None = None, **more: Any
) -> LossBatch:
    """Tokens with `pi_theta / pi_old = ratio`, `pi_old = pi_engine = 1/2`, weight 1 and entropy 1;
    one sample a token unless `counts` says otherwise. more: any field of the batch."""
    log_ratio = double(*ratio).log()
    counts = counts or [1] * len(ratio)
    logprobs = (log_ratio - LN2).requires_grad_()
    ones = torch.ones_like(log_ratio)
    fields: dict[str, Any] = {
        "logprobs": logprobs,
        "old_logprobs": -LN2 * ones,
        "rollout_logprobs": -LN2 * ones,
        "entropies": ones.clone(),
        "advantages": double(*advantages),
        "weights": ones.clone(),
        "sample": torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        "token_counts": torch.tensor(counts),
        "domain": torch.zeros(len(counts), dtype=torch.int64),
        "untruncated_logprobs": logprobs,
    }
    return LossBatch(**(fields | more))


def loss_of(
    batch: LossBatch, *overrides: str, preset: str = "grpo", domains: tuple[str, ...] = ("all",)
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient by the log-probs, metrics."""
    config, own = load_objective(preset, overrides, domains)
    loss, stats = policy_loss(Objective(config, domains, own), batch)
    (gradient,) = torch.autograd.grad(loss, [batch.logprobs], allow_unused=True)
    return float(loss.detach()), [] if gradient is None else gradient.tolist(), stats.result()


# --- clips


def test_the_dual_clip_is_in_proportion_to_the_advantage():
    loss, gradient, metrics = loss_of(micro_batch([5.0, 2.0], [-0.5, -0.5]), "dual_clip=3.0")
    assert loss == pytest.approx(3.0 * 0.5 + 2.0 * 0.5)
    assert gradient == pytest.approx([0.0, 2.0 * 0.5])
    assert metrics["clip/dual_fraction"] == 0.5


def test_an_upper_clip_holds_for_both_signs_of_the_advantage():
    batch = micro_batch([1.5, 1.5, 0.5, 0.5], [2.0, -3.0, 1.0, -4.0])
    loss, gradient, metrics = loss_of(batch, "clip=upper", "clip_high=0.3")
    assert loss == pytest.approx(-1.3 * 2 + 1.3 * 3 - 0.5 * 1 + 0.5 * 4)
    assert gradient == pytest.approx([0.0, 0.0, -0.5, 2.0])
    assert metrics["clip/high_fraction"] == 0.5
    assert "clip/low_fraction" not in metrics


def test_no_clip_takes_the_plain_ratio():
    loss, gradient, metrics = loss_of(micro_batch([3.0, 0.25], [1.0, -2.0]), "clip=none")
    assert loss == pytest.approx(-3.0 + 0.5)
    assert gradient == pytest.approx([-3.0, 0.5])
    assert not any(name.startswith("clip/") for name in metrics)


def test_the_mean_of_token_ratios_is_the_ratio_of_a_sample():
    batch = micro_batch([1.0, 3.0, 0.5], [1.0, 1.0, 1.0], [2, 1])
    loss, _, metrics = loss_of(batch, "ratio=sequence_mean", "clip=none")
    assert loss == pytest.approx(-(2.0 + 2.0 + 0.5))
    assert metrics["ratio/mean"] == pytest.approx((2.0 + 2.0 + 0.5) / 3)
    assert metrics["ratio/max"] == pytest.approx(2.0)


@pytest.mark.parametrize("ratio", ["sequence_product", "prefix_min"])
def test_a_product_of_many_ratios_stays_finite(ratio):
    """100 tokens that are e^10 times as likely, or as unlikely: e^1000 would overflow."""
    far = torch.full((100,), 10.0)
    sample, counts = torch.zeros(100, dtype=torch.int64), torch.tensor([100])
    for log_ratio in (far, -far):
        found = ratios.RATIOS[ratio](2 * log_ratio, sample, counts)
        assert found.abs().max() == ratios.MAX_LOG_RATIO


RATIOS = [0.5, 0.5, 0.9, 1.2, 1.6, 1.6, 4.0]
SIGNS = [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("clip=ppo",), {"low": [1], "high": [4]}),
        (("clip=ppo", "dual_clip=1.5"), {"low": [1], "high": [4], "dual": [5]}),
        (("clip=upper",), {"high": [4, 5]}),
        (("clip=gmpo", "ratio=sequence_geo"), {"low": [1], "high": [4]}),
        (("clip=cispo", "ratio_min=0.6", "ratio_max=1.5"), {"low": [0, 1], "high": [4, 5]}),
        (("clip=sapo",), {}),
        (("clip=none",), {}),
    ],
)
def test_which_tokens_a_clip_holds(overrides, expected):
    """Ratios above and below the bounds, with advantages of both signs and of none."""
    config, _ = load_objective("grpo", [*overrides, "clip_low=0.2", "clip_high=0.3"])
    logprobs = double(*RATIOS).log()
    old = torch.zeros_like(logprobs)
    inputs = ClipInputs(logprobs, double(*SIGNS), logprobs, old, 0.2, 0.3)
    found = clip_status(config, inputs)
    tokens = {side: mask.nonzero()[:, 0].tolist() for side, mask in found.items()}
    assert tokens == expected


def _on_a_grid(clip: str) -> tuple[ObjectiveConfig, ClipInputs]:
    """Ratios from 1/8 to 8 at probabilities from 1/16 to 1/2, with advantages of both signs; every
    third token is chosen by its covariance."""
    config = ObjectiveConfig(preset="grpo", clip=clip, dual_clip=3.0)
    old = torch.linspace(-4 * LN2, -LN2, 7, dtype=torch.float64).repeat(40)
    log_ratio = torch.linspace(-3 * LN2, 3 * LN2, 280, dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    advantages = double(1.5, -0.5).repeat(140)
    covariant = torch.arange(280) % 3 == 0
    return config, ClipInputs(logprobs - old, advantages, logprobs, old, 0.2, 0.3, covariant)


@pytest.mark.parametrize("clip", CLIPS)
def test_a_clip_says_which_tokens_it_holds(clip):
    """Remedy: @holds(...) on the clip, see `grpo_megatron.algorithms.custom.holds`."""
    config, inputs = _on_a_grid(clip)
    status = clip_status(config, inputs)
    held = torch.zeros(280, dtype=torch.bool)
    for mask in status.values():
        held |= mask
    (gradient,) = torch.autograd.grad(
        CLIPS[clip](config, inputs).sum(), [inputs.logprobs], retain_graph=True
    )
    (plain,) = torch.autograd.grad(unclipped(config, inputs).sum(), [inputs.logprobs])
    has_none = gradient == 0
    assert not (has_none & ~held).any(), "it removes gradients of which its status says nothing"
    only_cuts = bool(status) and torch.equal(has_none, held)
    is_plain_elsewhere = only_cuts and torch.allclose(gradient[~held], plain[~held])
    assert follows_recorded_clips(config) is is_plain_elsewhere


def test_clips_are_counted_by_token_and_by_sample():
    batch = micro_batch([2.0, 2.0, 0.5, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0, 1.0], [2, 2, 1])
    _, _, metrics = loss_of(batch)
    assert metrics["clip/high_fraction"] == pytest.approx(2 / 5)
    assert metrics["clip/high_sample_fraction"] == pytest.approx(1 / 3)
    assert metrics["clip/low_fraction"] == pytest.approx(1 / 5)
    assert metrics["clip/low_sample_fraction"] == pytest.approx(1 / 3)
    assert metrics["clip/region_fraction"] == pytest.approx(3 / 5)
    assert metrics["clip/region_sample_fraction"] == pytest.approx(2 / 3)


def test_gmpo_clips_tokens_and_counts_them_before_their_mean():
    batch = micro_batch([4.0, 1.0], [1.0, 1.0], [2])
    loss, gradient, metrics = loss_of(batch, "clip_low=0.4", "clip_high=0.4", preset="gmpo")
    mean = math.exp((0.4 + 0.0) / 2)
    assert loss == pytest.approx(-2 * mean)
    assert gradient == pytest.approx([0.0, -mean])
    assert metrics["clip/high_fraction"] == 0.5  # the sample's ratio is below the bound


def test_gmpo_does_not_clip_a_token_without_an_advantage():
    log_ratio = double(2.0, -2.0, 2.0, -2.0)
    inputs = ClipInputs(log_ratio, double(0, 0, -1, 1), log_ratio - 3, double(-3), 0.4, 0.4)
    assert gmpo_clip(inputs).tolist() == [2.0, -2.0, 2.0, -2.0]


# --- masks that are replayed


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_a_replayed_clip_is_followed_on_any_side():
    """As they were recorded: 0 is clipped above, 1 below, 2 and 3 are not, though they would be."""
    recorded = {"high": flags(1, 0, 0, 0), "low": flags(0, 1, 0, 0)}
    batch = micro_batch([1.1, 0.9, 1.5, 0.5], [1.0, -1.0, 1.0, -1.0], replayed_masks=recorded)
    loss, gradient, metrics = loss_of(batch, "clip_low=0.2", "clip_high=0.2")
    assert gradient == pytest.approx([0.0, 0.0, -1.5, 0.5])
    assert loss == pytest.approx(-1.1 + 0.9 - 1.5 + 0.5)
    assert metrics["replay/decisions_changed"] == 1.0


def test_replayed_masks_that_agree_change_nothing():
    recorded = {"high": flags(1, 0, 0), "low": flags(0, 1, 0)}
    values = ([1.5, 0.5, 1.0], [1.0, -1.0, 1.0])
    plain = loss_of(micro_batch(*values))
    loss, gradient, metrics = loss_of(micro_batch(*values, replayed_masks=recorded))
    assert metrics["replay/decisions_changed"] == 0.0
    assert (loss, gradient) == plain[:2]


def test_a_side_that_was_not_recorded_is_decided_anew():
    recorded = {"high": flags(0, 0)}
    batch = micro_batch([1.5, 0.5], [1.0, -1.0], replayed_masks=recorded)
    _, gradient, metrics = loss_of(batch)
    assert gradient == pytest.approx([-1.5, 0.0])
    assert metrics["replay/decisions_changed"] == 0.5


def test_a_replayed_clip_of_gmpo_is_followed_before_the_mean():
    recorded = {"high": flags(1, 0), "low": flags(0, 0)}
    values = ([1.2, 3.0], [1.0, 1.0], [2])
    batch = micro_batch(*values, replayed_masks=recorded)
    loss, gradient, _ = loss_of(batch, "clip_low=0.4", "clip_high=0.4", preset="gmpo")
    mean = math.sqrt(1.2 * 3.0)
    assert loss == pytest.approx(-2 * mean)
    assert gradient == pytest.approx([0.0, -mean])


def test_a_replayed_mismatch_mask_is_followed():
    """Token 0 was kept and would be rejected, token 1 was rejected and would be kept."""
    batch = micro_batch(
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0],
        rollout_logprobs=double(4.0, 1.5, 1.5).reciprocal().log() - LN2,
        replayed_masks={"mismatch": flags(0, 1, 0)},
    )
    settings = ("mismatch=icepop", "mismatch_min=0.5", "mismatch_max=2.0", "clip=none")
    _, gradient, metrics = loss_of(batch, *settings)
    assert gradient == pytest.approx([-4.0, 0.0, -1.5])
    assert metrics["rejected/mismatch_fraction"] == pytest.approx(1 / 3)
    assert metrics["replay/decisions_changed"] == pytest.approx(2 / 3)


def test_a_replayed_step_bounds_its_mismatch_weights_as_ever():
    """A weight that is cut, not set to zero, rejects nobody: nothing was recorded to follow."""
    batch = micro_batch(
        [1.0, 1.0],
        [1.0, 1.0],
        rollout_logprobs=double(4.0, 0.5).reciprocal().log() - LN2,
        replayed_masks={"mismatch": flags(0, 0)},
    )
    _, gradient, metrics = loss_of(batch, "mismatch=tis", "mismatch_max=1.5", "clip=none")
    assert gradient == pytest.approx([-1.5, -0.5])
    assert metrics["replay/decisions_changed"] == 0.0


def test_a_replayed_off_policy_mask_is_followed():
    behind = {"rollout_logprobs": double(0.0, -LN2), "replayed_masks": {"opsm": flags(0, 1)}}
    batch = micro_batch([1.0, 1.0], [-1.0, -1.0], **behind)
    _, gradient, metrics = loss_of(batch, "off_policy_mask=opsm", "opsm_delta=0.5", "clip=none")
    assert gradient == [1.0, 0.0]
    assert metrics["rejected/opsm_fraction"] == 0.5
    assert metrics["replay/decisions_changed"] == 1.0


# --- off policy


def test_bounds_of_a_mismatch_belong_to_what_is_kept():
    rho = double(0.5, 2.0, 0.25, 4.0)
    batch = micro_batch([1.0] * 4, [1.0] * 4, rollout_logprobs=-LN2 - rho.log())
    for name in ("icepop", "geometric_mask"):
        _, gradient, metrics = loss_of(
            batch, f"mismatch={name}", "mismatch_min=0.5", "mismatch_max=2.0", "clip=none"
        )
        assert gradient == pytest.approx([-0.5, -2.0, 0.0, 0.0])
        assert metrics["rejected/mismatch_fraction"] == 0.5
        assert metrics["weight/mean"] == pytest.approx(2.5 / 4)
        assert metrics["weight/square"] == pytest.approx(4.25 / 4)


def test_a_geometric_mask_looks_at_the_mean_of_a_sample():
    """The product of its rho is 4, their geometric mean is 2: within the bounds."""
    batch = micro_batch([1.0] * 2, [1.0] * 2, [2], rollout_logprobs=double(-2 * LN2, -2 * LN2))
    _, gradient, _ = loss_of(
        batch, "mismatch=geometric_mask", "mismatch_min=0.5", "mismatch_max=2.5", "clip=none"
    )
    assert gradient == pytest.approx([-2.0, -2.0])


def test_mismatch_weights_have_no_gradient():
    """Also where the old log-probs are those of the policy itself."""
    config, _ = load_objective("grpo", ["mismatch=tis"])
    logprobs = double(-1.0, -2.0).requires_grad_()
    inputs = MismatchInputs(logprobs, double(-1.5, -1.5), torch.tensor([0, 0]), torch.tensor([2]))
    assert not ratios.mismatch_weights(config, inputs).requires_grad


def test_a_rejected_sample_stays_rejected_beside_a_mismatch_weight():
    batch = micro_batch([1.0, 1.0], [-1.0, -1.0], rollout_logprobs=double(0.0, -LN2 - LN2))
    _, gradient, metrics = loss_of(
        batch,
        "off_policy_mask=opsm",
        "opsm_delta=0.5",
        "mismatch=tis",
        "mismatch_max=1.5",
        "clip=none",
    )
    assert gradient == pytest.approx([0.0, 1.5])
    assert metrics["weight/mean"] == pytest.approx(0.75)


def test_only_samples_with_a_negative_advantage_are_left_behind():
    batch = micro_batch([1.0] * 3, [1.0, 0.0, -1.0], rollout_logprobs=double(0.0, 0.0, 0.0))
    _, _, metrics = loss_of(batch, "off_policy_mask=opsm", "opsm_delta=0.5")
    assert metrics["rejected/opsm_fraction"] == pytest.approx(1 / 3)


def test_a_sample_at_just_the_threshold_is_not_left_behind():
    batch = micro_batch([1.0] * 2, [-1.0] * 2, rollout_logprobs=double(0.0, 1e-9))
    _, _, metrics = loss_of(batch, "off_policy_mask=opsm", f"opsm_delta={LN2!r}")
    assert metrics["rejected/opsm_fraction"] == 0.5


def test_thresholds_of_the_off_policy_mask_are_those_of_the_domain():
    batch = micro_batch(
        [1.0, 1.0],
        [-1.0, -1.0],
        rollout_logprobs=double(0.0, 0.0),
        domain=torch.tensor([0, 1]),
    )
    config, own = load_objective(
        "grpo", ["off_policy_mask=opsm", "clip=none", "domain.a.opsm_delta=0.5"], ("a", "b")
    )
    for state, expected in (({}, [0.0, 1.0]), ({"opsm_delta@b": 0.1}, [0.0, 0.0])):
        loss, stats = policy_loss(Objective(config, ("a", "b"), own, state), batch)
        (gradient,) = torch.autograd.grad(loss, [batch.logprobs])
        assert gradient.tolist() == expected
        calibrated = {name: values.tolist() for name, values in stats.kept_samples().items()}
        assert calibrated == ({"b": [LN2]} if not state else {})


def test_the_threshold_is_five_times_a_percentile_within_bounds():
    distances = torch.linspace(0.0, 0.1, 101, dtype=torch.float64)
    assert ratios.calibrated_delta(distances) == pytest.approx(5 * 0.099)
    assert ratios.calibrated_delta(distances / 1000) == 0.01
    assert ratios.calibrated_delta(-distances) == 0.01
    assert ratios.calibrated_delta(100 * distances) == 0.5
    assert ratios.calibrated_delta(distances[:0]) == 0.5


def test_the_mean_of_an_empty_segment_is_zero():
    """Else the threshold of the off-policy mask would be calibrated to not-a-number."""
    segment = torch.tensor([0, 0, 2])
    means = ratios.segment_mean(double(1.0, 3.0, 5.0), segment, torch.tensor([2, 0, 1]))
    assert means.tolist() == [2.0, 0.0, 5.0]


# --- what is added to the policy gradient


def test_entropy_is_rewarded_by_its_weight():
    entropies = double(0.5, 3.0).requires_grad_()
    batch = micro_batch([1.0, 1.0], [1.0, 1.0], entropies=entropies)
    plain, _, metrics = loss_of(batch)
    config, own = load_objective("grpo", ["entropy_weight=0.2"])
    loss, _ = policy_loss(Objective(config, own=own), batch)
    (gradient,) = torch.autograd.grad(loss, [entropies])
    assert float(loss.detach()) - plain == pytest.approx(-0.2 * 3.5)
    assert gradient.tolist() == pytest.approx([-0.2, -0.2])
    assert metrics["policy/entropy"] == pytest.approx(1.75)


def test_weights_of_regularisers_are_those_of_the_domain():
    more = {
        "domain": torch.tensor([0, 1]),
        "entropies": double(3.0, 5.0),
        "ref_logprobs": double(-LN2 + 1.0, -LN2 + 2.0),
    }
    batch = micro_batch([1.0, 1.0], [1.0, 1.0], **more)
    base = ("kl=k2",)
    plain, _, _ = loss_of(batch, *base, "kl_beta=0", domains=("a", "b"))
    own_entropy, _, _ = loss_of(
        batch, *base, "kl_beta=0", "domain.b.entropy_weight=0.1", domains=("a", "b")
    )
    own_kl, _, _ = loss_of(batch, *base, "kl_beta=0.1", "domain.b.kl_beta=0.3", domains=("a", "b"))
    assert own_entropy - plain == pytest.approx(-0.1 * 5.0)
    assert own_kl - plain == pytest.approx(0.1 * 1.0**2 / 2 + 0.3 * 2.0**2 / 2)


def test_displacement_is_held_against_answers_that_are_not_wrong():
    """Tokens of an advantage of at least zero, in samples that became less likely altogether."""
    falling = [0.5, 2.0, 0.25, 0.5, 0.5]
    batch = micro_batch(falling, [1.0, 1.0, 0.0, -1.0, 1.0], [1, 1, 1, 1, 1])
    plain, _, _ = loss_of(batch)
    loss, _, _ = loss_of(batch, "llds_weight=0.1")
    assert loss - plain == pytest.approx(0.1 * (LN2 + 2 * LN2 + LN2))
    together = micro_batch([0.5, 4.0], [1.0, 1.0], [2])  # its sum rose
    assert loss_of(together, "llds_weight=0.1")[0] == pytest.approx(loss_of(together)[0])


def test_a_spoilt_token_is_in_no_part_of_the_loss():
    """Nor in its likelihood, nor in the slope of lambda."""
    more = {"positive_weights": double(0.5, 0.5), "weight_slopes": double(1.0, 1.0)}
    batch = micro_batch([1.5, 1.0], [1.0, 3.0], spoilt=torch.tensor([True, False]), **more)
    loss, gradient, metrics = loss_of(batch, "clip=none")
    assert loss == pytest.approx(-3.0 + 0.5 * LN2)
    assert gradient == pytest.approx([0.0, -3.0 - 0.5])
    assert metrics["lambda/gradient"] == pytest.approx(-3.0)


def test_a_spoilt_token_is_not_pulled_with_its_sample():
    """A preference is of whole samples, yet moves the other tokens only."""
    half = double(-LN2, -LN2)
    preference = torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    batch = micro_batch([1.0, 1.0], [0.0, 0.0], [2], ref_logprobs=half, preference=preference)
    assert loss_of(batch)[1] == [2.0, 2.0]
    spoilt = replace(batch, spoilt=torch.tensor([True, False]))
    assert loss_of(spoilt)[1] == [0.0, 2.0]


def test_a_sample_has_the_weights_of_its_domain_whatever_its_place():
    batch = micro_batch([1.0] * 2, [0.0] * 2, entropies=double(1, 3), domain=torch.tensor([1, 0]))
    loss, _, _ = loss_of(batch, "domain.b.entropy_weight=0.5", domains=("a", "b"))
    assert loss == -0.5


def test_nothing_is_displaced_on_policy():
    batch = micro_batch([1.0, 1.0], [1.0, 0.0])
    assert loss_of(batch, "llds_weight=0.1")[:2] == loss_of(batch)[:2]


@pytest.mark.parametrize("name", ["k2", "k3", "is_k2", "is_k3"])
def test_a_far_reference_has_a_finite_divergence_without_gradient(name):
    """In fp32, where `e^100` would be infinite."""
    logprobs = torch.tensor([-101.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -101.0])
    divergence = KL[name](logprobs, reference, torch.zeros(2))
    far = ratios.MAX_LOG_RATIO
    expected = [far**2 / 2] * 2
    if name.endswith("k3"):
        expected = [math.exp(far) - 1 - far, math.exp(-far) - 1 + far]
    assert divergence.tolist() == pytest.approx(expected)
    divergence.sum().backward()
    assert logprobs.grad.tolist() == [0, 0]


def test_absolute_terms_and_the_slope_of_lambda_are_sums():
    batch = micro_batch(
        [1.0, 1.0, 1.0],
        [1.0, -2.0, 4.0],
        weights=double(0.5, 0.5, 0.25),
        weight_slopes=double(1.0, 2.0, -1.0),
    )
    loss, _, metrics = loss_of(batch)
    assert loss == pytest.approx(-0.5 + 1.0 - 1.0)
    assert metrics["loss/abs_terms"] == pytest.approx(0.5 + 1.0 + 1.0)
    assert metrics["lambda/gradient"] == pytest.approx(-1.0 + 4.0 + 4.0)
    assert metrics["advantage/abs_mean"] == pytest.approx(7 / 3)


# --- metrics


def test_how_far_the_policy_moved_is_told_by_the_sign_of_the_advantage():
    batch = micro_batch([2.0, 4.0, 0.5, 0.125], [1.0, 3.0, -1.0, 0.0])
    _, _, metrics = loss_of(batch)
    assert metrics["update/k1"] == pytest.approx(-(1 + 2 - 1 - 3) * LN2 / 4)
    assert metrics["update/k2"] == pytest.approx((1 + 4 + 1 + 9) * LN2**2 / 8)
    assert metrics["update/logprob_gain_positive"] == pytest.approx(1.5 * LN2)
    assert metrics["update/logprob_gain_negative"] == pytest.approx(-LN2)
    assert metrics["policy/logprob_positive"] == pytest.approx((0 + 1) * LN2 / 2)
    assert metrics["policy/logprob_negative"] == pytest.approx(-2 * LN2)


def test_mismatch_metrics_by_hand():
    rho = double(2.0, 0.5)
    _, _, metrics = loss_of(micro_batch([1.0, 1.0], [1.0, 1.0], rollout_logprobs=-LN2 - rho.log()))
    assert metrics["mismatch/k1"] == pytest.approx(0.0)
    assert metrics["mismatch/k3"] == pytest.approx((2.0 + 0.5) / 2 - 1)
    assert metrics["mismatch/abs_mean"] == pytest.approx(LN2)
    assert metrics["mismatch/abs_max"] == pytest.approx(LN2)
    assert metrics["mismatch/exp_abs_mean"] == pytest.approx(2.0)
    assert metrics["mismatch/chi2"] == pytest.approx((3.0 - 0.75) / 2)
    assert metrics["mismatch/rho/mean"] == pytest.approx(1.25)
    assert metrics["mismatch/rho/square"] == pytest.approx(4.25 / 2)


def test_metrics_of_domains_count_their_own_tokens_and_samples():
    batch = micro_batch(
        [2.0, 2.0, 1.0, 4.0],
        [1.0, 1.0, 1.0, 1.0],
        [3, 1],
        domain=torch.tensor([0, 1]),
    )
    _, _, metrics = loss_of(batch, domains=("a", "b"))
    assert metrics["clip/high_fraction@a"] == pytest.approx(2 / 3)
    assert metrics["clip/high_fraction@b"] == 1.0
    assert metrics["clip/high_sample_fraction@a"] == 1.0
    assert metrics["ratio/max@a"] == pytest.approx(2.0)
    assert metrics["ratio/max@b"] == metrics["ratio/max"] == pytest.approx(4.0)
    assert metrics["ratio/mean@a"] == pytest.approx(5 / 3)
    _, _, alone = loss_of(micro_batch([2.0], [1.0]))
    assert not any("@" in name for name in alone)


def test_an_infinite_log_prob_of_any_column_leaves_the_token_out():
    ref = {"ref_logprobs": -LN2 * torch.ones(2).double()}
    values = ([1.0, 1.5], [1.0, 1.0])
    for column in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "untruncated_logprobs"):
        infinite = {column: double(-math.inf, -LN2)}
        batch = micro_batch(*values, **(ref | infinite))
        loss, gradient, metrics = loss_of(batch, "clip=none")
        assert metrics["tokens/infinite_fraction"] == 0.5
        assert loss == pytest.approx(-1.5)
        assert gradient == pytest.approx([0.0, -1.5])
