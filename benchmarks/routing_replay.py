"""Step time with replayed routes (R3) against without, in one run on the real engines.

    python benchmarks/routing_replay.py [--pairs 7] [--tokens 64]

Two runs of the demo's model live side by side: one whose server records every token's experts and
whose trainer replays them, one whose server has no such flag. They step in turn; the one that
does not is idle. A step is everything from sampling to publishing. Prints each pair, the
median ratio, where the time goes, and what a route costs on disk; exit code 1 above 1.05.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # reward workers import from here

from versus_trl_ours import OurSide  # noqa: E402
from versus_trl_workload import Case, write_case  # noqa: E402

LIMIT = 1.05
SIDES = {"off": [], "r3": ["routing.replay=r3", "routing.on_missing=fail"]}


async def measure(options: argparse.Namespace, root: Path) -> float:
    case = Case("routes", options.prompts, 8, options.tokens, options.tokens, options.tokens, 0.0)
    async with AsyncExitStack() as stack:
        sides = {}
        for name, overrides in SIDES.items():
            (root / name).mkdir()
            write_case(root / name, case)
            side = OurSide(case, root / name, overrides)
            side.make_model()
            sides[name] = await stack.enter_async_context(side)
        ratios, phases = [], {name: [] for name in sides}
        for pair in range(-1, options.pairs):
            order = list(sides) if pair % 2 else list(reversed(sides))
            found = {name: await sides[name].run(options.steps) for name in order}
            seconds = {name: statistics.median(f["seconds"]) for name, f in found.items()}
            ratio = seconds["r3"] / seconds["off"]
            print(
                f"pair {pair}: off {seconds['off']:.3f}, r3 {seconds['r3']:.3f} s a step, ratio "
                f"{ratio:.3f}{' (warm-up)' if pair < 0 else ''}",
                flush=True,
            )
            if pair >= 0:
                ratios.append(ratio)
                for name, f in found.items():
                    phases[name].append({k: v / options.steps for k, v in f["phases"].items()})
        for name, parts in phases.items():
            medians = {k: statistics.median(p.get(k, 0.0) for p in parts) for k in parts[0]}
            print(f"  {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in medians.items()))
        print_size(sides)
    return statistics.median(ratios)


def print_size(sides: dict[str, OurSide]) -> None:
    sizes = {}
    for name, side in sides.items():
        step = sorted(side.run_dir.store.iterdir())[-1]
        sizes[name] = sum(f.stat().st_size for f in step.iterdir() if f.name.startswith("rollout"))
        routes = sum(f.stat().st_size for f in step.glob("*.routes"))
    print(
        f"store of a step: {sizes['off']} bytes without routes, {sizes['r3']} with; "
        f"{routes} bytes of ids, {(sizes['r3'] - sizes['off']) / routes - 1:.2%} beside them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in each pair")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="routing-replay-") as name:
        ratio = asyncio.run(measure(options, Path(name)))
    print(f"median ratio r3 / off {ratio:.3f} of {options.pairs} pairs, limit {LIMIT}")
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
