"""`[alarms]`: from where on a run says that something goes wrong."""

from pydantic import Field

from grpo_megatron.config.base import Strict


class AlarmsConfig(Strict):
    """Limits of the alarms of an RL run (docs/sampling.md). Each looks at the mean of a metric over
    a window of steps, if it does not say otherwise. An alarm says something; it stops nothing."""

    window: int = Field(10, ge=2)
    """Steps that are averaged, since one step proves nothing; nothing is said before the first
    window is full."""
    min_entropy: float = Field(0.01, ge=0)
    """Entropy collapse: say so below this mean entropy (nats a token); 0: never. Rewards saturate
    as entropy is used up (arXiv:2505.22617); no critical value is known. At 0.01, one token in
    seventy is a toss-up and all others are certain. A task that is solved gets there too."""
    entropy_growth: float = Field(4.0, gt=1)
    """Entropy explosion: say so at this multiple of the run's first window, if that is more than a
    nat a token. Growth is normal with a high upper clip (DAPO, arXiv:2503.14476); no limit is
    published."""
    reference_kl: float = Field(0.5, gt=0)
    """Say so above this KL to the reference (`reference/k3`, nats a token), where it is measured.
    No limit is published; at 0.5, a response of a hundred tokens is e^50 times likelier than under
    the reference."""
    length_growth: float = Field(2.0, gt=1)
    """Say so when the mean response length is this multiple of the window before. Chains of thought
    grow over hundreds of steps (arXiv:2501.12948); what doubles within two windows is running
    away."""
    no_signal_fraction: float = Field(0.9, gt=0, le=1)
    """Say so above this share of sampled groups whose rewards are all equal; 1: never. Their
    advantages are 0: at 0.9, ten groups are sampled for one that teaches something (DAPO drops
    them)."""
    clip_fraction: float = Field(0.4, gt=0, le=1)
    """Say so above this share of tokens outside of the clip range; 1: never. GRPO clips about
    0.001 of its tokens, GSPO 0.15 (arXiv:2507.18071)."""
    unscorable_fraction: float = Field(0.25, gt=0, le=1)
    """Say so above this share of a single step's samples that no reward could score; 1: never. A
    few bad reference answers are usual. A quarter is not: a server, a time limit or a program
    fails, and the batch is smaller than it seems, of what was easy to score."""
    staleness_distance: float = Field(0.5, gt=0)
    """Say so when the seen staleness of trained tokens and the one that follows from the seen
    durations (docs/staleness.md) are further apart than this share of the predicted one, or than
    this many versions where that is below 1. No limit is published."""
