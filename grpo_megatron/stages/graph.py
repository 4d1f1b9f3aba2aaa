"""The stage graph: one TOML file that names recipes and what each takes from other stages, as
docs/stages.md shows it. Rejection sampling gives a data set, every other stage that trains a
checkpoint, and with [lora] adapters beside it."""

import graphlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, ValidationError
from pydantic_core import ErrorDetails

from grpo_megatron import assets
from grpo_megatron.config.base import Strict
from grpo_megatron.config.gates import evaluated_domains, parse_gate, refuse_beyond_reach
from grpo_megatron.config.keys import dotted
from grpo_megatron.config.loader import ResolvedConfig, load_recipe
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RUN_NAME, ModelConfig, RunConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.config.toml_file import TomlFile, find_recipe, read_toml
from grpo_megatron.config.validation import in_words
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.critic_model import why_not_a_critic
from grpo_megatron.plan.lora import why_not_adapters
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.reward_labels import USES, needs_language_model
from grpo_megatron.rundir import RunDir

_MEASURED_BY_MERGES = ("seconds",)
"""In the `result.json` of a merge or an export: nothing is evaluated."""
_OTHER_FILES = ("records", "report.html")
"""What a graph's directory has beside the runs of its stages."""
_ADAPTERS_KEY = "lora.path"
_SET_BY_THE_GRAPH = ("name", "runs_dir")
_QUOTED = re.compile(r"'([^']*)'")
_DATA_KEY = re.compile(r"domains\.\d+\.path")
_OUTPUTS = {"rejection_sample": "a data set", "experience": "lessons", "eval": "only numbers"}
"""By kind of stage; every other one gives a checkpoint."""


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
    merge: dict[str, PositiveFloat] = {}
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
            self._configs[name] = load_recipe(recipe, self._overrides(name)).config
        return self._configs[name]

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
        """Whether what a stage makes is there, of every domain that has a checkpoint of its own."""
        output = self.output(name)
        domains = self.domains_with_checkpoints(name) or ("",)
        return all((output / domain).exists() for domain in domains)

    def input(self, key: str, text: str) -> Path:
        """Absolute path of what a stage's key takes from a `Source`: its output, or of an RL run
        the directory with its recorded samples, for a domain; its adapters, for `lora.path`."""
        source = Source.parse(text)
        if _is_data(key) and self.kind(source.stage) == "rl":
            return self.run_dir(source.stage).root.absolute()
        if key == _ADAPTERS_KEY:
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
        """Whether the checkpoint of a stage is a reward model; of merges and exports, by the first
        part."""
        part = next(iter(self.table.stages[name].parts), None)
        if part is not None:
            return self.gives_reward_model(Source.parse(part).stage)
        return self.kind(name) == "reward_model"

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
        if source is None or self.part(source).exists():
            return resolve(recipe, overrides)
        resolve(recipe, [*overrides, *self._overrides_of_model(source)])
        return load_recipe(recipe, overrides)

    def why_not_a_critic(self, name: str) -> str:
        """Return why the critic of a stage cannot begin with what another stage is to give it, by
        the models that both descend from; empty where it can, or takes nothing from a stage."""
        inputs = self.table.stages[name].inputs
        start = inputs.get("critic.path")
        if start is None:
            return ""
        policy = self._config(name).model
        if "model.path" in inputs:
            policy = self._model_of(inputs["model.path"])
        return why_not_a_critic(self._model_of(start), policy)

    def why_not_adapters(self, name: str) -> str:
        """Return why a stage cannot begin with the adapters that another stage is to give it, by
        the [lora] of both; empty where it can, or takes none."""
        text = self.table.stages[name].inputs.get(_ADAPTERS_KEY)
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


def load_graph(path: str | Path) -> Graph:
    """Read and validate a graph and the recipes of all its stages. ConfigError with the stage."""
    file = read_toml(find_recipe(path, assets.root() / "recipes" / "graphs"))
    try:
        graph = Graph(file, GraphFile.model_validate(file.values))
    except ValidationError as error:
        raise _error_of_file(file, error.errors(include_url=False)) from None
    _refuse_places(graph.table.settings, "the graph", file.where(("settings",)))
    for name in graph.table.stages:
        _check_name(graph, name)
    for name, stage in graph.table.stages.items():
        _check_stage(graph, name, stage)
    for name in graph.order:
        stage = graph.table.stages[name]
        for key, text in stage.inputs.items():
            _check_type(graph, name, key, Source.parse(text).stage)
            _check_domain_of_source(graph, name, key, text)
        for text in stage.parts:
            _check_type(graph, name, "model.path", Source.parse(text).stage)
            _check_domain_of_source(graph, name, "model.path", text)
        _check_reward_models(graph, name)
        if stage.recipe is not None:
            graph.resolve(name)
            _check_domains(graph, name)
            _check_critic(graph, name)
            _check_adapters(graph, name)
    return graph


