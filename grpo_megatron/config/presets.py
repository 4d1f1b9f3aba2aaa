"""Model presets: `models/<name>.toml`."""

from dataclasses import dataclass, field
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.config.toml_file import TomlFile, read_toml
from grpo_megatron.errors import ConfigError

_TABLES = ("name", "hf", "hf_null", "tokenizer", "defaults", "checkpoint", "layouts")


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model that a recipe can name: `models/<name>.toml`."""

    name: str
    file: TomlFile
    hf: dict[str, Any]  # becomes `config.json` of the model
    tokenizer: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)  # below the recipe's, in its shape
    checkpoint: dict[str, Any] = field(default_factory=dict)  # where and how a model is released
    layouts: list[dict[str, Any]] = field(default_factory=list)  # recommended, with their GPUs


def preset_names() -> list[str]:
    """Return names of all shipped model presets."""
    return assets.names(assets.root() / "models")


def load_preset(name: str) -> ModelPreset:
    """ConfigError where there is none, or it is no preset."""
    folder = assets.root() / "models"
    known = preset_names()
    if name not in known:
        raise ConfigError(
            f"no model preset is called {name!r}",
            where=str(folder),
            remedy=did_you_mean(name, known),
        )
    document = read_toml(folder / f"{name}.toml")
    wrong = [key for key in document.values if key not in _TABLES]
    if wrong or not isinstance(document.values.get("hf"), dict):
        what = "no [hf] table"
        if wrong:
            what = f"unknown key {wrong[0]}"
        raise ConfigError(
            f"{what} in a model preset",
            where=document.where(tuple(wrong[:1])),
            remedy="a model preset has the keys " + ", ".join(_TABLES),
        )
    values = {**document.values, "name": name, "file": document}
    values["hf"] = values["hf"] | dict.fromkeys(values.pop("hf_null", ()))
    return ModelPreset(**values)
