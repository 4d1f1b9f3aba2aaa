"""Batch scripts as text, sites, and what srun says; a real Slurm is in tests/slurm."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.config.history import record_settings
from grpo_megatron.controller.recorder import drop_disconnected
from grpo_megatron.errors import ConfigError, SetupError, TrainerError
from grpo_megatron.launch.roles import RANK_VARIABLES
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.launch.slurm import cancel, is_active
from grpo_megatron.launch.steps import SlurmStep, SlurmSteps
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from tests.controller.scored_groups import recipe

RECIPES = assets.names(assets.root() / "recipes")
SITES = sorted(p.stem for p in (assets.root() / "slurm" / "sites").glob("*.env"))
GIVEN = {"VENV": "/shared/venv", "PARTITION": "gpu", "ACCOUNT": "lab", "IMAGE": "/shared/image"}
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


# On a CPU, on nodes that train and generate, and on nodes of two kinds.
ONE_OF_EACH_SHAPE = ("demo/gspo-moe-cpu", "dense/qwen3-8b", "moe/deepseek-v3")


def check(script: Path, *, lint: bool = True) -> None:
    """It parses, and shellcheck, where it is installed, finds nothing."""
    subprocess.run(["bash", "-n", script], check=True)
    if lint and SHELLCHECK:
        done = subprocess.run(
            [SHELLCHECK, "--shell=bash", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.fixture
def given(monkeypatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "path",
    sorted(
        p.relative_to(assets.root() / "slurm").as_posix()
        for p in (assets.root() / "slurm").rglob("*")
        if p.suffix in (".sbatch", ".sh", ".env")
    ),
)
def test_shipped_scripts_parse(path, given):
    if path.endswith(".env"):
        subprocess.run(["bash", "-n", assets.root() / "slurm" / path], check=True)
    else:
        check(assets.root() / "slurm" / path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_renders(given, tmp_path, capsys, recipe):
    for site in SITES:
        code = main(["submit", recipe, "--site", site, "--dry-run", f"runs_dir={tmp_path}"])
        script = tmp_path / "script"
        script.write_text(capsys.readouterr().out)
        assert code == 0
        check(script, lint=recipe in ONE_OF_EACH_SHAPE)
    assert sorted(tmp_path.iterdir()) == [script]  # a dry run leaves nothing


def test_a_rendered_script_is_complete(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ROLLOUT_PARTITION", "small")
    main(
        [
            "submit",
            "demo/gspo-moe-cpu",
            "--site",
            "bare",
            "--dry-run",
            f"runs_dir={tmp_path}",
            "placement.trainer_nodes=2",
            "placement.rollout_nodes=3",
        ]
    )
    text = capsys.readouterr().out
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --partition=gpu\n#SBATCH --nodes=2" in first
    assert "#SBATCH --requeue" in first and "#SBATCH --signal=B:USR1@600" in first
    assert "#SBATCH --partition=small\n#SBATCH --nodes=3" in second
    assert "ROLLOUT_PARTITION=small" in second and "VENV=/shared/venv" in second
    assert f"set -- {tmp_path}/demo\n" in second


@pytest.mark.parametrize(
    ("partitions", "parts"),
    [
        ({}, [("gpu", 6, True)]),
        ({"ROLLOUT_PARTITION": "small"}, [("gpu", 1, True), ("small", 5, True)]),
        ({"ENVIRONMENT_PARTITION": "cpu"}, [("gpu", 4, True), ("cpu", 2, False)]),
        (
            {"ROLLOUT_PARTITION": "small", "ENVIRONMENT_PARTITION": "cpu"},
            [("gpu", 1, True), ("small", 3, True), ("cpu", 2, False)],
        ),
    ],
)
def test_nodes_of_environments_may_have_a_partition_without_gpus(
    given, tmp_path, capsys, monkeypatch, partitions, parts
):
    for name, value in partitions.items():
        monkeypatch.setenv(name, value)
    sizes = ["trainer_nodes=1", "rollout_nodes=3", "environment_nodes=2", "gpus_per_node=2"]
    overrides = [f"placement.{size}" for size in sizes] + ["domains.0.environment.servers=2"]
    main(
        [
            "submit",
            "demo/agent-calculator-cpu",
            *("--site", "bare", "--dry-run", f"runs_dir={tmp_path}"),
            *overrides,
        ]
    )
    script = capsys.readouterr().out
    found = []
    for text in script.split("#SBATCH hetjob\n"):
        [partition] = re.findall("--partition=(.*)", text)
        [nodes] = re.findall("#SBATCH --nodes=(.*)", text)
        found.append((partition, int(nodes), "--gpus-per-node=2" in text))
    assert found == parts
    (tmp_path / "script").write_text(script)
    check(tmp_path / "script")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--site", "bare"], ["VENV is not set: ", "slurm/sites/bare.env"]),
        (["--site", "baer"], ["did you mean 'bare'"]),
        (["--site", "{own}"], ["activate() is missing"]),
        (["--site", "{latin}"], ["not UTF-8", "latin.env"]),
        ([], ["--site"]),
    ],
)
def test_a_wrong_site_is_one_message(
    tmp_path_factory, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.delenv("VENV", raising=False)
    own = tmp_path_factory.mktemp("sites") / "own.env"
    own.write_text("PARTITION=gpu\necho loaded\n")
    latin = own.with_name("latin.env")
    latin.write_text("PARTITION=gpu  # für\n", encoding="latin-1")
    arguments = [word.format(own=own, latin=latin) for word in arguments]
    assert main(["submit", "demo/gspo-moe-cpu", *arguments, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("TIME_LIMTI=60", "TIME_LIMIT"),
        ("export NOTICES_S=300", "NOTICE_S"),
        ("max_restarts=3", "MAX_RESTARTS"),
        ("GRPO_MEGATRON_INTREFACE=ib0", "GRPO_MEGATRON_INTERFACE"),
        ("SBATCH_FLAG=-C", "SBATCH_FLAGS"),
        ("NCCL_SOCKET_IFNAME=ib0", None),
        ("TIME_LIMIT=60\nTIME_LIMITS=9", None),
        ("JOB=x", None),
        ("IFS=:", None),
        ("IMG=x", None),
        ("MOUNT=/scratch", None),
        ("HF_HOME=/x", None),
        ("export GRPO_MEGATRON_TRACEBACK=1", None),
        ("export GRPO_MEGATRON_HOME=/x", None),
        ("export GRPO_MEGATRON_VENV=/x", None),
        ("MASTER_PORT=1", None),
        ("SBATCH_QOS=x", None),
    ],
)
def test_a_mistyped_setting_of_a_site_is_named(tmp_path, capsys, line, meant):
    site = tmp_path / "own.env"
    site.write_text(f"PARTITION=gpu  # main\nactivate() {{ :; }}\n{line}\n")
    code = main(["submit", "demo/gspo-moe-cpu", "--site", str(site), "--dry-run"])
    said = capsys.readouterr().err
    assert code == (2 if meant else 0) and (f"did you mean {meant}" in said) == bool(meant)


def test_what_a_site_prints_or_hides_is_no_part_of_the_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    monkeypatch.setenv("COLOUR", "blue")
    site = tmp_path / "own.env"
    site.write_text(
        "PARTITION=gpu\nexport WANDB_API_KEY=${WANDB_API_KEY:?}\nCOLOUR=${COLOUR:?}\n"
        "echo loaded\nactivate() { :; }\n"
    )
    assert main(["submit", "demo/gspo-moe-cpu", "--site", str(site), "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/usr/bin/env bash\n") and "COLOUR=blue" in script
    assert "hush" not in script and "${WANDB_API_KEY:?}" in script


@pytest.mark.parametrize(
    ("limit", "is_longer"),
    [
        ("10", False),
        ("11", False),  # Slurm may be a minute early
        ("12", True),
        ("10:00", False),
        ("00:11:00", False),
        ("00:11:01", True),
        ("0-0:10", False),
        ("1-0", True),
        ("0-0:11:01", True),
        ("0", True),  # Slurm: without a limit
        ("UNLIMITED", True),
        ("-1", True),
    ],
)
def test_a_notice_is_shorter_than_the_limit(given, monkeypatch, capsys, limit, is_longer):
    """Else the job is told to end when it begins, until it is out of restarts."""
    monkeypatch.setenv("TIME_LIMIT", limit)
    code = main(["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run"])
    assert code == (0 if is_longer else 2)
    assert is_longer or f"TIME_LIMIT={limit}" in capsys.readouterr().err


def test_a_notice_that_is_too_long_is_told_with_the_longest(given, monkeypatch, capsys):
    monkeypatch.setenv("TIME_LIMIT", "3")
    monkeypatch.setenv("NOTICE_S", "120")
    command = ["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run"]
    assert main(command) == 2
    assert "NOTICE_S may be 119" in capsys.readouterr().err
    monkeypatch.setenv("NOTICE_S", "119")
    assert main(command) == 0
    assert "\nslurm_notice_s=119 " in capsys.readouterr().out


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_job_speaks_only_of_the_notice_that_it_gets(tmp_path, is_submitted):
    """By hand it has no other one than at four fifths; a submitted one gets that of its script."""
    run, site = tmp_path / "grpo-megatron", tmp_path / "site.env"
    run.write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\ndate -d '+300 seconds' +%FT%T\n")
    for tool in (run, tmp_path / "squeue"):
        tool.chmod(0o755)
    site.write_text("activate() { :; }\n" + "slurm_notice_s=600\n" * is_submitted)
    job = _start_job(tmp_path, site)
    job.wait(timeout=300)  # what watches for its end, and has its output, sees that it is gone
    said = job.stdout.read()
    assert "finished" in said
    assert ("more than half of the time limit" in said) is not is_submitted


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("TIME_LIMIT", ("8h", "1-", "-5", "08:00:00:00", "1-2-3", ":30", "1:", "x", "1 2")),
        ("NOTICE_S", ("10m", "0", "-5", "65536", "100000", "060", "1.5")),
        ("MAX_RESTARTS", ("abc", "-1", "010", "1e3")),
    ],
)
def test_a_sites_numbers_are_numbers(given, monkeypatch, capsys, name, values):
    for value in values:
        monkeypatch.setenv(name, value)
        assert main(["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run"]) == 2
        said = capsys.readouterr()
        assert f"{name}={value} is no " in said.err and not said.out


def sbatch_word(line: str) -> str:
    """The word of a directive; a line that sbatch would read as others is an error."""
    word = line.removeprefix("#SBATCH ")
    quoted = re.fullmatch(r'"((?:[^"\\]|\\["\\])*)"', word)
    if quoted is None:
        assert re.fullmatch(r"[^\s\"'\\#$]+", word), line
        return word
    return re.sub(r'\\(["\\])', r"\1", quoted[1])


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_words_of_a_script_are_as_sbatch_reads_them(given, tmp_path, monkeypatch, capsys, locale):
    """It knows "…" with a backslash before a quote or a backslash, but neither `\\ ` nor $'…'."""
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setenv("ACCOUNT", "a'b c\\d")
    monkeypatch.setenv("SBATCH_FLAGS", '--exclusive --nodelist=node[1-4] --comment="#1"')
    directory = tmp_path / 'rüns "dir" $x'
    command = ["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run"]
    assert main([*command, f"runs_dir={directory}"]) == 0
    script = capsys.readouterr().out
    words = [sbatch_word(line) for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert f"--output={directory}/demo/logs/slurm-%j.out" in words
    assert "--account=a'b c\\d" in words
    assert "--comment=#1" in words
    assert "--nodelist=node[1-4]" in words
    assert "#SBATCH --exclusive\n" in script  # what needs no quotes has none


@pytest.mark.parametrize(
    ("account", "directory", "said"),
    [
        ("a\tb", "runs", "control character: $'--account=a\\tb'"),
        ("lab", "ru\nns", "control character"),
        ("lab", "ru\\ns", "no log below a path with a backslash"),
    ],
)
def test_what_sbatch_cannot_read_is_refused(
    given, tmp_path, monkeypatch, capsys, account, directory, said
):
    monkeypatch.setenv("ACCOUNT", account)
    command = ["submit", "demo/gspo-moe-cpu", "--site", "bare", "--dry-run"]
    assert main([*command, f"runs_dir={tmp_path / directory}"]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


OWN_SITE = "PARTITION=gpu\nactivate() {{ :; }}\n{}\n"
GPUS = ["placement.gpus_per_node=8"]


def rendered(tmp_path, capsys, *lines: str, overrides=()) -> tuple[int, str, str]:
    """Exit code, script and message for a site with these lines."""
    site = tmp_path / "own.env"
    site.write_text(OWN_SITE.format("\n".join(lines)))
    code = main(["submit", "demo/gspo-moe-cpu", "--site", str(site), "--dry-run", *overrides])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "flags",
    [
        """SBATCH_FLAGS=(--exclusive "--comment=my run" -C 'h100&ib')""",
        """SBATCH_FLAGS='--exclusive "--comment=my run" -C h100\\&ib'""",
        """export SBATCH_FLAGS="--exclusive --comment='my run'