def _error_of_file(file: TomlFile, errors: Sequence[ErrorDetails]) -> ConfigError:
    """Return what is wrong in a graph's file, first of all unknown keys: what they may be mistyped
    for is missing then."""
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    path = error["loc"]
    key = str(path[-1])
    owner = "the graph"
    known = list(GraphFile.model_fields)
    if path[0] == "stages" and len(path) > 1:
        owner = f"stage {path[1]}"
        known = list(Stage.model_fields)
    remedy = f"{owner} has {', '.join(known)}"
    if error["type"] == "extra_forbidden":
        message = "unknown key"
        remedy = did_you_mean(key, known)
    elif error["type"] == "missing":
        message = "is required"
        remedy = f"add {key} to {owner}"
    else:
        choices = _QUOTED.findall(error.get("ctx", {}).get("expected", ""))
        message = in_words(error, choices)
        if error["type"] == "tuple_type" and isinstance(error["input"], str):
            remedy = f"write {key} = {as_toml([error['input']])}"
    return ConfigError(f"{dotted(path)}: {message}", where=file.where(path), remedy=remedy)


def _refuse_places(settings: Sequence[str], owner: str, where: str) -> None:
    """ConfigError for settings of what the graph itself says of its stages."""
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in _SET_BY_THE_GRAPH:
            raise ConfigError(
                f"{owner} cannot set {key!r}: a stage runs in a directory of its name, below the "
                "graph's",
                where=where,
                remedy="take it away, or set runs_dir and name of the graph itself",
            )


def _check_name(graph: Graph, name: str) -> None:
    """ConfigError for a stage whose directory would be outside of the graph's, or one of its
    files."""
    if re.fullmatch(RUN_NAME, name) and name not in _OTHER_FILES:
        return
    remedy = "rename it"
    if name not in _OTHER_FILES:
        remedy = "begin with a letter or digit of ASCII, go on with these and with . _ -"
        nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
        if nearest:
            remedy += f", for example {nearest!r}"
    raise ConfigError(
        f"a stage cannot be called {name!r}: it is a directory of the graph",
        where=graph.file.where(("stages", name)),
        remedy=remedy,
    )


def _check_stage(graph: Graph, name: str, stage: Stage) -> None:
    where = graph.file.where(("stages", name))
    known = list(graph.table.stages)
    made_by = [bool(stage.recipe), bool(stage.merge), bool(stage.export)]
    if made_by.count(True) != 1:
        raise ConfigError(
            f"stage {name} needs exactly one of recipe, merge and export",
            where=where,
            remedy="take the others away",
        )
    others = ["settings", "inputs"]
    if stage.recipe:
        others = ["dtype"]
    stray = [field for field in others if getattr(stage, field)]
    if stray:
        raise ConfigError(
            f"stage {name} takes no {stray[0]}",
            where=where,
            remedy="dtype goes with export or merge, settings and inputs with recipe",
        )
    for key in _SET_BY_THE_GRAPH:
        if key in stage.inputs:
            raise ConfigError(
                f"stage {name} takes no input {key!r}: the graph says where a stage runs",
                where=where,
                remedy="take it away",
            )
    _refuse_places(stage.settings, f"stage {name}", graph.file.where(("stages", name, "settings")))
    for text in stage.gates:
        try:
            gate = parse_gate(text)
            if stage.recipe is None and gate.name in _MEASURED_BY_MERGES:
                refuse_beyond_reach(gate, num_steps=0)
        except ConfigError as error:
            error.where = f"stage {name}, {graph.file.where(('stages', name, 'gates'))}"
            raise
    for parent in stage.parents:
        if parent not in known:
            raise ConfigError(
                f"stage {name} builds on {parent!r}, which is no stage",
                where=where,
                remedy=did_you_mean(parent, known),
            )
    for text in stage.gates:
        _check_gate(graph, name, stage, text)


def _check_gate(graph: Graph, name: str, stage: Stage, text: str) -> None:
    """ConfigError for a gate on an evaluation that no stage makes: merges and exports have none.
    What the run of a recipe measures, its own rules know."""
    gate = parse_gate(text)
    silent = []
    if stage.recipe is None and gate.name not in _MEASURED_BY_MERGES:
        silent.append(name)
    if gate.against is not None and graph.table.stages[str(gate.against)].recipe is None:
        silent.append(str(gate.against))
    if silent:
        raise ConfigError(
            f"gate {text!r} of stage {name} can never be open: nothing is evaluated in {silent[0]}",
            where=graph.file.where(("stages", name)),
            remedy='make a stage of it with a recipe and settings = ["kind=eval", "num_steps=0"]',
        )


