"""Run the stages of a graph on this machine, or submit each as a Slurm job after its parents."""

import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from grpo_megatron.errors import (
    INTERRUPTED_EXIT_CODE,
    ConfigError,
    GateError,
    GrpoMegatronError,
    SetupError,
)
from grpo_megatron.files import clear_directory, replace_directory, write_atomically
from grpo_megatron.launch import slurm
from grpo_megatron.launch.bindings import SKIP_REMEDY, refuse_unbound_code, refuse_unfit_data
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.plan.resolve import refuse_cpu_engine
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.graph import Graph
from grpo_megatron.stages.interrupts import InterruptForwarder
from grpo_megatron.stages.records import Records, State
from grpo_megatron.stages.replaced import ReplacedStages


def run_graph(
    graph: Graph,
    say: Callable[[str], object],
    only: str | None = None,
    *,
    anew: Collection[str] = (),
) -> int:
    """Run every stage that is not done, parents first; a failed one stops its descendants only.

    anew: stages that begin anew although they may be done, and so does what builds on them.

    Returns the exit code of the first that failed. Raises RunLockedError where another process
    runs the graph, ConfigError where the engines of this machine cannot serve a stage."""
    interrupts = InterruptForwarder()
    with interrupts.installed():
        records = Records(graph, anew)
        if only:  # the run's own lock is enough
            return _run_stages(records, [only], say, interrupts)
        with run_lock(records.directory):
            ReplacedStages(records).put_back_left()
            return _run_stages(records, graph.order, say, interrupts)


def _run_stages(
    records: Records,
    names: Sequence[str],
    say: Callable[[str], object],
    interrupts: InterruptForwarder,
) -> int:
    graph = records.graph
    _refuse_cpu_engine(graph, records, names)
    first_failure = 0
    for name in names:
        if interrupts.pending:
            return INTERRUPTED_EXIT_CODE
        state = records.state(name)
        if state is State.DONE:
            say(_done(name, records))
            continue
        if state is State.WAITING:
            say(_not_run_because_of(name, records, records.unfinished_parents(name)))
            first_failure = first_failure or ConfigError.exit_code
            continue
        told = f"{name}: {graph.kind(name)}"
        changed = records.changed_since(name)
        if changed:
            told += f", anew ({changed})"
        elif state is State.PARTIAL:
            told += "; ".join([", goes on", *records.notes(name)])
        say(told)
        if state is State.GATED:
            code = GateError.exit_code
        else:
            code = _run_stage(graph, records, name, interrupts, resume=state is State.PARTIAL)
            records.has_begun_anew(name)
        if code == INTERRUPTED_EXIT_CODE:
            return code
        if code:
            first_failure = first_failure or code
            reasons = [f"failed with exit code {code}", *records.closed_gates(name)]
            say(f"{name}: " + "; ".join(reasons))
    return first_failure


def _done(name: str, records: Records) -> str:
    """Return what to say of a stage that is done."""
    notes = records.notes(name)
    if not notes:
        return f"{name}: done and unchanged"
    return f"{name}: done and unchanged, but {'; '.join(notes)}; --anew {name} makes it anew"


def _not_run_because_of(name: str, records: Records, stages: Sequence[str]) -> str:
    """Return what to say of a stage that waits for others, with what has changed in them."""
    told = []
    for stage in stages:
        changed = records.changed_since(stage)
        if changed:
            told.append(f"{stage} ({changed})")
        else:
            told.append(stage)
    return f"{name}: not run, because of {', '.join(told)}"


