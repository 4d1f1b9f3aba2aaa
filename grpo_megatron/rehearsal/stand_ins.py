"""What takes the place of inputs that a cluster has and this machine has not."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.presets import ModelPreset, load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.plan.model_facts import configuration_of, read_config
from grpo_megatron.rehearsal.made_up_rows import (
    missing_corpora,
    missing_files,
    write_corpus,
    write_rows,
)
from grpo_megatron.rehearsal.scale_down import StandIns, has_served_teachers
from grpo_megatron.rehearsal.teacher_servers import TeacherServers
from grpo_megatron.rehearsal.tiny_family import (
    tiny_config,
    write_tiny_checkpoint,
    write_tiny_relative,
)


@dataclass
class StandInWriter:
    """Writes tiny models and made-up rows below `folder`, each once."""

    folder: Path
    server: str
    """Address of the local server."""
    teachers: TeacherServers
    """Get the models of teachers that the recipe asks at a `url`."""
    num_layers: int
    """Of every tiny model."""
    special_tokens: Sequence[str]
    """What the templates write beside text; one token each."""
    given_model: Path | None = None
    """A checkpoint that is used instead of a tiny model."""
    fills_blocks: bool = False
    """Whether matrices of tiny models divide into blocks of FP8."""

    def __post_init__(self) -> None:
        self._models: dict[str, Path] = {}
        self._rows: dict[str, Path] = {}

    def write(self, config: RunConfig, root: RunConfig) -> StandIns:
        """Stand-ins for one run; its model is that of `root`, from which it descends."""
        model = self.given_model or self._model(root, other=False)
        other_model = model
        has_reference = any(domain.reference for domain in config.domains)
        has_reference = has_reference or config.preferences.reference is not None
        if config.distillation is not None or has_reference:
            other_model = self._model(root, other=True)
        sees_images = "vision_config" in read_config(model)
        data = {}
        for number in missing_files(config):
            data[number] = self._data(config, number, sees_images=sees_images)
        corpora = {number: self._corpus() for number in missing_corpora(config)}
        teacher_server = ""
        if has_served_teachers(config):
            teacher = self._served_teacher(root).absolute()
            teacher_server = self.teachers.url_of(teacher, config.rollout.dtype)
        return StandIns(
            model.absolute(),
            other_model.absolute(),
            data,
            self.server,
            model_is_given=self.given_model is not None,
            teacher_server=teacher_server,
            corpora=corpora,
        )

    def _served_teacher(self, root: RunConfig) -> Path:
        """Return a random checkpoint with other weights than the student, and its tokenizer."""
        student = self.given_model
        if student is None and root.model.path is not None and root.model.path.exists():
            student = root.model.path
        if student is None:
            return self._model(root, other=True)
        key = str(student)
        if key not in self._models:
            directory = self.folder / f"teacher-{len(self._models)}"
            write_tiny_relative(directory, student, self.num_layers, root.seed + 1)
            self._models[key] = directory
        return self._models[key]

    def _model(self, config: RunConfig, *, other: bool) -> Path:
        """Return a random checkpoint of the configured architecture; `other`: with another seed.
        One of ours that sees is tiny as it is, and has the tokens of its data."""
        hf, _ = configuration_of(config.model)
        key = json.dumps([hf, other], sort_keys=True)
        if key in self._models:
            return self._models[key]
        seed = config.seed
        name = "model"
        if other:
            seed += 1
            name = "other-model"
        taken = [path.name for path in self._models.values()]
        if name in taken:
            name += f"-{len(taken)}"
        directory = self.folder / name
        preset = _own_preset(config)
        if "vision_config" in hf and preset is not None:
            write_tiny_model(directory, preset)
            init_weights(directory, seed)
            self._models[key] = directory
            return directory
        tiny = tiny_config(hf, self.num_layers, fills_blocks=self.fills_blocks)
        write_tiny_checkpoint(directory, tiny, self.special_tokens, seed)
        self._models[key] = directory
        return directory

    def _data(self, config: RunConfig, number: int, *, sees_images: bool) -> Path:
        """Return rows for the file of a domain; equal domains of other stages read the same
        ones."""
        domain = config.domains[number]
        assert domain.path is not None
        key = json.dumps(
            [domain.model_dump(mode="json", exclude={"weight"}), config.uses_dataset, config.kind]
        )
        if key not in self._rows:
            suffix = domain.path.suffix or ".jsonl"
            name = re.sub(r"[^\w-]+", "-", domain.name)
            path = self.folder / f"{len(self._rows)}-{name}{suffix}"
            write_rows(path, config, number, sees_images=sees_images)
            self._rows[key] = path.absolute()
        return self._rows[key]

    def _corpus(self) -> Path:
        """Documents for environments that search."""
        path = self.folder / "documents.jsonl"
        if not path.exists():
            write_corpus(path)
        return path.absolute()


def _own_preset(config: RunConfig) -> ModelPreset | None:
    """The preset of a model that is made at random; None of a released one."""
    if config.model.path is not None or config.model.preset is None:
        return None
    preset = load_preset(config.model.preset)
    if preset.checkpoint:
        return None
    return preset
