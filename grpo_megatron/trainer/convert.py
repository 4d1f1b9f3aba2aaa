"""One rank of a conversion: `python -m grpo_megatron.trainer.convert JOB.json`.

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
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.checkpoints import durable, hf_export, hf_import, shard_files, torch_dist
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import GrpoMegatronError, MismatchError, SetupError, TrainerError
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer.checks import probe
from grpo_megatron.trainer.megatron.checkpoint_layout import parameter_table
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.protocol import error_reply
from grpo_megatron.weights.gather import all_gathered, on_rank_0
from grpo_megatron.weights.parameters import Parameter, num_elements
from grpo_megatron.weights.transfer_plan import digest_tensor

_REPORT_BYTES = 64 << 20
_TIMEOUT_S = 7 * 86400.0
"""Ranks wait for the slowest one between phases."""

Source = hf_import.HFSource | torch_dist.MegatronSource
Target = hf_export.HFTarget | torch_dist.MegatronTarget


class Job(msgspec.Struct, frozen=True):
    """What to convert. `target` None: only check `source`."""

    source: str
    target: str | None = None
    to: str = ""  # "hf" or "megatron"
    dtype: str | None = None
    shard_bytes: int = shard_files.DEFAULT_SHARD_BYTES
    layout: dict[str, Any] = {}
    probe: bool = True
    carry: bool = True


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _say_once(**message: Any) -> None:
    if dist.get_rank() == 0:
        say(**message)


@contextmanager
def _phase(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Tell of a phase of all ranks. Yields what takes the bytes that were handled."""
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


def run(job: Job, info: RankInfo, store: dist.Store | None = None) -> None:
    """Everything that one rank does. `store`: rendezvous, default that of the environment."""
    directory = Path(job.source)
    hf = read_config(directory)
    table = parameter_table(hf)
    layout = TrainerConfig(
        **{
            "num_ranks": info.world_size,
            "precision": "float32",
            "command_timeout_s": _TIMEOUT_S,
            **job.layout,
        }
    )
    initialize(layout, info, store)
    seed_everything(0)
    from_megatron = job.to == "hf" or (job.target is None and torch_dist.is_torch_dist(directory))
    source = (
        torch_dist.MegatronSource(table, directory, carry=job.carry)
        if from_megatron
        else hf_import.HFSource(table.parameters, directory, carry=job.carry)
    )
    if job.target is None:
        _check(source, directory)
        return
    final = Path(job.target)
    working = durable.working_directory(Path(job.target))
    dtype = getattr(torch, job.dtype) if job.dtype else None
    units = [p.entries(dtype or source.dtype(p)) for p in source.parameters]
    target = (
        hf_export.HFTarget(working, units, job.shard_bytes)
        if job.to == "hf"
        else torch_dist.MegatronTarget(table, source.parameters, working, units, job.shard_bytes)
    )
    on_rank_0(_prepare, job, target)
    _write(source, target, dtype, directory)
    with _phase("read back", sum(file.num_bytes for file in target.files)) as report:
        shard_files.read_back(target, final, report)
    if job.probe:
        _compare(job, hf, table.parameters, layout, working, dtype)
    on_rank_0(durable.commit, working, final)


def _left(target: Target) -> list[shard_files.ShardFile]:
    return [file for file in target.files if target.record(file) is None]


def _prepare(job: Job, target: Target) -> None:
    """Keep what an interrupted conversion of the same files left; start anew after others."""
    identity = [
        msgspec.to_builtins(job),
        [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(Path(job.source).rglob("*"))
            if path.is_file()
        ],
    ]
    working = target.working
    plan = target.working / durable.PROGRESS / "plan.json"
    if plan.exists() and json.loads(plan.read_text()) == identity:
        done = len(target.files) - len(_left(target))
        say(message=f"going on: {done} of {len(target.files)} files are finished")
    else:
        for path in working.iterdir() if working.exists() else ():
            if path.name != ".lock":  # held by whoever started us
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        durable.write_json(plan, identity)
    left = sum(file.num_bytes for file in _left(target))
    free = shutil.disk_usage(working).free
    if left > free:
        raise SetupError(
            f"{left / 1e9:.3f} GB are to be written and {free / 1e9:.3f} GB are free",
            where=str(working.parent),
            remedy="make room, or choose another disk",
        )


