"""One rank of a conversion: `python -m grpo_megatron.trainer.conversion_worker JOB.json`.

Ranks share the files out among them and need each other only between the phases: write, read back,
compare log-probs. Standard output carries one JSON object a line: bytes, messages, the error."""

import json
import os
import shutil
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # not in its stubs

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.checkpoints import (
    distributed,
    durable,
    hf_export,
    hf_import,
    shard_files,
    stacked_experts,
    torch_dist,
)
from grpo_megatron.checkpoints.casts import cast
from grpo_megatron.checkpoints.fitting import adapter_domains
from grpo_megatron.checkpoints.recorded_digests import RecordedDigests
from grpo_megatron.checkpoints.retention import DIGESTS, is_torch_dist
from grpo_megatron.config.trainer import TrainerConfig, refuse_other_than_layout
from grpo_megatron.errors import (
    CheckpointError,
    GrpoMegatronError,
    MismatchError,
    SetupError,
    TrainerError,
)
from grpo_megatron.files import clear_directory
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.tensor_names import transformers_type
from grpo_megatron.trainer.checks import probe
from grpo_megatron.trainer.megatron.checkpoint_layout import parameter_table
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.protocol import error_reply
from grpo_megatron.weights.gather import all_gathered, on_rank_0
from grpo_megatron.weights.parameters import (
    CARRIED,
    SELECTION_BIAS,
    Parameter,
    num_elements,
)

_REPORT_BYTES = 64 << 20
_TIMEOUT_S = 7 * 86400.0
"""Ranks wait for the slowest one between phases."""

Source = hf_import.HFSource | torch_dist.MegatronSource
Target = hf_export.HFTarget | torch_dist.MegatronTarget


class ConversionJob(msgspec.Struct, frozen=True):
    """What to convert, and how; a JSON file of it is all that a rank gets."""

    source: str
    target: str | None = None  # None: only check `source`
    to: str = ""  # "hf" or "megatron"
    dtype: str | None = None  # "bfloat16", as in torch.bfloat16; None: as it is
    shard_bytes: int = shard_files.DEFAULT_SHARD_BYTES
    layout: dict[str, Any] = {}  # keys of [trainer], of LAYOUT_KEYS
    probe: bool = True  # compare log-probs in the end
    carry: bool = True  # also tensors that Megatron has no parameter for
    domain: str = ""  # whose adapters are merged, where domains have adapters of their own


def say(**message: Any) -> None:
    """Print one JSON object for the process that started this rank."""
    print(json.dumps(message), flush=True)


def _say_once(**message: Any) -> None:
    if dist.get_rank() == 0:
        say(**message)


