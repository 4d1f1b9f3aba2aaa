"""One rank of a conversion: `python -m grpo_megatron.trainer.convert JOB.json`.

Ranks share the files out among them and need each other only between the phases: write, read back,
compare log-probs. Standard output carries one JSON object a line for whoever started them: bytes
of a phase, messages, the error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from grpo_megatron.trainer import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.checkpoints.durable import PROGRESS, commit, working_directory, write_json
from grpo_megatron.checkpoints.hf_export import DEFAULT_SHARD_BYTES, refuse_differences
from grpo_megatron.checkpoints.shard_files import Records, ShardFile
from grpo_megatron.checkpoints.torch_dist import is_torch_dist
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import (
    GrpoMegatronError,
    MismatchError,
    SetupError,
    TrainerError,
)
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer import probe
from grpo_megatron.trainer.conversions import (
    Conversion,
    HFSource,
    MegatronSource,
    ToHF,
    ToMegatron,
    problems_of,
)
from grpo_megatron.trainer.distributed import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.parameters import ParameterTable, parameter_table

_REPORT_BYTES = 64 << 20
_TIMEOUT_S = 7 * 86400.0
"""Ranks wait for the slowest one between phases."""


class Job(msgspec.Struct, frozen=True):
    """What to convert. `target` None: only check `source`."""

    source: str
    target: str | None = None
    to: str = ""  # "hf" or "megatron"
    dtype: str | None = None
    shard_bytes: int = DEFAULT_SHARD_BYTES
    layout: dict[str, Any] = {}
    probe: bool = True
    carry: bool = True


class Progress:
    """Bytes of one phase, told in lumps."""

    def __init__(self, phase: str):
        self.phase, self._pending = phase, 0

    def __call__(self, num_bytes: int) -> None:
        self._pending += num_bytes
        if self._pending >= _REPORT_BYTES:
            self.close()

    def close(self) -> None:
        say(phase=self.phase, bytes=self._pending)
        self._pending = 0


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def run(job: Job, info: RankInfo, store: dist.Store | None = None) -> None:
    """Everything that one rank does. `store`: rendezvous, default that of the environment."""
    source = Path(job.source)
    hf = read_config(source)
    table = parameter_table(hf)
    layout = TrainerConfig(**{"num_ranks": info.world_size, "precision": "float32",
                              "command_timeout_s": _TIMEOUT_S, **job.layout})
    initialize(layout, info, store)
    seed_everything(0)
    if job.target is None:
        _check(table, source)
        return
    target, dtype = Path(job.target), getattr(torch, job.dtype) if job.dtype else None
    working = working_directory(target)
    conversion: Conversion
    if job.to == "hf":
        conversion = ToHF(MegatronSource(table, source, carry=job.carry), source, working, dtype,
                          job.shard_bytes)
    else:
        conversion = ToMegatron(HFSource(table, source, carry=job.carry), working, dtype,
                                job.shard_bytes)
    if info.rank == 0:
        _prepare(job, working, conversion.files)
    dist.barrier()
    _write(conversion, working, info)
    _read_back(conversion, working, target, info)
    if job.probe:
        _compare(job, hf, table, layout, working)
    if info.rank == 0:
        commit(working, target)
    dist.barrier()


def _prepare(job: Job, working: Path, files: Sequence[ShardFile]) -> None:
    """Keep what an interrupted conversion of the same files left; start anew after others."""
    identity = {"job": msgspec.to_builtins(job), "source": [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(Path(job.source).rglob("*")) if path.is_file()]}
    plan = working / PROGRESS / "plan.json"
    if plan.exists() and json.loads(plan.read_text()) == json.loads(json.dumps(identity)):
        done = sum(Records(working).read(file) is not None for file in files)
        say(message=f"going on: {done} of {len(files)} files are finished")
    else:
        for path in working.iterdir() if working.exists() else ():
            if path.name != ".lock":  # held by whoever started us
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (working / "weights").mkdir(parents=True, exist_ok=True)
        if job.to == "hf":
            (working / "weights").rmdir()
        write_json(plan, identity)
    left = sum(file.num_bytes for file in files if Records(working).read(file) is None)
    free = shutil.disk_usage(working).free
    if left > free:
        raise SetupError(f"{left / 1e9:.3f} GB are to be written and {free / 1e9:.3f} GB are free",
                         where=str(working.parent), remedy="make room, or choose another disk")


def _write(conversion: Conversion, working: Path, info: RankInfo) -> None:
    left = [file for file in conversion.files if Records(working).read(file) is None]
    if info.rank == 0:
        say(phase="write", total=sum(file.num_bytes for file in left))
    started, report = time.monotonic(), Progress("write")
    for file in left[info.rank :: info.world_size]:
        conversion.write(file, report)
    conversion.close()
    report.close()
    dist.barrier()
    if info.rank == 0:
        conversion.finish()
    dist.barrier()
    if info.rank == 0:
        say(phase="write", seconds=time.monotonic() - started)


def _read_back(conversion: Conversion, working: Path, target: Path, info: RankInfo) -> None:
    """Each rank reads another one's files: on two machines that shows what never left one."""
    if info.rank == 0:
        say(phase="read back", total=sum(file.num_bytes for file in conversion.files))
    started, report, bad = time.monotonic(), Progress("read back"), []
    for file in conversion.files[(info.rank + 1) % info.world_size :: info.world_size]:
        wrong = conversion.read_back(file)
        if wrong:  # the next attempt writes it again
            (working / PROGRESS / f"{file.name}.json").unlink(missing_ok=True)
        bad += wrong
        report(file.num_bytes)
    report.close()
    refuse_differences([name for part in _gathered(bad) for name in part], target)
    if info.rank == 0:
        say(phase="read back", seconds=time.monotonic() - started)


