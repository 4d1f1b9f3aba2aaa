"""The shipped batch script on a real Slurm: what each event of a cluster does to a run."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from grpo_megatron.progress import read_progress
from tests.e2e import runs
from tests.slurm.jobs import CLUSTER, NODES, ROOT, SITE, TIMEOUT_S, Cluster, all_gone, processes

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Path:
    """An uninterrupted deterministic run of six steps."""
    job, run = cluster.submit("whole")
    state = cluster.wait(job)
    assert state["JobState"] == "COMPLETED", cluster.output(run)
    return run


def same_metrics(run: Path, other: Path) -> bool:
    return runs.timeless(runs.metrics(run)) == runs.timeless(runs.metrics(other))


def last_checkpoint(run: Path) -> int:
    return int(max(p.name for p in (run / "checkpoints").iterdir()).removeprefix("step_"))


def test_a_run_is_a_job(cluster, whole):
    job = (whole / "slurm/job").read_text().strip()
    assert [r["step"] for r in runs.metrics(whole)] == list(range(6))
    assert (whole / "export/model.safetensors").exists()
    logs = whole / "logs/latest"
    assert logs.readlink() == Path(f"{job}.0")
    assert {"trainer-0.log", "trainer-1.log", "rollout-0.log", "controller.log"} <= {
        p.name for p in logs.iterdir()
    }
    assert "held-out accuracy before 0.0" in cluster.output(whole)
    assert not all_gone(whole)
    status = cluster.command("status", str(whole)).stdout
    assert "step 6/6" in status and f"job {job} COMPLETED" in status and "finished" in status
    assert "trainer-1.log" in cluster.command("logs", str(whole)).stdout


def test_a_job_that_shares_its_nodes_has_room_for_its_ranks(cluster):
    """Not --exclusive: Slurm gives it one CPU of a node where it asks for nothing."""
    ranks = ("trainer.num_ranks=4", "num_steps=1")
    job, run = cluster.submit("shared", *ranks, SBATCH_FLAGS="--comment=shared")
    state = cluster.wait(job)
    assert state["JobState"] == "COMPLETED", cluster.output(run)
    assert (state["MinCPUsNode"], state["NumNodes"]) == ("2", "3")


NOTICED = "notice: checkpoint, then requeue"
HETJOB = {"ROLLOUT_PARTITION": "main"}  # the rollout nodes are a component of their own


@pytest.mark.parametrize("form", [{}, HETJOB], ids=["allocation", "hetjob"])
def test_notice_then_checkpoint_requeue_and_resume(cluster, whole, form):
    """USR1, as Slurm sends it before the time limit."""
    job, run = cluster.submit(f"noticed-{len(form)}", hold_after=3, **form)
    cluster.wait_for_steps(run, 3, job)
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_words(run, NOTICED)
    runs.release(run)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert (run / "logs/latest").readlink() == Path(f"{job}.1")
    assert "resumed after step" in cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


def test_a_requeue_without_notice_trains_recorded_steps_again(cluster, whole):
    job, run = cluster.submit("requeued", "checkpoint.interval=4", hold_after=3)
    cluster.wait_for_steps(run, 3, job)  # recorded, in no checkpoint
    cluster.ask("scontrol", "requeue", job)
    cluster.start_again(job)
    runs.release(run)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


@pytest.mark.parametrize("moment", ["before the run", "in its first moment"])
def test_a_notice_in_the_first_second_is_not_lost(cluster, whole, moment):
    """Not even before there is a program that could take it."""
    early = moment == "before the run"
    job, run = cluster.submit(f"early-{early}", ACTIVATE_S="3" if early else "0")
    log = run / f"logs/slurm-{job}.out"
    cluster.wait_until(job, JobState="RUNNING")
    deadline = time.monotonic() + TIMEOUT_S
    while not early and "grpo-megatron" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, cluster.job(job)
        time.sleep(0.01)
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert "notice" in cluster.output(run)
    assert same_metrics(run, whole)


def test_the_time_limit_is_no_end(cluster):
    """Slurm's own notice, at most a minute earlier than asked for.

    The limit is set once there are steps, however long the machine took to get there. More steps
    than any takes in a limit: the second attempt is looked at, then cancelled.
    """
    job, run = cluster.submit(
        "limited", "num_steps=5000", "checkpoint.interval=0", TIME_LIMIT="50", NOTICE_S="30"
    )
    cluster.wait_for_steps(run, 1, job)
    state = cluster.job(job)
    assert state["TimeLimit"] == "00:50:00"
    hours, minutes, _ = map(int, state["RunTime"].split(":"))
    cluster.ask("scontrol", "update", f"jobid={job}", f"timelimit={60 * hours + minutes + 2}")
    cluster.wait_until(job, Restarts="1")
    cluster.ask("scontrol", "update", f"jobid={job}", "timelimit=50")
    saved = last_checkpoint(run)
    cluster.wait_for_steps(run, saved + 1, job)
    assert cluster.command("cancel", str(run)).returncode == 0
    state = cluster.wait(job)
    assert state["ExitCode"] == "130:0", cluster.output(run)
    said = cluster.output(run)
    assert "notice" in said and f"resumed after step {saved}" in said
    steps = [row["step"] for row in runs.metrics(run)]
    assert steps == list(range(len(steps)))


def preempt(cluster: Cluster, run: Path, times: int = 1) -> None:
    """A job of a better partition needs all nodes. The run, which is held, goes on when it has been
    told so, `times` times by now."""
    urgent = cluster.ask(
        "sbatch",
        "--parsable",
        "--partition=main",
        "--nodes=4",
        "--exclusive",
        "--wrap=srun sleep 1",
    ).strip()
    cluster.wait_for_words(run, NOTICED, times)
    runs.release(run)
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"


def test_preemption_then_checkpoint_and_resume(cluster, whole):
    """By a job that needs the nodes of one in the spot partition."""
    job, run = cluster.submit("preempted", PARTITION="spot", hold_after=2)
    cluster.wait_for_steps(run, 2, job)
    preempt(cluster, run)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert "stopped after" in cluster.output(run) and "resumed after step" in cluster.output(run)
    assert same_metrics(run, whole)


def test_preempted_twice_in_a_row(cluster, whole):
    """The second time before anything of the second attempt is trained."""
    job, run = cluster.submit("preempted-twice", PARTITION="spot", hold_after=2)
    cluster.wait_for_steps(run, 2, job)
    preempt(cluster, run)
    runs.hold(run, 0)
    cluster.start_again(job)
    preempt(cluster, run, times=2)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


def test_a_drained_node_is_left_with_the_next_attempt(cluster, whole):
    """What runs there goes on; a job that is requeued gets other nodes."""
    job, run = cluster.submit("drained", hold_after=2)
    cluster.wait_for_steps(run, 2, job)
    nodes = cluster.job(job)["NodeList"]
    cluster.ask("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    try:
        runs.hold(run, 3)
        cluster.wait_for_steps(run, 3, job)
        assert cluster.job(job)["Restarts"] == "0"
        cluster.ask("scontrol", "requeue", job)
        cluster.start_again(job)
        runs.release(run)
        state = cluster.wait(job)
    finally:
        cluster.ask("scontrol", "update", "nodename=node2", "state=resume")
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert nodes == "node[1-3]" and state["NodeList"] == "node[1,3-4]"
    assert same_metrics(run, whole)


@pytest.mark.parametrize("node", ["node1", "node2", "node3"])
def test_a_rebooted_node_costs_no_recorded_step(cluster, whole, node):
    """It is back before Slurm has missed it: then the job may end by the process that it has lost,
    with its name, and is resumed."""
    job, run = cluster.submit(f"rebooted-{node}", hold_after=3)
    cluster.wait_for_steps(run, 3, job)
    subprocess.run([CLUSTER, "crash", node], check=True)
    runs.release(run)
    subprocess.run([CLUSTER, "revive", node], check=True)
    state = cluster.wait(job)
    if state["JobState"] == "FAILED":
        assert state["ExitCode"] in ("5:0", "6:0"), cluster.output(run)
        assert "error: " in cluster.output(run)
        done = cluster.command("resume", str(run))
        assert done.returncode == 0, done.stderr
        state = cluster.wait((run / "slurm/job").read_text().strip())
    assert state["JobState"] == "COMPLETED", cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


TRAINER_NODES = ("node1", "node2")


def cut(node: str) -> None:
    """Part the node of the engine from those of the trainer and of the controller."""
    for other in TRAINER_NODES:
        subprocess.run([CLUSTER, "cut", node, other], check=True)


def mend(node: str) -> None:
    for other in TRAINER_NODES:
        subprocess.run([CLUSTER, "mend", node, other], check=False)


def test_a_network_that_is_parted_for_a_while_costs_nothing(cluster, whole):
    """Trainer and engine do not reach each other for half a minute; what was on its way arrives."""
    job, run = cluster.submit("parted", "num_steps=5000")
    cluster.wait_for_steps(run, 3, job)
    cut("node3")
    try:
        time.sleep(30)
        before = len(runs.metrics(run))
    finally:
        mend("node3")
    cluster.wait_for_steps(run, before + 3, job)
    assert cluster.job(job)["Restarts"] == "0"
    assert not runs.events(run, "died") and not runs.events(run, "engine_dead")
    assert cluster.command("cancel", str(run)).returncode == 0
    cluster.wait(job)
    records = runs.metrics(run)
    assert [record["step"] for record in records] == list(range(len(records)))
    assert runs.timeless(records)[:3] == runs.timeless(runs.metrics(whole))[:3]


def test_a_network_that_stays_parted_ends_the_attempt_with_a_name(cluster, whole):
    """By the watch over what hangs: a connection that is silent is open. A node that is not reached
    is one for Slurm to judge; the next attempt is the run without the fault."""
    job, run = cluster.submit(
        "parted-for-good", "watch.kill_after_s=10", "rollout.max_restarts=0", hold_after=3
    )
    cluster.wait_for_steps(run, 3, job)
    cut("node3")
    runs.release(run)
    try:
        cluster.wait_for_words(run, "a node does not answer; Slurm will requeue the job")
    finally:
        mend("node3")
    said = cluster.output(run)
    assert "has made no progress" in said and "remedy" in said
    cluster.ask("scontrol", "requeue", job)
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


@pytest.mark.parametrize(
    ("node", "form"),
    [
        ("node1", {}),
        ("node2", {}),  # that of the batch script; another trainer's
        ("node1", HETJOB),
        ("node3", HETJOB),  # of either component
    ],
)
def test_a_crashed_node_costs_no_recorded_step(cluster, whole, node, form):
    job, run = cluster.submit(f"crashed-{node}-{len(form)}", hold_after=3, **form)
    cluster.wait_for_steps(run, 3, job)
    subprocess.run([CLUSTER, "crash", node], check=True)
    runs.release(run)
    try:
        cluster.wait_until(job, Restarts="1")
        state = cluster.wait(job)
    finally:
        subprocess.run([CLUSTER, "revive", node], check=True)
    assert state["JobState"] == "COMPLETED", cluster.output(run)
    assert all(node not in nodes_of(part) for part in cluster.parts(job))
    assert same_metrics(run, whole)


def nodes_of(part: dict[str, str]) -> list[str]:
    named = subprocess.run(
        ["scontrol", "show", "hostnames", part["NodeList"]],
        capture_output=True,
        text=True,
        check=True,
    )
    return named.stdout.split()


def test_training_begins_again_in_the_job_when_a_rank_is_killed(cluster, whole):
    """Trainer, controller and worker are new steps; the server's stays."""
    job, run = cluster.submit("killed-rank", hold_after=3)
    cluster.wait_for_steps(run, 3, job)
    servers = processes(run, "rollout.serve")
    runs.kill(processes(run, "trainer.trainer_rank")[-1])
    runs.release(run)
    wait_for_event(run, "restarted")
    assert processes(run, "rollout.serve") == servers
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), cluster.output(run)
    begun = [event["role"] for event in runs.events(run, "restarted")]
    assert sorted(begun) == ["controller", "trainer", "worker-0"]
    assert "ended with exit code 137" in cluster.output(run)
    assert same_metrics(run, whole)
    assert not all_gone(run)


