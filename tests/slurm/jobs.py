"""Submit the shipped files, wait for jobs, look at what they left."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e import runs

ROOT = Path(__file__).parents[2]
CLUSTER = str(ROOT / "tests/slurm/cluster.sh")
SITE = str(ROOT / "tests/slurm/site.env")
NODES = ("placement.trainer_nodes=2", "placement.rollout_nodes=1")
TIMEOUT_S = runs.TIMEOUT_S
ACTIVE = "PD,CF,R,S,CG"
NUM_NODES = 4


class Cluster:
    """Commands as a user gives them; runs are in a directory that all nodes share."""

    def __init__(self, shared: Path):
        self.shared = shared
        commands = shared / "bin"
        commands.mkdir()
        for name, module in (("grpo-megatron", "-m grpo_megatron.cli.main "), ("python", "")):
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            (commands / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "TEST_BIN": str(commands),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{runs.HERE}",
        }

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self.shared,
            env=self.environment | environment,
            timeout=TIMEOUT_S,
            check=False,
        )

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """A grpo-megatron command."""
        return self.run(*runs.COMMAND, *arguments, **environment)

    def ask(self, *command: str) -> str:
        """What a command of Slurm says; no answer is no news of a job."""
        done = self.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self,
        name: str,
        *overrides: str,
        flags: tuple[str, ...] = (),
        recipe: str = runs.RECIPE,
        hold_after: int | None = None,
        **environment: str,
    ) -> tuple[str, Path]:
        """The short recipe on two nodes that train and one that generates: job and directory.

        hold_after: recorded steps after which the run waits until `runs.release`."""
        run = self.shared / "runs" / name
        if hold_after is not None:
            environment |= runs.hold(run, hold_after)
            overrides = (*runs.HELD, *overrides)
        done = self.command(
            "submit",
            recipe,
            "--site",
            SITE,
            *flags,
            f"name={name}",
            *NODES,
            *overrides,
            **environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), run

    def parts(self, job: str) -> list[dict[str, str]]:
        """What Slurm says of a job; of a hetjob, of each of its components."""
        lines = self.ask("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line]

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job; of a hetjob, of the component with the batch script."""
        return self.parts(job)[0]

    def wait(self, job: str) -> dict[str, str]:
        """Until the job has left the queue; what Slurm says of it then."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.ask("squeue", "-h", "-j", job, "-t", ACTIVE).strip():
            self._shorten_hold(job)
            assert time.monotonic() < deadline, self.job(job)
            time.sleep(0.2)
        return self.job(job)

    def _shorten_hold(self, job: str) -> None:
        """Slurm holds what was requeued for two minutes, so that the end of the old script is not
        taken for the new one's. A job whose nodes have told that end is completing no longer.
        Nodes refuse what starts in the second of that end: they know its time in whole seconds."""
        parts = self.parts(job)
        has_ended = all(part["JobState"] == "PENDING" for part in parts)
        if has_ended and any(part["Reason"] == "BeginTime" for part in parts):
            time.sleep(2)
            self.run("scontrol", "update", f"jobid={job}", "starttime=now")  # it may run by now

    def start_again(self, job: str) -> None:
        """Wait until a job that was requeued runs again."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.job(job)["JobState"] != "RUNNING":
            self._shorten_hold(job)
            assert time.monotonic() < deadline, self.job(job)
            time.sleep(0.2)

    def wait_for_steps(self, run: Path, count: int, job: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(runs.metrics(run)) < count:
            self._shorten_hold(job)
            state = self.job(job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), self.output(run)
            assert time.monotonic() < deadline, self.output(run)
            time.sleep(0.1)

    def wait_until(self, job: str, **wanted: str) -> None:
        """Until fields of the job have these values."""
        deadline = time.monotonic() + TIMEOUT_S
        while wanted.items() - self.job(job).items():
            assert time.monotonic() < deadline, self.job(job)
            time.sleep(0.1)

    def wait_for_words(self, run: Path, words: str, count: int = 1) -> None:
        """Until the batch scripts of a run have printed these words so often."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.output(run).count(words) < count:
            assert time.monotonic() < deadline, self.output(run)
            time.sleep(0.1)

    def make_idle(self) -> None:
        """End what a test that failed has left, and wait until every node can take a job: Slurm
        gives a job other nodes than the first ones where these are not ready."""
        for job in self.ask("squeue", "-h", "-o", "%A", "-t", ACTIVE).split():
            self.run("scancel", job)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            states = self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
            if states == [f"node{number + 1} idle" for number in range(NUM_NODES)]:
                return
            assert time.monotonic() < deadline, (states, self.ask("sinfo", "-R"))
            time.sleep(0.2)

    def output(self, run: Path) -> str:
        """What the batch scripts of a run printed."""
        return "".join(p.read_text() for p in sorted((run / "logs").glob("slurm-*.out")))


def processes(run: Path, module: str) -> list[int]:
    """Python processes of a role of the run, on whichever node; sruns not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            line[0] != b"srun"
            and f"grpo_megatron.{module}".encode() in line
            and any(part.startswith(str(run).encode()) for part in line)
        ):
            found.append(int(path.name))
    return sorted(found)


def all_gone(run: Path) -> list[str]:
    """Command lines that still name the run, after a while: what was killed ends when the machine
    gets to it. Not by the groups that the run has noted: on its node the numbers are others."""
    deadline = time.monotonic() + 120
    while (left := runs.command_lines_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
