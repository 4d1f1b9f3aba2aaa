"""Every weight of a rank, in Megatron's order, as closed forms (`closed_forms.toml`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import megatron_settings, model_fields

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FORMS = assets.tables(__file__, "closed_forms.toml")


@dataclass(frozen=True, slots=True)
class Weight:
    numel: int  # on a rank
    kind: str = ""  # expert, router, or shared: a tied embedding over pipeline stages


@dataclass(frozen=True)
class Sizes:
    trainer: TrainerConfig
    model: Mapping[str, Any]  # `[megatron]` settings of the family
    hf: Mapping[str, Any]
    symbols: Mapping[str, Any]  # sizes on a rank, by their names in the closed forms

    @property
    def num_chunks(self) -> int:
        return self.trainer.virtual_pipeline_parallel_size or 1

    def layers_of(self, stage: int, chunk: int) -> list[bool]:
        """For each layer of a model chunk: does it have experts?"""
        t = self.trainer
        ends = (t.first_stage_layers, t.last_stage_layers)
        inner = t.pipeline_parallel_size - sum(given is not None for given in ends)
        left = self.model["num_layers"] - sum(given or 0 for given in ends)
        sizes = [left // max(inner, 1)] * t.pipeline_parallel_size
        sizes[0], sizes[-1] = ends[0] or sizes[0], ends[1] or sizes[-1]
        start = (chunk * sum(sizes) + sum(sizes[:stage])) // self.num_chunks
        pattern = self.hf["moe_layers"] or [0] * self.model["num_layers"]
        return [bool(x) for x in pattern[start : start + sizes[stage] // self.num_chunks]]


def sizes_of(hf: Mapping[str, Any], vocab_size: int, trainer: TrainerConfig) -> Sizes:
    """From a config.json (or a preset's `[hf]` table) and a layout that obeys the rules."""
    fields = {**model_fields(hf), "vocab_size": vocab_size}
    model = megatron_settings(family_of(hf["model_type"]), fields)
    attention = "latent" if model.get("multi_latent_attention") else "grouped_query"
    known = {
        **model,
        "vocabulary": vocab_size,
        "tp": trainer.tensor_parallel_size,
        "etp": trainer.etp,
        "element": ELEMENT_BYTES[trainer.precision],
    }
    for name, form in {**FORMS["sizes"]["any"], **FORMS["sizes"][attention]}.items():
        whole, _, divisor = form.partition(" / ")
        total = sum(product(part, known) for part in whole.split(" + "))
        known[name] = -(-total // known.get(divisor, 1))
    known["q_input"] = known.get("q_rank") or known["hidden"]
    return Sizes(trainer, model, fields, known)


def product(form: str, known: Mapping[str, Any]) -> int:
    """`"2 width hidden"` in numbers; 0 with what a model does not have."""
    return math.prod(int(x) if x.isdigit() else known.get(x) or 0 for x in form.split())


def weights_of_chunk(s: Sizes, stage: int, chunk: int) -> list[Weight]:
    """The parameters of one model chunk of a rank of pipeline stage `stage`, in order."""

    def of(part: str, kind: str = "") -> list[Weight]:
        numels = [product(form, s.symbols) for form in FORMS["weights"][part]]
        return [Weight(numel, kind) for numel in numels if numel]

    pp = s.trainer.pipeline_parallel_size
    tied = s.hf["tie_word_embeddings"]
    is_first = stage == chunk == 0
    is_last = (stage, chunk) == (pp - 1, s.num_chunks - 1)
    table = Weight(
        s.symbols["vocabulary"] * s.symbols["hidden"], "shared" if tied and pp > 1 else ""
    )
    experts = s.symbols["experts"] // s.trainer.expert_parallel_size
    attention = of("latent" if "latent" in s.symbols else "grouped_query")
    mlp = {
        False: of("mlp"),
        True: of("router", "router") + of("expert", "expert") * experts + of("shared"),
    }
    weights = [table] if is_first else []
    for is_moe in s.layers_of(stage, chunk):
        weights += [*of("norm"), *attention, *of("norm"), *mlp[is_moe]]
    if is_last:
        weights += of("norm") + ([] if is_first and tied else [table])
    return weights