-C 'h100&ib'\"""",
    ],
)
def test_flags_are_an_array_or_a_text_with_quotes(tmp_path, capsys, flags):
    code, script, _ = rendered(tmp_path, capsys, flags)
    words = [sbatch_word(line) for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert code == 0
    start = words.index("--exclusive")
    assert words[start : start + 4] == ["--exclusive", "--comment=my run", "-C", "h100&ib"]


@pytest.mark.parametrize(
    "text",
    [
        "--x 'b c'd \"e \\\" f\" g\\ h ''",
        "--comment='it is \"x\" \\' \t --mem=0",
        '"\\a" $HOME * [1-4] `x` #y',
    ],
)
def test_a_text_of_flags_is_split_as_a_shell_does(tmp_path, capsys, text):
    code, script, _ = rendered(tmp_path, capsys, f"SBATCH_FLAGS={shlex.quote(f'-Q {text} -Q')}")
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    first, last = [number for number, line in enumerate(lines) if line == "#SBATCH -Q"]
    words = []
    for line in lines[first + 1 : last]:
        words.append("" if line == "#SBATCH " else sbatch_word(line))
    assert code == 0 and words == [word.replace("\t", " ") for word in shlex.split(text)]


@pytest.mark.parametrize("flags", ["SBATCH_FLAGS=", "SBATCH_FLAGS=()", "X=1"])
def test_a_site_may_have_no_flags(tmp_path, capsys, flags):
    code, script, _ = rendered(tmp_path, capsys, flags)
    assert code == 0 and "#SBATCH --gpus" not in script and '#SBATCH ""' not in script


@pytest.mark.parametrize(
    ("flag", "meaning"),
    [
        ("--time=1:00", "TIME_LIMIT"),
        ("--tim 5", "TIME_LIMIT"),
        ("-t5", "TIME_LIMIT"),
        ("--signal=TERM@5", "NOTICE_S"),
        ("--no-requeue", "MAX_RESTARTS"),
        ("--output=x.log", "runs_dir"),
        ("--array=0-3", "a run is one job"),
        ("-N 3", "[placement]"),
        ("--nodes=3", "[placement]"),
        ("--gpus-per-node=2", "placement.gpus_per_node"),
        ("--job-name=x", "name of the recipe"),
        ("-A lab", "ACCOUNT"),
        ("--open-mode=truncate", "appends"),
    ],
)
@pytest.mark.parametrize("layout", ["SBATCH_FLAGS='--exclusive {}'", "SBATCH_FLAGS=(-C x {})"])
def test_flags_that_the_script_sets_are_refused(tmp_path, capsys, layout, flag, meaning):
    lines = ["ACCOUNT=lab", layout.format(flag)]
    code, script, error = rendered(tmp_path, capsys, *lines, overrides=GPUS)
    assert code == 2 and not script
    assert f"{flag.split()[0]} in SBATCH_FLAGS" in error and meaning in error


@pytest.mark.parametrize(
    "flag",
    [
        *("--gpus=2", "--nodelist=n1", "--time-min=5", "--mem=0", "-C p"),
        *("-Alab", "--account=lab", "--gpus-per-node=2"),  # the script sets none of its own here
        *("--requeue", "--open-mode=append"),  # as the script says
    ],
)
def test_other_flags_are_the_sites(tmp_path, capsys, flag):
    code, script, _ = rendered(tmp_path, capsys, f"SBATCH_FLAGS='{flag}'")
    assert code == 0 and f"#SBATCH {flag.split()[0]}\n" in script


RANKS = ["placement.trainer_nodes=2", "trainer.num_ranks=8"]


@pytest.mark.parametrize(
    ("flags", "are_said"),
    [
        ("--qos=x", True),
        ("--exclusive=user", True),  # the job has one CPU of a node all the same
        ("--cpus-per-task=6", True),
        ("--exclusive", False),
        ("--mincpus=64", False),
        ("--cpus-per-gpu=12", False),
        ("-O", False),
    ],
)
def test_a_shared_node_gives_a_job_room_for_its_ranks(tmp_path, capsys, flags, are_said):
    line = f"SBATCH_FLAGS='{flags}'"
    code, script, _ = rendered(tmp_path, capsys, line, overrides=RANKS)
    assert code == 0 and ("#SBATCH --mincpus=4\n" in script) is are_said


def test_only_nodes_that_train_need_room_for_ranks(tmp_path, capsys):
    lines = ["SBATCH_FLAGS=", "ROLLOUT_PARTITION=rollout"]
    nodes = "placement.rollout_nodes=1"
    _, script, _ = rendered(tmp_path, capsys, *lines, overrides=[*RANKS, nodes])
    training, generating = script.split("#SBATCH hetjob\n")
    assert "--mincpus=4" in training and "--mincpus" not in generating
    _, script, _ = rendered(tmp_path, capsys, *lines, overrides=["trainer.num_ranks=1"])
    assert "--mincpus" not in script


def test_a_quote_of_the_flags_has_an_end(tmp_path, capsys):
    code, _, error = rendered(tmp_path, capsys, """SBATCH_FLAGS='--comment="my run'""")
    assert code == 2 and "a quote without its end" in error


def test_a_site_without_a_time_limit_is_told(tmp_path, capsys):
    _, script, _ = rendered(tmp_path, capsys)
    assert "#SBATCH --time=60\n" in script and "no TIME_LIMIT: 60 minutes" in script
    _, script, _ = rendered(tmp_path, capsys, "TIME_LIMIT=60")
    assert "no TIME_LIMIT" not in script


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
@pytest.mark.parametrize(
    ("site", "variable", "expected"),
    [
        (
            "pyxis",
            "GRPO_MEGATRON_SRUN_FLAGS",
            ["--container-image={image}", "--container-mounts={mounts}"],
        ),
        ("apptainer", "GRPO_MEGATRON_ENTER", ["--bind", "{mounts}", "{image}"]),
    ],
)
def test_paths_of_containers_may_have_blanks(
    given, monkeypatch, capsys, locale, site, variable, expected
):
    """As the supervisor splits them, and as the batch scripts for doctor, serve and others do."""
    paths = {"image": "/my images/it's ü.sif", "mounts": "/a b:/a b,/c"}
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setenv("IMAGE", paths["image"])
    monkeypatch.setenv("MOUNTS", paths["mounts"])
    monkeypatch.setenv("BINDS", paths["mounts"])
    assert main(["submit", "demo/gspo-moe-cpu", "--site", site, "--dry-run"]) == 0
    settings = capsys.readouterr().out.partition("# --- the site")[2].partition("\nset --")[0]
    source = f"source {assets.root() / 'slurm' / 'words.sh'}"
    split = f"{source}; words_of {variable} found"
    show = f'printf "%s\\n" "${variable}"; {split}; printf "%s\\n" "${{found[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"#{settings}\n{show}"], capture_output=True, text=True, check=True
    )
    joined, *words = done.stdout.splitlines()
    assert shlex.split(joined) == words
    for word in expected:
        assert word.format(**paths) in words


SHOWN = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n"


def job_of_script(tmp_path, name: str, text: str, monkeypatch) -> subprocess.CompletedProcess:
    """What a script of `slurm` does on a site with this GRPO_MEGATRON_SRUN_FLAGS; `srun` is a
    stand-in that prints its words."""
    for tool, content in (("srun", SHOWN), ("scontrol", "#!/bin/sh\n")):
        (tmp_path / tool).write_text(content)
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "config.json").touch()
    site = tmp_path / "site.env"
    site.write_text(f"activate() {{ :; }}\nGRPO_MEGATRON_SRUN_FLAGS={shlex.quote(text)}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(assets.root()))
    monkeypatch.setenv("SITE", str(site))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    return subprocess.run(
        ["bash", assets.root() / "slurm" / f"{name}.sbatch", tmp_path, tmp_path / "address"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_words_of_a_site_are_those_of_a_run(tmp_path, monkeypatch):
    text = """--comment="it's x" --a='b  c' d\\ e '' "\n" --last"""
    done = job_of_script(tmp_path, "convert", text, monkeypatch)
    assert done.returncode == 0, done.stderr
    expected = ["--ntasks=1", *shlex.split(text), "grpo-megatron", "convert", str(tmp_path)]
    assert done.stdout == "\n".join([*expected, str(tmp_path / "address"), ""])


@pytest.mark.parametrize("name", ["convert", "doctor", "serve", "prove"])
def test_a_quote_of_a_site_has_an_end(tmp_path, monkeypatch, name):
    """Words that are lost would be a container without its mounts, for example."""
    done = job_of_script(tmp_path, name, "--comment=it's --mem=0", monkeypatch)
    assert done.returncode == 2 and not done.stdout
    assert "GRPO_MEGATRON_SRUN_FLAGS of the site: No closing quotation" in done.stderr
    assert "Traceback" not in done.stderr


RUN = """#!/usr/bin/env bash
told=0
trap 'told=$((told + 1)); echo "told $told" >> "$0.log"; ((told < 2)) || exit 130' USR1
echo started >> "$0.log"
while [[ ! -e $0.end ]]; do sleep 0.05; done
((told)) && exit 130
"""


NEAR_LIMIT = """#!/bin/sh
# counted from the first question: a busy machine may be long about starting the job
[ -e "$0.end" ] || date -d "+6 seconds" +%FT%T > "$0.end"
cat "$0.end"
"""


@pytest.mark.parametrize(
    ("signals", "told", "is_requeued"),
    [
        ("USR1", 1, True),
        ("USR1 USR1", 1, True),
        ("USR1 INT", 1, False),
        ("INT USR1", 1, False),
        ("INT", 1, False),
        ("INT INT", 2, False),
        ("", 1, True),
    ],
)
def test_what_a_job_makes_of_signals(tmp_path, signals, told, is_requeued):
    """The run ends at once at a second one: of several notices it gets one; a cancel holds.
    Without any the time limit is near."""
    run, site = tmp_path / "grpo-megatron", tmp_path / "site.env"
    run.write_text(RUN)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -TERM $PPID\n")
    site.write_text('activate() { : "$NEVER_SET"; }\n')
    (tmp_path / "squeue").write_text("#!/bin/sh\necho\n" if signals else NEAR_LIMIT)
    for tool in (run, tmp_path / "scontrol", tmp_path / "squeue"):
        tool.chmod(0o755)
    job = _start_job(tmp_path, site)
    log = tmp_path / "grpo-megatron.log"
    try:
        _wait_for(log.exists)
        said = job.stdout.readline()
        for name in signals.split():
            time.sleep(0.3)  # bash may lose a signal that comes while its trap for the last runs
            job.send_signal(getattr(signal, f"SIG{name}"))
            _wait_for(lambda: "told" in log.read_text())
        _wait_for(lambda: f"told {told}" in log.read_text())
        (tmp_path / "grpo-megatron.end").touch()
        said += job.communicate(timeout=300)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 130 and log.read_text().count("told") == told, said
    assert ("job 7.0: requeue\n" in said) is is_requeued


WAITS_TO_BE_TOLD = """#!/usr/bin/env bash
trap 'exit 130' USR1
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""
AT_THE_FORK = """
trap '[[ $BASH_COMMAND != "run=\\$!" ]] || kill -USR1 $$' DEBUG
"""


