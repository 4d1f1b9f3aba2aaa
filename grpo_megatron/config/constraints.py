"""Rules between keys that need neither the model nor the machine (those: `plan/layout.py`)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from grpo_megatron.config.objective_rules import batch_violations, objective_violations
from grpo_megatron.config.presets import preset_names
from grpo_megatron.config.problems import Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_BFLOAT16_NOISE = 0.02
"""Mean difference of log-probs between two bfloat16 engines that agree."""


def check_constraints(config: RunConfig) -> list[Violation]:
    """All violated rules, in the order of the schema."""
    rules = (_model, _domains, _problem_counts, _objective, _routing, _batch, _sampling, _lengths,
             _staleness, _publish, _validation, _optimizers)
    return [violation for rule in rules for violation in rule(config)]


def _model(config: RunConfig) -> Iterator[Violation]:
    model = config.model
    if (model.preset is None) == (model.path is None):
        said = "both" if model.preset else "neither"
        yield Violation("model_source", "model.preset", model.preset,
                        f"exactly one of model.preset and model.path must be set; {said} is",
                        nearest=() if model.preset else tuple(preset_names()[:3]),
                        remedy="remove one of them" if model.preset else
                        "name a preset, or give the path of a Hugging Face checkpoint",
                        related=("model.path",))
    elif model.preset is not None and model.preset not in preset_names():
        near = nearest(model.preset, preset_names())
        yield Violation("model_preset", "model.preset", model.preset,
                        f"no model preset is called {model.preset!r}", nearest=tuple(near),
                        remedy="" if near else "presets: " + ", ".join(preset_names()))


def _domains(config: RunConfig) -> Iterator[Violation]:
    first_use: dict[str, int] = {}
    for index, domain in enumerate(config.domains):
        prefix = f"domains.{index}"
        if domain.name in first_use:
            yield Violation("domain_names", f"{prefix}.name", domain.name,
                            "two domains have the same name", remedy="rename one of them",
                            related=(f"domains.{first_use[domain.name]}.name",))
        first_use.setdefault(domain.name, index)
        needed, useless = (("dataset", "path") if domain.source == "reasoning_gym" else
                           ("path", "dataset"))
        if getattr(domain, needed) is None:
            yield Violation("domain_source", f"{prefix}.{needed}", None,
                            f"source {domain.source} needs {needed}",
                            remedy=f"set {prefix}.{needed}", related=(f"{prefix}.source",))
        if getattr(domain, useless) is not None:
            yield Violation("domain_source", f"{prefix}.{useless}", getattr(domain, useless),
                            f"source {domain.source} does not use {useless}",
                            remedy=f"remove {prefix}.{useless}", related=(f"{prefix}.source",))
        yield from _template(prefix, domain.template)
        for number, reward in enumerate(domain.rewards):
            if not _FUNCTION.fullmatch(reward.function):
                yield Violation("reward_function", f"{prefix}.rewards.{number}.function",
                                reward.function, "a reward is named module:function",
                                remedy="for example grpo_megatron.rewards.functions:exact_match")
        names = [reward.component for reward in domain.rewards]
        if domain.accuracy not in (None, *names):
            yield Violation("accuracy_component", f"{prefix}.accuracy", domain.accuracy,
                            f"no reward of domain {domain.name} is called {domain.accuracy!r}",
                            nearest=(*nearest(domain.accuracy, names), names[0])[:1])
        longest = config.rollout.max_new_tokens
        if (domain.max_new_tokens or 0) > longest:
            yield Violation("length_budget", f"{prefix}.max_new_tokens", domain.max_new_tokens,
                            f"a domain's budget cannot exceed rollout.max_new_tokens ({longest})",
                            nearest=(longest,), related=("rollout.max_new_tokens",))


def _template(prefix: str, template: str) -> Iterator[Violation]:
    key = f"{prefix}.template"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield Violation("template", key, template, f"is not a template: {error}",
                        remedy="write {question}; double the braces that are meant literally")
        return
    if any(re.split(r"[.\[]", name)[0] == "answer" for name in fields):
        yield Violation("template", key, template, "the prompt would contain the answer",
                        remedy="remove {answer} from the template")


def _problem_counts(config: RunConfig) -> Iterator[Violation]:
    counts = [domain.num_problems for domain in config.domains]
    reserved = config.data.num_validation + config.data.num_heldout
    if None not in counts and sum(counts) <= reserved:
        yield Violation(
            "problem_counts", "data.num_heldout", config.data.num_heldout,
            f"the domains have {sum(counts)} problems; validation ({config.data.num_validation}) "
            f"and held-out ({config.data.num_heldout}) prompts leave none for training",
            remedy="raise domains.*.num_problems, or keep fewer prompts out of training",
            related=("data.num_validation", *(f"domains.{index}.num_problems"
                                              for index in range(len(counts)))))


def _objective(config: RunConfig) -> Iterator[Violation]:
    batch = config.batch
    yield from objective_violations(config.objective)
    for index, domain in enumerate(config.domains):
        beta = domain.objective.kl_beta if domain.objective else None
        if beta and config.objective.kl == "none":
            yield Violation("objective", f"domains.{index}.objective.kl_beta", beta,
                            "there is no KL estimator to weigh", related=("objective.kl",),
                            remedy="set objective.kl, for example is_k3")
    if config.num_steps:
        yield from batch_violations(config.objective, batch.num_samples_per_prompt,
                                    batch.updates_per_rollout, batch.max_staleness)


def _routing(config: RunConfig) -> Iterator[Violation]:
    routing = config.routing
    weights = [routing.keep_weight, *(d.keep_routing_weight or 0 for d in config.domains)]
    if (routing.keep_loss != "none") != any(weights):
        yield Violation("keep_routing", "routing.keep_loss", routing.keep_loss,
                        "a keep-routing loss and its weight are set together",
                        remedy="set routing.keep_weight, for example 1e-3" if not any(weights)
                        else "set routing.keep_loss, for example set_mass",
                        related=("routing.keep_weight",))
    for key, on in (("routing.keep_loss", routing.keep_loss in ("set_mass", "cross_entropy")),
                    ("routing.balance_weight", routing.balance_weight > 0)):
        if on and routing.replay == "none":
            yield Violation("routing_replay", "routing.replay", "none",
                            f"{key} counts replayed experts, and none are replayed",
                            nearest=("r3", "r2"), related=(key,))


def _batch(config: RunConfig) -> Iterator[Violation]:
    batch = config.batch
    if batch.updates_per_rollout > batch.num_prompts:
        yield Violation("updates_per_rollout", "batch.updates_per_rollout",
                        batch.updates_per_rollout,
                        f"a batch of {batch.num_prompts} prompts cannot be split into "
                        f"{batch.updates_per_rollout} updates", nearest=(batch.num_prompts,),
                        related=("batch.num_prompts",))


def _sampling(config: RunConfig) -> Iterator[Violation]:
    sampling = config.sampling
    if sampling.zero_variance == "resample":
        yield Violation("zero_variance_resample", "sampling.zero_variance", "resample",
                        "is not offered: completions sampled at a higher temperature have other "
                        "log-probs than the trainer's, which are all at rollout.temperature",
                        nearest=("drop",), remedy="set sampling.zero_variance=drop, or "
                        "sampling.dynamic=true to draw other prompts")
    if sampling.surplus_staleness and config.rollout.deterministic:
        yield Violation("deterministic_surplus", "sampling.surplus_staleness",
                        sampling.surplus_staleness,
                        "surplus groups are kept in memory, a resumed run lacks them: "
                        "rollout.deterministic cannot hold", nearest=(0,),
                        related=("rollout.deterministic",))


def _lengths(config: RunConfig) -> Iterator[Violation]:
    rollout, longest = config.rollout, config.rollout.max_model_len
    if rollout.max_new_tokens >= longest:
        yield Violation("completion_length", "rollout.max_new_tokens", rollout.max_new_tokens,
                        f"prompt and completion share max_model_len ({longest}): nothing is left "
                        "for the prompt", nearest=(longest - 1,),
                        remedy="lower rollout.max_new_tokens or raise rollout.max_model_len",
                        related=("rollout.max_model_len",))
    budget = config.trainer.max_tokens_per_microbatch
    if budget < longest:
        yield Violation("microbatch_length", "trainer.max_tokens_per_microbatch", budget,
                        f"a sample of up to {longest} tokens must fit into a micro-batch",
                        nearest=(longest,), related=("rollout.max_model_len",))


def _staleness(config: RunConfig) -> Iterator[Violation]:
    if config.batch.max_staleness and config.rollout.deterministic:
        yield Violation("deterministic_staleness", "batch.max_staleness",
                        config.batch.max_staleness,
                        "which weights a sample sees depends on timing when rollouts run ahead, "
                        "so rollout.deterministic cannot hold", nearest=(0,),
                        remedy="set batch.max_staleness=0 or rollout.deterministic=false",
                        related=("rollout.deterministic",))


def _publish(config: RunConfig) -> Iterator[Violation]:
    publish, num_ranks = config.publish, config.trainer.num_ranks
    if publish.pause != "wait" and not config.batch.max_staleness:
        yield Violation("pause_in_flight", "publish.pause", publish.pause,
                        "nothing is in flight while weights are published: with max_staleness=0 a "
                        "step is sampled, trained and published in turn", nearest=("wait",),
                        remedy="set publish.pause=wait or batch.max_staleness=1",
                        related=("batch.max_staleness",))
    if publish.num_senders > num_ranks:
        yield Violation("num_senders", "publish.num_senders", publish.num_senders,
                        f"only {num_ranks} trainer rank(s) can send", nearest=(num_ranks,),
                        related=("trainer.num_ranks",))
    low_precision = [key for key, value in (("trainer.precision", config.trainer.precision),
                                            ("rollout.dtype", config.rollout.dtype))
                     if value == "bfloat16"]
    tolerance = publish.canary_tolerance
    if publish.canary and low_precision and tolerance is not None and tolerance < _BFLOAT16_NOISE:
        yield Violation("canary_tolerance", "publish.canary_tolerance", publish.canary_tolerance,
                        "bfloat16 log-probs of a trainer and an engine that agree differ by more "
                        "than this: the first publish would stop the run", nearest=(0.1,),
                        related=tuple(low_precision))


def _validation(config: RunConfig) -> Iterator[Violation]:
    if config.data.num_validation:
        return
    wants = [key for key, wanted in (("cold_start.target_accuracy", config.cold_start),
                                     ("evaluation.interval", config.evaluation.interval))
             if wanted]
    if wants:
        yield Violation("validation_prompts", "data.num_validation", 0,
                        "accuracy is measured on validation prompts, and there are none",
                        nearest=(512,), related=tuple(wants))


def _optimizers(config: RunConfig) -> Iterator[Violation]:
    tables = {"optimizer": config.optimizer}
    if config.cold_start:
        tables["cold_start.optimizer"] = config.cold_start.optimizer
    for prefix, optimizer in tables.items():
        if optimizer.min_lr > optimizer.lr:
            yield Violation("min_lr", f"{prefix}.min_lr", optimizer.min_lr,
                            f"the rate decays from lr ({optimizer.lr:g}) to min_lr, so min_lr "
                            "cannot be above", nearest=(optimizer.lr,), related=(f"{prefix}.lr",))
