"""The stage graph: one TOML file that names recipes and what each takes from other stages, as
docs/stages.md shows it. Rejection sampling gives a data set, every other stage that trains a
checkpoint, and with [lora] adapters beside it."""

import graphlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from grpo_megatron.checkpoints.weight_files import has_whole_weights, is_whole
from grpo_megatron.config.base import Strict
from grpo_megatron.config.gates import evaluated_domains, parse_gate
from grpo_megatron.config.loader import ResolvedConfig, load_recipe
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RUN_NAME, ModelConfig, RunConfig
from grpo_megatron.config.toml_file import TomlFile, find_recipe
from grpo_megatron.errors import ConfigError, GrpoMegatronError
from grpo_megatron.plan.critic_model import why_no_value, why_not_a_critic
from grpo_megatron.plan.lora import why_not_adapters
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf
from grpo_megatron.plan.models_beside import why_not_beside
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.reward_labels import (
    RewardHead,
    needs_language_model,
    other_head,
    other_scalars,
)
from grpo_megatron.rundir import RunDir

ADAPTERS_KEY = "lora.path"
CRITIC_KEY = "critic.path"
_DATA_KEY = re.compile(r"domains\.\d+\.path")
Weight = Annotated[float, Field(gt=0, strict=True)]
"""Of a part of a merge: a number, and nothing that could be read as one."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stage takes something from: `STAGE`, or `STAGE/DOMAIN` where the domains of a stage
    have adapters of their own, and so a checkpoint each."""

    stage: str
    domain: str = ""

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Read `STAGE` or `STAGE/DOMAIN`."""
        stage, _, domain = text.partition("/")
        return cls(stage, domain)


class Stage(Strict):
    """One table of `[stages]`: a recipe with what it takes from other stages, a merge of their
    checkpoints, or an export of one (docs/stages.md). What is taken is told as of `Source`."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    inputs: dict[str, str] = {}
    gates: tuple[str, ...] = ()
    merge: dict[str, Weight] = {}
    export: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @property
    def parts(self) -> dict[str, float]:
        """What is averaged, with its weight; empty for a recipe."""
        if self.export:
            return {self.export: 1.0}
        return self.merge

    @property
    def sources(self) -> list[str]:
        """Stages that it is made from."""
        texts = [*self.inputs.values(), *self.parts]
        return list(dict.fromkeys(Source.parse(text).stage for text in texts))

    @property
    def parents(self) -> list[str]:
        """Stages that it waits for: its sources and those that its gates compare it with."""
        parents = self.sources
        for text in self.gates:
            gate = parse_gate(text)
            if gate.against and str(gate.against) not in parents:
                parents.append(str(gate.against))
        return parents


class GraphFile(Strict):
    """The whole file. `settings` are overrides of every recipe in it."""

    name: str = Field(pattern=RUN_NAME)
    runs_dir: Path = Path("runs")
    settings: tuple[str, ...] = ()
    stages: dict[str, Stage] = Field(min_length=1)