def test_engines_come_and_go_within_the_nodes_of_the_job(cluster):
    job, run = cluster.submit(
        "elastic",
        "num_steps=5000",
        "placement.trainer_nodes=1",
        "placement.rollout_nodes=2",
        "rollout.num_replicas=2",
    )
    cluster.wait_for_steps(run, 2, job)
    listed = cluster.command("engines", "list", str(run)).stdout.splitlines()
    nodes = [line.split()[-1] for line in listed]
    assert len(set(nodes)) == 2 and all(" serves " in line for line in listed)
    refused = cluster.command("engines", "add", str(run))
    assert refused.returncode == 2
    assert "the nodes of the job have places for 2 engines" in refused.stderr
    assert cluster.command("engines", "remove", str(run), "1").returncode == 0
    assert wait_for_event(run, "removed")["role"] == "rollout-1"
    assert len(processes(run, "rollout.serve")) == 1
    cluster.wait_for_steps(run, len(runs.metrics(run)) + 2, job)
    assert cluster.command("engines", "add", str(run)).returncode == 0
    assert wait_for_event(run, "joined")["role"].endswith("-1")
    cluster.wait_for_steps(run, len(runs.metrics(run)) + 3, job)
    again = cluster.command("engines", "list", str(run)).stdout.splitlines()
    assert [line.split()[-1] for line in again] == nodes
    assert cluster.command("cancel", str(run)).returncode == 0
    assert cluster.wait(job)["ExitCode"] == "130:0", cluster.output(run)
    assert cluster.command("engines", "list", str(run)).returncode == 2
    assert not all_gone(run)