def test_a_notice_between_the_start_of_the_run_and_its_number_is_not_lost(tmp_path):
    run, site = tmp_path / "grpo-megatron", tmp_path / "site.env"
    run.write_text(WAITS_TO_BE_TOLD)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -TERM $PPID\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho\n")
    site.write_text(f"activate() {{ :; }}\n{AT_THE_FORK}")
    for tool in (run, tmp_path / "scontrol", tmp_path / "squeue"):
        tool.chmod(0o755)
    job = _start_job(tmp_path, site)
    said, _ = job.communicate(timeout=300)
    assert job.returncode in (130, 138) and "job 7.0: requeue\n" in said, said


@pytest.mark.parametrize(
    ("code", "waits"), [(1, True), (3, True), (8, True), (2, False), (11, False)]
)
def test_a_run_that_failed_with_its_node_is_slurms_to_judge(tmp_path, code, waits):
    """Whatever error the lost node shows as."""
    run, site = tmp_path / "grpo-megatron", tmp_path / "site.env"
    run.write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho\n")
    site.write_text("activate() { :; }\n")
    for tool in (run, tmp_path / "srun", tmp_path / "squeue"):
        tool.chmod(0o755)
    job = _start_job(tmp_path, site)
    said = ""
    try:
        while "a node does not answer" not in said and (line := job.stdout.readline()):
            said += line
        while job.poll() is None and waits:  # until it waits, a signal is one for the run
            job.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        job.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what slept for the script too
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == code, said
    assert ("a node does not answer; Slurm will requeue the job" in said) is waits


