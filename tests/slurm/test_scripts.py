"""The other scripts, and what is found before a run starts; no engines."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from tests.e2e import runs
from tests.slurm.jobs import NODES, ROOT, SITE, Cluster

pytestmark = pytest.mark.slurm


def test_a_chain_stops_at_the_stage_that_fails(cluster: Cluster):
    """The stages themselves are stand-ins, the middle one fails; submission and Slurm are real."""
    stand_in = cluster.shared / "stand-in" / "grpo-megatron"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\ncase "$*" in *middle*) exit 7;; esac\n')
    stand_in.chmod(0o755)
    recipes = []
    for name in ("first", "middle", "last"):
        recipes.append(cluster.shared / f"{name}.toml")
        recipes[-1].write_text(Path(runs.RECIPE).read_text().replace('"short"', f'"{name}"'))
    path = f"{cluster.environment['TEST_BIN']}:{os.environ['PATH']}"
    done = cluster.run(
        str(ROOT / "slurm/stage_chain.sh"),
        SITE,
        *map(str, recipes),
        "--",
        *NODES,
        TEST_BIN=str(stand_in.parent),
        PATH=path,
    )
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[0] for line in done.stdout.splitlines()]
    states = [cluster.wait(job) for job in jobs]
    assert [s["JobState"] for s in states] == ["COMPLETED", "FAILED", "CANCELLED"]
    assert states[1]["ExitCode"] == "7:0" and states[2]["StartTime"] == states[2]["EndTime"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PARTITION": "mian"}, ["partition", "main, spot"]),
        ({"SBATCH_FLAGS": "--constraint=absent"}, ["feature"]),
    ],
)
def test_what_slurm_refuses_is_one_message(cluster, environment, words):
    done = cluster.command(
        "submit",
        runs.RECIPE,
        "--site",
        "bare",
        "name=refused",
        *NODES,
        VENV="/v",
        **{"PARTITION": "main"} | environment,
    )
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not (cluster.shared / "runs/refused").exists()


def test_an_unwritable_directory_is_one_message(cluster):
    done = cluster.command("submit", runs.RECIPE, "--site", SITE, *NODES, "runs_dir=/proc/runs")
    assert done.returncode == 3 and "/proc/runs" in done.stderr and "remedy" in done.stderr


def test_a_directory_that_nodes_do_not_share_is_one_message(cluster):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # each node has its own /tmp
        done = cluster.run(
            "sbatch",
            "--parsable",
            "--nodes=3",
            "--output=unshared.out",
            str(ROOT / "slurm/train.sbatch"),
            runs.RECIPE,
            f"runs_dir={folder}",
            *NODES,
            SITE=SITE,
        )
        state = cluster.wait(done.stdout.strip())
    text = (cluster.shared / "unshared.out").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "3:0"), text
    assert "node2, node3 cannot read" in text and "Traceback" not in text


def test_a_job_of_the_wrong_size_says_which(cluster):
    done = cluster.run(
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--output=size.out",
        str(ROOT / "slurm/train.sbatch"),
        runs.RECIPE,
        "name=size",
        *NODES,
        SITE=SITE,
    )
    assert cluster.wait(done.stdout.strip())["ExitCode"] == "3:0"
    assert "sbatch --nodes=3" in (cluster.shared / "size.out").read_text()


def test_restarts_have_a_limit(cluster):
    stand_in = cluster.shared / "no-restart.env"
    stand_in.write_text("MAX_RESTARTS=0\nactivate() { sleep 300 & wait; }\n")
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--output=limit.out",
        str(ROOT / "slurm/train.sbatch"),
        "any",
        SITE=str(stand_in),
    ).stdout.strip()
    cluster.wait_until(job, JobState="RUNNING")
    cluster.run("scontrol", "requeue", job)
    cluster.wait_until(job, Restarts="1")
    state = cluster.wait(job)
    assert state["JobState"] == "FAILED"
    assert "MAX_RESTARTS is 0" in (cluster.shared / "limit.out").read_text()


def test_a_judge_is_a_job_of_its_own(cluster):
    """Its address appears when it answers, also to other nodes, and goes with it."""
    model, url = cluster.shared / "judge", cluster.shared / "judge.url"
    write_tiny_model(model, load_preset("tiny-qwen3-moe"))
    init_weights(model, 0)
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--output=serve.out",
        "--nodelist=node2",
        str(ROOT / "slurm/serve.sbatch"),
        str(model),
        str(url),
        "--enforce-eager",
        "--max-model-len",
        "64",
        "--kv-cache-memory-bytes",
        "200000000",
        SITE=SITE,
        TORCHDYNAMO_DISABLE="1",
    ).stdout.strip()
    while not url.exists():
        assert cluster.job(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), (
            cluster.shared / "serve.out"
        ).read_text()[-3000:]
        time.sleep(1)
    address = url.read_text().strip() + "/v1/models"
    ask = f"import urllib.request as u; print(u.urlopen('{address}').read())"
    asked = cluster.run("srun", "--nodelist=node1", sys.executable, "-c", ask)
    assert '"judge"' in asked.stdout, asked.stderr
    cluster.run("scancel", job)
    cluster.wait(job)
    assert not url.exists()


def test_doctor_names_the_nodes_that_are_not_fit(cluster):
    def doctor(**environment: str) -> str:
        job = cluster.run(
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--output=doctor.out",
            str(ROOT / "slurm/doctor.sbatch"),
            SITE=SITE,
            MIN_MEMORY_GIB="1",
            **environment,
        ).stdout.strip()
        state = cluster.wait(job)
        return state["ExitCode"] + "\n" + (cluster.shared / "doctor.out").read_text()

    healthy = doctor()
    assert "node1: ok" in healthy and "node2: ok" in healthy and healthy.startswith("0:0"), healthy
    assert "all-reduce of 16 MiB over 2 tasks" in healthy
    ill = doctor(MIN_SHM_MIB="99999999")
    assert ill.startswith("3:0") and "node1: WRONG" in ill and "/dev/shm" in ill
