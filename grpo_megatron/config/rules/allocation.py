"""Rules of `[allocation]` and `[seeding]`: groups that differ in size, prompts with exemplars."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.templates import CHAT

ALLOCATION_RULES = RuleSet()
"""Their checks take the run."""


@ALLOCATION_RULES.rule("allocation_sizes")
def something_is_left_to_allocate(run: RunConfig) -> Violation | None:
    """Refuse a base that is the whole budget of a prompt, or more."""
    size = run.batch.num_samples_per_prompt
    if run.allocation is None or run.allocation.base_samples_per_prompt < size:
        return None
    nearest = []
    if size > 2:
        nearest.append(size - 1)
    return Violation(
        "allocation.base_samples_per_prompt",
        f"prompts have {size} samples on average: nothing is left to be given to some of them",
        nearest=nearest,
        remedy="lower it, or raise batch.num_samples_per_prompt",
        related=("batch.num_samples_per_prompt",),
    )


@ALLOCATION_RULES.rule("allocation_sizes")
def the_budget_can_be_spent(run: RunConfig) -> Violation | None:
    """Refuse a maximum below the mean."""
    size = run.batch.num_samples_per_prompt
    if run.allocation is None or run.largest_group >= size:
        return None
    return Violation(
        "allocation.max_samples_per_prompt",
        f"a step has {size} samples a prompt, which cannot all be given where none may have more "
        f"than {run.largest_group}",
        nearest=(size, 2 * size),
        related=("batch.num_samples_per_prompt",),
    )


@ALLOCATION_RULES.rule("allocation_objective")
def every_group_is_large_enough(run: RunConfig) -> list[Violation]:
    """Refuse choices among more samples than the smallest group has."""
    if run.allocation is None:
        return []
    objective = run.objective
    wanted = {}
    if objective.advantage in ("passk", "pkpo"):
        wanted["objective.passk_k"] = objective.passk_k
    if objective.subset != "none":
        wanted["objective.subset_size"] = objective.subset_size
    smallest = run.allocation.base_samples_per_prompt
    found = []
    for key, size in wanted.items():
        if size > smallest:
            violation = Violation(
                key,
                f"the smallest groups have {smallest} samples",
                nearest=(smallest,),
                remedy="lower it, or raise allocation.base_samples_per_prompt",
                related=("allocation.base_samples_per_prompt",),
            )
            found.append(violation)
    return found


@ALLOCATION_RULES.rule("seeding_rounds")
def seeded_prompts_are_sampled_later(run: RunConfig) -> Violation | None:
    """Refuse seeding where all samples of a prompt are asked for at once."""
    if run.seeding is None or run.allocation is not None:
        return None
    return Violation(
        "seeding",
        "a prompt is seeded when its first samples are all wrong, and without [allocation] it has "
        "no later ones",
        nearest=("null",),
        remedy="add a table [allocation], which may be empty",
        related=("allocation",),
    )


@ALLOCATION_RULES.rule("seeding_layout")
def layouts_have_their_places(run: RunConfig) -> list[Violation]:
    """Refuse layouts that leave out what they are for."""
    if run.seeding is None:
        return []
    places = {
        "exemplar": (run.seeding.exemplar, ("{question}", "{answer}")),
        "question": (run.seeding.question, ("{question}",)),
    }
    found = []
    for name, (layout, fields) in places.items():
        missing = [field for field in fields if field not in layout]
        if missing:
            violation = Violation(
                f"seeding.{name}",
                f"has no {' and no '.join(missing)}",
                remedy=f"write {' and '.join(missing)} where it belongs",
            )
            found.append(violation)
    return found


@ALLOCATION_RULES.rule("seeding_layout")
def an_open_question_has_no_answer(run: RunConfig) -> Violation | None:
    """Refuse a place for the answer of the question that is asked."""
    if run.seeding is None or "{answer}" not in run.seeding.question:
        return None
    return Violation(
        "seeding.question",
        "the answer of the question that is asked is not known: {answer} belongs to "
        "seeding.exemplar",
        remedy="remove {answer} from it",
        related=("seeding.exemplar",),
    )


@ALLOCATION_RULES.rule("seeding_template")
def templates_take_a_seeded_question(run: RunConfig) -> list[Violation]:
    """Refuse plain templates in which a question has no place."""
    if run.seeding is None:
        return []
    found = []
    for index, domain in enumerate(run.domains):
        if domain.template != CHAT and "{question}" not in domain.template:
            violation = Violation(
                f"domains.{index}.template",
                "exemplars are put before the question, and this template has no {question}",
                remedy='use {question} in it, or template = "chat"',
                related=("seeding",),
            )
            found.append(violation)
    return found
