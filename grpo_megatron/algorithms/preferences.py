"""Losses of preferences: pure functions of what a policy thinks of whole answers.

A *score* of an answer is the sum of its tokens' log-probs, or their mean, less that of a reference
where the loss has one. Of P pairs: chosen, rejected: scores [P]; of M single answers: scores [M].
All losses are to be minimised and have the shape of their input. docs/preferences.md compares them
with TRL's."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from grpo_megatron.config.preferences import PreferencesConfig

MAX_SCORE = -1e-7
"""Largest mean log-prob of an answer that ORPO tells apart from 0: log-probs in float32 of tokens
that are certain are 0, or above it by rounding, where odds are infinite."""
MARGIN = "margin"
"""Component of a recorded step: by how much the chosen answer of a pair is better."""
REFERENCE = "reference"
"""Component of a recorded step: the sum of an answer's log-probs under the reference."""


def sigmoid_loss(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`-log sigmoid(m)`, the negative log-likelihood of Bradley and Terry: DPO (arXiv:2305.18290)
    where m is beta times the difference of scores. With `label_smoothing` e conservative DPO,
    `-(1 - e) log sigmoid(m) - e log sigmoid(-m)`."""
    kept = (1 - label_smoothing) * softplus(-margins)
    if not label_smoothing:
        return kept
    return kept + label_smoothing * softplus(margins)


def sigmoid_loss_slope(margins: Tensor) -> Tensor:
    """`d loss / d m` of `sigmoid_loss` without smoothing: `-sigmoid(-m)`."""
    return -torch.sigmoid(-margins)


def hinge_loss(margins: Tensor) -> Tensor:
    """`max(0, 1 - m)` (SLiC-HF, arXiv:2305.10425; on DPO's margin: RSO, arXiv:2309.06657)."""
    return torch.relu(1 - margins)


def ipo_loss(differences: Tensor, beta: float) -> Tensor:
    """`(d - 1 / (2 beta))^2`, d the difference of scores (IPO, arXiv:2310.12036, equation 17)."""
    return (differences - 1 / (2 * beta)) ** 2


def simpo_loss(differences: Tensor, beta: float, gamma: float, label_smoothing: float) -> Tensor:
    """`-log sigmoid(beta d - gamma)`, d the difference of mean log-probs (SimPO, arXiv:2405.14734,
    equation 6); `label_smoothing` as in `sigmoid_loss`."""
    return sigmoid_loss(beta * differences - gamma, label_smoothing)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return `log(p / (1 - p))` of `log p`, which is below 0; in the shape of `logprobs`."""
    return logprobs - _log1mexp(logprobs)


def _log1mexp(logprobs: Tensor) -> Tensor:
    """`log(1 - e^x)` for x < 0, exact near both ends."""
    is_near_zero = logprobs > -0.6931471805599453
    far = torch.where(is_near_zero, -1.0, logprobs)  # at 0 its gradient would be infinite
    of_near = torch.log(-torch.expm1(logprobs))
    of_far = torch.log1p(-torch.exp(far))
    return torch.where(is_near_zero, of_near, of_far)


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-beta log sigmoid(log odds(chosen) - log odds(rejected))`, of mean log-probs (ORPO,
    arXiv:2403.07691, equation 7). Beside it the whole loss has the negative log-likelihood of the
    chosen answers' tokens.

    Scores above `MAX_SCORE` count as that much, without a gradient."""
    odds_of_chosen = log_odds(chosen.clamp(max=MAX_SCORE))
    odds_of_rejected = log_odds(rejected.clamp(max=MAX_SCORE))
    return -beta * logsigmoid(odds_of_chosen - odds_of_rejected)


def kto_loss(
    scores: Tensor,
    labels: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`w (1 - sigmoid(beta (s - z)))` of answers with the label true, with `z - s` of the others
    (KTO, arXiv:2402.01306, equation 8). labels: bool [M]; baseline: z, a scalar, see
    `kto_baseline`."""
    signs = torch.where(labels, 1.0, -1.0).to(scores)
    weights = torch.where(labels, desirable_weight, undesirable_weight).to(scores)
    return weights * (1 - torch.sigmoid(beta * signs * (scores - baseline)))


def kto_baseline(scores: Tensor) -> Tensor:
    """Return KTO's z: the mean over scores, which are sums over tokens, of answers to other prompts
    of the step; at least 0, a scalar without gradient. scores: [M]."""
    return scores.detach().mean().clamp(min=0)


def labelled_losses(
    settings: PreferencesConfig, scores: Tensor, labels: Tensor, baseline: Tensor
) -> Tensor:
    """Return the loss of every answer with a label, [M]: KTO, with the weights that the recipe
    gives the labels. scores: [M]; labels: bool [M]; baseline: z, a scalar."""
    assert settings.loss == "kto", settings.loss
    return kto_loss(
        scores,
        labels,
        baseline,
        settings.beta,
        settings.desirable_weight,
        settings.undesirable_weight,
    )


def reward_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor | float, centre_weight: float = 0.0
) -> Tensor:
    """`-log sigmoid(r_c - r_r - margin) + centre_weight (r_c + r_r)^2` of a reward model's scalars
    (Bradley and Terry; margins: Llama 2, arXiv:2307.09288; centred: arXiv:2312.09244)."""
    losses = sigmoid_loss(chosen - rejected - margins)
    if not centre_weight:
        return losses
    return losses + centre_weight * (chosen + rejected) ** 2


def step_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """`-(y log sigmoid(x) + (1 - y) log(1 - sigmoid(x)))` of the steps of answers: the logit that a
    process reward model gives a step, and how likely it is right, both [n] (Math-Shepherd,
    arXiv:2312.08935; its soft estimates are labels between 0 and 1)."""
    return softplus(logits) - labels * logits


def pair_losses(
    settings: PreferencesConfig,
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor | float = 0.0,
) -> Tensor:
    """Return the loss of every pair but for ORPO's likelihood, [P]. chosen, rejected: scores, [P];
    of bradley_terry a reward model's scalars, and margins between them, [P]."""
    beta = settings.beta
    differences = chosen - rejected
    if settings.loss == "dpo":
        return sigmoid_loss(beta * differences, settings.label_smoothing)
    if settings.loss == "hinge":
        return hinge_loss(beta * differences)
    if settings.loss == "ipo":
        return ipo_loss(differences, beta)
    if settings.loss == "bradley_terry":
        return reward_loss(chosen, rejected, margins, settings.centre_weight)
    if settings.loss == "simpo":
        return simpo_loss(differences, beta, settings.gamma, settings.label_smoothing)
    assert settings.loss == "orpo", settings.loss
    return orpo_loss(chosen, rejected, beta)
