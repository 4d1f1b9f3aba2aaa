"""Rules of one `[[domains]]` table."""

import re
from collections.abc import Iterator

from grpo_megatron.config.gates import OF_ALL
from grpo_megatron.config.imports import ENVIRONMENT_REWARD, with_colon
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.templates import CHAT, PromptTemplate, ResponseTemplate
from grpo_megatron.errors import DataError

DOMAIN_RULES = RuleSet()
"""Their checks take the run, the domain and its index."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NOT_IN_NAMES = re.compile(r"(?:[.@<>=\x00-\x1f\x7f]|[^\S ])+")
_OF_CHAT_TEMPLATE = (
    "template_arguments",
    "template_date",
    "system_prompt",
    "question_template",
    "assistant_prefix",
)
_TRAINED_APART = {"process": "rewards of steps", "components": "every component by itself"}
"""What advantages train that take no sum of rewards."""
_FIELD_OF_SOURCE = {"reasoning_gym": "dataset", "file": "path", "run": "path", "shapes": None}


@DOMAIN_RULES.rule("length_budget")
def budget_within_completions(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a length budget above the longest completion of the engines."""
    longest = run.rollout.max_new_tokens
    if domain.max_new_tokens is None or domain.max_new_tokens <= longest:
        return None
    return Violation(
        f"domains.{index}.max_new_tokens",
        f"a domain's budget cannot exceed rollout.max_new_tokens ({longest})",
        nearest=(longest,),
        related=("rollout.max_new_tokens",),
    )


