"""A reward of one's own: nothing is registered, a recipe names it as `custom_reward:nearly`.

Run `grpo-megatron` from this directory, or put the module where Python finds it."""


def nearly(completion: str, answer: str, *, tolerance: float = 10.0) -> float:
    """1 for the right number, less the further away it is, 0 from `tolerance` on or without one.

    completion: what the policy wrote; answer: of the problem; tolerance: from the recipe's
    `arguments`. NaN or None would mean that the sample cannot be scored."""
    try:
        distance = abs(float(completion.strip()) - float(answer))
    except ValueError:
        return 0.0
    return max(0.0, 1.0 - distance / tolerance)


def digits(completion: str, answer: str) -> float:
    """Share of the completion's characters that are digits: even an untrained policy earns some of
    it, which shows within a few steps whether a loop learns at all."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)
