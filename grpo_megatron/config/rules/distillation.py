"""Rules of `kind`, `[distillation]` and what other kinds than `rl` do without."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import DistillationConfig, RunConfig, TeacherConfig
from grpo_megatron.config.suggest import nearest

DISTILLATION_RULES = RuleSet()
"""Their checks take the run."""

_OF_TOKENS = ("sft", "distil", "preferences", "reward_model")
"""Kinds that train a batch once, without an old policy."""


def _teachers(run: RunConfig) -> tuple[TeacherConfig, ...]:
    if run.distillation is None:
        return ()
    return run.distillation.teachers


@DISTILLATION_RULES.rule("distillation")
def kind_and_table_go_together(run: RunConfig) -> Violation | None:
    """Refuse kind distil without [distillation], and the table without the kind."""
    distils = run.kind == "distil"
    has_table = run.distillation is not None
    if distils == has_table:
        return None
    fitting_kind = "rl"
    if has_table:
        fitting_kind = "distil"
    return Violation(
        "kind",
        "kind distil and the table [distillation] go together",
        nearest=(fitting_kind,),
        related=("distillation",),
    )


@DISTILLATION_RULES.rule("kind_steps")
def only_training_has_steps(run: RunConfig) -> Violation | None:
    """Refuse steps of a run that learns nothing."""
    if run.takes_steps or run.num_steps == 0:
        return None
    return Violation("num_steps", f"kind {run.kind} has no steps", nearest=(0,), related=("kind",))


@DISTILLATION_RULES.rule("rl_only")
def only_rl_has_its_tables(run: RunConfig) -> list[Violation]:
    """Refuse the tables of RL in runs of other kinds."""
    found = []
    for field in ("cold_start", "correction", "allocation", "seeding"):
        if run.kind != "rl" and getattr(run, field) is not None:
            violation = Violation(
                field, f"only kind rl has [{field}]", nearest=("null",), related=("kind",)
            )
            found.append(violation)
    return found


@DISTILLATION_RULES.rule("rl_only")
def only_rl_trains_a_batch_again(run: RunConfig) -> Violation | None:
    """Refuse epochs over a batch where losses of tokens have no old policy."""
    if run.kind not in _OF_TOKENS or run.batch.epochs == 1:
        return None
    return Violation(
        "batch.epochs",
        f"a run of kind {run.kind} takes {run.batch.updates_per_rollout} updates of a batch, each "
        "part of it once",
        nearest=(1,),
        remedy="raise num_steps",
        related=("kind",),
    )


@DISTILLATION_RULES.rule("token_routing")
def losses_of_tokens_use_their_routing(run: RunConfig) -> list[Violation]:
    """Whether a supervised or distilling run asks for routes that are not recorded."""
    if run.kind not in _OF_TOKENS:
        return []
    off: dict[str, object] = {"keep_loss": "none", "balance_weight": 0.0}
    sampled_by_nobody = run.uses_dataset
    needs_an_old_policy = run.routing.replay == "r2"
    if sampled_by_nobody or needs_an_old_policy:
        off["replay"] = "none"
    found = []
    for field, value in off.items():
        if getattr(run.routing, field) != value:
            violation = Violation(
                f"routing.{field}",
                f"{field} does nothing in this run of kind {run.kind}",
                nearest=(value,),
                related=("kind",),
            )
            found.append(violation)
    return found


@DISTILLATION_RULES.rule("dataset_staleness")
def responses_of_a_data_set_do_not_age(run: RunConfig) -> Violation | None:
    """Refuse staleness where no rollout runs ahead of training."""
    if not run.uses_dataset or run.batch.max_staleness == 0:
        return None
    return Violation(
        "batch.max_staleness",
        "the responses of a data set do not age",
        nearest=(0,),
        related=("kind",),
    )


@DISTILLATION_RULES.rule("teacher_source")
def teacher_is_a_path_or_a_server(run: RunConfig) -> list[Violation]:
    """Refuse a teacher with neither or both of `path` and `url`."""
    found = []
    for index, teacher in enumerate(_teachers(run)):
        has_path = teacher.path is not None
        has_url = teacher.url is not None
        if has_path == has_url:
            violation = Violation(
                f"distillation.teachers.{index}",
                "a teacher is a path or the url of a server, one of them",
                remedy="set one, and the other to null",
            )
            found.append(violation)
    return found


@DISTILLATION_RULES.rule("teacher_model")
def names_are_of_servers(run: RunConfig) -> list[Violation]:
    """Refuse the name of a model where there is no server that could have several."""
    found = []
    for index, teacher in enumerate(_teachers(run)):
        if teacher.model is not None and teacher.url is None:
            violation = Violation(
                f"distillation.teachers.{index}.model",
                "a teacher with a path has no other name",
                remedy="remove it, or set the url of the server that has the model",
            )
            found.append(violation)
    return found


@DISTILLATION_RULES.rule("teacher_domains")
def teachers_know_their_domains(run: RunConfig) -> list[Violation]:
    """Refuse teachers of domains that the recipe does not have."""
    known = [domain.name for domain in run.domains]
    found = []
    for index, teacher in enumerate(_teachers(run)):
        for name in teacher.domains:
            if name not in known:
                violation = Violation(
                    f"distillation.teachers.{index}.domains",
                    f"there is no domain {name!r}",
                    nearest=nearest(name, known) or known,
                )
                found.append(violation)
    return found


@DISTILLATION_RULES.rule("untaught_domain")
def domains_have_a_teacher(run: RunConfig) -> list[Violation]:
    """Refuse trained domains without a teacher."""
    if run.distillation is None:
        return []
    every = [domain.name for domain in run.domains]
    taught: set[str] = set()
    for teacher in run.distillation.teachers:
        taught.update(teacher.domains or every)
    found = []
    for domain in run.domains:
        if domain.weight and domain.name not in taught:
            violation = Violation(
                "distillation.teachers",
                f"no teacher teaches the domain {domain.name!r}",
                remedy="give it a teacher, or the domain the weight 0",
                related=("domains",),
            )
            found.append(violation)
    return found


@DISTILLATION_RULES.rule("served_teacher")
def servers_answer_top_k_at_temperature_one(run: RunConfig) -> list[Violation]:
    """Refuse what a vLLM server cannot report of a prompt: other modes and temperatures."""
    distillation = run.distillation
    if distillation is None or not any(teacher.url for teacher in distillation.teachers):
        return []
    message = "a teacher behind a server answers with its likeliest tokens at temperature 1"
    related = ("distillation.teachers",)
    found = []
    if distillation.mode != "topk_tail":
        found.append(
            Violation("distillation.mode", message, nearest=("topk_tail",), related=related)
        )
    if distillation.temperature is None:
        key = "rollout.temperature"
        temperature = run.rollout.temperature
    else:
        key = "distillation.temperature"
        temperature = distillation.temperature
    if temperature != 1.0:
        found.append(Violation(key, message, nearest=(1.0,), related=related))
    return found


@DISTILLATION_RULES.rule("likeliest_tokens")
def only_topk_tail_counts_tokens(run: RunConfig) -> Violation | None:
    """Refuse a number of likeliest tokens in modes that have none."""
    default: int = DistillationConfig.model_fields["top_k"].default
    if run.distillation is None or run.distillation.mode == "topk_tail":
        return None
    if run.distillation.top_k == default:
        return None
    return Violation(
        "distillation.top_k",
        f"mode {run.distillation.mode!r} has no likeliest tokens",
        remedy="remove it, or take distillation.mode='topk_tail'",
        related=("distillation.mode",),
    )


@DISTILLATION_RULES.rule("sampled_tokens")
def sampled_mode_goes_by_the_policys_samples(run: RunConfig) -> list[Violation]:
    """Refuse foreign samples, temperatures and forward KL in mode sampled, a policy gradient."""
    if run.distillation is None or run.distillation.mode != "sampled":
        return []
    wrong = []
    if run.uses_dataset:
        wrong.append("samples")
    if run.distillation.temperature is not None:
        wrong.append("temperature")
    if run.distillation.forward_weight > 0:
        wrong.append("forward_weight")
    found = []
    for field in wrong:
        violation = Violation(
            f"distillation.{field}",
            "mode 'sampled' goes by log-probs of the tokens that the policy sampled",
            remedy="remove it, or take distillation.mode='full' or 'topk_tail'",
            related=("distillation.mode",),
        )
        found.append(violation)
    return found
