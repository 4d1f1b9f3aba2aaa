"""The report of a recorded step of which every domain was trained by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.trainer.requests import TrainReport

_COUNTS = (
    "batch/unscorable",
    "batch/not_trained",
    "batch/empty_responses",
    "batch/skipped_updates",
    "routing/split_prompts",
)
_ROUTES = "_routes"
"""What names of counts of routes end with."""
_MAXIMA = ("routing/load_max_ratio",)
"""Metrics that are neither means nor have a unit of their own."""


def joined_report(reports: Mapping[str, TrainReport], state: Mapping[str, Any]) -> TrainReport:
    """Return the report of the step. reports: by domain; state: what the objectives of all domains
    had learned before it, by domain.

    Every metric of a domain is there as `name@domain`, and one of all domains as `name`
    (`joined_metrics`)."""
    metrics: dict[str, float] = {}
    normalisers: dict[str, str] = {}
    for domain, report in reports.items():
        normalisers |= report.normalisers
        for name, value in _of_domain(report, domain).items():
            metrics[name] = value
            known_as = name.removesuffix(f"@{domain}")
            if known_as in report.normalisers:
                normalisers[name] = report.normalisers[known_as]
    of_all = [(_without_domains(report), report.tokens) for report in reports.values()]
    metrics |= joined_metrics(of_all, normalisers)
    learned = dict(state)
    losses: list[float] = []
    grad_norms: list[float] = []
    for domain, report in reports.items():
        learned[domain] = report.state
        losses += report.losses
        grad_norms += report.grad_norms
    return TrainReport(
        metrics=metrics,
        normalisers=normalisers,
        state=learned,
        updates=max(report.updates for report in reports.values()),
        losses=losses,
        grad_norms=grad_norms,
        tokens=sum(report.tokens for report in reports.values()),
        old_logprobs_s=sum(report.old_logprobs_s for report in reports.values()),
        train_s=sum(report.train_s for report in reports.values()),
    )


def joined_metrics(
    parts: Sequence[tuple[Mapping[str, float], int]], normalisers: Mapping[str, str]
) -> dict[str, float]:
    """Return metrics of all parts of a step together: of maxima the largest, of sums and counts the
    sum, else the mean weighted by tokens, of the parts that have one.

    parts: metrics by name, and tokens; normalisers: units of metrics, as `Stats.units`."""
    found: dict[str, list[tuple[float, int]]] = {}
    for metrics, num_tokens in parts:
        for name, value in metrics.items():
            found.setdefault(name, []).append((value, num_tokens))
    return {name: _joined(values, _unit(name, normalisers)) for name, values in found.items()}


def _unit(name: str, normalisers: Mapping[str, str]) -> str:
    if name in _COUNTS or name.endswith(_ROUTES):
        return "sum"
    if name in _MAXIMA:
        return "max"
    return normalisers.get(name, "")


def _joined(weighted: Sequence[tuple[float, int]], unit: str) -> float:
    """Return one number for several with their tokens. unit: as `Stats.units`."""
    values = [value for value, _ in weighted]
    if unit == "max":
        return max(values)
    if unit == "sum":
        return sum(values)
    if len(set(values)) == 1:  # a mean may round it
        return values[0]
    num_tokens = sum(tokens for _, tokens in weighted)
    if num_tokens == 0:  # nothing was trained
        return sum(values) / len(values)
    return sum(value * tokens for value, tokens in weighted) / num_tokens


def _of_domain(report: TrainReport, domain: str) -> dict[str, float]:
    """Return the metrics of a report as those of its domain; what it says of others is left out."""
    found = {}
    for name, value in _without_domains(report).items():
        found[f"{name}@{domain}"] = value
    for name, value in report.metrics.items():
        if name.endswith(f"@{domain}"):
            found[name] = value
    return found


def _without_domains(report: TrainReport) -> dict[str, float]:
    """Return the metrics that are not of a single domain."""
    return {name: value for name, value in report.metrics.items() if "@" not in name}
