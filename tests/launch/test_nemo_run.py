"""The NeMo-Run front end, where NeMo-Run is installed (an environment without vLLM)."""

import os

import pytest

run = pytest.importorskip("nemo_run")

from grpo_megatron.launch.nemo_run import add_stages  # noqa: E402

RECIPE = "demo/gspo-moe-cpu"
NODES = ("placement.trainer_nodes=2", "placement.rollout_nodes=1")

# of a cluster that a dry run does not ask
KUBE = """{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"clusters": [{"name": "c", "cluster": {"server": "http://localhost:1"}}],
"users": [{"name": "u", "user": {}}]}"""


@pytest.fixture(autouse=True)
def no_input(monkeypatch):
    """NeMo-Run passes standard input on to what it runs."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield


def test_slurm_job_has_the_recipes_nodes_and_one_supervisor(tmp_path, capsys):
    executor = run.SlurmExecutor(
        account="lab", partition="gpu", tunnel=run.LocalTunnel(job_dir=str(tmp_path))
    )
    with run.Experiment("stages", base_dir=str(tmp_path)) as experiment:
        add_stages(experiment, [RECIPE, RECIPE], executor, NODES)
        experiment.dryrun()
    text = capsys.readouterr().out
    assert executor.nodes == 1  # the caller's is as it was
    assert "#SBATCH --nodes=3" in text and "--ntasks=1" in text and "--overlap" in text


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LocalExecutor", {}),
        ("DockerExecutor", {"container_image": "image"}),
        ("KubeflowExecutor", {"image": "image"}),
    ],
)
def test_other_executors_start_one_machine(tmp_path, monkeypatch, capsys, kind, settings):
    (tmp_path / "kube").write_text(KUBE)
    if kind == "KubeflowExecutor":
        monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kube")
        )
    executor = getattr(run, kind)(**settings)
    with run.Experiment("one", base_dir=str(tmp_path)) as experiment:
        add_stages(experiment, [RECIPE], executor)
        experiment.dryrun()
    assert "demo" in capsys.readouterr().out
