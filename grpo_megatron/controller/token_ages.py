"""How old the tokens of groups are: which weight versions sampled them."""

from collections import Counter
from collections.abc import Sequence

from grpo_megatron.controller.sampling_metrics import completions_of
from grpo_megatron.types import ScoredGroup, StoredCompletion, policy_tokens_by_version


def without_tokens_before(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """Return the groups without a token that was sampled before weight version `version`."""
    return [group for group in groups if _oldest_version(group, version) >= version]


def with_tokens_since(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """Return the groups with a token that weight version `version` or a newer one sampled, and
    those without tokens."""
    found = []
    for group in groups:
        newest = max(_tokens_by_version(group.group.completions), default=version)
        if newest >= version:
            found.append(group)
    return found


def count_tokens_before(groups: Sequence[ScoredGroup], version: int) -> int:
    """Count the policy's tokens that were sampled before weight version `version`."""
    tokens = _tokens_by_version(completions_of(groups))
    return sum(count for sampled_by, count in tokens.items() if sampled_by < version)


def _oldest_version(group: ScoredGroup, default: int) -> int:
    """Return the oldest weight version that sampled a token of the group; `default` where it has no
    tokens."""
    return min(_tokens_by_version(group.group.completions), default=default)


def staleness(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """Return `staleness/<n>`: the share of the tokens sampled n weight versions before `step`."""
    tokens = _tokens_by_version(completions_of(groups))
    metrics = {}
    for version, count in sorted(tokens.items(), reverse=True):
        metrics[f"staleness/{step - version}"] = count / tokens.total()
    return metrics


def _tokens_by_version(completions: Sequence[StoredCompletion]) -> Counter[int]:
    """Count the policy tokens that each weight version sampled."""
    tokens: Counter[int] = Counter()
    for completion in completions:
        for sequence in completion.sequences:
            counted = policy_tokens_by_version(
                sequence.versions, sequence.turns, sequence.num_tokens
            )
            tokens.update(counted)
    return tokens
