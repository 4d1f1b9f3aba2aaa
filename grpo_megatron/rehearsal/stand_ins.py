"""What takes the place of inputs that a cluster has and this machine has not."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.rehearsal.made_up_rows import missing_files, write_rows
from grpo_megatron.rehearsal.scale_down import StandIns
from grpo_megatron.rehearsal.tiny_family import tiny_config, write_tiny_checkpoint

_SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Families whose code transformers does not carry, and the one that computes the same."""


@dataclass
class StandInWriter:
    """Writes tiny models and made-up rows below `folder`, each once."""

    folder: Path
    server: str
    """Address of the local server."""
    num_layers: int
    """Of every tiny model."""
    special_tokens: Sequence[str]
    """What the templates write beside text; one token each."""
    given_model: Path | None = None
    """A checkpoint that is used instead of a tiny model."""

    def __post_init__(self) -> None:
        self._models: dict[str, Path] = {}
        self._rows: dict[str, Path] = {}

    def write(self, config: RunConfig, root: RunConfig) -> StandIns:
        """Stand-ins for one run; its model is that of `root`, from which it descends."""
        model = self.given_model or self._model(root, other=False)
        other_model = model
        if config.distillation is not None or any(domain.reference for domain in config.domains):
            other_model = self._model(root, other=True)
        data = {number: self._data(config, number) for number in missing_files(config)}
        return StandIns(
            model.absolute(),
            other_model.absolute(),
            data,
            self.server,
            model_is_given=self.given_model is not None,
        )

    def _model(self, config: RunConfig, *, other: bool) -> Path:
        """A random checkpoint of the configured architecture; `other`: with another seed."""
        hf, _ = configuration_of(config.model)
        key = json.dumps([hf, other], sort_keys=True)
        if key in self._models:
            return self._models[key]
        seed = config.seed
        name = "model"
        if other:
            seed += 1
            name = "other-model"
        if len(self._models) > 1:
            name += f"-{len(self._models)}"
        directory = self.folder / name
        tiny = tiny_config(hf, self.num_layers)
        same_code = _SAME_CODE.get(tiny["model_type"])
        write_tiny_checkpoint(directory, tiny, self.special_tokens, seed, same_code_as=same_code)
        self._models[key] = directory
        return directory

    def _data(self, config: RunConfig, number: int) -> Path:
        """Rows for the file of a domain; equal domains of other stages read the same ones."""
        domain = config.domains[number]
        assert domain.path is not None
        key = json.dumps([domain.model_dump(mode="json", exclude={"weight"}), config.uses_dataset])
        if key not in self._rows:
            suffix = domain.path.suffix or ".jsonl"
            path = self.folder / f"{len(self._rows)}-{domain.name}{suffix}"
            write_rows(path, config, number)
            self._rows[key] = path.absolute()
        return self._rows[key]
