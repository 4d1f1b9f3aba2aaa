"""How long engines pause for new weights: in one pause, and beside decoding.

    python benchmarks/publish_pause.py [--hidden 512] [--layers 8] [--steps 12] [--pairs 2]

A Qwen3-MoE of random weights is trained by the demo's recipe, two steps behind, with
`publish.pause=keep`. Runs with `publish.beside_decoding` off and on take turns. Prints for each
the medians over steps of the seconds of a publish, of the pause of engines in it, and of a whole
step (docs/publishing.md#beside-decoding). The first two steps are left out: rollouts have no lead
yet."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics

_RECIPE = "demo/gspo-moe-cpu"
_SETTINGS = (
    "cold_start=null",
    "model.preset=null",
    "batch.max_staleness=2",
    "batch.num_prompts=16",
    "publish.pause=keep",
    "data.num_heldout=8",
    "data.num_validation=8",
)
_FIRST_STEP = 2
_SHOWN = {
    "publish": "time/publish_s",
    "engines pause": "time/publish_pause_s",
    "step": "time/step_s",
}


def write_model(directory: Path, hidden: int, layers: int) -> int:
    """Write a model of random weights; returns their number."""
    write_tiny_model(directory, load_preset("tiny-qwen3-moe"))
    file = directory / "config.json"
    hf = json.loads(file.read_text())
    hf |= {"hidden_size": hidden, "num_hidden_layers": layers}
    hf |= {"moe_intermediate_size": hidden, "intermediate_size": 2 * hidden}
    file.write_text(json.dumps(hf))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    model.save_pretrained(directory)
    file.write_text(json.dumps(hf))  # as it was, with the keys that the project reads
    return model.num_parameters()


def train(runs: Path, name: str, model: Path, steps: int, *, beside: bool) -> dict[str, float]:
    """Train; returns the medians of what is shown."""
    settings = [
        *_SETTINGS,
        f"model.path={json.dumps(str(model))}",
        f"num_steps={steps}",
        f"publish.beside_decoding={json.dumps(beside)}",
        f"runs_dir={runs}",
        f"name={name}",
    ]
    command = [sys.executable, "-m", "grpo_megatron.cli.main", "train", _RECIPE, *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit("\n".join(done.stdout.splitlines()[-10:]))
    records = read_metrics(RunDir(runs / name).metrics)[_FIRST_STEP:]
    found = {}
    for shown, metric in _SHOWN.items():
        found[shown] = statistics.median(record[metric] for record in records)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()
    runs = options.runs
    if runs is None:
        runs = Path(tempfile.mkdtemp(prefix="publish-pause-"))
    model = (runs / "model").absolute()
    count = write_model(model, options.hidden, options.layers)
    print(f"{count / 1e6:.0f} M parameters; runs in {runs}", flush=True)
    for pair in range(options.pairs):
        for beside in (False, True):
            kind = "paused"
            if beside:
                kind = "beside"
            found = train(runs, f"{kind}-{pair}", model, options.steps, beside=beside)
            told = ", ".join(f"{shown} {seconds:.3f} s" for shown, seconds in found.items())
            print(f"{kind}: {told}", flush=True)


if __name__ == "__main__":
    main()
