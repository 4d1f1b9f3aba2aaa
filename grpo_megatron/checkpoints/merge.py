"""A weighted mean of Hugging Face checkpoints of one model, tensor by tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.checkpoints import durable
from grpo_megatron.checkpoints.casts import cast
from grpo_megatron.checkpoints.hf_export import HFTarget
from grpo_megatron.checkpoints.hf_import import (
    LANGUAGE_HEAD,
    HFReader,
    Shape,
    refuse_unfit,
    refuse_untied_head,
)
from grpo_megatron.checkpoints.recorded_digests import RecordedDigests
from grpo_megatron.checkpoints.shard_files import (
    DEFAULT_SHARD_BYTES,
    NamedTensors,
    refuse_misread,
)
from grpo_megatron.checkpoints.stacked_experts import stacks_in
from grpo_megatron.data.tokenizer import token_with_another_id
from grpo_megatron.errors import CheckpointError, ConfigError
from grpo_megatron.files import empty_directory
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.plan.family import family_names, family_of, tables_of
from grpo_megatron.plan.hf_config import model_fields, other_computation, other_field
from grpo_megatron.plan.model_facts import (
    IMAGE_FILES,
    config_fields,
    image_processor,
    written_config,
)
from grpo_megatron.plan.reward_labels import RewardHead, labels_of, other_head
from grpo_megatron.weights.parameters import EMBEDDING, names_with_own_dtype
from grpo_megatron.weights.tensor_entry import TensorEntry, dtype_name


def merge_checkpoints(
    weights: Mapping[Path, float],
    directory: Path,
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `sum_i w_i * checkpoint_i / sum_i w_i`, computed in float64, as `dtype` (default, and
    of what chooses experts always: that of the first); config and tokenizer are the first's.

    Raises CheckpointError where tensors differ in name or shape, are no weights or not those of
    their index, where the models compute something else with them or have other tokens, and where
    a number is not finite, or none of the dtype; ConfigError for weights that are no numbers above
    0, and where a config.json is missing or damaged; MismatchError where a tensor is not what was
    written, of a part or of the result."""
    _refuse_no_weights(weights)
    configs = {path: written_config(path) for path in weights}
    readers = {HFReader(path): share for path, share in _shares(weights).items()}
    first = next(iter(readers))
    for reader in readers:
        reader.check_index()
    shapes_of = {reader: reader.shapes() for reader in readers}
    _leave_out_tied_heads(shapes_of)
    shapes = shapes_of[first]
    for reader in readers:
        if reader is not first:
            refuse_unfit(
                reader.directory,
                shapes_of[reader],
                shapes,
                f"the model in {first.directory}",
                "merge models of one shape",
            )
    _refuse_other_models(configs)
    for reader in readers:
        for name in shapes:
            reader.dtype(name)  # refuses what is no weight
    entries = _entries(first, shapes, dtype)
    working = empty_directory(durable.working_directory(directory))
    units = [[entry] for entry in entries]
    target = HFTarget(working, units, shard_bytes, stacks_in(first.directory))
    digests = {reader: RecordedDigests(reader.directory) for reader in readers}
    for file in target.files:
        target.write(file, _means(readers, digests, file.entries, str(directory)))
    target.wait()
    target.finish(first.directory, dtype)
    bad: list[str] = []
    for file in target.files:
        bad += target.read_back(file)
    refuse_misread(bad, directory)
    durable.commit(working, directory)


def _refuse_no_weights(weights: Mapping[Path, float]) -> None:
    """Raise ConfigError where there is nothing to merge, or a weight is no number above 0."""
    if not weights:
        raise ConfigError("a merge of no checkpoints", remedy="name one or several")
    for path, weight in weights.items():
        is_weight = math.isfinite(weight) and weight > 0
        if not is_weight:
            raise ConfigError(
                f"a checkpoint cannot weigh {weight}",
                where=str(path),
                remedy="give finite numbers above 0, of which only the shares of their sum count",
            )


def _leave_out_tied_heads(shapes_of: Mapping[HFReader, dict[str, Shape]]) -> None:
    """Take the output layer from the tensors of all parts where all have tied embeddings and some
    say them twice, others once. Raises CheckpointError for one that is another matrix."""
    having = [reader for reader, shapes in shapes_of.items() if LANGUAGE_HEAD in shapes]
    if len(having) in (0, len(shapes_of)):
        return
    names = {reader: _embeddings_of_tied(reader.directory) for reader in shapes_of}
    for reader, shapes in shapes_of.items():
        if names[reader] not in shapes:
            return  # not tied, or not known to be: told as a difference of tensors
    for reader in having:
        shapes = shapes_of[reader]
        refuse_untied_head(reader, names[reader], shapes[names[reader]])
        del shapes[LANGUAGE_HEAD]


def _embeddings_of_tied(directory: Path) -> str:
    """Return the name of the embeddings that a checkpoint's config.json says are its output layer
    too; empty where it says so of none, or is of a family that is not known."""
    hf = config_fields(directory)
    is_tied = bool(hf.get(_TIED)) and not labels_of(hf)
    if not is_tied or not _is_of_family(hf):
        return ""
    return family_of(hf["model_type"]).model[EMBEDDING]


def _shares(weights: Mapping[Path, float]) -> dict[Path, float]:
    """Return the weights divided by their sum, which may itself be beyond the largest number."""
    largest = max(weights.values())
    scaled = {path: weight / largest for path, weight in weights.items()}
    total = sum(scaled.values())
    return {path: weight / total for path, weight in scaled.items()}


