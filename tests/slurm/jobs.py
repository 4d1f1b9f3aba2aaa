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
TIMEOUT_S = 300
ACTIVE = "PD,CF,R,S,CG"


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

    def submit(
        self,
        name: str,
        *overrides: str,
        flags: tuple[str, ...] = (),
        recipe: str = runs.RECIPE,
        **environment: str,
    ) -> tuple[str, Path]:
        """The short recipe on two nodes that train and one that generates: job and directory."""
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
        return done.stdout.strip(), self.shared / "runs" / name

    def job(self, job: str) -> dict[str, str]:
        text = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, job: str, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Until the job has left the queue; what Slurm says of it then."""
        deadline = time.monotonic() + timeout_s
        while self.run("squeue", "-h", "-j", job, "-t", ACTIVE).stdout.strip():
            self._shorten_hold(job)
            assert time.monotonic() < deadline, self.job(job)
            time.sleep(0.2)
        return self.job(job)

    def _shorten_hold(self, job: str) -> None:
        """Slurm holds what was requeued for two minutes, so that the end of the old script is not
        taken for the new one's."""
        if self.job(job)["Reason"] == "BeginTime":
            time.sleep(5)
            self.run("scontrol", "update", f"jobid={job}", "starttime=now")

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


def all_gone(run: Path, timeout_s: float = 10) -> list[str]:
    """Command lines that still name the run, after a moment."""
    deadline = time.monotonic() + timeout_s
    while (left := runs.survivors(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
