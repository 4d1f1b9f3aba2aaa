"""Model presets: `models/<name>.toml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.config.toml_file import TomlFile, read_toml
from grpo_megatron.errors import ConfigError

_TABLES = ("name", "hf", "hf_null", "tokenizer", "defaults", "checkpoint", "layouts")


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """An architecture, its tokenizer and the settings that suit it."""

    name: str
    file: TomlFile
    hf: dict[str, Any]  # becomes `config.json` of the model
    tokenizer: dict[str, Any]
    defaults: dict[str, Any]  # below the recipe's, in the shape of a recipe
    checkpoint: dict[str, Any]  # of a released model: repository, parameters, stop tokens, template
    layouts: list[dict[str, Any]]  # recommended [trainer] and [rollout], with the GPUs of both

    @property
    def path(self) -> Path:
        return self.file.path


def preset_names() -> list[str]:
    """Names that `model.preset` accepts."""
    return assets.names(assets.models())


def load_preset(name: str) -> ModelPreset:
    """Read `models/<name>.toml`; ConfigError where there is none, or it is no preset."""
    if name not in preset_names():
        raise ConfigError(f"no model preset is called {name!r}", where=str(assets.models()),
                          remedy=did_you_mean(name, preset_names()))
    document = read_toml(assets.models() / f"{name}.toml")
    wrong = [key for key in document.values if key not in _TABLES]
    if wrong or not isinstance(document.values.get("hf"), dict):
        raise ConfigError(
            f"{'unknown key ' + wrong[0] if wrong else 'no [hf] table'} in a model preset",
            where=document.where(tuple(wrong[:1])),
            remedy="a model preset has the keys " + ", ".join(_TABLES))
    values = {"layouts": [], **document.values}
    hf = values["hf"] | dict.fromkeys(values.get("hf_null", ()))
    return ModelPreset(name, document, hf, *(values.get(table, {}) for table in (
        "tokenizer", "defaults", "checkpoint", "layouts")))
