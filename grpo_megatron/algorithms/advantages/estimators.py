"""Advantage estimators. Rewards are after shaping; `groups` has the samples that count.

Shape legend: N samples, n policy tokens of all of them, flat."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Events, MismatchInputs, SampleBatch
from grpo_megatron.algorithms.groups import (
    ZERO_VARIANCE,
    Groups,
    by_groups,
    prefix_sums,
    suffix_sums,
    without_rounding,
)
from grpo_megatron.algorithms.ratios import discounted_from, mismatch_weights, shifted
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.errors import DataError

MIN_ENTROPY = 1e-6
"""Nats. Smaller entropies count as this much where they are divided by."""

ESTIMATORS: Registry[Callable[[ObjectiveConfig, SampleBatch, Groups], Tensor]] = Registry()
"""`(objective, batch, groups) -> float64 [N]`, or `[n]` where tokens of a sample differ
(`config.objective.TOKEN_LEVEL`)."""


@ESTIMATORS.register("reward")
def plain_reward(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i`, no baseline (REINFORCE++, arXiv:2501.03262, whitens it afterwards)."""
    return torch.where(groups.valid, batch.rewards, 0.0)


@ESTIMATORS.register("batch")
def batch_relative(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i - mean`, the mean over all samples of the scope, whatever their prompt."""
    return Groups(batch.scopes(o.statistics_scope), groups.valid).centred(batch.rewards)


@ESTIMATORS.register("group")
def group_relative(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = (R_i - mean) / (std + eps)`, the mean over the group.

    std none: 1 (Dr. GRPO, arXiv:2503.20783); group: of the group (GRPO, arXiv:2402.03300);
    batch_raw: of all rewards of the scope, those of groups that were dropped included (Lite PPO,
    arXiv:2508.08221); batch_residual: of all centred rewards of the scope, to which a dropped group
    adds nothing but zeros. It divides by n - 1, with std_kind = "population" by n. Groups without
    spread and groups of one get exactly 0."""
    centred = groups.centred(batch.rewards)
    if o.advantage_std == "none":
        return centred
    if o.advantage_std == "group":
        return groups.standardised(batch.rewards, o.std_kind, o.advantage_eps)
    if o.advantage_std == "batch_raw":
        std = _raw_std(o, batch, groups)
    else:
        scope = Groups(batch.scopes(o.statistics_scope), groups.valid)
        std = scope.std(centred, o.std_kind)
    return torch.where(centred == 0, 0.0, centred / (std + o.advantage_eps))


def _raw_std(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Return the deviation of the rewards in each sample's scope as they were sampled: before any
    filter, which leaves out all-right and all-wrong groups. [N]"""
    rewards = batch.rewards
    valid = groups.valid
    scopes = batch.scopes(o.statistics_scope)
    if batch.dropped is not None:
        dropped = batch.dropped.domains
        if o.statistics_scope != "domain":
            dropped = torch.zeros_like(dropped)
        rewards = torch.cat([rewards, batch.dropped.rewards])
        valid = torch.cat([valid, torch.ones_like(dropped, dtype=torch.bool)])
        scopes = torch.cat([scopes, dropped])
    return Groups(scopes, valid).std(rewards, o.std_kind)[: len(batch)]


@ESTIMATORS.register("rloo")
def rloo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i - mean of the others = G / (G - 1) (R_i - mean)` (RLOO, arXiv:2402.14740)."""
    return groups.centred(batch.rewards) * groups.count / (groups.count - 1).clamp(min=1)


@ESTIMATORS.register("opo")
def opo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = R_i - sum_j T_j R_j / sum_j T_j`: the baseline of least variance if the gradient of a
    sample grows with its length (OPO, arXiv:2505.23585). Groups without spread get exactly 0."""
    lengths = batch.token_counts.double()
    baseline = groups.sum(lengths * batch.rewards) / groups.sum(lengths).clamp(min=1)
    return groups.beside(batch.rewards, baseline)


@ESTIMATORS.register("maxrl")
def maxrl(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = (R_i - mean) / (mean + eps)`, for rewards of at least 0 (MaxRL)."""
    mean = groups.mean(batch.rewards) + o.advantage_eps
    return torch.where(mean > 0, groups.centred(batch.rewards) / mean, 0.0)


@ESTIMATORS.register("components")
def standardised_components(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = sum_k w_k (R_ik - mean_k) / (std_k + eps)`: every reward component standardised.

    MO-GRPO (arXiv:2509.22047) with weights 1; GDPO (arXiv:2601.05242) whitens the sum over the
    batch. A component without spread in the group adds 0, a skipped one (NaN) too."""
    total = torch.zeros_like(batch.rewards)
    magnitude = torch.zeros_like(batch.rewards)
    for name, values in batch.components.items():
        part = Groups(groups.ids, groups.valid & ~torch.isnan(values))
        scores = part.standardised(values, o.std_kind, o.advantage_eps)
        scores = batch.component_weights[name] * scores
        total += scores
        magnitude += scores.abs()
    return without_rounding(total, magnitude)


@ESTIMATORS.register("best_minus_second")
def best_minus_second(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Only the best sample of a group gets `R_max - R_second` (ties: 0); with
    `advantage_std = "group"` divided by `std + eps`."""
    best = groups.rank(-batch.rewards, batch.sample_ids) == 0
    rest = Groups(groups.ids, groups.valid & ~best)
    gap = groups.max(batch.rewards) - rest.max(batch.rewards)
    if o.advantage_std == "group":
        std = groups.std(batch.rewards, o.std_kind) + o.advantage_eps
        gap = gap / torch.where(std > 0, std, 1.0)
    return torch.where(best & (rest.count > 0), gap, 0.0)


@ESTIMATORS.register("passk")
def passk(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Analytic pass@k advantage (Chen et al., arXiv:2508.10751), n0 wrong of N samples:

    `m = 1 - C(n0,k)/C(N,k)`, `s = sqrt(m (1-m))`; right: `(1-m)/s`;
    wrong: `(1 - m - C(n0-1,k-1)/C(N-1,k-1))/s`; 0 where s is 0, as in every group of at most k."""
    right, wrong, n = _counts(o, batch, groups)
    mean = 1 - _choose_ratio(wrong, n, o.passk_k)
    std = (mean * (1 - mean)).clamp(min=0).sqrt()
    others = _choose_ratio(wrong - 1, n - 1, o.passk_k - 1)
    value = torch.where(right, 1 - mean, 1 - mean - others) / std.clamp(min=1e-12)
    return torch.where(groups.valid & (std > 1e-12), value, 0.0)


@ESTIMATORS.register("pkpo")
def pkpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """PKPO (arXiv:2505.15201): a right sample earns `k/N`, a wrong one `k/N rho(N-1, c, k-1)`,
    with `rho(n, c, k) = 1 - C(n-c,k)/C(n,k)`, c right; less the leave-one-out baseline, the
    same expectation over the sets of k without the sample: `k/N rho(N-1, c_others, k)`."""
    right, wrong, n = _counts(o, batch, groups)
    num_right = n - wrong
    share = o.passk_k / n.clamp(min=1)
    of_wrong = share * (1 - _choose_ratio(wrong - 1, n - 1, o.passk_k - 1))
    value = torch.where(right, share, of_wrong)
    if o.pkpo_baseline:
        wrong_others = (n - 1) - (num_right - right.double())
        value = value - share * (1 - _choose_ratio(wrong_others, n - 1, o.passk_k))
        value = torch.where(n > o.passk_k, value, 0.0)
    return torch.where(groups.valid & (n >= o.passk_k), value, 0.0)


@ESTIMATORS.register("gtpo_entropy")
def gtpo_entropy(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Right samples alive at t: `a1 + a2 d_t H_it / sum_k H_kt`, d_t their number; wrong ones:
    `-(a1 + a2 h_t (1/H_jt) / sum_k 1/H_kt)`. Each pool of a group standardised over its tokens
    (`gtpo_pool = "joint"`: both together, which keeps right above wrong). [n]"""

    def of_groups(part: SampleBatch) -> Tensor:
        shaped, pool, counts = shaped_rewards(o, part)
        return Groups(pool, counts).standardised(shaped, o.std_kind, o.advantage_eps)

    counted = torch.where(groups.valid, batch.rewards, torch.nan)
    return by_groups(replace(batch, rewards=counted), of_groups)


@ESTIMATORS.register("grpo_s")
def grpo_s(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Like gtpo_entropy, with every sample's mean entropy in place of its tokens'. [N]"""
    entropy = batch.means(batch.tokens["entropies"]).double().clamp(min=MIN_ENTROPY)
    right = batch.is_correct(o.correct_threshold)
    pools = groups.ids * 2 + right
    shaped = _shape(o, entropy, right, Groups(pools, groups.valid))
    if o.gtpo_pool == "joint":
        pools = groups.ids
    return Groups(pools, groups.valid).standardised(shaped, o.std_kind, o.advantage_eps)


OTB_EPS = 1e-8
"""Added to the sum of weights that the token baseline is divided by."""


@ESTIMATORS.register("otb")
def optimal_token_baseline(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_t = R - B_t`, `B_t = sum_i W_it R_i / (sum_i W_it + 1e-8)` over the samples of the group
    that have a token t, `W_t = sum_{j<=t} rho_j^2 (1 - 2 pi_j + sum_v pi_j(v)^2)`: the baseline of
    least variance if gradients of tokens grow as those of their logits (OTB, arXiv:2602.07078).

    pi is the old policy, rho the mismatch weight, 1 without one. The baseline of a group of one is
    0, with `otb_zero_tail` also where only one sample still has tokens. Elsewhere samples with
    equal rewards get exactly 0. [n]"""

    def of_groups(part: SampleBatch) -> Tensor:
        longest = 0
        if len(part):
            longest = int(part.token_counts.max())
        place = part.to_tokens(part.group_ids) * longest + part.positions()
        alive = Groups(place, part.to_tokens(part.valid))
        rewards = part.to_tokens(part.rewards)
        weights = prefix_sums(_squared_score_norms(o, part), part)
        baseline = alive.sum(weights * rewards) / (alive.sum(weights) + OTB_EPS)
        all_equal = alive.spread(rewards) <= ZERO_VARIANCE
        values = torch.where(all_equal, 0.0, rewards - baseline)
        group_size = Groups(part.group_ids, part.valid).count
        has_no_baseline = part.to_tokens(group_size) == 1
        if o.otb_zero_tail:
            has_no_baseline = has_no_baseline | (alive.count == 1)
        values = torch.where(has_no_baseline, rewards, values)
        return torch.where(alive.valid, values, 0.0)

    counted = torch.where(groups.valid, batch.rewards, torch.nan)
    return by_groups(replace(batch, rewards=counted), of_groups)


@ESTIMATORS.register("opob")
def off_policy_baseline(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_i = (R_i - b) / (std + eps)`, `b = sum_i W_i R_i / sum_i W_i` over the group, with
    `W_i = w_i^2 sum_t (1 - 2 pi_t + sum_v pi_t(v)^2)`: the baseline of least variance of weighted
    policy gradients (VCPO, arXiv:2602.17616, which measures the norm of each sample's gradient;
    ours adds up those of its logits, as in otb).

    w is the product of pi / pi_engine over the sample, pi the old policy. std none: 1; group: of
    the group. Groups without spread and groups of one get exactly 0. [N]"""
    has_signal = groups.valid & (groups.spread(batch.rewards) > ZERO_VARIANCE)
    log_weights = 2 * batch.trajectory_log_ratios()
    largest = groups.max(log_weights)
    weights = (log_weights - largest).exp() * batch.sums(_logit_gradients(batch)).double()
    total = groups.sum(weights)
    rewards = torch.where(groups.valid, batch.rewards, 0.0)
    weighted = groups.sum(weights * rewards) / torch.where(total > 0, total, 1.0)
    baseline = torch.where(total > 0, weighted, groups.mean(rewards))
    values = groups.beside(batch.rewards, baseline)
    if o.advantage_std == "none":
        return values
    return values / torch.where(
        has_signal, groups.std(batch.rewards, o.std_kind) + o.advantage_eps, 1.0
    )


def _logit_gradients(part: SampleBatch) -> Tensor:
    """`|e_y - pi|^2` of each token y under the old policy: its gradient by the logits, squared.
    [n]"""
    norms = 1 - 2 * part.tokens["old_logprobs"].exp() + part.tokens["squared_probs"]
    return norms.clamp(min=0)  # rounding


def _squared_score_norms(o: ObjectiveConfig, part: SampleBatch) -> Tensor:
    """`rho^2 |e_y - pi|^2` of each token y: its gradient by the logits, squared and weighed as the
    loss weighs it. [n]"""
    old_logprobs = part.tokens["old_logprobs"]
    norms = _logit_gradients(part)
    if o.mismatch == "none":
        return norms
    rollout_logprobs = part.tokens["rollout_logprobs"]
    is_usable = torch.isfinite(old_logprobs) & torch.isfinite(rollout_logprobs)
    inputs = MismatchInputs(
        torch.where(is_usable, old_logprobs, 0.0),
        torch.where(is_usable, rollout_logprobs, 0.0),
        part.to_tokens(torch.arange(len(part))),
        part.token_counts,
    )
    return norms * mismatch_weights(o, inputs) ** 2


@ESTIMATORS.register("process")
def process_supervision(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Process supervision (DeepSeekMath, arXiv:2402.03300): all step rewards of a group are
    standardised together; a token's advantage is the sum over the steps that end at it or later.
    Without step rewards, turns for which the environment gave a reward are the steps.

    Tokens after the last step, and samples without steps, get 0."""
    events = steps_of(batch)
    if events is None:
        raise _without("steps")
    pool = Groups(groups.ids[events.sample], groups.valid[events.sample])
    return _credit(batch, events, pool.standardised(events.reward, o.std_kind, o.advantage_eps))


@ESTIMATORS.register("gagpo")
def gagpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GAGPO (arXiv:2605.13217): `V(s)` is the mean return-to-go of the group's visits to s;
    `delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`, `A_t = sum_l (gamma lambda)^l delta_{t+l}`,
    standardised over the turns of the group. All tokens of a turn share its advantage.

    A state seen once is its own value: its advantage comes from later turns only. A sample without
    a reward for any turn has its own reward at the last one."""
    turns, is_last = _turns_in_order(batch)
    returns = _discounted(turns.reward, is_last, o.gagpo_gamma)
    of_group = groups.ids[turns.sample]
    valid = groups.valid[turns.sample]
    assert turns.state is not None  # turns have one
    _, visit = torch.unique(torch.stack((of_group, turns.state)), dim=1, return_inverse=True)
    value = Groups(visit, valid).mean(returns)
    next_value = torch.where(is_last, 0.0, value.roll(-1))
    delta = turns.reward + o.gagpo_gamma * next_value - value
    advantage = _discounted(delta, is_last, o.gagpo_gamma * o.gagpo_lambda)
    values = Groups(of_group, valid).standardised(advantage, o.std_kind, o.advantage_eps)
    return _to_tokens_of_turns(batch, turns, is_last, values)


@ESTIMATORS.register("gigpo")
def gigpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GiGPO (arXiv:2505.10978): `A_t = A_i + omega A(s_t)`, of the episode and of the turn.
    `A_i = (R_i - mean) / (std + eps)` in the group; `A(s_t)` is the same of the discounted returns
    `sum_{u >= t} gamma^(u-t) r_u` among all visits of the group to the state s_t. With
    `advantage_std = "none"` nothing is divided. All tokens of a turn share its advantage. [n]

    `A(s_t)` is 0 for a state seen once. A sample without a reward for any turn has its own reward
    at the last one."""
    turns, is_last = _turns_in_order(batch)
    returns = _discounted(turns.reward, is_last, o.gigpo_gamma)
    assert turns.state is not None  # turns have one
    visits = torch.stack((groups.ids[turns.sample], turns.state))
    _, anchor = torch.unique(visits, dim=1, return_inverse=True)
    of_turns = _beside_mean(o, Groups(anchor, groups.valid[turns.sample]), returns)
    of_episodes = _beside_mean(o, groups, batch.rewards)
    of_episodes = of_episodes[turns.sample]
    of_turns = o.gigpo_omega * of_turns
    values = without_rounding(of_episodes + of_turns, of_episodes.abs() + of_turns.abs())
    return _to_tokens_of_turns(batch, turns, is_last, values)


@ESTIMATORS.register("gae")
def generalised_advantages(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """`A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}`, `delta_t = r_t + gamma V_{t+1} - V_t` over
    the policy tokens of a sample, one after another (GAE, arXiv:1506.02438): those of an
    environment between them are no steps. V_t is the critic's value before the token, from before
    the step; V after the last one is 0. The last token earns the sample's reward, and with
    `kl = "reward_k1"` every token `-beta (log pi_old - log pi_ref)` (arXiv:2203.02155).

    Samples without a reward get 0. [n]"""

    def of_groups(part: SampleBatch) -> Tensor:
        rewards = torch.zeros(part.num_tokens, dtype=torch.float64)
        if "token_rewards" in part.tokens:
            rewards = rewards + part.tokens["token_rewards"]
        has_tokens = part.token_counts > 0
        last = part.offsets[1:][has_tokens] - 1
        rewards[last] += torch.where(part.valid, part.rewards, 0.0)[has_tokens]
        sample = part.to_tokens(torch.arange(len(part)))
        found = gae(rewards, part.tokens["values"], sample, o.gae_gamma, o.gae_lambda)
        return torch.where(part.to_tokens(part.valid), found, 0.0)

    counted = torch.where(groups.valid, batch.rewards, torch.nan)
    return by_groups(replace(batch, rewards=counted), of_groups)


def gae(rewards: Tensor, values: Tensor, sample: Tensor, discount: float, decay: float) -> Tensor:
    """Return generalised advantages of tokens, [n]: `sum_l (discount decay)^l delta_{t+l}` with
    `delta_t = r_t + discount V_{t+1} - V_t` within a sample, V after its last token 0.

    rewards, values: [n]; sample: int64 [n], samples follow one another."""
    next_values = shifted(values, sample, -1, 0.0)
    return discounted_from(rewards + discount * next_values - values, sample, discount * decay)


def _beside_mean(o: ObjectiveConfig, groups: Groups, values: Tensor) -> Tensor:
    """Return values less their group's mean, divided by its deviation where `advantage_std` says
    so."""
    if o.advantage_std == "group":
        return groups.standardised(values, o.std_kind, o.advantage_eps)
    return groups.centred(values)


def _counts(
    o: ObjectiveConfig, batch: SampleBatch, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which samples are right, bool [N]; of each one's group, how many are wrong, and its
    size."""
    right = batch.is_correct(o.correct_threshold)
    num_wrong = groups.sum((~right).double())
    return right, num_wrong, groups.count


def _choose_ratio(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """`C(top, k) / C(bottom, k)`, 0 where top < k."""
    ratio = torch.ones_like(top)
    for j in range(k):
        ratio = ratio * (top - j).clamp(min=0) / (bottom - j).clamp(min=1)
    return ratio


def shaped_rewards(o: ObjectiveConfig, part: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return shaped token rewards [n], the pool of every token (int64), and whether it counts
    (bool)."""
    right = part.is_correct(o.correct_threshold)
    pools = part.group_ids * 2 + right
    longest = 0
    if len(part):
        longest = int(part.token_counts.max())
    counts = part.to_tokens(part.valid)
    at_same_place = part.to_tokens(pools) * longest + part.positions()
    entropies = part.tokens["entropies"].clamp(min=MIN_ENTROPY)
    shaped = _shape(o, entropies, part.to_tokens(right), Groups(at_same_place, counts))
    if o.gtpo_pool == "joint":
        pools = part.group_ids
    return shaped, part.to_tokens(pools), counts


def _shape(o: ObjectiveConfig, entropy: Tensor, right: Tensor, pool: Groups) -> Tensor:
    """GTPO's reward by entropy within a pool of right or of wrong ones; [n], or [N] by samples."""
    measure = torch.where(right, entropy, 1 / entropy)
    portion = pool.count * measure / pool.sum(measure).clamp(min=1e-300)
    sign = torch.where(right, 1.0, -1.0)
    return sign * (o.gtpo_alpha1 + o.gtpo_alpha2 * portion)


def turn_index(batch: SampleBatch) -> Tensor:
    """int32 [n]: a number for every turn; tokens after the last turn form one of their own.

    Raises DataError where the samples have no turns."""
    events = _turns(batch)
    starts = torch.zeros(batch.num_tokens + 1, dtype=torch.int32)
    starts[batch.offsets[:-1]] = 1
    starts[batch.offsets[events.sample] + events.end + 1] = 1
    return starts[:-1].cumsum(0, dtype=torch.int32)


def steps_of(batch: SampleBatch) -> Events | None:
    """Return what process supervision standardises: steps, else turns, that have a reward; None:
    there are neither."""
    steps = batch.events
    if steps is None:
        steps = batch.turns
    if steps is None:
        return None
    return steps[~torch.isnan(steps.reward)]


def _turns(batch: SampleBatch) -> Events:
    """Return all turns. Raises DataError where the samples have none."""
    if batch.turns is None:
        raise _without("turns")
    return batch.turns


def _turns_in_order(batch: SampleBatch) -> tuple[Events, Tensor]:
    """Return all turns, one sample after another, and whether each is the last of its sample, bool
    [K].

    Their rewards: 0 without one, and of a sample without any its own reward at the last turn."""
    turns = _turns(batch)
    in_order = np.lexsort((turns.end, turns.sample))
    turns = turns[torch.from_numpy(in_order)]
    is_last = torch.diff(turns.sample, append=turns.sample.new_tensor([-1])) != 0
    is_rewarded = ~torch.isnan(turns.reward)
    num_rewarded = torch.zeros(len(batch), dtype=torch.int64)
    num_rewarded.index_add_(0, turns.sample, is_rewarded.long())
    takes_outcome = is_last & (num_rewarded[turns.sample] == 0)
    rewards = torch.where(is_rewarded, turns.reward, 0.0)
    rewards = torch.where(takes_outcome, batch.rewards[turns.sample], rewards)
    return replace(turns, reward=rewards), is_last


def _without(what: str) -> DataError:
    return DataError(
        f"the samples have no {what}",
        where=what,
        remedy=f"give {what}, or choose an outcome-level advantage",
    )


def _to_tokens_of_turns(
    batch: SampleBatch, turns: Events, is_last: Tensor, values: Tensor
) -> Tensor:
    """Give all tokens of a turn its value, [n]. is_last: whether a turn is its sample's last, [K];
    values: [K].

    Credit is summed from the back, so a turn's own is its value less that of the turn after it."""
    next_values = torch.where(is_last, 0.0, values.roll(-1))
    return _credit(batch, turns, values - next_values)


def _credit(batch: SampleBatch, events: Events, values: Tensor) -> Tensor:
    """Give every token the sum of the values of events that end at it or later; exactly 0 where
    they cancel each other."""

    def of_groups(part: SampleBatch) -> Tensor:
        inside = part.events
        assert inside is not None  # given below
        marks = torch.zeros(part.num_tokens, dtype=torch.float64)
        marks.index_add_(0, part.offsets[inside.sample] + inside.end, inside.reward)
        whole_group = Groups(part.group_ids, torch.ones_like(part.valid))
        magnitude = whole_group.sum(part.sums(marks.abs()))
        return without_rounding(suffix_sums(marks, part), part.to_tokens(magnitude))

    return by_groups(replace(batch, events=replace(events, reward=values)), of_groups)


def _discounted(values: Tensor, last: Tensor, factor: float) -> Tensor:
    """Return backward discounted sums that restart after every `last`, [K]."""
    backwards = []
    running = 0.0
    for value, is_last in zip(values.flip(0).tolist(), last.flip(0).tolist(), strict=True):
        if is_last:
            running = 0.0
        running = value + factor * running
        backwards.append(running)
    return torch.tensor(backwards[::-1], dtype=values.dtype)
