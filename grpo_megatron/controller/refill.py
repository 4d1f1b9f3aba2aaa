"""Dynamic sampling: draw further prompts until enough groups are kept (DAPO, arXiv:2503.14476)."""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence

from grpo_megatron.config.sampling import SamplingConfig
from grpo_megatron.types import Prompt, ScoredGroup


async def fill_batch(settings: SamplingConfig, target: int, acceptance: float,
                     carried: Sequence[ScoredGroup],
                     draw: Callable[[int, Collection[str] | None], Sequence[Prompt]],
                     score: Callable[[Sequence[Prompt]], Awaitable[list[ScoredGroup]]],
                     keeps: Callable[[ScoredGroup], bool],
                     ) -> tuple[list[ScoredGroup], list[ScoredGroup], int]:
    """Sample rounds of prompts until `target` groups are kept or the rounds run out.

    A round draws missing / acceptance prompts, within `max_oversampling`. Without
    `settings.dynamic` there is one round of `target` prompts.

    Args:
        acceptance: Expected fraction of kept groups; replaced by what this step observes.
        carried: Surplus of the step before.
        draw: (number, ids that the step has already) -> prompts; ids None: exactly so many.

    Returns:
        Kept groups, the carried first, maybe more than `target`; all groups sampled here; rounds.
    """
    kept, sampled, num_rounds = list(carried), [], 0
    used = {group.group.prompt.prompt_id for group in carried}
    while len(kept) < target and num_rounds <= settings.max_refill_rounds * settings.dynamic:
        missing = target - len(kept)
        if sampled:
            acceptance = (len(kept) - len(carried)) / len(sampled)
        size = math.ceil(missing * min(settings.max_oversampling, 1 / max(acceptance, 1e-9)))
        prompts = draw(size, used) if settings.dynamic else draw(missing, None)
        if not prompts:  # the step has had every prompt
            break
        used |= {prompt.prompt_id for prompt in prompts}
        groups = await score(prompts)
        sampled += groups
        kept += filter(keeps, groups)
        num_rounds += 1
    return kept, sampled, num_rounds
