"""Models and layouts that nobody chose: drawn from a seed, of every family."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Widths are multiples of 32, which vLLM's CPU build needs.
_BASE = {
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_FAMILIES = (
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "llama",
    "mixtral",
    "deepseek_v2",
    "qwen2",
    "kimi_k2",
    "qwen3",
    "mistral",
)
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
TP, PP, VPP = "tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size"
EP, ETP, CP = "expert_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"
_LAYOUTS: tuple[dict[str, int], ...] = (
    {"num_ranks": 1},
    {"num_ranks": 3},
    {"num_ranks": 3, PP: 3},
    {"num_ranks": 3, TP: 3},
    {"num_ranks": 2, PP: 2, VPP: 2},
    {"num_ranks": 4, TP: 2, PP: 2},
    {"num_ranks": 4, TP: 2, CP: 2},
    {"num_ranks": 3, EP: 3},
    {"num_ranks": 2, TP: 2, EP: 2, ETP: 1},
    {"num_ranks": 4, PP: 2, EP: 2},
    {"num_ranks": 4, TP: 2, EP: 2, ETP: 2},
    {"num_ranks": 2, CP: 2, EP: 2},
)


@dataclass(frozen=True)
class RandomCase:
    """A model as its config.json has it, where it trains and where a step is replayed."""

    hf: dict
    layout: tuple[str, ...]
    other_layout: tuple[str, ...]

    @property
    def is_sparse(self) -> bool:
        return "num_experts_per_tok" in self.hf


def random_case(seed: int) -> RandomCase:
    """Ten seeds in a row have ten families; the layouts divide the model."""
    draw = random.Random(seed)
    family = _FAMILIES[seed % len(_FAMILIES)]
    hf = _BASE | {"model_type": family} | _shared(draw) | _own(family, draw)
    possible = [layout for layout in _LAYOUTS if _divides(hf, layout)]
    chosen = draw.sample(possible, 2)
    return RandomCase(hf, *(_as_overrides(layout) for layout in chosen))


def _shared(draw: random.Random) -> dict:
    """Sizes that every family has."""
    heads = draw.choice([2, 3, 4, 6])
    return {
        "hidden_size": 96 * draw.randint(1, 2),
        "intermediate_size": 96 * draw.randint(1, 2),
        "num_hidden_layers": draw.choice([3, 4, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "rope_theta": draw.choice([1e4, 1e6]),
    }


def _own(family: str, draw: random.Random) -> dict:
    """What the family has beside the shared sizes."""
    head_dim = draw.choice([32, 64])
    layers = {"num_hidden_layers": draw.choice([4, 5])}
    experts = 6 * draw.randint(1, 2)
    expert_size = 32 * draw.randint(1, 3)
    match family:
        case "qwen2":
            heads = draw.choice([2, 3])
            sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
            return sizes | {"hidden_size": 32 * heads, "tie_word_embeddings": draw.random() < 0.5}
        case "llama":
            return {"head_dim": head_dim, "rope_scaling": _llama3(draw)}
        case "mistral":
            return {"head_dim": head_dim, "sliding_window": None}
        case "qwen3":
            return {"head_dim": head_dim, "tie_word_embeddings": draw.random() < 0.5}
        case "mixtral":
            return {
                "head_dim": head_dim,
                "num_local_experts": experts,
                "num_experts_per_tok": draw.randint(1, 3),
            }
        case "qwen3_moe":
            return {
                "head_dim": head_dim,
                "num_experts": experts,
                "num_experts_per_tok": draw.randint(1, 4),
                "norm_topk_prob": draw.random() < 0.5,
                "moe_intermediate_size": expert_size,
                "mlp_only_layers": draw.choice([[], [1], [0, 2]]),
            }
        case "glm4_moe":
            return layers | {
                "head_dim": head_dim,
                "partial_rotary_factor": 0.5,
                "use_qk_norm": draw.random() < 0.5,
                "attention_bias": draw.random() < 0.5,
                **_grouped(draw, experts, expert_size),
            }
        case _:
            return layers | _latent(draw) | _of_version(family, draw, experts, expert_size)


def _llama3(draw: random.Random) -> dict:
    return {
        "rope_type": "llama3",
        "factor": draw.choice([4.0, 8.0]),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def _grouped(draw: random.Random, experts: int, expert_size: int) -> dict:
    """Experts in groups, shared ones beside them, dense layers before them."""
    groups = draw.choice([1, 2, 3])
    taken = draw.randint(1, groups)
    return {
        "first_k_dense_replace": draw.randint(1, 2),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": taken,
        "num_experts_per_tok": draw.randint(1, min(3, taken * experts // groups)),
        "n_shared_experts": draw.randint(1, 2),
        "moe_intermediate_size": expert_size,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "norm_topk_prob": True,
    }


def _latent(draw: random.Random) -> dict:
    heads = draw.choice([2, 3, 4, 6])
    width = draw.choice([16, 32])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, 20, 36]),
        "kv_lora_rank": draw.choice([16, 24, 40]),
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": draw.choice([8, 16]),
        "v_head_dim": width,
        "rms_norm_eps": 1e-6,
    }


def _of_version(family: str, draw: random.Random, experts: int, expert_size: int) -> dict:
    own = _grouped(draw, experts, expert_size)
    if family == "deepseek_v2":
        own |= {"norm_topk_prob": False, "topk_method": "group_limited_greedy"}
        if draw.random() < 0.5:
            own |= {"topk_method": "greedy"}
    if family == "kimi_k2":
        own |= {"n_group": 1, "topk_group": 1}
    if draw.random() < 0.5:
        own["rope_scaling"] = {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": draw.choice([0.7, 1.0]),
        }
    return own


def _divides(hf: dict, layout: dict[str, int]) -> bool:
    experts = hf.get("num_experts", hf.get("num_local_experts", hf.get("n_routed_experts")))
    if experts is None:
        if EP in layout:
            return False
    elif experts % layout.get(EP, 1):
        return False
    tp = layout.get(TP, 1)
    divided = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    if any(hf[name] % tp for name in divided):
        return False
    if hf.get("moe_intermediate_size", 0) % tp:
        return False
    return hf["num_hidden_layers"] % (layout.get(PP, 1) * layout.get(VPP, 1)) == 0


def _as_overrides(layout: dict[str, int]) -> tuple[str, ...]:
    """Every size is set, so that a layout can replace another one."""
    overrides = []
    for name in ("num_ranks", TP, PP, EP, CP):
        overrides.append(f"trainer.{name}={layout.get(name, 1)}")
    for name in (VPP, ETP):
        overrides.append(f"trainer.{name}={layout.get(name, 'null')}")
    return tuple(overrides)
