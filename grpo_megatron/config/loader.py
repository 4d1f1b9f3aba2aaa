"""Recipes to resolved configurations (defaults < recipes < flags), and their `config.json`."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

import grpo_megatron
from grpo_megatron import assets
from grpo_megatron.config.base import Strict
from grpo_megatron.config.keys import KeyPath, dotted, leaves
from grpo_megatron.config.objective import PRESETS, DomainObjective, ObjectiveConfig
from grpo_megatron.config.overlay import DEFAULT, ConfigOverlay, Origin, apply_overrides
from grpo_megatron.config.presets import ModelPreset, load_preset, preset_names
from grpo_megatron.config.problems import ConfigProblem
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.toml_file import TomlFile, find_recipe, read_recipe_chain
from grpo_megatron.config.validation import Check, valid
from grpo_megatron.errors import ConfigError, raised_as
from grpo_megatron.files import write_atomically


class ResolvedConfig(Strict):
    """A valid configuration and where each of its values comes from."""

    format: Literal[1] = 1  # of the file
    version: str = Field(grpo_megatron.__version__, alias="grpo_megatron")  # which wrote it
    recipe: str  # it was made from, as messages show it
    config: RunConfig
    provenance: dict[str, Origin]  # of every leaf, by dotted key

    @property
    def run_path(self) -> Path:
        """The run's directory."""
        return self.config.runs_dir / self.config.name


def to_json(resolved: ResolvedConfig) -> str:
    """Return the text of `config.json`: stable key order, exact numbers."""
    return resolved.model_dump_json(indent=2, by_alias=True) + "\n"


def write_resolved(path: Path, resolved: ResolvedConfig) -> None:
    """Write `config.json`, whole or not at all."""
    write_atomically(path, to_json(resolved))


def load_recipe(
    recipe: str | Path, overrides: Sequence[str] = (), *, checks: Sequence[Check] = ()
) -> ResolvedConfig:
    """Read a recipe (TOML file, or name below `recipes/`), apply `overrides` (`cold_start=null`),
    validate, also by `checks`. InvalidConfigError with everything that is wrong (`problems`)."""
    chain = read_recipe_chain(find_recipe(recipe))
    overlay, _ = _assemble(None, chain, overrides)
    overlay, problems = _assemble(_preset_of(overlay.tree), chain, overrides)
    display = chain[-1].display
    source = _with_settings(display, overrides)
    return _finish(overlay, problems, checks, source=source, recipe=display)


def read_resolved(
    path: Path, overrides: Sequence[str] = (), *, checks: Sequence[Check] = ()
) -> ResolvedConfig:
    """Read a run's `config.json` (or its directory), with more overrides on top. ConfigError where
    it is missing, damaged, or of another version's schema; or as `load_recipe`."""
    file = path
    if path.is_dir():
        file = path / "config.json"
    where = assets.display(file)
    with raised_as(
        ConfigError,
        "cannot read the run's configuration",
        (OSError, ValueError),
        where=where,
        remedy="give the directory of a run, for example runs/demo",
    ):
        text = file.read_text(encoding="utf-8")
    try:
        resolved = ResolvedConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        if is_of_model(text):
            raise ConfigError(
                "it configures a model, not a run",
                where=where,
                remedy="give the directory of a run, or a recipe, whose `model.path` may be this "
                "checkpoint",
            ) from None
        first = error.errors(include_url=False)[0]
        problem = first["msg"]
        if first["loc"]:  # of a value; else of the whole text
            problem = f"{dotted(first['loc'])}: {problem}"
        what = f"the run's configuration is damaged: {problem}"
        raise ConfigError(
            what,
            where=where,
            remedy="use the version of grpo-megatron that wrote "
            "it, or start the run again from its recipe",
        ) from None
    if not overrides:
        return resolved
    tree = resolved.config.model_dump(mode="json")
    tree["objective"] = _set_by_hand(resolved, tree["objective"])
    origins: dict[KeyPath, Origin] = {}
    for key, _ in leaves(tree):
        origins[key] = resolved.provenance.get(dotted(key), DEFAULT)
    overlay = ConfigOverlay(tree, origins)
    problems = apply_overrides(overlay, overrides)
    source = _with_settings(where, overrides)
    return _finish(overlay, problems, checks, source=source, recipe=resolved.recipe)


