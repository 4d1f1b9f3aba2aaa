"""What a vision tower computes for the images of a micro-batch: amounts, no seconds.

    operations of a matrix        2 x its elements x the patches that it meets, or the tokens
    operations of attention       4 x hidden size x sum of squared patches: every patch meets all of
                                  its image, or of its window

Every rank of the first stage has the tower whole and computes all images of its micro-batch. What
recipes do not say is assumed: a prompt is one image and nothing else."""

from dataclasses import dataclass, replace

from grpo_megatron.plan.step_memory import tower_block_bytes
from grpo_megatron.plan.weights import FORMS, Sizes, is_matrix, product

_NOT_MULTIPLIED = "tower_positions"
"""A weight whose form has this size is a table that is looked up, no matrix product."""


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a micro-batch."""

    number: float
    tokens: float
    """Of each."""


@dataclass(frozen=True, slots=True)
class TowerAmounts:
    """What a tower computes and moves in a forward."""

    matrix_flops: float
    attention_flops: float
    weight_bytes: float
    kept_bytes: float
    """That its blocks would keep of their activations."""
    num_blocks: int

    @property
    def flops(self) -> float:
        """All operations."""
        return self.matrix_flops + self.attention_flops


def tower_amounts(s: Sizes, images: Images) -> TowerAmounts:
    """Return the amounts of a forward of a model that sees."""
    forms = FORMS["tower"][s.tower]["weights"]
    num_blocks: int = s.symbols["tower_blocks"]
    of_patches = _elements(forms["patches"], s) + num_blocks * _elements(forms["block"], s)
    of_tokens = _elements(forms["merger"], s)
    of_tokens += s.symbols["deep_levels"] * _elements(forms.get("deep_merger", []), s)
    tokens = images.number * images.tokens
    patches = tokens * s.symbols["patches_of_token"]
    return TowerAmounts(
        matrix_flops=2.0 * (of_patches * patches + of_tokens * tokens),
        attention_flops=4.0 * s.symbols["tower_hidden"] * _met_patches(s, images),
        weight_bytes=float((of_patches + of_tokens) * s.symbols["element"]),
        kept_bytes=float(num_blocks * tower_block_bytes(_with_patches(s, patches))),
        num_blocks=num_blocks,
    )


def _met_patches(s: Sizes, images: Images) -> float:
    """Return the sum, over blocks and patches, of the patches that one meets."""
    of_image: float = images.tokens * s.symbols["patches_of_token"]
    in_window: float = min(s.symbols["window_patches"] or of_image, of_image)
    whole: int = s.symbols["whole_image_blocks"]
    windowed: int = s.symbols["tower_blocks"] - whole
    return images.number * of_image * (whole * of_image + windowed * in_window)


def _with_patches(s: Sizes, patches: float) -> Sizes:
    return replace(s, symbols={**s.symbols, "patches": round(patches)})


def _elements(forms: list[str], s: Sizes) -> int:
    """Return elements of the matrices among weights; vectors cost too little to count."""
    total = 0
    for form in forms:
        if is_matrix(form) and _NOT_MULTIPLIED not in form.split():
            total += product(form, s.symbols)
    return total