def _refuse_other_models(configs: Mapping[Path, dict[str, Any]]) -> None:
    """Raise CheckpointError for the first part that computes something else than the first one, by
    its config.json, or has other tokens. configs: by directory."""
    first, *others = configs
    for path in others:
        problem = ""
        say_more = _prepares_images(path) and _prepares_images(first)
        is_compared_further = say_more and _is_of_family(configs[path])
        if is_compared_further or configs[path] != configs[first]:
            problem = _difference(path, first)
        if problem:
            raise CheckpointError(
                problem,
                where=str(path / "config.json"),
                remedy="merge models that descend from one",
            )
        token = token_with_another_id(path, first)
        if token is not None:
            text, their_id, first_id = token
            raise CheckpointError(
                f"its tokenizer has the id {their_id} for {text!r}, that of the model in {first} "
                f"{first_id}",
                where=str(path / "tokenizer.json"),
                remedy="merge models that descend from one",
            )


def _prepares_images(directory: Path) -> bool:
    """Whether a checkpoint says, beside its config.json, how images become patches."""
    return any((directory / name).exists() for name in IMAGE_FILES)


def _read_beside(directory: Path, other: Path) -> dict[str, Any]:
    """Return the config.json of a part as `read_config`, but that one which was saved without its
    processor sees as the other part does; without `image_processor` where neither has it."""
    fields = config_fields(directory)
    if "vision_config" not in fields:
        return fields
    for source in (directory, other):
        if _prepares_images(source):
            return fields | {"image_processor": image_processor(source)}
    return fields


def _difference(path: Path, first: Path) -> str:
    """Return in what the model in `path` computes something else than that in `first`, by their
    config.json; empty: in nothing."""
    theirs = _read_beside(path, first)
    ours = _read_beside(first, path)
    owner = f"the model in {first}"
    our_head = RewardHead.of_config(ours)
    problem = other_head(RewardHead.of_config(theirs), our_head, owner)
    if problem:
        return problem
    if not _is_trained(theirs) or not _is_trained(ours):
        return other_field(theirs, ours, owner)
    problem = other_computation(theirs, ours, owner) or _other_images(theirs, ours, owner)
    their_tie = bool(theirs.get(_TIED))
    our_tie = bool(ours.get(_TIED))
    has_output_layer = not our_head.labels
    if not problem and has_output_layer and their_tie != our_tie:
        problem = f"{_TIED} of its config.json is {their_tie}, of {owner} {our_tie}"
    return problem


_TIED = "tie_word_embeddings"
_LIMITS = ("least_pixels", "most_pixels")
"""Of images: how large they are shown, not what a model makes of their patches."""


def _other_images(theirs: Mapping[str, Any], ours: Mapping[str, Any], owner: str) -> str:
    """Return the first in which images become other patches for `theirs` than for `ours`, two
    models with equal towers; empty: in nothing, or neither of them sees."""
    if "vision_config" not in ours:
        return ""
    our_settings = asdict(ImageSettings.of_model(ours))
    for name, found in asdict(ImageSettings.of_model(theirs)).items():
        wanted = our_settings[name]
        if name not in _LIMITS and found != wanted:
            return f"{name} of its images is {found}, of {owner} {wanted}"
    return ""


def _is_trained(hf: Mapping[str, Any]) -> bool:
    """Whether the trainer knows what all fields of a config.json mean, and computes them."""
    if not _is_of_family(hf):
        return False
    try:
        model_fields(hf)
    except ConfigError:
        return False
    return True


def _is_of_family(hf: Mapping[str, Any]) -> bool:
    """Whether the trainer knows the tensors of a model."""
    model_type = hf.get("model_type")
    return model_type in family_names() and not tables_of(model_type).get("lacks")


def _entries(
    first: HFReader, shapes: Mapping[str, tuple[int, ...]], dtype: str | None
) -> list[TensorEntry]:
    """Plan the tensors of the result, in the first part's dtypes or in `dtype`."""
    keep_own: set[str] = set()
    if dtype is not None:
        keep_own = _names_with_own_dtype(first.directory, list(shapes))
    entries = []
    for name, shape in shapes.items():
        kind = dtype_name(first.dtype(name))
        if dtype is not None and name not in keep_own:
            kind = dtype
        entries.append(TensorEntry(name, kind, shape))
    return entries


def _names_with_own_dtype(directory: Path, names: Sequence[str]) -> set[str]:
    """Return the tensors that a wanted dtype is not for; none of a family that is not known."""
    hf = config_fields(directory)
    if not _is_of_family(hf):
        return set()
    return names_with_own_dtype(hf, names)


def _means(
    readers: Mapping[HFReader, float],
    digests: Mapping[HFReader, RecordedDigests],
    entries: Sequence[TensorEntry],
    where: str,
) -> NamedTensors:
    """Yield names and weighted means of the tensors `entries`; weights sum to 1. where: what
    messages call the result. Raises CheckpointError for numbers that are not finite, MismatchError
    for a tensor that has another digest than was recorded."""
    for entry in entries:
        total = torch.zeros(entry.shape, dtype=torch.float64)
        for reader, weight in readers.items():
            part = reader.tensor(entry.name)
            _refuse_not_finite(entry.name, part, reader.directory)
            digests[reader].check(entry.name, part)
            total += weight * part.double()
        yield entry.name, cast(entry.name, total, entry.torch_dtype, where)


def _refuse_not_finite(name: str, tensor: torch.Tensor, directory: Path) -> None:
    num_wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
    if num_wrong:
        raise CheckpointError(
            f"{num_wrong} numbers of {name} are not finite",
            where=str(directory),
            remedy="take an earlier checkpoint of this model, whose numbers are finite",
        )
