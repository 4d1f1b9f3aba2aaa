"""How well a process reward model judges answers that it is not trained on."""

import math
from collections.abc import Sequence

import torch

from grpo_megatron.algorithms.preferences import step_losses
from grpo_megatron.config.evaluated_share import EvaluatedShare, share_of
from grpo_megatron.controller.evaluation import Results, wilson
from grpo_megatron.controller.preference_steps import AnswerScorer, Logits, results_by_domain
from grpo_megatron.data.preferences import Preference, Preferences
from grpo_megatron.types import Prompt


class StepEvaluator:
    """Accuracy of the trainer's weights on the steps of answers that are not trained, by domain: a
    step is taken to be right where its probability is above one half."""

    def __init__(self, preferences: Preferences, scorer: AnswerScorer):
        self._preferences = preferences
        self._scorer = scorer

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> EvaluatedShare:
        """Return the share of steps that are judged as labelled; NaN without any prompts."""
        results = await self.evaluate(prompts)
        return share_of(results["all"], "accuracy")

    async def evaluate(self, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
        """Return results by domain, and over all prompts as `all`: `accuracy` and `loss` of steps,
        and `first_error`, the share of answers whose first wrong step is found, or in which none is
        found where none is (as ProcessBench, arXiv:2412.06559, counts both)."""
        if not prompts:
            return {"all": {"prompts": 0.0}}
        chosen = [self._preferences.by_id[prompt.prompt_id] for prompt in prompts]
        logits = await self._scorer.step_logits(chosen)
        results = results_by_domain(chosen, lambda members: _measured(members, logits))
        of_all = _measured(chosen, logits)  # of steps, of which domains' answers have more or fewer
        results["all"] = {name: of_all[name] for name in results["all"]}
        return results


def _measured(members: Sequence[Preference], logits: Logits) -> dict[str, float]:
    """Return the metrics of one domain's answers."""
    losses = []
    num_right = num_found = 0
    for one in members:
        found = logits[one.prompt.prompt_id]
        labels = [turn.reward for turn in one.answers[0].turns]
        losses += step_losses(
            torch.tensor(found, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64)
        ).tolist()
        judged = [logit > 0 for logit in found]
        wanted = [label > 0.5 for label in labels]
        num_right += sum(a == b for a, b in zip(judged, wanted, strict=True))
        num_found += _first_wrong(judged) == _first_wrong(wanted)
    accuracy = num_right / len(losses)
    low, high = wilson(accuracy, len(losses))
    return {
        "prompts": float(len(members)),
        "steps": float(len(losses)),
        "loss": math.fsum(losses) / len(losses),
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "first_error": num_found / len(members),
    }


def _first_wrong(is_right: Sequence[bool]) -> int:
    """Return the place of the first step that is not right; behind the last where all are."""
    for place, right in enumerate(is_right):
        if not right:
            return place
    return len(is_right)