def test_a_dead_trainer_fails_the_job(cluster):
    job, run = cluster.submit("no-trainer", "num_steps=5000", "trainer.max_restarts=0")
    cluster.wait_for_steps(run, 1, job)
    runs.kill(processes(run, "trainer.trainer_rank")[-1])
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "6:0")
    assert "ended with exit code 137" in cluster.output(run)
    assert not all_gone(run)


def test_dead_servers_are_named_until_the_last(cluster):
    job, run = cluster.submit(
        "no-server",
        "num_steps=5000",
        "placement.trainer_nodes=1",
        "placement.rollout_nodes=2",
        "rollout.num_replicas=2",
        "rollout.max_restarts=0",
    )
    cluster.wait_for_steps(run, 2, job)
    again = cluster.run("sbatch", "--parsable", "--nodes=1", str(run / "slurm/train.sbatch"))
    refused = cluster.wait(again.stdout.strip())
    assert refused["ExitCode"] == "9:0" and f"Slurm job {job}" in cluster.output(run)
    assert cluster.command("resume", str(run)).returncode == 9
    first, *_ = processes(run, "rollout.serve")
    runs.kill(first)
    cluster.wait_for_steps(run, len(runs.metrics(run)) + 4, job)
    [died] = runs.events(run, "died")
    assert died["role"] in ("rollout-0", "rollout-1") and f"{died['role']} died" in cluster.output(
        run
    )
    for pid in processes(run, "rollout.serve"):
        runs.kill(pid)
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "5:0")
    assert "the last rollout server died" in cluster.output(run)
    assert "rollout-" in cluster.output(run).rsplit("the last rollout server died", 1)[1]
    assert not all_gone(run)