def _start_job(folder: Path, site: Path) -> subprocess.Popen:
    """The batch script, with the programs of a folder before those of the machine."""
    return subprocess.Popen(
        ["bash", assets.root() / "slurm" / "train.sbatch", "demo"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # ignored by whatever a shell runs in the background, as `make test` may run this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SITE": str(site),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_NUM_NODES": "1",
        },
    )


def _wait_for(condition) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_slurm_nothing_is_left_behind(given, tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "sed", "sort", "cat"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["submit", "demo/gspo-moe-cpu", "--site", "bare", f"runs_dir={tmp_path}/runs"]) != 0
    assert "login node" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "demo").exists()


def test_a_silent_controller_does_not_mean_an_ended_job(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error: '\"$SAID\" >&2; exit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", "Invalid job id specified")
    assert not is_active("7")
    monkeypatch.setenv("SAID", "Unable to contact slurm controller (connect failure)")
    with pytest.raises(SetupError, match="Unable to contact"):
        is_active("7")


@pytest.mark.parametrize(
    ("said", "name", "code"),
    [
        (
            "srun: error: node2: task 1: Killed\n"
            "srun: error: node1: task 0: Exited with exit code 6\n",
            "trainer-1",
            137,
        ),
        ("srun: error: node1: tasks 4-7: Exited with exit code 8\n", "trainer-4", 8),
        ("srun: error: Unable to create step for job 3\n", "step", 1),
    ],
)
def test_the_first_task_that_ended_is_named(tmp_path, said, name, code):
    (tmp_path / f"{name}.log").write_text("its last words\n")
    step = SlurmStep(
        "step",
        ["bash", "-c", f"printf '{said}' >&2; exit 1"],
        tmp_path / "srun.log",
        task_log="trainer-%t.log",
    )
    step.start()
    step.process.wait()
    end = step.end()
    assert (end.name, end.exit_code) == (name, code)
    assert ("its last words" in str(end)) == (name != "step")


def test_recorded_steps_after_a_gap_are_dropped(tmp_path):
    for step in (3, 4, 5, 7, 8):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}" / "manifest.json").touch()
    drop_disconnected(tmp_path, 4)
    assert sorted(int(p.name[5:]) for p in tmp_path.iterdir()) == [3, 4, 5]


@pytest.fixture
def job_state(given, tmp_path, monkeypatch) -> Path:
    """A file with the state of every job, for stand-ins of `sbatch` and `scontrol`."""
    tools, state = tmp_path / "tools", tmp_path / "tools" / "state"
    tools.mkdir()
    state.write_text("PENDING")
    (tools / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tools / "scontrol").write_text(f"#!/bin/sh\necho JobId=7 JobState=$(cat {state})\n")
    for tool in ("sbatch", "scontrol"):
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return state