def _check_domains(graph: Graph, name: str) -> None:
    """ConfigError for a gate that compares with a stage that evaluates other domains, or none."""
    for text in graph.table.stages[name].gates:
        gate = parse_gate(text)
        if gate.against is None:
            continue
        problem = graph.why_not_compared(name, str(gate.against))
        if problem:
            raise ConfigError(
                f"gate {text!r} of stage {name} can never be open: {problem}",
                where=graph.file.where(("stages", name)),
                remedy="compare with a stage that evaluates domains of this one; a domain of "
                "weight = 0 is evaluated, and not trained",
            )


def _check_reward_models(graph: Graph, name: str) -> None:
    """ConfigError for a reward model where a stage needs a language model, or merges it with
    one."""
    stage = graph.table.stages[name]
    where = graph.file.where(("stages", name))
    for key, text in stage.inputs.items():
        source = Source.parse(text).stage
        if graph.gives_reward_model(source) and graph.needs_language_model(name, key):
            raise ConfigError(
                f"{key} of stage {name} takes a language model, and stage {source} gives a reward "
                "model, which has no output layer",
                where=where,
                remedy=USES,
            )
    by_kind: dict[bool, str] = {}
    for text in stage.parts:
        source = Source.parse(text).stage
        by_kind.setdefault(graph.gives_reward_model(source), source)
    if len(by_kind) > 1:
        raise ConfigError(
            f"stage {name} merges the reward model of stage {by_kind[True]} with the language "
            f"model of stage {by_kind[False]}",
            where=where,
            remedy="merge checkpoints of one kind",
        )


def _check_critic(graph: Graph, name: str) -> None:
    problem = graph.why_not_a_critic(name)
    if problem:
        source = graph.table.stages[name].inputs["critic.path"]
        raise ConfigError(
            f"critic.path of stage {name} takes a model like its policy, and that of stage "
            f"{source} is another: {problem}",
            where=graph.file.where(("stages", name)),
            remedy="name a stage that trains a reward model of the policy's architecture",
        )


def _check_adapters(graph: Graph, name: str) -> None:
    problem = graph.why_not_adapters(name)
    if problem:
        source = graph.table.stages[name].inputs[_ADAPTERS_KEY]
        raise ConfigError(
            f"{_ADAPTERS_KEY} of stage {name} takes adapters like its own, and those of stage "
            f"{source} are others: {problem}",
            where=graph.file.where(("stages", name)),
            remedy=f"set [lora] as in stage {source}, or give its checkpoint to model.path",
        )


def _check_domain_of_source(graph: Graph, name: str, key: str, text: str) -> None:
    """ConfigError where a `Source` leaves open which domain's checkpoint is meant, or names a
    domain that has none."""
    source = Source.parse(text)
    domains = graph.domains_with_checkpoints(source.stage)
    where = graph.file.where(("stages", name))
    takes_samples = _is_data(key) and graph.kind(source.stage) == "rl"
    if takes_samples or not domains:
        if "/" not in text:
            return
        raise ConfigError(
            f"stage {name} takes {text!r}, and what stage {source.stage} gives is of all domains",
            where=where,
            remedy=f"write {source.stage!r}",
        )
    if source.domain in domains:
        return
    remedy = f"write {source.stage + '/' + domains[0]!r}, for example"
    if source.domain:
        remedy = did_you_mean(text, [f"{source.stage}/{domain}" for domain in domains])
    raise ConfigError(
        f"stage {name} takes {text!r}, and stage {source.stage} gives a checkpoint for each of its "
        f"domains {', '.join(domains)}",
        where=where,
        remedy=remedy,
    )


def _is_data(key: str) -> bool:
    """Whether a key takes data: the path of a domain."""
    return _DATA_KEY.fullmatch(key) is not None


def _check_type(graph: Graph, name: str, key: str, parent: str) -> None:
    kind = graph.kind(parent)
    gives = _OUTPUTS.get(kind, "a checkpoint")
    wants = "a checkpoint"
    if _is_data(key):
        wants = "a data set"
        if kind == "rl" and graph.takes_samples(name, key):
            return
    if key == "experience.path":
        wants = "lessons"
    if key == _ADAPTERS_KEY:
        wants = "adapters"
        if graph.gives_adapters(parent):
            return
    if wants == gives:
        return
    remedy = "name another stage"
    if gives == "a data set":
        remedy = "a data set goes to domains.N.path"
    elif gives == "lessons":
        remedy = "lessons go to experience.path"
    elif wants == "adapters":
        remedy = "name a stage with [lora], or give its checkpoint to model.path"
    elif wants == "a data set" and kind == "rl":
        remedy = 'a domain with source = "run" takes the samples of an RL stage'
    raise ConfigError(
        f"{key} of stage {name} takes {wants}; stage {parent} ({kind}) gives {gives}",
        where=graph.file.where(("stages", name)),
        remedy=remedy,
    )