@contextmanager
def _phase(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Tell of a phase of all ranks; yield what takes the bytes that were handled. Collective."""
    _say_once(phase=name, total=total)
    started = time.monotonic()
    pending = 0

    def report(num_bytes: int, at_least: int = _REPORT_BYTES) -> None:
        nonlocal pending
        pending += num_bytes
        if pending >= at_least:
            say(phase=name, bytes=pending)
            pending = 0

    yield report
    report(0, at_least=0)
    dist.barrier()
    _say_once(phase=name, seconds=time.monotonic() - started)


def run(job: ConversionJob, info: RankInfo, store: Store | None = None) -> None:
    """Do everything that one rank does. `store`: rendezvous, default that of the environment.

    Raises CheckpointError where `job.source` is none, damaged or of another model, ConfigError
    where its config.json is not supported or `job.layout` has other keys, MismatchError where the
    result is not the source, SetupError where the disk is full."""
    for key in job.layout:
        refuse_other_than_layout(key, where="layout")
    directory = Path(job.source)
    hf = read_config(directory)
    table = parameter_table(hf)
    settings = {
        "num_ranks": info.world_size,
        "precision": "float32",
        "command_timeout_s": _TIMEOUT_S,
    }
    layout = TrainerConfig(**(settings | job.layout))
    initialize(layout, info, store)
    seed_everything(0)
    if is_torch_dist(directory):
        _refuse_damaged(directory)
    source = _open_source(job, table)
    if job.target is None:
        _check(source, directory)
        for domain in adapter_domains(directory):
            _say_once(message=f"with the adapters of {domain}:")
            adapted = torch_dist.MegatronSource(table, directory, domain=domain)
            adapted.parameters = adapted.adapted_parameters()
            _check(adapted, directory)
        return
    _require_choice(job, directory)
    final = Path(job.target)
    working = durable.working_directory(final)
    dtype = _wanted_dtype(job)
    target = _plan_target(job, table, source, working, dtype)
    on_rank_0(_prepare, job, target)
    _write(source, target, job, dtype)
    with _phase("read back", target.num_bytes) as report:
        shard_files.read_back(target, final, report)
    if job.probe:
        _compare(job, hf, table, source, layout, working)
    on_rank_0(durable.commit, working, final)


def _refuse_damaged(directory: Path) -> None:
    """Raise CheckpointError where files of a run's checkpoint are not as they were written, before
    anything is made of them; a copy may be without the critic, which no conversion reads. What was
    converted has digests of its tensors instead. Collective."""
    if not (directory / DIGESTS).exists():
        return
    names = distributed.corrupt_files(directory)
    if not (directory / distributed.CRITIC).exists():
        names = [name for name in names if not name.startswith(f"{distributed.CRITIC}/")]
    if names:
        raise CheckpointError(
            f"{len(names)} files are not as they were written, for example {names[:3]}",
            where=str(directory),
            remedy="take the checkpoint before it, or restore this one from a backup",
        )
    _say_once(message=f"every file is as it was written, by {DIGESTS}")


def _require_choice(job: ConversionJob, directory: Path) -> None:
    """Raise CheckpointError where domains have adapters of their own and none is chosen."""
    domains = adapter_domains(directory)
    if domains and not job.domain:
        raise CheckpointError(
            f"the domains {', '.join(domains)} have adapters of their own, and a Hugging Face "
            "checkpoint has those of one in its weights",
            where=str(directory),
            remedy=f"choose one: --domain {domains[0]}",
        )


def _open_source(job: ConversionJob, table: torch_dist.ParameterTable) -> Source:
    directory = Path(job.source)
    is_from_megatron = job.to == "hf"
    if job.target is None:
        is_from_megatron = is_torch_dist(directory)
    if is_from_megatron:
        return torch_dist.MegatronSource(
            table,
            directory,
            carry=job.carry,
            domain=job.domain,
            exact_sums=job.dtype is not None,
        )
    return hf_import.HFSource(table.parameters, directory, carry=job.carry)


def _plan_target(
    job: ConversionJob,
    table: torch_dist.ParameterTable,
    source: Source,
    working: Path,
    dtype: torch.dtype | None,
) -> Target:
    """Plan the files of the result, in `working`; dtype: None keeps that of the source."""
    units = []
    for parameter in source.parameters:
        units.append(parameter.entries(_dtype_of(parameter, source, dtype)))
    if job.to == "hf":
        stacks = stacked_experts.stacks_in(Path(job.source))
        return hf_export.HFTarget(working, units, job.shard_bytes, stacks)
    return torch_dist.MegatronTarget(table, source.parameters, working, units, job.shard_bytes)


def _unfinished(target: Target) -> list[shard_files.ShardFile]:
    return [file for file in target.files if target.record(file) is None]


def _num_bytes(files: Sequence[shard_files.ShardFile]) -> int:
    return sum(file.num_bytes for file in files)


def _prepare(job: ConversionJob, target: Target) -> None:
    """Keep what an interrupted conversion of the same files left; start anew after others.

    Raises SetupError where the disk has no room for the rest."""
    working = target.working
    plan = working / durable.PROGRESS / "plan.json"
    identity = _identity(job)
    if plan.exists() and json.loads(plan.read_text()) == identity:
        done = len(target.files) - len(_unfinished(target))
        say(message=f"going on: {done} of {len(target.files)} files are finished")
    else:
        if working.exists():  # the lock is of the process that started us
            clear_directory(working, kept=(working / ".lock",))
        durable.write_json(plan, identity)
    needed = _num_bytes(_unfinished(target))
    free = shutil.disk_usage(working).free
    if needed > free:
        raise SetupError(
            f"{needed / 1e9:.3f} GB are to be written and {free / 1e9:.3f} GB are free",
            where=str(working.parent),
            remedy="make room, or choose another disk",
        )


def _identity(job: ConversionJob) -> list[Any]:
    """Tell one conversion from another: the job, and its source's files with size and time."""
    files = []
    for path in sorted(Path(job.source).rglob("*")):
        if path.is_file():
            files.append([str(path), path.stat().st_size, path.stat().st_mtime_ns])
    return [msgspec.to_builtins(job), files]


def _write(source: Source, target: Target, job: ConversionJob, dtype: torch.dtype | None) -> None:
    """Write the files that are not finished; each rank its share. Collective."""
    unfinished = _unfinished(target)
    digests = RecordedDigests(Path(job.source))
    dist.barrier()  # all have looked what is left
    with _phase("write", _num_bytes(unfinished)) as report:
        for file in unfinished[dist.get_rank() :: dist.get_world_size()]:
            target.write(file, _tensors_of(source, file, dtype, digests), report)
        target.wait()
        dist.barrier()
        on_rank_0(target.finish, Path(job.source), job.dtype)


def _tensors_of(
    source: Source,
    file: shard_files.ShardFile,
    dtype: torch.dtype | None,
    digests: RecordedDigests,
) -> shard_files.NamedTensors:
    """Yield the tensors of a file as `dtype`, while the disk already reads the next ones.

    digests: of the source's tensors. Raises MismatchError where one is not what was written."""
    parameters = [source.parameters[unit] for unit in file.units]
    for parameter in shard_files.read_ahead(parameters, source.prefetch):
        written_as = _dtype_of(parameter, source, dtype)
        for name, tensor in source.tensors(parameter):
            digests.check(name, tensor)
            yield name, cast(name, tensor, written_as, where="--dtype")


def _wanted_dtype(job: ConversionJob) -> torch.dtype | None:
    """Return the dtype that the job asks for; None: every tensor keeps its own."""
    if job.dtype is None:
        return None
    wanted: torch.dtype = getattr(torch, job.dtype)
    return wanted


def _dtype_of(parameter: Parameter, source: Source, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is written: the wanted one, but that of the source
    for what chooses experts, and for what Megatron has no parameter for."""
    keeps_own = parameter.name.startswith(CARRIED) or parameter.name.endswith(SELECTION_BIAS)
    if wanted is None or keeps_own:
        return source.dtype(parameter)
    return wanted  # also where the tensors of the parameter have several


def _compare(
    job: ConversionJob,
    hf: dict[str, Any],
    table: torch_dist.ParameterTable,
    source: Source,
    layout: TrainerConfig,
    working: Path,
) -> None:
    """Compare log-probs of source and result, where that can be done. Collective."""
    hf_directory = Path(job.source)
    megatron = working
    if job.to == "hf":
        hf_directory = working
        megatron = Path(job.source)
    stored = {}
    if isinstance(source, torch_dist.MegatronSource):
        stored = {parameter.name: source.dtype(parameter) for parameter in source.parameters}
    for reason in all_gathered(probe.why_not(hf, num_elements(table.parameters), layout)):
        if reason:
            _say_once(message=f"log-probs were not compared: {reason}")
            return
    worst = probe.largest_difference(
        hf,
        hf_directory,
        megatron / "weights",
        layout,
        _wanted_dtype(job),
        domain=job.domain,
        stored=stored,
    )
    if not worst <= probe.TOLERANCE:
        raise MismatchError(
            f"log-probs of the probe text differ by {worst:.2g} between Megatron "
            f"and transformers (allowed: {probe.TOLERANCE:g})",
            where=job.target,
            remedy=f"the files are kept in {working}; please report this model",
        )
    code = transformers_type(hf["model_type"])
    if code != hf["model_type"]:
        code = f"{code} for {hf['model_type']}"
    message = f"log-probs by Megatron and by transformers ({code}) agree to {worst:.1e}"
    _say_once(message=message)


def _check(source: Source, directory: Path) -> None:
    """Read every tensor: finite numbers, and the digests that were recorded, if there are any.

    Raises MismatchError. Collective."""
    recorded = RecordedDigests(directory)
    problems: list[tuple[str, str]] = []
    with _phase("check", 4 * num_elements(source.parameters)) as report:
        for parameter in source.parameters[dist.get_rank() :: dist.get_world_size()]:
            for name, tensor in source.tensors(parameter):
                if not torch.isfinite(tensor).all():
                    problems.append(("hold numbers that are not finite", name))
                if recorded.differs(name, tensor):
                    problems.append(("are not what was written", name))
                report(4 * tensor.numel())
    names_by_problem: dict[str, list[str]] = defaultdict(list)
    for problems_there in all_gathered(problems):
        for problem, name in problems_there:
            names_by_problem[problem].append(name)
    if names_by_problem:
        described = []
        for problem, names in names_by_problem.items():
            described.append(f"{len(names)} tensors {problem}, for example {names[:3]}")
        raise MismatchError("; ".join(described), where=str(directory))
    of_digests = "; no digests of tensors were recorded"
    if recorded:
        of_digests = ", and the digest that was recorded"
    _say_once(message=f"every tensor has its place, its shape and finite numbers{of_digests}")


def main(path: str, store: str | None = None) -> None:
    """Run the job in the file `path`; the exit code is that of the error's class. Ranks meet at
    the new file `store`, by default where torchrun's variables say."""
    code = 0
    try:
        info = RankInfo.from_environment()
        job = msgspec.json.decode(Path(path).read_bytes(), type=ConversionJob)
        rendezvous: Store | None = None
        if store is not None:
            rendezvous = FileStore(store, info.world_size)
        run(job, info, rendezvous)
    except Exception as error:
        if not isinstance(error, GrpoMegatronError):
            traceback.print_exc()
        code = getattr(error, "exit_code", TrainerError.exit_code)
        say(**error_reply(error))
    os._exit(code)  # other ranks may be inside a collective: do not wait


if __name__ == "__main__":
    main(*sys.argv[1:])