def role_of(process: int) -> str:
    """The role of a process: the name of its step."""
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in variables if "=" in line)["SLURM_JOB_NAME"]


def test_what_is_stopped_is_seen_on_its_node_and_servers_come_back(cluster):
    """A server on another node than the supervisor's, then a trainer rank."""
    job, run = cluster.submit(
        "stopped",
        "num_steps=5000",
        "placement.trainer_nodes=1",
        "placement.rollout_nodes=2",
        "rollout.num_replicas=2",
        "watch.replace_after_s=1",
        "watch.kill_after_s=1",
        "trainer.max_restarts=0",
    )
    cluster.wait_for_steps(run, 2, job)
    status = cluster.command("status", str(run)).stdout
    for role in ("controller", "trainer-1", "rollout-0", "rollout-1", "worker-1"):
        assert f"\n  {role} " in status
    server, *_ = processes(run, "rollout.serve")
    role = role_of(server)
    os.kill(server, signal.SIGSTOP)
    assert wait_for_event(run, "hung", role)["cause"] == "stopped"
    for kind in ("died", "restarted", "joined"):
        wait_for_event(run, kind, role)
    cluster.wait_for_steps(run, len(runs.metrics(run)) + 3, job)
    os.kill(processes(run, "trainer.trainer_rank")[-1], signal.SIGSTOP)
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "6:0")
    assert "has given no sign of life" in cluster.output(run)
    assert "it is stopped" in cluster.output(run)
    assert not all_gone(run)


AGENTS = (
    "num_steps=5000",
    "cold_start=null",
    "domains.0.environment.demonstration=[]",
    "domains.0.environment.servers=2",
    "data.num_validation=16",
    "data.num_heldout=16",
    "batch.num_prompts=8",
    "placement.trainer_nodes=1",
    "placement.rollout_nodes=1",
    "placement.environment_nodes=2",
)