@DOMAIN_RULES.rule("objective")
def domain_kl_needs_an_estimator(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse a weight of a KL term that the objective does not have."""
    own = domain.objective
    if run.objective.kl != "none" or own is None or not own.kl_beta:
        return None
    return Violation(
        f"domains.{index}.objective.kl_beta",
        "there is no KL estimator to weigh",
        remedy="set objective.kl, for example is_k3",
        related=("objective.kl",),
    )


@DOMAIN_RULES.rule("domain_names")
def names_differ(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a second domain of the same name: metrics and prompt ids carry it."""
    names = [other.name for other in run.domains]
    first = names.index(domain.name)
    if first == index:
        return None
    return Violation(
        f"domains.{index}.name",
        "two domains have the same name",
        remedy="rename one of them",
        related=(f"domains.{first}.name",),
    )


@DOMAIN_RULES.rule("domain_names")
def names_can_be_asked_for(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse names that cannot be told from what stands around them in gates
    (`eval.NAME.accuracy >= 0.5`) and metrics (`policy/entropy@NAME`), and that of the results of
    all domains."""
    if domain.name == OF_ALL:
        return Violation(
            f"domains.{index}.name",
            f"{OF_ALL!r} is what results of all domains together are called",
            remedy="rename the domain",
        )
    nearest_name = _NOT_IN_NAMES.sub("-", domain.name).strip("- ")
    is_name = not _NOT_IN_NAMES.search(domain.name) and domain.name == domain.name.strip()
    if domain.name and is_name:
        return None
    if nearest_name in ("", OF_ALL):
        nearest_name = f"domain{index}"
    remedy = "leave out . @ < > = and blanks at both ends"
    if not domain.name.strip():
        remedy = f"give it a name, for example {nearest_name}"
    return Violation(
        f"domains.{index}.name",
        f"a domain cannot be called {domain.name!r}: gates and metrics carry its name",
        nearest=(nearest_name,),
        remedy=remedy,
    )


@DOMAIN_RULES.rule("domain_source")
def source_has_what_it_needs(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a source without its data set's name or path."""
    field = _FIELD_OF_SOURCE[domain.source]
    if field is None or getattr(domain, field) is not None:
        return None
    return Violation(
        f"domains.{index}.{field}",
        f"source {domain.source} needs {field}",
        remedy=f"set domains.{index}.{field}",
        related=(f"domains.{index}.source",),
    )


@DOMAIN_RULES.rule("domain_source")
def source_uses_what_is_set(run: RunConfig, domain: DomainConfig, index: int) -> list[Violation]:
    """Refuse another source's field, which would be ignored."""
    return list(_unused_source_fields(domain, index))


def _unused_source_fields(domain: DomainConfig, index: int) -> Iterator[Violation]:
    for field in ("dataset", "path"):
        is_used = field == _FIELD_OF_SOURCE[domain.source]
        if not is_used and getattr(domain, field):
            yield Violation(
                f"domains.{index}.{field}",
                f"source {domain.source} does not use {field}",
                remedy=f"remove domains.{index}.{field}",
                related=(f"domains.{index}.source",),
            )


@DOMAIN_RULES.rule("domain_source")
def only_preferences_are_of_a_run(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse samples of another run where problems are asked for."""
    if domain.source != "run" or run.trains_preferences:
        return None
    return Violation(
        f"domains.{index}.source",
        "source run gives preferences, which only kind preferences trains",
        nearest=("file",),
        related=("kind",),
    )


@DOMAIN_RULES.rule("template")
def template_can_be_read(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a template with unknown fields, or one that leaks the answer."""
    field = "template"
    if domain.template == CHAT:
        field = "question_template"
    try:
        PromptTemplate(getattr(domain, field))
    except DataError as error:
        return Violation(f"domains.{index}.{field}", error.message, remedy=error.remedy or "")
    return None


@DOMAIN_RULES.rule("template")
def response_template_can_be_read(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse a template of responses with unknown fields, or without any."""
    if domain.response_template is None:
        return None
    try:
        ResponseTemplate(domain.response_template)
    except DataError as error:
        key = f"domains.{index}.response_template"
        return Violation(key, error.message, remedy=error.remedy or "")
    return None


@DOMAIN_RULES.rule("chat_template")
def only_chat_templates_have_turns(
    run: RunConfig, domain: DomainConfig, index: int
) -> list[Violation]:
    """Refuse settings of the chat template beside a plain one, which would ignore them."""
    if domain.template == CHAT:
        return []
    found = []
    for field in _OF_CHAT_TEMPLATE:
        if getattr(domain, field) != DomainConfig.model_fields[field].default:
            violation = Violation(
                f"domains.{index}.{field}",
                f"a plain template has no use for {field}",
                remedy=f'set template = "chat", or remove domains.{index}.{field}',
                related=(f"domains.{index}.template",),
            )
            found.append(violation)
    return found


@DOMAIN_RULES.rule("chat_template")
def template_arguments_have_free_names(
    run: RunConfig, domain: DomainConfig, index: int
) -> list[Violation]:
    """Refuse arguments under the names of what every chat template is given."""
    found = []
    for name in ("messages", "add_generation_prompt"):
        if name in domain.template_arguments:
            violation = Violation(
                f"domains.{index}.template_arguments.{name}",
                "every prompt gives the chat template its own",
                remedy=f"remove domains.{index}.template_arguments.{name}",
            )
            found.append(violation)
    return found


@DOMAIN_RULES.rule("rewards")
def answers_are_rewarded(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a domain without rewards where answers are scored by them."""
    if domain.rewards or run.trains_preferences:
        return None
    return Violation(
        f"domains.{index}.rewards",
        f"domain {domain.name} has no reward, and a run of kind {run.kind} scores answers by it",
        remedy='for example [{ function = "grpo_megatron.rewards.functions:exact_match" }]',
        related=("kind",),
    )


@DOMAIN_RULES.rule("reward_function")
def rewards_are_named(run: RunConfig, domain: DomainConfig, index: int) -> list[Violation]:
    """Refuse rewards that are not `module:function`."""
    found = []
    for number, reward in enumerate(domain.rewards):
        is_named = reward.function == ENVIRONMENT_REWARD or _FUNCTION.fullmatch(reward.function)
        if not is_named:
            near: tuple[str, ...] = ()
            remedy = "for example grpo_megatron.rewards.functions:exact_match"
            meant = with_colon(reward.function)
            if meant:
                near = (meant,)
                remedy = ""
            violation = Violation(
                f"domains.{index}.rewards.{number}.function",
                "a reward is named module:function",
                nearest=near,
                remedy=remedy,
            )
            found.append(violation)
    return found


@DOMAIN_RULES.rule("reward_clip")
def what_is_trained_is_clipped(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse a clip of the sum of rewards where their parts are trained, which nothing clips."""
    parts = _TRAINED_APART.get(run.objective.advantage)
    if run.kind != "rl" or domain.reward_clip is None or parts is None:
        return None
    return Violation(
        f"domains.{index}.reward_clip",
        f"advantage {run.objective.advantage} trains {parts}, which reward_clip does not bound",
        remedy="remove it, and clip in the reward functions",
        related=("objective.advantage",),
    )


@DOMAIN_RULES.rule("accuracy_component")
def accuracy_is_a_reward(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse an accuracy component that no reward of the domain has."""
    names = [reward.component for reward in domain.rewards]
    if domain.accuracy is None or domain.accuracy in names:
        return None
    return Violation(
        f"domains.{index}.accuracy",
        f"no reward of domain {domain.name} is called {domain.accuracy!r}",
        nearest=nearest(domain.accuracy, names, count=1) or names[:1],
    )