def _run_stage(
    graph: Graph, records: Records, name: str, interrupts: InterruptForwarder, *, resume: bool
) -> int:
    if graph.table.stages[name].recipe is None:
        return _merge(graph, records, name)
    command = [sys.executable, "-m", "grpo_megatron.cli.main", "train"]
    command += graph.recipe_arguments(name)
    record = records.directory.root / f"{name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, records.text_for_run(name, goes_on=resume))
    command += ["--stage", str(record.absolute())]
    if resume:
        command.append("--resume-if-exists")
    else:
        command.append("--overwrite")
    return interrupts.run(
        command,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _merge(graph: Graph, records: Records, name: str) -> int:
    from grpo_megatron.checkpoints.merge import merge_checkpoints  # a login node may lack torch

    started = time.monotonic()
    stage = graph.table.stages[name]
    run_dir = graph.run_dir(name)
    try:
        with run_lock(run_dir):
            record = records.text_for_run(name, goes_on=False)
            replaces_run = run_dir.has_run
            merged = run_dir.export
            if replaces_run:  # which stays until there is something in its place
                merged = run_dir.root / "merged"
            else:
                records.begin_merge(name, record)
            merge_checkpoints(
                {graph.part(text): weight for text, weight in stage.parts.items()},
                merged,
                stage.dtype,
            )
            if replaces_run:
                _remove_run(run_dir, kept=merged)
                records.begin_merge(name, record)
                replace_directory(merged, run_dir.export)
                run_dir.config.unlink()
            seconds = time.monotonic() - started
            write_atomically(run_dir.result, f'{{"seconds": {seconds:.1f}}}')
    except GrpoMegatronError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if records.closed_gates(name):
        return GateError.exit_code
    return 0


def _remove_run(run_dir: RunDir, kept: Path) -> None:
    """Remove the run that a stage had before it became a merge, but for its logs, its job, and its
    configuration, which says until the end that it is to be replaced. kept: another part that
    stays."""
    run_dir.stage_record.unlink(missing_ok=True)  # killed from here on, it is no stage any more
    logs = run_dir.root / "logs"
    clear_directory(run_dir.root, (run_dir.lock, run_dir.config, run_dir.slurm, logs, kept))


def submit_graph(
    graph: Graph,
    site: str,
    say: Callable[[str], object],
    *,
    check_rewards: bool = False,
    anew: Collection[str] = (),
) -> dict[str, str]:
    """Submit a job for each stage that is not done, after its parents' jobs; returns job ids by
    stage. Jobs of stages that build on a failed one are cancelled by Slurm. Where it refuses a job,
    those before it are cancelled, and every stage has what it had.

    anew: as of `run_graph`.

    Errors as by `slurm.submit`; before any job, what a stage's controller or trainer would raise of
    its problems and, where `check_rewards`, of its functions and keys."""
    records = Records(graph, anew)
    jobs: dict[str, str] = {}
    replaced = ReplacedStages(records)
    stopped: set[str] = set()
    """Stages with a closed gate, and what builds on them."""
    slurm.render_job(
        graph.root, site, slurm.JobSizes()
    )  # a wrong site must not cost earlier results
    _refuse_what_stages_lack(graph, records, check_rewards=check_rewards)
    with run_lock(records.directory):
        replaced.put_back_left()
        for name in graph.order:
            state = records.state(name)
            parents = graph.table.stages[name].parents
            if state is State.DONE:
                say(_done(name, records))
                continue
            if state is State.GATED:
                stopped.add(name)
                say(f"{name}: " + "; ".join(records.closed_gates(name)))
                continue
            blocking = stopped.intersection(parents)
            if blocking:
                stopped.add(name)
                say(_not_run_because_of(name, records, sorted(blocking)))
                continue
            after = [jobs[parent] for parent in parents if parent in jobs]
            changed = records.changed_since(name)
            try:
                jobs[name] = _submit(records, replaced, name, site, after)
            except GrpoMegatronError as error:
                replaced.put_back(name)
                _take_back(jobs, replaced, error)
                raise
            told = f"{name}: job {jobs[name]}"
            if after:
                told += f" after {', '.join(after)}"
            if changed:
                told += f", anew ({changed})"
            say(told)
        replaced.remove()
    return jobs


def _take_back(jobs: dict[str, str], replaced: ReplacedStages, error: GrpoMegatronError) -> None:
    """Cancel the jobs that were queued before `error`, and put back what their stages had; the
    error says of which that is not possible."""
    for name, job in jobs.items():
        try:
            slurm.slurm("scancel", job)
            writes_on = slurm.is_active(job)
        except SetupError:  # Slurm does not answer: the job may begin
            writes_on = True
        if not writes_on:
            replaced.put_back(name)
            continue
        told = f"job {job} of stage {name} has not ended; cancel it"
        if replaced.place(name).exists():
            told += f", then move {replaced.place(name)}, which is what the stage had, back"
        error.remedy = "; ".join(filter(None, (error.remedy, told)))


def _refuse_cpu_engine(graph: Graph, records: Records, names: Sequence[str]) -> None:
    """Raise ConfigError, before any stage begins, for one that the engines of this machine cannot
    serve."""
    for name in names:
        is_merge = graph.table.stages[name].recipe is None
        if is_merge or records.state(name) is State.DONE:
            continue
        config = graph.resolve(name).config
        with graph.errors_of(name):
            refuse_cpu_engine(config)


def _refuse_what_stages_lack(graph: Graph, records: Records, *, check_rewards: bool) -> None:
    """Raise, before any stage is queued, what the controller or the trainer of one would. Problems
    of a stage whose parents have not run, which may be theirs to write, are not read.

    check_rewards: also functions and variables of the environment, which may be there on the
    cluster alone."""
    for name in graph.order:
        stage = graph.table.stages[name]
        if stage.recipe is None or records.state(name) is State.DONE:
            continue
        config = graph.resolve(name).config
        with graph.errors_of(name):
            if check_rewards:
                refuse_unbound_code(config, remedy=SKIP_REMEDY)
            if all(records.state(parent) is State.DONE for parent in stage.parents):
                refuse_unfit_data(config)


def _submit(
    records: Records, replaced: ReplacedStages, name: str, site: str, after: list[str]
) -> str:
    graph = records.graph
    run_dir = graph.run_dir(name)
    stage = graph.table.stages[name]
    slurm.refuse_active(run_dir)
    goes_on = records.is_unchanged(name) and run_dir.config.exists()
    replaced.begin(name, goes_on=goes_on)
    if goes_on:
        script = slurm.render(graph.resolve(name), site)
    elif stage.recipe is not None:
        return slurm.submit(graph.resolve(name), site, after)
    else:
        merge = ["stages", "run", str(graph.file.path.resolve()), "--only", name]
        script = slurm.render_job(run_dir.root, site, slurm.JobSizes(), merge)
    for folder in (run_dir.slurm, run_dir.logs):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.slurm / "train.sbatch", script)
    return slurm.submit_again(run_dir, after)
