"""Whether checkpoints that a run begins with have what it reads of them."""

from pathlib import Path

from grpo_megatron.checkpoints.retention import is_torch_dist
from grpo_megatron.checkpoints.weight_files import named_files
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import CheckpointError


def refuse_incomplete_models(config: RunConfig, *, has_checkpoint: bool = False) -> None:
    """DataError where the policy's checkpoint directory has no tokenizer with an end token,
    CheckpointError where one lacks weights, as the trainer would tell it. Directories that are not
    there are left to `refuse_missing`, what is in the files to the trainer; so is a checkpoint of
    Megatron's, which serves as well.

    has_checkpoint: the run goes on after one of its own, which has the weights."""
    paths = config.paths_of_other_models
    model = config.model.path
    if model is not None:
        paths = {"model.path": model, **paths}
        if model.is_dir():
            load_tokenizer(model)
    if has_checkpoint:
        return
    for key, path in paths.items():
        if path.is_dir() and not is_torch_dist(path):
            _refuse_without_weights(key, path)


def _refuse_without_weights(key: str, directory: Path) -> None:
    files = named_files(directory)
    missing = [name for name in files if not (directory / name).exists()]
    if not missing:
        return
    problem = f"{missing[0]} is missing"
    if len(missing) > 1:
        problem = f"{len(missing)} of {len(files)} files of weights are missing, {missing[0]} first"
    raise CheckpointError(
        f"{key}: {problem}",
        where=str(directory.absolute()),
        remedy="download or copy the whole checkpoint, in safetensors format",
    )
