"""Every weight of a rank, in Megatron's order, as closed forms (`closed_forms.toml`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron import assets
from grpo_megatron.config.lora import LoraConfig, is_target
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import megatron_settings, model_fields
from grpo_megatron.plan.tower import tower_symbols

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FORMS = assets.tables(__file__, "closed_forms.toml")


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a rank."""

    numel: int  # on a rank
    kind: str = ""  # expert, router, tower, or shared: a tied embedding over pipeline stages
    is_trained: bool = True  # has a gradient and optimizer state
    is_matrix: bool = False  # of a layer, for matrix products: engines may keep it in FP8


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model on one trainer rank."""

    trainer: TrainerConfig
    model: Mapping[str, Any]  # `[megatron]` settings of the family
    hf: Mapping[str, Any]
    symbols: Mapping[str, Any]  # sizes on a rank, by their names in the closed forms
    num_scalars: int = 0  # numbers a token instead of the vocabulary's logits; 0: these
    has_value_head: bool = False  # a number a token beside the vocabulary's logits
    lora: LoraConfig | None = None  # adapters are trained, and nothing else

    @property
    def has_reward_head(self) -> bool:
        """Whether a reward model's head, or a critic's, is in the place of the output layer."""
        return self.num_scalars > 0

    @property
    def num_chunks(self) -> int:
        """Model chunks of a pipeline rank."""
        return self.trainer.virtual_pipeline_parallel_size or 1

    @property
    def attention(self) -> str:
        """The name of the attention in the closed forms."""
        if self.model.get("multi_latent_attention"):
            return "latent"
        return "grouped_query"

    @property
    def tower(self) -> str:
        """The name of the vision tower in the closed forms; "" where there is none."""
        return family_of(self.hf["model_type"]).tower

    def layers_of(self, stage: int, chunk: int) -> list[bool]:
        """Return whether each layer of a model chunk has experts."""
        sizes = self._layers_of_stages()
        # chunk 0 of all stages comes first in the model, then chunk 1 of all of them
        start = (chunk * sum(sizes) + sum(sizes[:stage])) // self.num_chunks
        end = start + sizes[stage] // self.num_chunks
        pattern = self.hf["moe_layers"] or [0] * self.model["num_layers"]
        return [bool(has_experts) for has_experts in pattern[start:end]]

    def layers_of_stage(self, stage: int) -> list[bool]:
        """Return whether each layer of a stage, over all its model chunks, has experts."""
        layers = []
        for chunk in range(self.num_chunks):
            layers += self.layers_of(stage, chunk)
        return layers

    def first_stages(self) -> list[int]:
        """Return the first pipeline stage of every kind, ascending. Stages are of a kind that have
        the same layers and the same end of the model; of a kind the first one holds the activations
        of the most micro-batches."""
        last = self.trainer.pipeline_parallel_size - 1
        found: dict[object, int] = {}
        for stage in range(last + 1):
            layers = tuple(tuple(self.layers_of(stage, chunk)) for chunk in range(self.num_chunks))
            kind = (layers, stage == 0, stage == last)
            found.setdefault(kind, stage)
        return list(found.values())

    def _layers_of_stages(self) -> list[int]:
        """Return the number of layers of each pipeline stage, over all of its chunks."""
        t = self.trainer
        num_inner = t.pipeline_parallel_size
        num_left = self.model["num_layers"]
        for given in (t.first_stage_layers, t.last_stage_layers):
            if given is not None:
                num_inner -= 1
                num_left -= given
        sizes = [num_left // max(num_inner, 1)] * t.pipeline_parallel_size
        if t.first_stage_layers:
            sizes[0] = t.first_stage_layers
        if t.last_stage_layers:
            sizes[-1] = t.last_stage_layers
        return sizes


def sizes_of(
    hf: Mapping[str, Any],
    vocab_size: int,
    trainer: TrainerConfig,
    lora: LoraConfig | None = None,
    *,
    num_scalars: int = 0,
    has_value_head: bool = False,
) -> Sizes:
    """Return sizes from a config.json (or a preset's `[hf]` table) and a layout that obeys the
    rules.

    lora: of a run that trains adapters; num_scalars: of one whose model answers with so many
    scalars a token; has_value_head: of one whose policy has a value head."""
    fields = {**model_fields(hf), "vocab_size": vocab_size}
    model = megatron_settings(family_of(hf["model_type"]), fields)
    known = {
        **model,
        "vocabulary": vocab_size,
        "tp": trainer.tensor_parallel_size,
        "etp": trainer.etp,
        "element": ELEMENT_BYTES[trainer.precision],
        "trained": lora is None,  # the weights
        **tower_symbols(fields),
    }
    attention = Sizes(trainer, model, fields, known).attention
    forms = FORMS["sizes"]["any"] | FORMS["sizes"][attention]
    for name, form in forms.items():
        whole, _, divisor = form.partition(" / ")
        total = sum(product(part, known) for part in whole.split(" + "))
        known[name] = -(-total // known.get(divisor, 1))
    known["q_input"] = known.get("q_rank") or known["hidden"]
    fields["model_type"] = hf["model_type"]
    return Sizes(
        trainer,
        model,
        fields,
        known,
        num_scalars=num_scalars,
        has_value_head=has_value_head,
        lora=lora,
    )


def is_matrix(form: str) -> bool:
    """Say whether a form has two sizes: a matrix, not a vector."""
    return len([factor for factor in form.split() if not factor.isdigit()]) > 1


def product(form: str, known: Mapping[str, Any]) -> int:
    """`"2 width hidden"` in numbers; 0 with what a model does not have."""
    result = 1
    for factor in form.split():
        result *= _factor(factor, known)
    return result


def _factor(word: str, known: Mapping[str, Any]) -> int:
    """Return a factor of a form: a number as it stands, or a size by its name."""
    if word.isdigit():
        return int(word)
    size: int | None = known.get(word)
    if size is None:
        return 0
    return size


def weights_of_chunk(s: Sizes, stage: int, chunk: int) -> list[Weight]:
    """Return the parameters of one model chunk of a rank of pipeline stage `stage`, in order."""
    last_stage = s.trainer.pipeline_parallel_size - 1
    last_chunk = s.num_chunks - 1
    is_first = stage == 0 and chunk == 0
    is_last = stage == last_stage and chunk == last_chunk
    attention = _attention_weights(s)
    moe = _moe_weights(s)
    mlp = _weights_of_part(s, "mlp")
    weights: list[Weight] = []
    if is_first:
        weights.append(_vocabulary_table(s))
    for has_experts in s.layers_of(stage, chunk):
        weights += attention
        if has_experts:
            weights += moe
        else:
            weights += mlp
    if is_last:
        weights += _weights_of_part(s, "norm")
        weights += _output_weights(s, has_embedding=is_first)
    if is_first:
        weights += _weights_of_tower(s)
    if is_last and s.has_value_head:
        weights.append(Weight(s.symbols["hidden"]))
    return weights


def _attention_weights(s: Sizes) -> list[Weight]:
    """The attention of a layer, and the norms before and after it."""
    norm = _weights_of_part(s, "norm")
    return [*norm, *_weights_of_part(s, s.attention), *norm]


def _moe_weights(s: Sizes) -> list[Weight]:
    """The router, this rank's experts and the shared expert of a layer with experts."""
    num_experts = s.symbols["experts"] // s.trainer.expert_parallel_size
    weights = _weights_of_part(s, "router", "router")
    expert = _weights_of_part(s, "expert", "expert")
    for _ in range(num_experts):
        weights += expert
    if _experts_share_adapters(s):
        for adapter in adapters_of_part(s, "expert"):
            weights += adapter.weights("")
    return weights + _weights_of_part(s, "shared")


def _experts_share_adapters(s: Sizes) -> bool:
    """Whether all experts of a layer have the same adapters."""
    return s.lora is not None and s.lora.experts == "shared"


def _is_tied(s: Sizes) -> bool:
    """Whether the embedding is the output layer as well."""
    return s.hf["tie_word_embeddings"] and not s.has_reward_head


def _vocabulary_table(s: Sizes) -> Weight:
    """The embedding, or an output layer of its own."""
    kind = ""
    if _is_tied(s) and s.trainer.pipeline_parallel_size > 1:
        kind = "shared"
    num_elements = s.symbols["vocabulary"] * s.symbols["hidden"]
    return Weight(num_elements, kind, is_trained=s.lora is None)


def _output_weights(s: Sizes, *, has_embedding: bool) -> list[Weight]:
    """What makes logits, or a reward, of the last hidden states; nothing where that is the
    embedding and the chunk has it."""
    if s.has_reward_head:
        return [Weight(s.num_scalars * s.symbols["hidden"])]  # not split: every TP rank has it
    if has_embedding and _is_tied(s):
        return []
    return [_vocabulary_table(s)]


def _weights_of_tower(s: Sizes) -> list[Weight]:
    """The weights of a vision tower, in transformers' order; none of a model without one."""
    if not s.tower:
        return []
    forms = FORMS["tower"][s.tower]["weights"]
    in_order = [*forms["patches"]]
    in_order += forms["block"] * s.symbols["tower_blocks"]
    in_order += forms["merger"]
    in_order += forms.get("deep_merger", []) * s.symbols["deep_levels"]
    trained = s.trainer.vision_tower == "trained" and s.lora is None
    weights = []
    for form in in_order:
        numel = product(form, s.symbols)
        if numel:
            weights.append(Weight(numel, "tower", is_trained=trained))
    return weights


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """The adapter of one of Hugging Face's layers, on a rank."""

    layer: str  # Megatron's name of the layer, in a layer of the model
    after: int  # so many of the part's weights
    split: Literal["rows", "columns", "none"]  # of the layer, over tensor ranks
    rank: int
    num_inputs: int
    num_outputs: int
    has_magnitude: bool = False  # of DoRA

    @property
    def num_magnitudes(self) -> int:
        """Elements of the magnitude."""
        return self.num_outputs * self.has_magnitude

    def num_whole(self, *, is_split: bool) -> int:
        """Return elements of A, B and the magnitude that every tensor rank has.

        is_split: several ranks share the layer."""
        of_a = self.rank * self.num_inputs
        of_b = self.rank * self.num_outputs + self.num_magnitudes
        if is_split and self.split == "rows":
            return of_a
        if is_split and self.split == "columns":
            return of_b
        return of_a + of_b

    def weights(self, kind: str) -> list[Weight]:
        """Return A, B and, with DoRA, the magnitude."""
        found = [
            Weight(self.rank * self.num_inputs, kind),
            Weight(self.num_outputs * self.rank, kind),
        ]
        if self.has_magnitude:
            found.append(Weight(self.num_magnitudes, kind))
        return found


def adapters_of_part(s: Sizes, part: str) -> list[PlannedAdapter]:
    """Return the adapters of a layer's part, as `closed_forms.toml` names it, in Megatron's
    order."""
    if s.lora is None:
        return []
    names = family_of(s.hf["model_type"]).layer
    found = []
    for form in FORMS["adapters"].get(part, ()):
        without_rank = form["layer"] == "self_attention.linear_q_proj"
        if without_rank and s.symbols.get("q_rank"):
            continue  # its queries have a low rank of their own
        tensors = names.get(f"{form['layer']}.weight", [])
        if isinstance(tensors, str):
            tensors = [tensors]
        for tensor, shape in zip(tensors, form["shapes"], strict=False):
            num_inputs, num_outputs = (product(size, s.symbols) for size in shape.split())
            module = tensor.removesuffix(".weight").replace("{expert}", "0")
            if num_inputs and num_outputs and is_target(module, s.lora.targets):
                split = _split_of(form["layer"])
                found.append(
                    PlannedAdapter(
                        form["layer"],
                        form["after"],
                        split,
                        s.lora.rank,
                        num_inputs,
                        num_outputs,
                        s.lora.dora,
                    )
                )
    return found


def _split_of(layer: str) -> Literal["rows", "columns", "none"]:
    """Return how tensor ranks share a layer of Megatron's."""
    if layer.endswith("_down_proj"):  # to a latent vector
        return "none"
    if layer.endswith(("linear_proj", "linear_fc2")):
        return "columns"
    return "rows"


def _weights_of_part(s: Sizes, part: str, kind: str = "") -> list[Weight]:
    """Return the weights of a layer's part, and the adapters beside them."""
    adapters = adapters_of_part(s, part)
    if part == "expert" and _experts_share_adapters(s):
        adapters = []  # they come after those of all experts
    weights = []
    for number, form in enumerate(FORMS["weights"][part], start=1):
        numel = product(form, s.symbols)
        if numel:
            is_layer_matrix = is_matrix(form) and part != "router"
            weight = Weight(numel, kind, is_trained=s.lora is None, is_matrix=is_layer_matrix)
            weights.append(weight)
        for adapter in adapters:
            if adapter.after == number:
                weights += adapter.weights(kind)
    return weights
