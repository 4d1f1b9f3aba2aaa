"""Seconds of one RL step, TRL's GRPOTrainer against this project, in turn on the same CPU.

    python benchmarks/versus_trl.py --trl-python /path/to/trl-venv/bin/python [--case ragged]

Both train the demo's tiny Qwen3-MoE in fp32 on all cores, with the same prompts, the same number
of tokens forced per completion, the same group size and learning rate. A step is everything:
TRL's generation, scoring, forward, backward and optimizer; our rollout through the vLLM server,
reward, sample store, canary, Megatron step, weight publishing and metrics. Processes of the side
whose turn it is not are stopped (ours) or wait (TRL). Left out are how far
a step moved the policy (`objective.monitor_share`: two more passes, of which TRL has no like),
start-up and warm-up. TRL gets the fastest of its settings on this machine, tried first. Prints each
pair's medians, and the median over pairs of TRL's time / ours; exit code 1 when that misses a
case's required ratio. For information, it also prints our seconds when rollouts run one step ahead
of training; the ratio is strictly on-policy.

TRL is no dependency of this project. It needs an environment of its own, which may look into
this project's for the rest:

    python -m venv trl-venv
    trl-venv/bin/pip install --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash \\
        fsspec pandas pyarrow
    purelib="import sysconfig; print(sysconfig.get_path('purelib'))"
    python -c "$purelib" > "$(trl-venv/bin/python -c "$purelib")/project.pth"
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
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # reward workers import from here

from versus_trl_ours import OurSide  # noqa: E402
from versus_trl_workload import CASES, Case, write_case  # noqa: E402

TRIALS = 6  # steps of each of TRL's settings, the first of which does not count
EXPERTS = ("grouped_mm", "eager")  # of transformers; batched_mm takes 30 times as long


class TrlSide:
    """TRL in a process of its own, idle between requests."""

    def __init__(self, python: str, directory: Path, model: Path, settings: dict):
        self.settings, self._log = settings, directory / "trl.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [python, HERE / "versus_trl_worker.py", directory, model, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(settings["threads"])},
            )
        self._answer()

    def run(self, num_steps: int) -> dict:
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            sys.exit("TRL's process ended:\n" + self._log.read_text()[-2000:])
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def fastest_trl(python: str, directory: Path, model: Path, candidates: list[dict]) -> TrlSide:
    """TRL with the settings that are fastest here: threads do not always help a tiny model.

    All take turns, so that a machine whose speed changes treats them alike."""
    sides = [TrlSide(python, directory, model, settings) for settings in candidates]
    seconds = [[] for _ in sides]
    for _ in range(TRIALS if len(sides) > 1 else 0):
        for side, found in zip(sides, seconds, strict=True):
            found += side.run(1)["seconds"]
    medians = [statistics.median(found[1:] or [0.0]) for found in seconds]
    best = sides[medians.index(min(medians))]
    for side, median in zip(sides, medians, strict=True):
        if len(sides) > 1:
            print(f"TRL with {side.settings}: {median:.2f} s a step", flush=True)
        if side is not best:
            side.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trl-python",
        default=os.environ.get("TRL_PYTHON", sys.executable),
        help="Python of an environment with TRL (default: $TRL_PYTHON)",
    )
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a side in each pair")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before")
    parser.add_argument("--trl-threads", type=int, help="default: the faster of 1 and all cores")
    parser.add_argument("--trl-experts", choices=EXPERTS, help="default: the faster")
    parser.add_argument("overrides", nargs="*", help="key=value for our side's recipe")
    options = parser.parse_args()
    require_trl(options.trl_python)
    ratios = {}
    for case in CASES.values() if options.case == "all" else [CASES[options.case]]:
        with tempfile.TemporaryDirectory(prefix="versus-trl-") as name:
            write_case(Path(name), case)
            ratios[case] = asyncio.run(measure(case, Path(name), options))
    sys.exit(any(ratio < case.required_ratio for case, ratio in ratios.items()))


def require_trl(python: str) -> None:
    probe = subprocess.run(
        [python, "-W", "ignore", "-c", "import trl"], capture_output=True, text=True
    )
    if probe.returncode:
        how = __doc__[__doc__.index("TRL is no dependency") :]
        sys.exit(
            f"{python} cannot import trl: {probe.stderr.strip().splitlines()[-1]}\n\n{how}\n"
            "Then give its Python: --trl-python trl-venv/bin/python"
        )


async def measure(case: Case, directory: Path, options: argparse.Namespace) -> float:
    """The median ratio."""
    print(
        f"\n{case.name}: {case.num_prompts} prompts x {case.num_samples} samples of "
        f"{case.shortest} to {case.longest} tokens",
        flush=True,
    )
    ours = OurSide(case, directory, options.overrides)
    model = ours.make_model()
    threads = [options.trl_threads] if options.trl_threads else sorted({1, os.cpu_count()})
    experts = [options.trl_experts] if options.trl_experts else EXPERTS
    candidates = [{"threads": t, "experts": e} for t in threads for e in experts]
    trl = fastest_trl(options.trl_python, directory, model, candidates)
    try:
        async with ours:
            return await compare(case, ours, trl, options)
    finally:
        trl.close()


async def compare(case: Case, ours: OurSide, trl: TrlSide, options: argparse.Namespace) -> float:
    ratios, phases = [], {"ours": [], "TRL": []}
    for pair in range(-1, options.pairs):
        steps = options.steps if pair >= 0 else options.warmup
        found = {"ours": await ours.run(steps)}
        with ours.stopped():
            found["TRL"] = await asyncio.to_thread(trl.run, steps)
        mine, theirs = (statistics.median(found[side]["seconds"]) for side in phases)
        print(
            f"pair {pair}: TRL {theirs:.3f}, ours {mine:.3f} s a step, ratio "
            f"{theirs / mine:.2f}, load {os.getloadavg()[0]:.1f}"
            f"{' (warm-up)' if pair < 0 else ''}",
            flush=True,
        )
        if pair >= 0:
            ratios.append(theirs / mine)
            for side, parts in phases.items():
                parts.append({k: v / steps for k, v in found[side]["phases"].items()})
    for side, parts in phases.items():
        medians = {k: statistics.median(p.get(k, 0.0) for p in parts) for k in parts[0]}
        print(
            f"  {side}, seconds by phase: " + ", ".join(f"{k} {v:.3f}" for k, v in medians.items())
        )
    ahead = statistics.median((await ours.run(options.steps + 1, ahead=True))["seconds"][1:])
    print(
        f"  ours when rollouts run one step ahead (max_staleness 1): {ahead:.3f} s a step, "
        f"last pair's TRL / that {theirs / ahead:.2f}"
    )
    ratio = statistics.median(ratios)
    print(
        f"{case.name}: median ratio TRL / ours {ratio:.2f} of {len(ratios)} pairs, required "
        f"{case.required_ratio}; TRL with {trl.settings}",
        flush=True,
    )
    return ratio


if __name__ == "__main__":
    main()
