"""Seconds of one RL step, TRL's GRPOTrainer against this project, in turn on the same CPU.

    python benchmarks/versus_trl.py --trl-python /path/to/trl-venv/bin/python [--case ragged]

Both train the demo's tiny Qwen3-MoE in fp32 on all cores, with the same prompts, the same number
of tokens forced per completion, the same group size and learning rate. A step is everything:
TRL's generation, scoring, forward, backward and optimizer; our rollout through the vLLM server,
reward, sample store, canary, Megatron step, weight publishing and metrics. Start-up and warm-up
are left out. Prints each pair's medians, and the median over pairs of TRL's time / ours.

TRL is no dependency of this project. It needs an environment of its own, which may look into
this project's for the rest:

    python -m venv trl-venv
    trl-venv/bin/pip install --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash \\
        fsspec pandas pyarrow
    python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \\
        > "$(trl-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # reward workers import from here

from versus_trl_ours import OurSide  # noqa: E402
from versus_trl_workload import CASES, Case, write_case  # noqa: E402


class TrlSide:
    """TRL in a process of its own, idle between requests."""

    def __init__(self, python: str, directory: Path, model: Path, options: dict):
        self._log = open(directory / "trl.log", "w")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [python, HERE / "versus_trl_worker.py", directory, model, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options["threads"])})
        self._answer()

    def run(self, num_steps: int) -> dict:
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            tail = Path(self._log.name).read_text().splitlines()[-15:]
            sys.exit("TRL's process ended:\n" + "\n".join(tail))
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", default=os.environ.get("TRL_PYTHON", sys.executable),
                        help="Python of an environment with TRL (default: $TRL_PYTHON)")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a side in each pair")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before")
    parser.add_argument("--trl-experts", default="grouped_mm", help="of transformers")
    parser.add_argument("--trl-accumulation", type=int, default=1)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for our side's recipe")
    options = parser.parse_args()
    if not options.ours_only:
        require_trl(options.trl_python)
    for case in CASES.values() if options.case == "all" else [CASES[options.case]]:
        with tempfile.TemporaryDirectory(prefix="versus-trl-") as name:
            write_case(Path(name), case)
            asyncio.run(measure(case, Path(name), options))


def require_trl(python: str) -> None:
    probe = subprocess.run([python, "-W", "ignore", "-c", "import trl; print(trl.__version__)"],
                           capture_output=True, text=True)
    if probe.returncode:
        sys.exit(f"{python} cannot import trl.\n{__doc__.split('TRL is no dependency')[1]}")


async def measure(case: Case, directory: Path, options: argparse.Namespace) -> None:
    ours = OurSide(case, directory, options.overrides)
    model = ours.make_model()
    trl_options = {"threads": len(os.sched_getaffinity(0)), "experts": options.trl_experts,
                   "accumulation": options.trl_accumulation}
    trl = None if options.ours_only else TrlSide(options.trl_python, directory, model, trl_options)
    try:
        async with ours:
            await compare(case, ours, trl, options)
    finally:
        if trl:
            trl.close()


async def compare(case: Case, ours: OurSide, trl: TrlSide | None,
                  options: argparse.Namespace) -> None:
    print(f"\n{case.name}: {case.num_prompts} prompts x {case.num_samples} samples of "
          f"{case.shortest} to {case.longest} tokens, load {os.getloadavg()[0]:.1f}", flush=True)
    ratios, phases = [], {"ours": [], "TRL": []}
    for pair in range(-1, options.pairs):
        steps = options.steps if pair >= 0 else options.warmup
        mine = await ours.run(steps)
        theirs = await asyncio.to_thread(trl.run, steps) if trl else mine
        medians = [statistics.median(side["seconds"]) for side in (theirs, mine)]
        ratio = medians[0] / medians[1]
        print(f"pair {pair}: TRL {medians[0]:.3f}, ours {medians[1]:.3f} s a step, "
              f"ratio {ratio:.2f}{' (warm-up)' if pair < 0 else ''}", flush=True)
        if pair >= 0:
            ratios.append(ratio)
            for name, side in (("ours", mine), ("TRL", theirs)):
                phases[name].append({k: v / steps for k, v in side["phases"].items()})
    for name, found in phases.items():
        parts = {k: statistics.median(p.get(k, 0.0) for p in found) for k in found[0]}
        print(f"  {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in parts.items()) + " s")
    print(f"{case.name}: median ratio TRL / ours {statistics.median(ratios):.2f} "
          f"(required {case.required_ratio}) over {len(ratios)} pairs", flush=True)


if __name__ == "__main__":
    main()