@dataclass(frozen=True)
class Graph:
    """A valid graph; its stages are run directories below `root`."""

    file: TomlFile
    table: GraphFile

    @property
    def root(self) -> Path:
        """Directory of the graph, with a run directory for each stage."""
        return self.table.runs_dir / self.table.name

    @cached_property
    def order(self) -> list[str]:
        """Every stage after those that it builds on; ConfigError where two wait for each other."""
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        for name, stage in self.table.stages.items():
            sorter.add(name, *stage.parents)
        try:
            return list(sorter.static_order())
        except graphlib.CycleError as error:
            raise ConfigError(
                "stages wait for each other: " + " <- ".join(error.args[1]),
                where=self.file.display,
                remedy="take one of these inputs away",
            ) from None

    def levels(self) -> list[list[str]]:
        """Return stages that may run at the same time, level by level."""
        levels: list[list[str]] = []
        level_of: dict[str, int] = {}
        for name in self.order:
            after = [level_of[parent] for parent in self.table.stages[name].parents]
            level_of[name] = max(after, default=-1) + 1
            if level_of[name] == len(levels):
                levels.append([])
            levels[level_of[name]].append(name)
        return levels

    def run_dir(self, name: str) -> RunDir:
        """Return where a stage runs."""
        return RunDir(self.root / name)

    @cached_property
    def _configs(self) -> dict[str, RunConfig]:
        return {}

    def _config(self, name: str) -> RunConfig:
        if name not in self._configs:
            recipe = self._recipe(self.table.stages[name])
            with self.errors_of(name):
                self._configs[name] = load_recipe(recipe, self._overrides(name)).config
        return self._configs[name]

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """What the block raises says of which stage it is."""
        try:
            yield
        except GrpoMegatronError as error:
            place = error.where or self.file.where(("stages", name))
            error.where = f"stage {name}, {place}"
            raise

    def kind(self, name: str) -> str:
        """Kind of a stage's run (`rl`, `sft`, …), else `merge` or `export`."""
        stage = self.table.stages[name]
        if stage.recipe is not None:
            return self._config(name).kind
        if stage.export:
            return "export"
        return "merge"

    def gates(self, name: str) -> tuple[str, ...]:
        """Return the stage's own gates, or else those of its recipe; in its own, the stages to
        compare with are absolute paths of run directories."""
        stage = self.table.stages[name]
        if stage.recipe:
            return self._config(name).gates
        return self._below(stage.gates)

    def _below(self, gates: Sequence[str]) -> tuple[str, ...]:
        return tuple(parse_gate(text).below(self.root.absolute()).text for text in gates)

    def output(self, name: str) -> Path:
        """Absolute path of what a stage makes: a data set, lessons, or a checkpoint's directory."""
        run_dir = self.run_dir(name)
        if self.kind(name) == "rejection_sample":
            return run_dir.dataset.absolute()
        if self.kind(name) == "experience":
            return run_dir.experience.absolute()
        return run_dir.export.absolute()

    def has_output(self, name: str) -> bool:
        """Whether what a stage makes is there as a whole, of every domain that has a checkpoint of
        its own."""
        output = self.output(name)
        domains = self.domains_with_checkpoints(name) or ("",)
        return all(is_there(output / domain) for domain in domains)

    def input(self, key: str, text: str) -> Path:
        """Absolute path of what a stage's key takes from a `Source`: its output, or of an RL run
        the directory with its recorded samples, for a domain; its adapters, for `lora.path`."""
        source = Source.parse(text)
        if is_data(key) and self.kind(source.stage) == "rl":
            return self.run_dir(source.stage).root.absolute()
        if key == ADAPTERS_KEY:
            return self.run_dir(source.stage).adapter.absolute() / source.domain
        return self.part(text)

    def part(self, text: str) -> Path:
        """Absolute path of what a `Source` gives."""
        source = Source.parse(text)
        return self.output(source.stage) / source.domain

    def gives_only_numbers(self, name: str) -> bool:
        """Whether a stage makes no files for others."""
        return self.kind(name) == "eval"

    def takers(self, name: str) -> list[str]:
        """Return stages that are made from what a stage gives."""
        return [other for other, stage in self.table.stages.items() if name in stage.sources]

    def taken(self, name: str, source: str) -> list[Path]:
        """Return absolute paths of what a stage takes from another one."""
        stage = self.table.stages[name]
        paths = []
        for key, text in stage.inputs.items():
            if Source.parse(text).stage == source:
                paths.append(self.input(key, text))
        for text in stage.parts:
            if Source.parse(text).stage == source:
                paths.append(self.part(text))
        return paths

    def why_not_compared(self, name: str, other: str) -> str:
        """Return why no domain of a stage can be compared with those that another one evaluates;
        empty where all can."""
        run = self._config(other)
        if not run.data.num_heldout:
            return f"data.num_heldout of {other} is 0, and nothing is evaluated there"
        own = [domain.name for domain in self._config(name).domains]
        missing = [domain for domain in evaluated_domains(run) if domain not in own]
        if missing:
            return f"{other} evaluates {', '.join(missing)}, and {name} does not"
        return ""

    def domains_with_checkpoints(self, name: str) -> tuple[str, ...]:
        """Return the domains of which a stage gives a checkpoint each; none where it gives one."""
        if self.table.stages[name].recipe is None:
            return ()
        return self._config(name).adapter_domains

    def gives_adapters(self, name: str) -> bool:
        """Whether a stage writes the adapters that it trains beside its checkpoint."""
        return self.table.stages[name].recipe is not None and self._config(name).lora is not None

    def gives_reward_model(self, name: str) -> bool:
        """Whether the checkpoint of a stage is a reward model."""
        return bool(self._head_of(name).labels)

    def _head_of(self, name: str) -> RewardHead:
        """Return what the head of a stage's checkpoint gives; of merges and exports, that of the
        first part."""
        part = next(iter(self.table.stages[name].parts), None)
        if part is not None:
            return self._head_of(Source.parse(part).stage)
        return RewardHead.of_run(self._config(name))

    def why_no_common_head(self, name: str) -> str:
        """Return why the heads of the reward models that a stage merges have no mean, by the
        recipes that train them; empty where they have one."""
        first, *others = self.table.stages[name].parts
        ours = self._head_of(Source.parse(first).stage)
        for text in others:
            theirs = self._head_of(Source.parse(text).stage)
            problem = other_head(theirs, ours, f"the reward model of stage {first}")
            if problem:
                return f"{text}: {problem}"
        return ""

    def why_other_scalars(self, name: str) -> str:
        """Return why a stage cannot begin with the reward model that another one is to give it, by
        the scalars of both; empty where it can, or begins with none."""
        text = self.table.stages[name].inputs.get("model.path")
        if text is None:
            return ""
        labels = self._head_of(Source.parse(text).stage).labels
        return other_scalars(labels, self._config(name).reward_labels)

    def needs_language_model(self, name: str, key: str) -> bool:
        """Whether what a stage takes for a key is asked for log-probs of tokens."""
        return needs_language_model(self._config(name), key)

    def takes_samples(self, name: str, key: str) -> bool:
        """Whether `key` is the path of a domain that takes the samples of a run."""
        number = int(key.split(".")[1])
        try:
            return self._config(name).domains[number].source == "run"
        except ConfigError:  # a domain of another source may not have this path at all
            return False

    def resolve(self, name: str) -> ResolvedConfig:
        """Return the configuration of a recipe's stage, validated as far as it can be now: where
        the model that it starts from is not there yet, by that of the stage before. ConfigError."""
        stage = self.table.stages[name]
        overrides = self._overrides(name)
        recipe = self._recipe(stage)
        source = stage.inputs.get("model.path")
        with self.errors_of(name):
            if source is None or self.part(source).exists():
                return resolve(recipe, overrides)
            resolve(recipe, [*overrides, *self._overrides_of_model(source)])
            return load_recipe(recipe, overrides)

    def why_not_beside(self, name: str, key: str) -> str:
        """Return why the checkpoint that a stage takes for `key` cannot be loaded in place of its
        policy, to be asked about tokens, or for its critic to begin with, by the models that both
        descend from; empty where it can, or is taken for something else."""
        if key not in self._config(name).paths_of_other_models:
            return ""
        other = self._model_of(self.table.stages[name].inputs[key])
        policy = self._policy_of(name)
        if key == CRITIC_KEY:
            head = self._head_of(Source.parse(self.table.stages[name].inputs[key]).stage)
            return why_no_value(head.labels) or why_not_a_critic(other, policy)
        return why_not_beside(other, policy, f"the policy of stage {name}")

    def why_not_merged(self, name: str) -> str:
        """Return why the checkpoints that a stage merges are no models of one descent, by those
        that they descend from; empty where they are."""
        first, *others = self.table.stages[name].parts
        for text in others:
            owner = f"the model of {first}"
            problem = why_not_beside(self._model_of(text), self._model_of(first), owner)
            if problem:
                return f"{text}: {problem}"
        return ""

    def _policy_of(self, name: str) -> ModelConfig:
        """Return the model from which the policy of a recipe's stage descends."""
        inputs = self.table.stages[name].inputs
        if "model.path" in inputs:
            return self._model_of(inputs["model.path"])
        return self._config(name).model

    def why_not_adapters(self, name: str) -> str:
        """Return why a stage cannot begin with the adapters that another stage is to give it, by
        the [lora] of both; empty where it can, or takes none."""
        text = self.table.stages[name].inputs.get(ADAPTERS_KEY)
        if text is None:
            return ""
        parent = Source.parse(text).stage
        theirs = self._config(parent).lora
        ours = self._config(name).lora
        assert theirs is not None and ours is not None  # one gives adapters, the other takes them
        model, _ = configuration_of(self._model_of(parent))
        return why_not_adapters(theirs, ours, facts_from_hf(model))

    def recipe_arguments(self, name: str) -> list[str]:
        """Return the recipe of a stage and its overrides, for `grpo-megatron train`."""
        return [self._recipe(self.table.stages[name]), *self._overrides(name)]

    def _recipe(self, stage: Stage) -> str:
        assert stage.recipe is not None  # a merge has none, and is no run
        beside = self.file.path.parent / stage.recipe
        if beside.is_file():
            return str(beside)
        return str(find_recipe(stage.recipe))

    def _overrides(self, name: str) -> list[str]:
        stage = self.table.stages[name]
        flags = [*self.table.settings, *stage.settings]
        if "model.path" in stage.inputs:
            flags.append("model.preset=null")
        for key, parent in stage.inputs.items():
            flags.append(f"{key}={as_toml(str(self.input(key, parent)))}")
        if stage.gates:
            flags.append(f"gates={as_toml(list(self._below(stage.gates)))}")
        return [*flags, f"runs_dir={as_toml(str(self.root))}", f"name={as_toml(name)}"]

    def _model_of(self, text: str) -> ModelConfig:
        """Return the model from which the checkpoint of a `Source` descends."""
        name = Source.parse(text).stage
        stage = self.table.stages[name]
        parent = stage.inputs.get("model.path") or next(iter(stage.parts), None)
        if parent is not None:
            return self._model_of(parent)
        return self._config(name).model

    def _overrides_of_model(self, text: str) -> list[str]:
        """Return overrides that name the model from which the checkpoint of a `Source` descends."""
        model = self._model_of(text)
        return [
            f"model.preset={as_toml(model.preset)}",
            f"model.path={as_toml(model.path and str(model.path))}",
        ]


def is_data(key: str) -> bool:
    """Whether a key takes data: the path of a domain."""
    return _DATA_KEY.fullmatch(key) is not None


def is_there(path: Path) -> bool:
    """Whether what a stage has given is there: a file, a run's directory, or a checkpoint or
    adapters with whole files of weights."""
    if (path / "adapter_config.json").is_file():
        return is_whole(path / "adapter_model.safetensors")
    if path.is_dir() and not RunDir(path).has_run:
        return (path / "config.json").is_file() and has_whole_weights(path)
    return path.exists()