@pytest.mark.parametrize("form", [{}, {"ENVIRONMENT_PARTITION": "main"}], ids=["one", "hetjob"])
def test_servers_of_environments_have_nodes_of_their_own(cluster, form):
    """One of them dies and comes back; then the job is told to end."""
    name = f"agents-{len(form)}"
    job, run = cluster.submit(name, *AGENTS, recipe="demo/agent-calculator-cpu", **form)
    cluster.wait_for_steps(run, 2, job)
    status = cluster.command("status", str(run)).stdout
    records = [read_progress(file) for file in (run / "progress").glob("*/*.json")]
    hosts = {record.role: record.host for record in records if record is not None}
    places = [hosts[role] for role in ("trainer-0", "rollout-0", "environment-0", "environment-1")]
    assert len(set(places)) == 4
    assert "\n  environment-0 " in status and "serving products: calculator at http" in status
    runs.kill(processes(run, "environments.server")[0])
    back = wait_for_event(run, "restarted")
    assert back["role"].startswith("environment-")
    cluster.wait_for_steps(run, len(runs.metrics(run)) + 3, job)
    assert cluster.command("cancel", str(run)).returncode == 0
    state = cluster.wait(job)
    assert state["ExitCode"] == "130:0", cluster.output(run)
    assert f"{back['role']} died" in cluster.output(run)
    assert not all_gone(run)


def wait_for_event(run: Path, kind: str, role: str = "") -> dict:
    """The first event of that kind, of that role where one is given."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        for event in runs.events(run, kind):
            if role in ("", event["role"]):
                return event
        assert time.monotonic() < deadline, f"no event {kind} {role}"
        time.sleep(0.1)


def test_cancel_keeps_the_last_step_and_resume_submits_again(cluster, whole):
    """As a hetjob."""
    job, run = cluster.submit("cancelled", ROLLOUT_PARTITION="main", hold_after=2)
    cluster.wait_for_steps(run, 2, job)
    assert cluster.command("cancel", str(run)).returncode == 0
    cluster.wait_for_words(run, "checkpoint, then stop")
    runs.release(run)
    state = cluster.wait(job)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "130:0"
    assert len(runs.metrics(run)) == last_checkpoint(run)
    done = cluster.command("resume", str(run))
    again = done.stdout.strip()
    assert cluster.wait(again)["JobState"] == "COMPLETED", cluster.output(run)
    assert same_metrics(run, whole)


def test_a_cancel_within_a_notice_is_obeyed(cluster):
    """Whichever of the two signals the run takes first. Its path has what srun would expand."""
    job, _ = cluster.submit("changed-mind", "num_steps=5000", "runs_dir=100%t")
    run = cluster.shared / "100%t/changed-mind"
    cluster.wait_for_steps(run, 2, job)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.command("cancel", str(run)).returncode == 0
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "130:0", "0")
    assert len(runs.metrics(run)) == last_checkpoint(run)
    assert not all_gone(run)


def test_a_stage_starts_from_the_export_of_the_one_before(cluster, tmp_path):
    """The second is submitted before the first has exported anything."""
    second, text = tmp_path / "second.toml", Path(runs.RECIPE).read_text()
    for old, new in (
        ("short", "second"),
        ("num_steps = 6", "num_steps = 0"),
        ('preset = "tiny-qwen3-moe"', 'path = "runs/short/export"'),
    ):
        assert old in text
        text = text.replace(old, new)
    second.write_text(text)
    path = f"{cluster.environment['TEST_BIN']}:{cluster.environment['PATH']}"
    done = cluster.run(
        str(ROOT / "slurm/stage_chain.sh"), SITE, runs.RECIPE, str(second), "--", *NODES, PATH=path
    )
    assert done.returncode == 0, done.stderr
    weights = []
    for line, name in zip(done.stdout.splitlines(), ("short", "second"), strict=True):
        run = cluster.shared / "runs" / name
        assert cluster.wait(line.split()[0])["JobState"] == "COMPLETED", cluster.output(run)
        weights.append((run / "export/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_an_export_is_converted_and_evaluated_by_jobs(cluster, whole):
    export, made = str(whole / "export"), cluster.shared / "converted"
    convert, evaluate = (
        cluster.run(
            "sbatch",
            "--parsable",
            f"--output={script}.out",
            *flags,
            str(ROOT / f"slurm/{script}.sbatch"),
            *arguments,
            SITE=SITE,
        ).stdout.strip()
        for script, flags, arguments in (
            ("convert", [], ["from-hf", export, "--to", str(made)]),
            ("eval", ["--nodes=3"], [runs.RECIPE, export, *NODES]),
        )
    )
    state = cluster.wait(convert)
    said = (cluster.shared / "convert.out").read_text()
    assert state["JobState"] == "COMPLETED", said
    assert "was read back" in said and (made / "weights").is_dir()
    state = cluster.wait(evaluate)
    said = (cluster.shared / "eval.out").read_text()
    assert state["JobState"] == "COMPLETED", said
    result = json.loads((cluster.shared / f"runs/eval-whole-{evaluate}/result.json").read_text())
    assert result["steps"] == 0 and f"accuracy {result['eval']['all']['accuracy']:.2f}" in said
