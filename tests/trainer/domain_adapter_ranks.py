"""What the worker groups execute of adapters by domain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.batching.columns import read_columns
from grpo_megatron.batching.store import SampleTable, StepDomain
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.lora.peft_format import adapter_model
from grpo_megatron.trainer.requests import (
    ExportModel,
    LoadCheckpoint,
    MeasureLogprobDiff,
    ResetOptimizer,
    SaveCheckpoint,
    SnapshotReference,
    Train,
    TrainColdStart,
    TrainReport,
    to_json_values,
)
from grpo_megatron.trainer.service import TrainerService
from grpo_megatron.weights.gather import ShardedModel
from tests.integration import trainer_side
from tests.trainer.lora_ranks import service_config

DOMAINS = ("even", "odd")


def _service(config: RunConfig, model: str) -> TrainerService:
    trainer_side.start(config, model)
    assert trainer_side._service is not None
    return trainer_side._service


def _config(layout: dict[str, Any], lora: dict[str, Any], **settings: Any) -> RunConfig:
    config = service_config(layout, lora, cold_start=settings.pop("cold_start", False))
    objective = config.objective.model_copy(update=settings)
    return config.model_copy(update={"objective": objective})


def _train(step: str) -> Train:
    return Train(directory=Path(step), first_update=0, num_updates=9, state={})


def _gathered(model: ShardedModel) -> dict[str, np.ndarray]:
    """Whole adapters by name, on rank 0."""
    found = {}
    for name, tensor in model.stream(model.entries, [0] * len(model.entries)):
        found[name] = tensor.float().cpu().numpy().copy()
    return found


def _figures(report: TrainReport) -> dict[str, Any]:
    return {"losses": report.losses, "norms": report.grad_norms, "state": report.state}


def trained_apart(
    model: str, steps: list[str], layout: dict[str, Any], lora: dict[str, Any], **objective: Any
) -> dict[str, Any]:
    """Each domain by a trainer of its own that sees nothing of the other."""
    found: dict[str, Any] = {}
    for number, domain in enumerate(DOMAINS):
        service = _service(_config(layout, lora, **objective), model)
        service.execute(SnapshotReference())
        reports = []
        state: dict[str, Any] = {}
        for step in steps:
            table = SampleTable(Path(step), domain=StepDomain(number, domain))
            if len(table):
                report = service._train_rl(_train(step), table, state)
                state = report.state
                reports.append(_figures(report))
        found[domain] = {"reports": reports, "adapters": _gathered(adapter_model(service.policy))}
    return found


def trained_together(
    model: str,
    steps: list[str],
    layout: dict[str, Any],
    lora: dict[str, Any],
    cold_start: bool = False,
    **objective: Any,
) -> dict[str, Any]:
    """Both by one trainer; what a publish sends, and what each domain has after the last step."""
    lora = {**lora, "per_domain": True, "publish": "adapter"}
    service = _service(_config(layout, lora, cold_start=cold_start, **objective), model)
    if cold_start:
        service.execute(ResetOptimizer(cold_start=True))
        service.execute(TrainColdStart(directory=Path(steps[0]), first_update=0))
        service.execute(ResetOptimizer(cold_start=False))
    service.execute(SnapshotReference())
    reports = _trained(service, steps)
    return {"reports": reports, **_adapters_of(service)}


def _trained(service: TrainerService, steps: list[str]) -> list[TrainReport]:
    reports = []
    state: dict[str, Any] = {}
    for step in steps:
        request = Train(directory=Path(step), first_update=0, num_updates=9, state=state)
        report = service.execute(request)
        state = report.state
        reports.append(report)
    return reports


def _adapters_of(service: TrainerService) -> dict[str, Any]:
    assert service.domain_adapters is not None
    service.domain_adapters.refresh()
    found: dict[str, Any] = {"published": _gathered(service.domain_adapters.published())}
    for domain in DOMAINS:
        service.domain_adapters.take(domain)
        found[domain] = _gathered(adapter_model(service.policy))
    return found


def resumed(
    model: str, steps: list[str], layout: dict[str, Any], lora: dict[str, Any], root: str
) -> dict[str, Any]:
    """Save after the first step and export, then take the others: at once, and from the
    checkpoint."""
    lora = {**lora, "per_domain": True, "publish": "adapter"}
    config = _config(layout, lora)
    service = _service(config, model)
    service.execute(SnapshotReference())
    [first] = _trained(service, steps[:1])
    checkpoint = Path(root) / "step_000001"
    service.execute(SaveCheckpoint(directory=checkpoint, state={"step": 1}))
    service.execute(ExportModel(Path(root) / "export"))
    expected = _trained(service, steps[1:])
    adapters = _adapters_of(service)
    return {
        "first": first,
        "expected": expected,
        "adapters": adapters,
        "found": gone_on(model, steps, layout, lora, str(checkpoint)),
    }


def gone_on(
    model: str, steps: list[str], layout: dict[str, Any], lora: dict[str, Any], checkpoint: str
) -> dict[str, Any]:
    """Take all steps but the first one from a checkpoint, written at any layout."""
    service = _service(_config(layout, lora), model)
    state = service.execute(LoadCheckpoint(Path(checkpoint)))
    reports = _trained(service, steps[1:])
    return {"state": state, "reports": reports, **_adapters_of(service)}


def refused(model: str, layout: dict[str, Any], lora: dict[str, Any], checkpoint: str) -> str:
    """What a trainer says of a checkpoint of other domains."""
    config = _config(layout, lora)
    first, second = config.domains
    domains = (first, second.model_copy(update={"name": "third"}))
    service = _service(config.model_copy(update={"domains": domains}), model)
    try:
        service.execute(LoadCheckpoint(Path(checkpoint)))
    except CheckpointError as error:
        return str(error)
    return ""


def logprobs(
    model: str,
    step: str,
    layout: dict[str, Any],
    lora: dict[str, Any],
    checkpoint: str,
    to: str,
) -> dict[str, np.ndarray]:
    """The columns of the mismatch report at the weights of a checkpoint."""
    service = _service(_config(layout, lora), model)
    service.execute(LoadCheckpoint(Path(checkpoint)))
    request = MeasureLogprobDiff(directory=Path(step), to=Path(to), by_layer=False, state={})
    to_json_values(service.execute(request))
    dist.barrier()
    return {name: np.array(column) for name, column in read_columns(Path(to)).items()}


def merged_logprobs_of(
    model: str, step: str, layout: dict[str, Any], to: str
) -> dict[str, np.ndarray]:
    """The same columns of a checkpoint into which adapters were merged."""
    service = _service(service_config(layout, None), model)
    request = MeasureLogprobDiff(directory=Path(step), to=Path(to), by_layer=False, state={})
    service.execute(request)
    dist.barrier()
    return {name: np.array(column) for name, column in read_columns(Path(to)).items()}


def tokens_of_odd(step: str) -> np.ndarray:
    """Which policy tokens of a step are of the second domain, bool [n]."""
    table = SampleTable(Path(step), verify=False)
    return np.repeat(table.domain == 1, table.policy_lengths)


def replayed(model: str, step: str, lora: dict[str, Any]) -> dict[str, float]:
    """Train a step unless it was trained, and again as it was recorded; whether the decisions of
    every domain were there."""
    lora = {**lora, "per_domain": True, "publish": "adapter"}
    if not list(Path(step).glob("decisions-*")):
        service = _service(_config({}, lora), model)
        service.execute(SnapshotReference())
        service.execute(_train(step))
    service = _service(_config({}, lora), model)
    service.execute(SnapshotReference())
    request = Train(directory=Path(step), first_update=0, num_updates=9, state={}, replayed=True)
    metrics = service.execute(request).metrics
    name = "replay/decisions_recorded"
    found = {domain: metrics[f"{name}@{domain}"] for domain in DOMAINS}
    return {**found, "both": metrics[name]}
