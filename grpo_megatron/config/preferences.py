"""`[preferences]`: training on pairs of answers, or on answers with a label."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict

PreferenceLoss = Literal["dpo", "hinge", "ipo", "kto", "simpo", "orpo", "bradley_terry", "stepwise"]
PreferenceRows = Literal["pairs", "labelled", "steps"]
"""What a row has: two answers, one with a label, or one whose steps have labels."""
REWARD_MODEL_LOSSES = ("bradley_terry", "stepwise")
_WITH_REFERENCE = ("dpo", "hinge", "ipo", "kto")
_OF_MEANS = ("ipo", "simpo", "orpo")


class PreferencesConfig(Strict):
    """What a run of kind `preferences` minimises (docs/preferences.md has the formulas)."""

    loss: PreferenceLoss = "dpo"
    """dpo; hinge: DPO's margin under a hinge (SLiC); ipo; kto: answers with a label instead of
    pairs; simpo and orpo: without a reference; bradley_terry: of kind reward_model; stepwise: of
    kind reward_model, a process reward model from answers whose steps have labels."""
    beta: float = Field(0.1, gt=0)
    """How strongly a margin of log-probs counts; of orpo, the weight of its odds ratio (lambda).
    Losses of reward models have none."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the labels that is taken for wrong, of dpo (conservative DPO) and simpo."""
    length_normalised: bool = False
    """Log-probs of an answer are means over its tokens, not sums, for dpo and hinge. ipo, simpo and
    orpo always take means, kto takes sums."""
    gamma: float = Field(0.5, ge=0)
    """simpo: the margin by which the chosen answer is to be likelier."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto: weight of answers with the label true."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of answers with the label false."""
    use_margins: bool = False
    """bradley_terry: the chosen answer's scalar is to be higher by the pair's `margin`."""
    centre_weight: float = Field(0.0, ge=0)
    """bradley_terry: weight of the squared sum of both scalars, which holds their mean at 0."""
    scalar_per_domain: bool = False
    """bradley_terry: every domain has a scalar of its own, by which its pairs are compared, in the
    order of the recipe: several labels in one model, such as helpful and harmless."""
    step_token: str = Field("<extra_0>", min_length=1)
    """stepwise: what stands behind every step, one token of the tokenizer. A step is read there."""
    reference: InputPath | None = None
    """Checkpoint of the reference, of the model's architecture; default: the model that the run
    begins with. simpo and orpo have none."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss in _WITH_REFERENCE

    @property
    def takes_means(self) -> bool:
        """Whether log-probs of an answer are means over its tokens."""
        return self.loss in _OF_MEANS or self.length_normalised

    @property
    def reward_scale(self) -> float:
        """What turns a score into a reward, for metrics."""
        if self.loss in REWARD_MODEL_LOSSES:
            return 1.0
        return self.beta

    @property
    def rows(self) -> PreferenceRows:
        """What the loss is of."""
        if self.loss == "kto":
            return "labelled"
        if self.loss == "stepwise":
            return "steps"
        return "pairs"

    @property
    def is_paired(self) -> bool:
        """Whether the loss is of pairs; else of single answers."""
        return self.rows == "pairs"
