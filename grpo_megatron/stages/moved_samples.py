"""Samples whose tokens the report shows before and after the optimizer steps that they trained."""

from typing import Any

import numpy as np

from grpo_megatron.batching.drift_file import SampleDrift, read_drift
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.token_text import Decode, decoder, text_pieces

MAX_STEPS = 3
SAMPLES_PER_STEP = 6
MAX_TOKENS = 256
_DIGITS = 4  # of a probability's logarithm
_IMPOSSIBLE = -1e4  # log-prob shown for a probability of 0, which JSON has no number for


def moved_samples(config: RunConfig, run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the samples that moved the most in the newest recorded steps that have log-probs after
    the step, newest step first: `tokens` are (id, text, log-probs of the engine, of the trainer
    before and after, advantage)."""
    decode = decoder(config.model.path or run_dir.model)
    manifests = sorted(run_dir.store.glob("step_*/manifest.json"), reverse=True)
    found: list[dict[str, Any]] = []
    num_steps = 0
    for manifest in manifests:
        if num_steps == MAX_STEPS:
            break
        if not any(manifest.parent.glob("drift-*.safetensors")):
            continue
        table = SampleTable(manifest.parent, verify=False)
        drift = read_drift(table.directory, table.policy_lengths)
        num_steps += 1
        by_movement = sorted(drift, key=lambda row: -_movement(drift[row]))
        for row in by_movement[:SAMPLES_PER_STEP]:
            found.append(_moved_sample(table, row, drift[row], decode))
    return found


def _movement(sample: SampleDrift) -> float:
    """Return the mean absolute change of its tokens' log-probs."""
    if not len(sample.before):
        return 0.0
    return float(np.abs(sample.after - sample.before).mean())


def _moved_sample(
    table: SampleTable, row: int, drift: SampleDrift, decode: Decode
) -> dict[str, Any]:
    token_ids, rollout_logprobs = table.policy_tokens(row)
    ids = token_ids[:MAX_TOKENS].tolist()
    columns = [ids, text_pieces(ids, decode)]
    for values in (rollout_logprobs, drift.before, drift.after, drift.advantages):
        finite = np.nan_to_num(values[:MAX_TOKENS].astype(float), neginf=_IMPOSSIBLE)
        columns.append(np.round(finite, _DIGITS).tolist())
    return {
        "step": table.manifest.step,
        "row": row,
        "domain": table.manifest.domains[table.domain[row]],
        "reward": float(table.reward[row]),
        "length": len(token_ids),
        "prompt": decode(table.prompt_ids(row).tolist()),
        "tokens": list(zip(*columns, strict=True)),
    }