def _write(source: Source, target: Target, dtype: torch.dtype | None, directory: Path) -> None:
    rank = dist.get_rank()
    left = _left(target)
    dist.barrier()  # all have looked what is left
    with _phase("write", sum(file.num_bytes for file in left)) as report:
        for file in left[rank :: dist.get_world_size()]:
            parameters = [source.parameters[unit] for unit in file.units]
            tensors = (
                (name, tensor.to(dtype or tensor.dtype))
                for parameter in shard_files.read_ahead(parameters, source.prefetch)
                for name, tensor in source.tensors(parameter)
            )
            target.write(file, tensors, report)
        target.wait()
        dist.barrier()
        on_rank_0(target.finish, directory)


def _compare(
    job: Job,
    hf: dict[str, Any],
    parameters: Sequence[Parameter],
    layout: TrainerConfig,
    working: Path,
    dtype: torch.dtype | None,
) -> None:
    source = Path(job.source)
    hf_directory, megatron = (working, source) if job.to == "hf" else (source, working)
    reasons = all_gathered(probe.why_not(hf, num_elements(parameters), layout))
    if reason := next(filter(None, reasons), None):
        _say_once(message=f"log-probs were not compared: {reason}")
        return
    worst = probe.largest_difference(hf, hf_directory, megatron / "weights", layout, dtype)
    if not worst <= probe.TOLERANCE:
        raise MismatchError(
            f"log-probs of the probe text differ by {worst:.2g} between Megatron "
            f"and transformers (allowed: {probe.TOLERANCE:g})",
            where=job.target,
            remedy=f"the files are kept in {working}; please report this model",
        )
    _say_once(message=f"log-probs by Megatron and by transformers agree to {worst:.1e}")


def _check(source: Source, directory: Path) -> None:
    """Read every tensor: finite numbers, and the digests that were recorded, if there are any."""
    record = directory / "conversion.json"
    recorded = json.loads(record.read_text())["tensors"] if record.exists() else {}
    problems: list[tuple[str, str]] = []
    with _phase("check", 4 * num_elements(source.parameters)) as report:
        for parameter in source.parameters[dist.get_rank() :: dist.get_world_size()]:
            for name, tensor in source.tensors(parameter):
                if not torch.isfinite(tensor).all():
                    problems.append(("hold numbers that are not finite", name))
                if name in recorded and digest_tensor(tensor) != recorded[name]:
                    problems.append(("are not what was written", name))
                report(4 * tensor.numel())
    total: dict[str, list[str]] = defaultdict(list)
    for problem, name in chain.from_iterable(all_gathered(problems)):
        total[problem].append(name)
    if total:
        raise MismatchError(
            "; ".join(
                f"{len(names)} tensors {problem}, for example {names[:3]}"
                for problem, names in total.items()
            ),
            where=str(directory),
        )
    _say_once(
        message="every tensor has its place, its shape and finite numbers"
        + (", and the digest that was recorded" if recorded else "; no digests were recorded")
    )


def main(path: str, store: str | None = None) -> None:
    """Run the job in the file `path`; the exit code is that of the error's class. Ranks meet at
    the new file `store`, by default where torchrun's variables say."""
    code = 0
    try:
        info = RankInfo.from_environment()
        run(
            msgspec.json.decode(Path(path).read_bytes(), type=Job),
            info,
            store and dist.FileStore(store, info.world_size),
        )
    except Exception as error:
        if not isinstance(error, GrpoMegatronError):
            traceback.print_exc()
        code = getattr(error, "exit_code", TrainerError.exit_code)
        say(**error_reply(error))
    os._exit(code)  # other ranks may be inside a collective: do not wait


if __name__ == "__main__":
    main(*sys.argv[1:])
