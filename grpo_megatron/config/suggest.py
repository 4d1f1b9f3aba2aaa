"""Did you mean: the nearest valid key or value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath, dotted

# What people type from habit, where difflib cannot see the likeness.
_HABITS = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_parallel_size", "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_parallel_size", "sp": "sequence_parallel",
    "tensor_model_parallel_size": "tensor_parallel_size", "world_size": "num_ranks",
    "num_gpus": "num_ranks", "learning_rate": "lr", "max_steps": "num_steps",
    "steps": "num_steps", "group_size": "num_samples_per_prompt",
    "num_generations": "num_samples_per_prompt", "batch_size": "num_prompts",
    "max_tokens": "max_new_tokens", "grad_clip": "clip_grad",
}


def nearest(word: str, candidates: Iterable[str], *, count: int = 3,
            cutoff: float = 0.6) -> list[str]:
    """Candidates like `word`, best first; letter case and `-` against `_` do not count."""
    if len(word) <= 3:  # one wrong letter of two is half of the word
        cutoff = min(cutoff, 0.5)
    matcher = difflib.SequenceMatcher(b=_plain(word), autojunk=False)
    scored = []
    for candidate in candidates:
        matcher.set_seq1(_plain(candidate))
        same_letters = matcher.quick_ratio()  # in any order: decides `bet1a` for beta1
        if same_letters >= cutoff and matcher.ratio() >= cutoff:
            scored.append((matcher.ratio(), same_letters, candidate))
    scored.sort(key=lambda entry: entry[:2], reverse=True)  # stable: ties keep the schema's order
    return [candidate for _, _, candidate in scored[:count]]


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def nearest_keys(path: KeyPath, *, count: int = 3) -> list[str]:
    """Valid dotted keys that the unknown key at `path` may stand for, best first.

    Likely typing errors come first, then the same name in another table.
    """
    *table, key = path
    prefix = tuple(table)
    here = schema.keys_of(prefix)
    close = nearest(str(key), here, cutoff=0.8)
    habit = _HABITS.get(_plain(str(key)))
    same = [full for last, full in schema.all_keys() if last in (_plain(str(key)), habit)]
    same.sort(key=lambda full: (dotted(prefix) not in full, "*" in full))
    if habit in here:
        close.insert(0, habit)
    near = nearest(str(key), here)
    elsewhere = _nearest_elsewhere(str(key)) if not near and not same else []
    found = [*(dotted((*prefix, name)) for name in close), *_concrete(same, path),
             *(dotted((*prefix, name)) for name in near), *elsewhere]
    return list(dict.fromkeys(found))[:count]


def _nearest_elsewhere(key: str) -> list[str]:
    by_name: dict[str, list[str]] = {}
    for last, full in schema.all_keys():
        by_name.setdefault(last, []).append(full)
    return [full for name in nearest(key, by_name, cutoff=0.75) for full in by_name[name]]


def _concrete(keys: list[str], path: KeyPath) -> list[str]:
    """Fill `*` with the list index of `path` where it has one, else with 0."""
    index = next((str(part) for part in path if isinstance(part, int)), "0")
    return [key.replace("*", index) for key in keys]
