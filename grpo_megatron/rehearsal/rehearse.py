"""Rehearse one recipe: scale it down, train, resume, export, and say what that showed."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from grpo_megatron import assets
from grpo_megatron.config.loader import ResolvedConfig, load_recipe
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError, GateError, GrpoMegatronError, SetupError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.bindings import (
    refuse_unbound_objective,
    refuse_unbound_rewards,
)
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rehearsal.evidence import Finding, at_cluster_scale, of_judges, of_run
from grpo_megatron.rehearsal.local_server import LocalServer
from grpo_megatron.rehearsal.made_up_rows import (
    refuse_unbound_environments_here,
    special_tokens_of,
)
from grpo_megatron.rehearsal.scale_down import (
    NUM_STEPS,
    Change,
    num_layers_of,
    scale_down,
)
from grpo_megatron.rehearsal.stand_ins import StandInWriter
from grpo_megatron.rehearsal.teacher_servers import TeacherServers
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.interrupts import InterruptForwarder

Say = Callable[[str], object]
_REPORT = "rehearsal.json"
_MARK = ".rehearsal"
"""A file that says that the folder is a rehearsal's, and may be emptied by the next one."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal changed and found."""

    recipe: str
    changes: list[Change]
    findings: list[Finding]
    seconds: float

    @property
    def failed(self) -> list[Finding]:
        """What was to be shown and was not."""
        return [finding for finding in self.findings if not finding.holds]


def rehearse_recipe(
    recipe: str,
    overrides: Sequence[str],
    *,
    model: Path | None = None,
    folder: Path | None = None,
    site: str | None = None,
    say: Say = print,
) -> Rehearsal:
    """Run the recipe for three steps on this machine, at two ranks wherever it has more.

    model: a checkpoint to start from, else a tiny random one of the recipe's family. folder: where
    inputs and the run go (`runs_dir/rehearsal/NAME`). site: for which the job script is rendered
    (one without containers). Raises what `train` raises, ConfigError where nothing says what the
    model is, GateError where something was not shown."""
    started = time.monotonic()
    at_scale = resolve_at_scale(recipe, overrides, model)
    config = at_scale.config
    refuse_unbound_objective(config)
    refuse_unbound_rewards(config)
    refuse_unbound_environments_here(config)
    if folder is None:
        folder = config.runs_dir / "rehearsal" / config.name
    take_folder(folder)
    if site is None:
        site = write_site(folder / "inputs" / "site.env")
    findings = at_cluster_scale(at_scale, site)
    for finding in findings:
        say(as_line(finding))
    with LocalServer() as server, TeacherServers(folder / "inputs") as teachers:
        writer = StandInWriter(
            folder / "inputs",
            server.url,
            teachers,
            num_layers_of(config.trainer),
            special_tokens_of(config),
            given_model=model,
            fills_blocks=config.rollout.fp8 != "none",
        )
        stand_ins = writer.write(config, config)
        changes = scale_down(config, stand_ins)
        for line in table_of(changes):
            say(line)
        scaled = [*overrides, *(change.override for change in changes)]
        scaled += [f"runs_dir={as_toml(str(folder))}", "name=run"]
        run_dir = RunDir(folder / "run")
        start_teachers(teachers, [config], say)
        num_attempts = _run(recipe, scaled, run_dir, config.takes_steps, say)
        shown = of_run(resolve(recipe, scaled).config, run_dir, num_attempts)
        shown += of_judges([config], server.num_judged)
    for finding in shown:
        say(as_line(finding))
    seconds = time.monotonic() - started
    return conclude(Rehearsal(recipe, changes, [*findings, *shown], seconds), folder)


def resolve_at_scale(recipe: str, overrides: Sequence[str], model: Path | None) -> ResolvedConfig:
    """Return the recipe at its own size; a model that is not on this machine is left to its preset.

    Raises ConfigError for everything that is wrong with it."""
    loaded = load_recipe(recipe, overrides).config.model
    absent = loaded.path is not None and not loaded.path.exists()
    if not absent:
        return resolve(recipe, overrides)
    if loaded.preset is not None:
        return resolve(recipe, [*overrides, "model.path=null"])
    if model is not None:
        return resolve(recipe, [*overrides, f"model.path={as_toml(str(model))}"])
    raise ConfigError(
        f"{loaded.path} is not on this machine, and no preset says what it is",
        where="model.path",
        remedy="name its model.preset=…, or give a checkpoint of the family with --model",
    )


