"""Rules of `[experience]` and of runs that learn lessons."""

from grpo_megatron.config.layouts import places_of
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.templates import CHAT

EXPERIENCE_RULES = RuleSet()
"""Their checks take the run."""

_KINDS = ("experience", "eval")


@EXPERIENCE_RULES.rule("experience")
def kind_and_table_go_together(run: RunConfig) -> Violation | None:
    """Refuse kind experience without [experience], and the table in runs whose policy gets no
    lessons."""
    has_table = run.experience is not None
    if run.kind == "experience" and not has_table:
        return Violation(
            "experience",
            "kind experience needs the table [experience]",
            remedy="add [experience], which may be empty",
            related=("kind",),
        )
    if has_table and run.kind not in _KINDS:
        return Violation(
            "experience",
            f"a run of kind {run.kind} tells its policy no lessons",
            nearest=("null",),
            remedy='set kind = "experience" to learn them, or "eval" to measure them',
            related=("kind",),
        )
    return None


@EXPERIENCE_RULES.rule("experience")
def measured_lessons_come_from_somewhere(run: RunConfig) -> Violation | None:
    """Refuse an evaluation with lessons for which no path is given."""
    if run.kind != "eval" or run.experience is None or run.experience.path is not None:
        return None
    return Violation(
        "experience.path",
        "a run of kind eval learns no lessons",
        remedy="name the experience.json of a run of kind experience",
        related=("kind",),
    )


@EXPERIENCE_RULES.rule("experience")
def a_served_writer_has_address_and_name(run: RunConfig) -> Violation | None:
    """Refuse one of the writer's two settings without the other."""
    if run.experience is None:
        return None
    settings = run.experience
    if (settings.writer_url is None) == (settings.writer_model is None):
        return None
    missing = "writer_model"
    given = "writer_url"
    if settings.writer_url is None:
        missing, given = given, missing
    return Violation(
        f"experience.{missing}",
        f"experience.{given} is set, and {missing} is not",
        remedy="set both, or none of them: then the policy writes the lessons",
        related=(f"experience.{given}",),
    )


@EXPERIENCE_RULES.rule("experience")
def the_policy_has_room_to_write(run: RunConfig) -> Violation | None:
    """Refuse replies of the policy that fill its whole context."""
    if run.experience is None or run.experience.writer_url is not None or run.kind != "experience":
        return None
    longest = run.rollout.max_model_len
    if run.experience.writer_max_tokens < longest:
        return None
    return Violation(
        "experience.writer_max_tokens",
        f"the policy writes the lessons, and its context of {longest} tokens has no room for what "
        "it is asked",
        nearest=(max(longest // 2, 1),),
        related=("rollout.max_model_len",),
    )


@EXPERIENCE_RULES.rule("experience_layout")
def the_layout_has_its_places(run: RunConfig) -> Violation | None:
    """Refuse a layout that leaves out the lessons or the question."""
    if run.experience is None:
        return None
    missing = {"experiences", "question"} - places_of(run.experience.layout)
    if not missing:
        return None
    names = " and ".join(f"{{{name}}}" for name in sorted(missing))
    return Violation(
        "experience.layout", f"it has no {names}", remedy=f"write {names} where it belongs"
    )


@EXPERIENCE_RULES.rule("experience_template")
def templates_take_lessons(run: RunConfig) -> list[Violation]:
    """Refuse plain templates in which a question has no place, and episodes of several turns."""
    if run.experience is None:
        return []
    found = []
    for index, domain in enumerate(run.domains):
        if domain.episodes is not None:
            violation = Violation(
                f"domains.{index}.{domain.episodes_table}",
                "lessons are put before the question of an answer of one turn",
                nearest=("null",),
                related=("experience",),
            )
            found.append(violation)
        elif domain.template != CHAT and "{question}" not in domain.template:
            violation = Violation(
                f"domains.{index}.template",
                "lessons are put before the question, and this template has no {question}",
                remedy='use {question} in it, or template = "chat"',
                related=("experience",),
            )
            found.append(violation)
    return found


@EXPERIENCE_RULES.rule("experience")
def lessons_are_learned_step_by_step(run: RunConfig) -> Violation | None:
    """Refuse steps that are sampled before the lessons of the last one are known."""
    if run.kind != "experience" or run.batch.max_staleness == 0:
        return None
    return Violation(
        "batch.max_staleness",
        "a step is sampled with the lessons of the one before",
        nearest=(0,),
        related=("kind",),
    )
