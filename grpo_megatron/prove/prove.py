"""`prove`: look at the machine, run the parts, write the page."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

import grpo_megatron
from grpo_megatron import pretended_cuda
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError, GateError, SetupError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.prove.child import CONDITIONS_FILE, read_conditions
from grpo_megatron.prove.conditions import PRETENDING, Conditions
from grpo_megatron.prove.page import PAGE_FILE, Proof, write_page
from grpo_megatron.prove.part import Part
from grpo_megatron.prove.runner import Outcome, run_parts

_MARK = ".prove"
"""A file that says that the folder is one of `prove`, and may be emptied by the next one."""
_PROBE_LIMIT_S = 300


def chosen_parts(only: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """Return the parts that are named, in their own order; all of them where none is.

    Raises ConfigError for a name that no part has."""
    known = [part.name for part in parts]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"no part is called {name!r}", where="--only", remedy=did_you_mean(name, known)
            )
    if not only:
        return list(parts)
    return [part for part in parts if part.name in only]


def prove_machine(
    parts: Sequence[Part],
    folder: Path,
    *,
    pretend: bool = False,
    minutes: float = 10.0,
    say: Callable[[str], object] = print,
) -> Proof:
    """Run `parts` and write their page into `folder`, within about `minutes`.

    pretend: on a CPU, with a device that only pretends to be a GPU. Raises ConfigError where
    something else is in `folder`, SetupError where it cannot be written, GateError where a part
    failed; the page is there then."""
    take_folder(folder)
    conditions = look_at_machine(folder, pretend=pretend)
    say(_machine_in_words(conditions))
    started = datetime.now().astimezone().isoformat(timespec="seconds")

    def proof_of(outcomes: list[Outcome]) -> Proof:
        return Proof(
            version=grpo_megatron.__version__,
            host=socket.gethostname(),
            date=started,
            conditions=conditions,
            outcomes=list(outcomes),
        )

    def write(outcomes: list[Outcome]) -> None:
        write_page(folder, proof_of(outcomes))

    outcomes = run_parts(parts, conditions, folder, minutes, say, write)
    proof = proof_of(outcomes)
    say(f"{proof.counted()}: {folder / PAGE_FILE}")
    if proof.failed:
        raise GateError(
            f"failed: {', '.join(proof.failed)}",
            where=str(folder / PAGE_FILE),
            remedy="the page says what each of them most likely failed of",
        )
    return proof


def take_folder(folder: Path) -> None:
    """Make the folder, or empty that of an earlier `prove`.

    Raises ConfigError where something else is there, SetupError where it cannot be written."""
    is_ours = (folder / _MARK).exists()
    if folder.exists() and not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is no folder of an earlier `prove`",
            where="--to",
            remedy="choose another folder, or remove it",
        )
    with raised_as(
        SetupError, "cannot write the folder", OSError, where=folder, remedy="choose another --to"
    ):
        if is_ours:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()


def look_at_machine(folder: Path, *, pretend: bool) -> Conditions:
    """Probe the machine in a child process; what that dies of is `problem` of the result."""
    environment = dict(os.environ)
    environment.pop(pretended_cuda.VARIABLE, None)
    if pretend:
        environment.update(PRETENDING)
    file = folder / CONDITIONS_FILE
    problem = ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_megatron.prove.probe", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
        if done.returncode:
            problem = "\n".join(done.stderr.strip().splitlines()[-10:]) or "its process died"
    except subprocess.TimeoutExpired:
        problem = f"torch and the driver did not answer in {_PROBE_LIMIT_S} s"
    if problem:
        write_atomically(
            file, msgspec.json.encode(Conditions(device="none", problem=problem)).decode()
        )
    return read_conditions(file)


def _machine_in_words(conditions: Conditions) -> str:
    if conditions.problem:
        return f"the machine could not be looked at: {conditions.problem.splitlines()[-1]}"
    if conditions.is_pretended:
        return "a pretended GPU: everything is computed on the CPU, and no figure says anything"
    if conditions.device == "none":
        return "torch sees no GPU (--pretend runs the parts on a CPU)"
    gib = conditions.memory_bytes / 2**30
    return f"{conditions.num_gpus} x {conditions.gpu_name}, {gib:.0f} GiB each"