def write_site(path: Path) -> str:
    """Write the settings of a cluster like the shipped `bare`, with this Python environment."""
    bare = assets.root() / "slurm" / "sites" / "bare.env"
    lines = [
        f"VENV={shlex.quote(sys.prefix)}",
        "PARTITION=rehearsal",
        f"source {shlex.quote(str(bare))}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def start_teachers(teachers: TeacherServers, configs: Iterable[RunConfig], say: Say) -> None:
    """Start the servers of random teachers, if any run asks one, and say so.

    Raises EngineError where one does not answer in the time that the runs give their engines."""
    if not teachers:
        return
    say(f"--- start {len(teachers)} server(s) of teachers")
    teachers.start(max(config.rollout.startup_timeout_s for config in configs))


def take_folder(folder: Path) -> None:
    """Make the folder, or empty that of an earlier rehearsal. ConfigError: something else is
    there."""
    is_ours = (folder / _MARK).exists()
    if folder.exists() and not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is no rehearsal's folder",
            where="--to",
            remedy="choose another folder, or remove it",
        )
    with raised_as(SetupError, "cannot write the rehearsal's folder", OSError, where=folder):
        if is_ours:
            shutil.rmtree(folder)
        (folder / "inputs").mkdir(parents=True)
        (folder / _MARK).touch()


def _run(recipe: str, scaled: Sequence[str], run_dir: RunDir, trains: bool, say: Say) -> int:
    """Train all steps but one, then resume; returns how often the run was started."""
    interrupts = InterruptForwarder()
    with interrupts.installed():
        if not trains:
            say("--- run")
            _grpo_megatron(interrupts, "train", recipe, *scaled)
            return 1
        say("--- train two steps")
        _grpo_megatron(interrupts, "train", recipe, *scaled, f"num_steps={NUM_STEPS - 1}")
        say("--- resume for one more")
        _grpo_megatron(interrupts, "resume", str(run_dir.root), f"num_steps={NUM_STEPS}")
        return 2


def _grpo_megatron(interrupts: InterruptForwarder, *arguments: str) -> None:
    command = [sys.executable, "-m", "grpo_megatron.cli.main", *arguments]
    code = interrupts.run(command, preexec_fn=partial(die_with_parent, os.getpid()))
    if code:
        error = GrpoMegatronError(
            f"the rehearsal's `grpo-megatron {arguments[0]}` ended with exit code {code}",
            remedy="what it said is above; on the cluster the recipe would have ended like this",
        )
        error.exit_code = code
        raise error


# --- what is told


def as_line(finding: Finding) -> str:
    """Return one line: `ok optimizer steps were taken (3 steps, …)`."""
    mark = "ok  "
    if not finding.holds:
        mark = "NOT "
    line = f"{mark} {finding.what}"
    if finding.detail:
        line += f" ({finding.detail})"
    return line


def table_of(changes: Sequence[Change]) -> list[str]:
    """Return one line a change: the key, the recipe's value, the rehearsal's, and why."""
    lines = [f"{len(changes)} settings differ from the recipe's:"]
    for change in changes:
        before = _short(as_toml(change.before))
        after = _short(as_toml(change.after))
        lines.append(f"  {change.key}: {before} -> {after}  ({change.why})")
    return lines


def _short(text: str, most: int = 60) -> str:
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def conclude(rehearsal: Rehearsal, folder: Path) -> Rehearsal:
    """Write changes and findings as JSON beside the run, and return the rehearsal.

    Raises GateError where something that was to be shown was not."""
    text = json.dumps(asdict(rehearsal), indent=2, ensure_ascii=False, default=str)
    write_atomically(folder / _REPORT, text + "\n")
    if rehearsal.failed:
        raise GateError(
            "not shown: " + "; ".join(finding.what for finding in rehearsal.failed),
            where=rehearsal.recipe,
            remedy="the lines that begin with NOT say what was seen",
        )
    return rehearsal