def is_of_model(text: str | bytes) -> bool:
    """Whether a config.json is that of a checkpoint in Hugging Face's format."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "architectures" in content


def _set_by_hand(resolved: ResolvedConfig, objective: dict[str, Any]) -> dict[str, Any]:
    """`[objective]` without what its preset or a default had set: another preset replaces that."""
    kept = {}
    for key, value in objective.items():
        # the run may be of a version that did not have this setting
        origin = resolved.provenance.get(f"objective.{key}", DEFAULT)
        if origin.kind not in ("default", "preset"):
            kept[key] = value
    return kept


def load_objective(
    preset: str,
    overrides: Sequence[str] = (),
    domains: Sequence[str] = ("all",),
) -> tuple[ObjectiveConfig, dict[str, DomainObjective]]:
    """Return choices of a preset with changes (`clip_low=0.1`, `domain.math.kl_beta=0.01`), and
    what each domain sets for itself. Raises as `load_recipe`."""
    tables = []
    for index in range(len(domains)):
        table = {
            "name": f"domain{index}",  # a case may call its domains what no recipe may
            "source": "file",
            "path": "case",
            "objective": {},
            "rewards": [{"function": "case:rewards"}],
        }
        tables.append(table)
    overlay = ConfigOverlay()
    overlay.merge(
        {
            "name": "objective",
            "num_steps": 0,
            "model": {"preset": preset_names()[0]},
            "domains": tables,
            "objective": {"preset": preset},
        },
        lambda path: Origin("flag", preset),
    )
    problems = apply_overrides(overlay, [_full_key(text, domains) for text in overrides])
    config = valid(overlay, problems, (), "objective")
    of_domains = {}
    for name, domain in zip(domains, config.domains, strict=True):
        if domain.objective:
            of_domains[name] = domain.objective
    return config.objective, of_domains


def _full_key(text: str, domains: Sequence[str]) -> str:
    """Return the override of a recipe that one of `objective eval` stands for."""
    for index, name in enumerate(domains):
        of_domain = f"domain.{name}."
        if text.startswith(of_domain):
            return f"domains.{index}.objective.{text.removeprefix(of_domain)}"
    if text.startswith("objective."):
        return text
    return f"objective.{text}"


def _assemble(
    preset: ModelPreset | None, chain: Sequence[TomlFile], overrides: Sequence[str]
) -> tuple[ConfigOverlay, list[ConfigProblem]]:
    """Merge all layers, lowest first; returns also what could not be placed."""
    overlay = ConfigOverlay()
    if preset:
        overlay.merge(
            preset.defaults, lambda path: Origin("model", preset.file.where(("defaults", *path)))
        )
    for file in chain:
        overlay.merge(file.values, partial(_origin_in, file))
    return overlay, apply_overrides(overlay, overrides)


def _origin_in(file: TomlFile, path: KeyPath) -> Origin:
    return Origin("recipe", file.where(path))


def _preset_of(tree: dict[str, Any]) -> ModelPreset | None:
    """Return the preset that the tree names; an unknown one is reported by the constraints."""
    model = tree.get("model")
    if not isinstance(model, dict):
        return None
    name = model.get("preset")
    if not isinstance(name, str) or name not in preset_names():
        return None
    return load_preset(name)


def _with_settings(file: str, overrides: Sequence[str]) -> str:
    """Return how messages name a file with what was set beside it."""
    if overrides:
        return f"{file} with the settings given"
    return file


def _finish(
    overlay: ConfigOverlay,
    problems: Sequence[ConfigProblem],
    checks: Sequence[Check],
    *,
    source: str,
    recipe: str,
) -> ResolvedConfig:
    """Validate what is set. source: what is wrong where something is, for messages."""
    config = valid(overlay, problems, checks, source)
    preset = config.objective.preset
    origins: dict[KeyPath, Origin] = {}
    for key in PRESETS[preset].values:
        origins["objective", key] = Origin("preset", f"objective preset {preset}")
    origins |= overlay.origins  # a recipe or a flag wins over the objective's preset
    provenance = {}
    for path, _ in leaves(config.model_dump(mode="json")):
        provenance[dotted(path)] = origins.get(path, DEFAULT)
    return ResolvedConfig(recipe=recipe, config=config, provenance=provenance)