def submit(*flags: str) -> int:
    return main(["submit", "demo/gspo-moe-cpu", "--site", "bare", *flags])


def test_a_stage_starts_from_what_the_one_before_will_export(job_state, capsys):
    flags = ["name=second", "model.preset=null", "model.path=runs/first/export"]
    assert submit(*flags) != 0
    assert submit("name=first") == 0
    assert submit(*flags) == 4 and "no such file" in capsys.readouterr().err  # nobody waits for it
    assert main(["plan", "demo/gspo-moe-cpu", *flags]) == 0  # its sizes are known all the same
    assert submit("--after", "7", *flags) == 0
    assert submit("--after", "7", *flags[:2], "model.path=runs/frist/export", "name=third") == 2
    assert not Path("runs/third").exists()


def test_a_directory_that_cannot_be_made_is_one_message(job_state, capsys):
    assert submit("runs_dir=/proc/runs") == 3
    assert "error: cannot write the run's directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "active"),
    [
        *((state, True) for state in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")),
        *((state, True) for state in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")),
        *((state, True) for state in ("STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "NEW_ONE")),
        *((state, False) for state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")),
        *((state, False) for state in ("NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")),
    ],
)
def test_a_job_has_ended_in_states_that_say_so(job_state, state, active):
    job_state.write_text(state)
    assert is_active("7") == active


RECORDS = "JobId=7 JobState=%s"


@pytest.mark.parametrize(
    ("record", "flags"),
    [
        *((RECORDS % state, "--batch --signal=INT ") for state in ("RUNNING", "SIGNALING")),
        (RECORDS % "RESIZING", "--batch --signal=INT "),
        *((RECORDS % state, "") for state in ("PENDING", "CONFIGURING", "REQUEUE_HOLD")),
        *((RECORDS % state, "") for state in ("STAGE_OUT", "COMPLETING")),
        ("JobId=7 Reason=None", ""),
    ],
)
@pytest.mark.parametrize("now", [False, True])
def test_a_job_whose_script_runs_is_cancelled_with_a_checkpoint(job_state, record, flags, now):
    """Of others there is nobody to make one, and a signal would be an error of scancel."""
    run, cancelled = run_of_job(job_state, record)
    told = cancel(run.root, now=now)
    if now:
        flags = ""
    assert cancelled.read_text() == f"{flags}7\n"
    assert told.startswith("job 7 ") and ("after its step" in told) == bool(flags)


def run_of_job(job_state: Path, record: str) -> tuple[RunDir, Path]:
    """A run whose job has the record, and the file in which its cancel would be written."""
    tools = job_state.parent
    (tools / "scontrol").write_text(f"#!/bin/sh\necho {record}\n")
    (tools / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tools}/cancelled\n')
    (tools / "scancel").chmod(0o755)
    run = RunDir(Path("run"))
    run.slurm.mkdir(parents=True)
    (run.slurm / "job").write_text("7\n")
    return run, tools / "cancelled"


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED"])
def test_a_job_that_is_held_can_make_no_checkpoint(job_state, state):
    run, cancelled = run_of_job(job_state, RECORDS % state)
    with pytest.raises(ConfigError, match=f"job 7 is {state}") as caught:
        cancel(run.root, now=False)
    assert not cancelled.exists()
    assert "scontrol resume 7" in caught.value.remedy and "--now" in caught.value.remedy
    assert cancel(run.root, now=True) == "job 7 ends"


def test_a_run_without_a_job_is_stopped_by_a_signal(job_state, capsys):
    assert submit() == 0
    job_state.write_text("FAILED")
    with run_lock(RunDir(Path("runs/demo"))):
        assert main(["cancel", "runs/demo"]) == 2
    assert f"kill -INT {os.getpid()} " in capsys.readouterr().err


@pytest.mark.parametrize("job", ["", "abc", "7;8"])
def test_a_job_waits_for_one_that_has_an_id(job_state, capsys, job):
    assert submit("--after", job) == 2
    assert "--after" in capsys.readouterr().err and not Path("runs").exists()


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        *((state, "") for state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED")),
        *((state, f"did not succeed: {state}") for state in ("FAILED", "CANCELLED", "TIMEOUT")),
        ("forgotten", "Slurm knows no job 7"),
    ],
)
def test_a_job_waits_for_one_that_may_succeed(job_state, capsys, state, problem):
    job_state.write_text(state)
    if state == "forgotten":
        script = "#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n"
        (job_state.parent / "scontrol").write_text(script)
    assert submit("--after", "7") == (2 if problem else 0)
    said = capsys.readouterr().err
    assert problem in said and Path("runs/demo").exists() is not bool(problem)


def test_a_refused_dependency_is_told_as_that(job_state, capsys):
    script = "#!/bin/sh\necho sbatch: error: Job dependency problem >&2; exit 1\n"
    (job_state.parent / "sbatch").write_text(script)
    assert submit("--after", "7") == 2
    said = capsys.readouterr().err
    assert "--after" in said and "site's file" not in said


SILENT = """#!/bin/sh
echo x >> {asked}
echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1
"""


def test_status_says_what_files_say_while_slurm_is_silent(job_state, capsys):
    for name in ("one", "two"):
        assert submit(f"name={name}") == 0
    asked = job_state.parent / "asked"
    (job_state.parent / "scontrol").write_text(SILENT.format(asked=asked))
    for runs in ([], ["runs/one", "runs/two"]):
        asked.unlink(missing_ok=True)
        assert main(["status", *runs]) == 3
        said = capsys.readouterr()
        lines = [line for line in said.out.splitlines() if line.startswith("runs/")]
        assert len(lines) == 2 and all("job 7 (Slurm does not answer)" in line for line in lines)
        assert "Unable to contact" in said.err and "remedy:" in said.err
        assert asked.read_text() == "x\n"


def test_roles_of_a_job_that_was_killed_are_not_shown(job_state, capsys, monkeypatch):
    assert submit() == 0
    run = RunDir(Path("runs/demo"))
    run.lock.write_text("process 1 on node1, Slurm job 7")
    monkeypatch.setattr("grpo_megatron.launch.role_status.role_lines", lambda run_dir: ["roles"])
    for state, is_shown in (("RUNNING", True), ("COMPLETING", True), ("CANCELLED", False)):
        job_state.write_text(state)
        assert main(["status", "runs/demo"]) == 0
        assert ("roles" in capsys.readouterr().out) is is_shown
    run.lock.write_text("process 1 on node1")  # taken here since
    assert main(["status", "runs/demo"]) == 0
    assert "roles" in capsys.readouterr().out


def test_a_run_whose_job_never_began_is_submitted_anew(job_state, capsys):
    assert submit() == 0
    assert submit("seed=1") == 9 and "grpo-megatron cancel" in capsys.readouterr().err
    job_state.write_text("CANCELLED")
    assert submit("seed=2") == 0
    Path("runs/demo/logs/1").mkdir()
    Path("runs/demo/logs/latest").symlink_to("1")
    Path("runs/demo/metrics.jsonl").write_text('{"step": 0}\n')
    assert submit("seed=3") == 2
    said = capsys.readouterr().err
    assert "exists" in said and "rm -r " in said and "--overwrite" not in said
    assert '"seed": 2' in Path("runs/demo/config.json").read_text()


@pytest.fixture
def died_before_its_first_step(job_state) -> RunDir:
    """The run of a job that began, and failed before it recorded anything."""
    assert submit("seed=2") == 0
    job_state.write_text("FAILED")
    run_dir = RunDir(Path("runs/demo")).begin("7.0")
    run_dir.model.mkdir()
    (run_dir.logs / "controller.log").write_text("no route to host")
    append_event(run_dir.events, "failed", exit_code=5, reason="no engine")
    record_settings(run_dir, 0)
    run_dir.metrics.touch()
    return run_dir


def test_a_run_that_recorded_nothing_is_submitted_anew(died_before_its_first_step, capsys):
    run_dir = died_before_its_first_step
    assert submit("seed=3") == 0
    assert "had recorded no step and begins anew" in capsys.readouterr().err
    assert '"seed": 3' in run_dir.config.read_text()
    assert not run_dir.model.exists() and not run_dir.events.exists()
    assert not run_dir.config_history.exists()
    assert (run_dir.logs / "controller.log").read_text() == "no route to host"
    assert submit("seed=4") == 0  # nor has that one


@pytest.mark.parametrize(
    "recorded",
    [
        "checkpoints/step_000010/complete.json",
        "checkpoints/cold_start/step_000002/complete.json",
        "store/step_000000/manifest.json",
        "samples/step_000000.jsonl",
        "reference/scores.npz",
        "export/config.json",
        "result.json",
        "metrics.jsonl",
        "notes of mine.txt",
    ],
)
def test_a_run_that_recorded_something_is_not(died_before_its_first_step, capsys, recorded):
    file = died_before_its_first_step.root / recorded
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("something")
    assert submit("seed=3") == 2
    assert "rm -r " in capsys.readouterr().err
    assert file.exists() and died_before_its_first_step.events.exists()


def test_a_run_that_somebody_begins_is_not_replaced(died_before_its_first_step, capsys):
    with run_lock(died_before_its_first_step):
        assert submit("seed=3") == 9
    assert "is being written by" in capsys.readouterr().err
    assert died_before_its_first_step.events.exists()
    assert '"seed": 2' in died_before_its_first_step.config.read_text()


def test_a_wrong_site_costs_no_run_that_recorded_nothing(died_before_its_first_step, capsys):
    assert main(["submit", "demo/gspo-moe-cpu", "--site", "bare_metl"]) == 2
    assert died_before_its_first_step.events.exists()


def test_a_resumed_job_is_the_one_of_its_script(job_state, capsys):
    assert submit() == 0
    job_state.write_text("FAILED")
    assert main(["resume", "runs/demo", "optimizer.lr=1e-5"]) == 0
    assert main(["resume", "runs/demo", "placement.trainer_nodes=2"]) == 2
    assert "model.path" not in capsys.readouterr().err
    Path("runs/demo/export").mkdir()
    assert main(["resume", "runs/demo", "placement.trainer_nodes=2"]) == 2
    assert "model.path=runs/demo/export" in capsys.readouterr().err
    assert main(["resume", "runs/demo", "name=other"]) == 2
    Path("runs/demo/result.json").write_text("{}")
    assert main(["resume", "runs/demo"]) == 2
    assert "num_steps=" in capsys.readouterr().err
    assert main(["resume", "runs/demo", "num_steps=500"]) == 0


def test_settings_of_a_job_that_slurm_refuses_are_not_kept(job_state, capsys):
    assert submit() == 0
    job_state.write_text("FAILED")
    before = Path("runs/demo/config.json").read_bytes()
    (job_state.parent / "sbatch").write_text("#!/bin/sh\necho invalid account >&2; exit 1\n")
    assert main(["resume", "runs/demo", "optimizer.lr=1e-5"]) == 2
    assert "invalid account" in capsys.readouterr().err
    assert Path("runs/demo/config.json").read_bytes() == before


def test_variables_of_sbatch_do_not_override_the_script(job_state, monkeypatch):
    seen = job_state.parent / "seen"
    (job_state.parent / "sbatch").write_text(f"#!/bin/sh\nenv > {seen}; echo 7\n")
    overriding = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_TIMELIMIT", "SBATCH_NO_REQUEUE")
    for variable in (*overriding, "SBATCH_RESERVATION"):
        monkeypatch.setenv(variable, "1")
    assert submit() == 0
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert not names & set(overriding)
    assert "SBATCH_RESERVATION" in names  # the script says nothing of it


def test_a_job_without_an_id_is_none(job_state, capsys):
    (job_state.parent / "sbatch").write_text("#!/bin/sh\necho would start >&2\n")
    assert submit() == 2
    assert "sbatch named no job" in capsys.readouterr().err
    assert not Path("runs/demo").exists()


def test_a_resumed_job_runs_where_it_was_submitted(job_state, tmp_path, monkeypatch):
    assert submit() == 0
    job_state.write_text("FAILED")
    monkeypatch.chdir("/")
    assert main(["resume", str(tmp_path / "runs" / "demo")]) == 0
    script = (tmp_path / "runs" / "demo" / "slurm" / "train.sbatch").read_text()
    assert f"#SBATCH --chdir={tmp_path}\n" in script


def test_steps_tell_their_ranks_themselves(tmp_path, monkeypatch):
    """Not by variables of the shell that submitted the job, which may be a rank of something."""
    for variable in RANK_VARIABLES:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [["n0"]])
    monkeypatch.setattr(SlurmSteps, "check", lambda self: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "srun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "srun").chmod(0o755)
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    [step] = SlurmSteps(recipe(placement={"trainer_nodes": 1}), run_dir).trainers()
    step.start()
    step.started.wait()
    names = {line.partition("=")[0] for line in step.log.read_text().splitlines()}
    assert "OMP_NUM_THREADS" in names and not names & set(RANK_VARIABLES)
    assert "--distribution=block" in step.argv


def test_what_a_setting_is_made_of_is_kept_too(given, tmp_path, monkeypatch, capsys):
    """Also where a line both sets a name and reads another; but not what is a job's own."""
    site = tmp_path / "own.env"
    site.write_text(
        "PARTITION=gpu\nactivate() { :; }\n"
        "PLACE=${MY_PLACE:-/default}/${MY_NAME:-any}\nTMP_OF_JOB=${SLURM_TMPDIR:-/tmp}\n"
    )
    monkeypatch.setenv("MY_PLACE", "/mine")
    monkeypatch.setenv("MY_NAME", "one")
    monkeypatch.setenv("SLURM_TMPDIR", "/of/this/shell")
    assert main(["submit", "demo/gspo-moe-cpu", "--site", str(site), "--dry-run"]) == 0
    lines = capsys.readouterr().out.partition("# --- the site")[2].splitlines()[1:]
    of_site = lines[: lines.index("TMP_OF_JOB=${SLURM_TMPDIR:-/tmp}") + 1]
    shown = 'echo "$PLACE $TMP_OF_JOB"'
    done = subprocess.run(
        ["bash", "-c", "\n".join([*of_site, shown])],
        env={"SLURM_TMPDIR": "/of/the/job"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "/mine/one /of/the/job\n"


OF_THE_ENVIRONMENT = """PARTITION=gpu
# $IN_A_COMMENT
activate() {
    : "$ON_A_NODE"
}
quoted() { echo "'$1$ON_A_NODE'"; }
IMAGE=$MY_IMAGES/x.sif MOUNTS=${MY_MOUNTS}
FLAGS="$FLAGS --more"
"""


def site_part(tmp_path, capsys, text: str) -> list[str]:
    """Lines of the rendered script from the site on, up to the end of the site's own."""
    site = tmp_path / "own.env"
    site.write_text(text)
    assert main(["submit", "demo/gspo-moe-cpu", "--site", str(site), "--dry-run"]) == 0
    lines = capsys.readouterr().out.partition("# --- the site")[2].splitlines()[1:]
    [end] = [n for n, line in enumerate(lines) if line.startswith("slurm_notice_s=")]
    return lines[:end]


def test_a_resumed_job_has_the_sites_environment_of_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_IMAGES", "/first")
    monkeypatch.setenv("MY_MOUNTS", "/a b")
    monkeypatch.setenv("FLAGS", "--one")
    monkeypatch.setenv("ON_A_NODE", "here")
    of_site = site_part(tmp_path, capsys, OF_THE_ENVIRONMENT)
    kept = of_site[: of_site.index("PARTITION=gpu")]
    assert kept == ["export FLAGS=--one", "export MY_IMAGES=/first", "export MY_MOUNTS=/a\\ b"]
    shown = 'echo "$IMAGE $MOUNTS $FLAGS"; env'
    done = subprocess.run(
        ["bash", "-c", "\n".join([*of_site, shown])],
        env={"MY_IMAGES": "/later", "FLAGS": "--another"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *exported = done.stdout.splitlines()
    assert first == "/first/x.sif /a b --one --more"
    assert "MY_IMAGES=/first" in exported


@pytest.mark.parametrize(
    "line",
    ["[[ $CLUSTER == b ]] && export NCCL_SOCKET_IFNAME=ib0", "A=$NEVER_SET", "((0)) || false || :"],
)
def test_a_site_need_not_care_for_unset_variables_or_its_last_line(
    tmp_path, monkeypatch, capsys, line
):
    monkeypatch.delenv("CLUSTER", raising=False)
    assert line in site_part(tmp_path, capsys, OWN_SITE.format("") + line + "\n")


def test_a_line_of_a_site_that_fails_is_named(tmp_path, capsys):
    code, _, said = rendered(tmp_path, capsys, "source /nowhere/modules.sh", "A=1")
    assert code == 2 and "modules.sh: No such file" in said
    code, _, said = rendered(tmp_path, capsys, "A=1", "test -d /nowhere")
    [number] = re.findall(r"its line (\d+) failed with exit code 1: test -d /nowhere", said)
    assert (tmp_path / "own.env").read_text().splitlines()[int(number) - 1] == "test -d /nowhere"


@pytest.mark.parametrize("name", ["convert", "doctor", "prove", "serve", "train"])
def test_a_script_says_that_it_cannot_read_its_site(tmp_path, name):
    done = subprocess.run(
        ["bash", assets.root() / "slurm" / f"{name}.sbatch"],
        env={"PATH": os.environ["PATH"], "SITE": str(tmp_path / "none.env")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and f"SITE={tmp_path}/none.env cannot be read" in done.stderr


def test_a_waiting_job_has_no_logs_yet(job_state, capfd):
    assert submit() == 0
    assert main(["logs", "runs/demo"]) == 0
    assert "job 7 PENDING" in capfd.readouterr().out


def test_followed_logs_go_on_in_the_next_attempt(tmp_path):
    """Of a run that has not begun, and with a `latest` that points elsewhere after a requeue."""
    logs = tmp_path / "logs"
    (tmp_path / "config.json").touch()
    tail = subprocess.Popen(
        [sys.executable, "-m", "grpo_megatron.cli.main", "logs", "-f", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for attempt in ("7.0", "7.1"):
            (logs / attempt).mkdir(parents=True)
            (logs / attempt / "trainer-0.log").write_text(f"attempt {attempt}\n")
            (logs / "next").symlink_to(attempt)
            (logs / "next").rename(logs / "latest")
            line = ""
            while f"attempt {attempt}" not in line:
                line = tail.stdout.readline()
                assert line, "the logs ended before the next attempt"
    finally:
        tail.kill()
        tail.wait()


def test_one_bad_run_does_not_hide_the_others(job_state, capsys):
    assert submit() == 0
    for name in ("bad/logs", "converted"):
        Path("runs", name).mkdir(parents=True)
    for name in ("bad", "converted"):
        Path(f"runs/{name}/config.json").write_text("{")
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "job 7 PENDING" in said and "runs/bad  " in said and "converted" not in said


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_a_named_run_that_is_damaged_is_an_error(job_state, capsys, content):
    assert submit() == 0
    Path("runs/demo/config.json").write_bytes(content)
    assert main(["status", "runs/demo"]) == 2
    assert "runs/demo  " in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "runs/demo  " in capsys.readouterr().out


@pytest.mark.parametrize("content", ["no step", "no\nsteps\n"])
def test_damaged_metrics_are_told_beside_the_job(job_state, capsys, content):
    assert submit() == 0
    Path("runs/demo/metrics.jsonl").write_text(content)
    assert main(["status", "runs/demo"]) == 0
    said = capsys.readouterr().out
    assert "step ?/" in said and "job 7 PENDING" in said and "metrics.jsonl: " in said


@pytest.mark.parametrize("steps", [[0, 1, 2], [0, 2]])
def test_the_step_is_that_of_the_newest_line(job_state, capsys, steps):
    """Lines before it may be lost with the machine that wrote them."""
    assert submit() == 0
    lines = [f'{{"step": {step}}}\n' for step in steps]
    Path("runs/demo/metrics.jsonl").write_text("".join(lines))
    assert main(["status", "runs/demo"]) == 0
    said = capsys.readouterr().out
    assert "step 3/" in said and "metrics.jsonl" not in said


def test_a_damaged_line_is_told_beside_the_step(job_state, capsys):
    assert submit() == 0
    Path("runs/demo/metrics.jsonl").write_text('{"step": 0}\ndamaged\n{"step": 2}\n')
    assert main(["status", "runs/demo"]) == 0
    said = capsys.readouterr().out
    assert "step 3/" in said and "metrics.jsonl: line 2 is no metrics record" in said


def test_a_run_that_failed_says_why(job_state, capsys, monkeypatch):
    def fail(supervisor):
        append_event(supervisor.run_dir.events, "kernels", kernels=[])
        raise TrainerError("cold start reached 0.1, the target is 0.5\nmore", where="a log")

    monkeypatch.setattr("grpo_megatron.launch.supervisor.Supervisor.run", fail)
    assert main(["train", "demo/gspo-moe-cpu"]) == 6
    capsys.readouterr()
    assert main(["status", "runs/demo"]) == 0
    said = capsys.readouterr().out
    assert "failed (exit code 6): cold start reached 0.1, the target is 0.5\n" in said
    append_event(RunDir(Path("runs/demo")).events, "started", role="trainer-0")
    assert main(["status", "runs/demo"]) == 0
    assert "last event: started" in capsys.readouterr().out


def test_what_is_no_run_gets_no_lock(tmp_path, capsys):
    """A checkpoint has a config.json too."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert main(["resume", str(tmp_path)]) == 2
    assert "damaged" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "srun: error: Unable to create step for job 7: "
            "Invalid generic resource (gres) specification",
            "srun starts no step: srun: error: Unable to create step",
        ),
        (
            "pyxis: importing docker image\n"
            "/usr/bin/cat: /x/shared-file-probe: No such file or directory\n"
            "srun: error: node2: task 0: Exited with exit code 1",
            "node2 cannot read what another wrote: /x/shared-file-probe: No such file",
        ),
        ("", "srun starts no step"),
    ],
)
def test_not_every_failure_is_the_file_systems(tmp_path, monkeypatch, says, words):
    (tmp_path / "says").write_text(says)
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat {tmp_path}/says >&2; exit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(SlurmSteps, "__init__", lambda self: None)
    monkeypatch.setattr(SlurmSteps, "_srun", lambda self, *_: ["srun"])
    steps = SlurmSteps()
    steps.config = recipe(placement={"trainer_nodes": 2})
    steps.placement = steps.config.placement
    steps.nodes = ["node1", "node2"]
    steps.components = [["node1", "node2"]]
    steps.run_dir = RunDir(tmp_path, "1")
    steps.run_dir.endpoints.mkdir(parents=True)
    with pytest.raises(SetupError, match=words):
        steps.check()


REFUSED = "srun: error: Unable to create step for job 3: More processors requested than permitted"


def test_a_job_without_room_for_its_ranks_starts_nothing(tmp_path, monkeypatch):
    """Nodes that generate only need a task each."""
    asked = tmp_path / "asked"
    (tmp_path / "srun").write_text(
        f"""#!/bin/sh
echo "$@" >> {asked}
case "$*" in *--ntasks-per-node=2*) echo '{REFUSED}' >&2; exit 1;; esac
"""
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [["t0", "r0", "r1"]])
    placement = {"trainer_nodes": 1, "rollout_nodes": 2}
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    with pytest.raises(SetupError, match=r"srun starts no step: .*Unable to create step") as caught:
        SlurmSteps(recipe(placement=placement, trainer={"num_ranks": 2}), run_dir)
    assert "--mincpus=2 in SBATCH_FLAGS" in caught.value.remedy
    asked.unlink()
    SlurmSteps(recipe(placement=placement, trainer={"num_ranks": 1}), run_dir)
    [training, others] = asked.read_text().splitlines()
    assert "--nodelist=t0 " in training and "--ntasks-per-node=1 " in training
    assert "--nodelist=r0,r1 " in others and "--ntasks-per-node=1 " in others


def test_all_nodes_that_do_not_see_the_run_are_named(tmp_path, monkeypatch):
    """Those that train and those that do not, of which each is asked in a step of its own."""
    (tmp_path / "srun").write_text(
        """#!/bin/sh
echo "cat: $1: No such file" >&2
case "$*" in *--nodelist=t0*) node=t0;; *) node=r1;; esac
echo "srun: error: $node: task 0: Exited with exit code 1" >&2
exit 1
"""
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [["t0", "r0", "r1"]])
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    with pytest.raises(SetupError, match=r"^r1, t0 cannot read what another wrote: "):
        SlurmSteps(recipe(placement={"trainer_nodes": 1, "rollout_nodes": 2}), run_dir)


@pytest.mark.parametrize(
    "engines", [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "data_parallel_size": 2}]
)
def test_workers_and_reward_hosts_are_steps_beside_the_engines(tmp_path, monkeypatch, engines):
    """Two nodes train, four generate: servers of two nodes' width, workers where they answer."""
    nodes = ["t0", "t1", "r0", "r1", "r2", "r3"]
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [nodes])
    monkeypatch.setattr(SlurmSteps, "check", lambda self: None)
    config = recipe(
        data={"reward_hosts": 3},
        placement={"trainer_nodes": 2, "rollout_nodes": 4, "gpus_per_node": 2},
        rollout={"num_replicas": 2, **engines},
    )
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    steps = SlurmSteps(config, run_dir)

    def places(children) -> dict[str, str]:
        found = {}
        for step in children:
            [listed] = [word for word in step.argv if word.startswith("--nodelist=")]
            found[step.name] = listed.removeprefix("--nodelist=")
        return found

    assert places(steps.replicas()) == {"rollout-0": "r0,r1", "rollout-1": "r2,r3"}
    assert places(steps.workers()) == {"worker-0": "r0", "worker-1": "r2"}
    assert places(steps.reward_hosts()) == {
        "reward-host-0": "r0",
        "reward-host-1": "r1",
        "reward-host-2": "r2",
    }
    [worker, _] = steps.workers()
    assert worker.argv[-4:] == ["grpo_megatron.rollout.worker_service", str(tmp_path), "1", "0"]


@pytest.mark.parametrize(
    ("components", "groups"),
    [
        ([["t0", "r0", "e0", "e1"]], [None, None, None]),
        ([["t0"], ["r0"], ["e0", "e1"]], [0, 1, 2]),
        ([["t0", "r0"], ["e0", "e1"]], [0, 0, 1]),
    ],
)
def test_servers_of_environments_are_steps_on_nodes_of_their_own(
    tmp_path, monkeypatch, components, groups
):
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: components)
    monkeypatch.setattr(SlurmSteps, "check", lambda self: None)
    sizes = {"trainer_nodes": 1, "rollout_nodes": 1, "environment_nodes": 2, "gpus_per_node": 2}
    config = agents(placement=sizes, servers=3)
    steps = SlurmSteps(config, RunDir(tmp_path, "1"))
    servers = [steps.environment_server(number) for number in range(3)]
    words = [" ".join(step.argv) for step in servers]
    for number, node in enumerate(("e0", "e0", "e1")):
        assert f"--nodelist={node}" in words[number] and "--gpus-per-node" not in words[number]
        assert words[number].endswith(f"environments.server {tmp_path} 1 {number}")
    [trainer] = steps.trainers()
    [replica] = steps.replicas()
    assert "--nodelist=r0" in replica.argv and "--gpus-per-node=2" in replica.argv
    for step, group in zip((trainer, replica, servers[0]), groups, strict=True):
        found = [word for word in step.argv if word.startswith("--het-group")]
        assert found == ([] if group is None else [f"--het-group={group}"])


def test_without_nodes_of_their_own_they_are_beside_the_engines(tmp_path, monkeypatch):
    nodes = ["t0", "r0", "r1"]
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [nodes])
    monkeypatch.setattr(SlurmSteps, "check", lambda self: None)
    config = agents(placement={"trainer_nodes": 1, "rollout_nodes": 2}, servers=2)
    steps = SlurmSteps(config, RunDir(tmp_path, "1"))
    for number, node in enumerate(("r0", "r1")):
        assert f"--nodelist={node}" in steps.environment_server(number).argv


def agents(*, placement, servers):
    """The agent's demo on nodes, with servers of its environment."""
    flags = [f"placement.{name}={value}" for name, value in placement.items()]
    flags.append(f"domains.0.environment.servers={servers}")
    return resolve("demo/agent-calculator-cpu", flags).config