def _compare(job: Job, hf: dict[str, Any], table: ParameterTable, layout: TrainerConfig,
             working: Path) -> None:
    reason = probe.why_not(hf, table.num_elements, layout)
    if reasons := [r for r in _gathered(reason) if r]:
        if dist.get_rank() == 0:
            say(message=f"log-probs were not compared: {reasons[0]}")
        return
    source = Path(job.source)
    hf_directory, megatron = (working, source) if job.to == "hf" else (source, working)
    worst = probe.largest_difference(hf, hf_directory, megatron / "weights", layout,
                                     getattr(torch, job.dtype) if job.dtype else None)
    if not worst <= probe.TOLERANCE:
        raise MismatchError(f"log-probs of the probe text differ by {worst:.2g} between Megatron "
                            f"and transformers (allowed: {probe.TOLERANCE:g})", where=job.target,
                            remedy=f"the files are kept in {working}; please report this model")
    if dist.get_rank() == 0:
        say(message=f"log-probs by Megatron and by transformers agree to {worst:.1e}")


def _check(table: ParameterTable, directory: Path) -> None:
    source = (MegatronSource if is_torch_dist(directory) else HFSource)(table, directory)
    table = source.table
    record = directory / "conversion.json"
    recorded = json.loads(record.read_text())["tensors"] if record.exists() else {}
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        say(phase="check", total=4 * table.num_elements)
    started, report, found = time.monotonic(), Progress("check"), defaultdict(list)
    for parameter in table.parameters[rank::world]:
        for problem, names in problems_of(source, parameter, recorded).items():
            found[problem] += names
        report(4 * torch.Size(parameter.shape).numel())
    report.close()
    total: dict[str, list[str]] = defaultdict(list)
    for part in _gathered(dict(found)):
        for problem, names in part.items():
            total[problem] += names
    if total:
        raise MismatchError("; ".join(f"{len(names)} tensors {problem}, for example {names[:3]}"
                                      for problem, names in total.items()), where=str(directory))
    if rank == 0:
        say(phase="check", seconds=time.monotonic() - started)
        say(message="every tensor has its place, its shape and finite numbers"
                    + (", and the digest that was recorded" if recorded else
                       "; no digests were recorded"))


def _gathered(value: Any) -> list[Any]:
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, value)
    return world


def main(path: Path) -> None:
    """Run the job of `path`; the exit code is that of the error's class."""
    try:
        run(msgspec.json.decode(path.read_bytes(), type=Job), RankInfo.from_environment())
    except GrpoMegatronError as error:
        say(error=[error.message, error.where, error.remedy], exit_code=error.exit_code)
        os._exit(error.exit_code)  # other ranks may be inside a collective: do not wait
    except Exception as error:
        import traceback

        traceback.print_exc()
        say(error=[f"{type(error).__name__}: {error}", None, None],
            exit_code=TrainerError.exit_code)
        os._exit(TrainerError.exit_code)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
