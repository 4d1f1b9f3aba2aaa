"""Reading a graph of stages, and what is refused of it before anything starts."""

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from grpo_megatron import assets
from grpo_megatron.config.gates import parse_gate, refuse_beyond_reach
from grpo_megatron.config.keys import dotted
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RUN_NAME
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.config.toml_file import TomlFile, find_recipe, read_toml
from grpo_megatron.config.validation import in_words
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.models_beside import REMEDY
from grpo_megatron.plan.reward_labels import REMEDY as REMEDY_OF_SCALARS
from grpo_megatron.plan.reward_labels import USES
from grpo_megatron.stages.graph import (
    ADAPTERS_KEY,
    CRITIC_KEY,
    Graph,
    GraphFile,
    Source,
    Stage,
    is_data,
)

_MEASURED_BY_MERGES = ("seconds",)
"""In the `result.json` of a merge or an export: nothing is evaluated."""
_OTHER_FILES = ("records", "report.html")
"""What a graph's directory has beside the runs of its stages."""
_SET_BY_THE_GRAPH = ("name", "runs_dir")
_VALUES = {
    "name": "the name of a directory: ASCII letters, digits and . _ -, a letter or digit first",
    "runs_dir": 'a path, for example runs_dir = "runs"',
    "settings": 'a list of texts, for example settings = ["seed=1"]',
    "stages": 'a table for each stage, for example [stages.base] with recipe = "stages/tiny-base"',
    "recipe": "the path of a recipe, or the name of a shipped one",
    "inputs": 'a table of keys and stages, for example inputs = { "model.path" = "base" }',
    "gates": 'a list of texts, for example gates = ["eval.all.accuracy >= 0.5"]',
    "merge": "a table of stages with numbers above 0, of which only the shares of their sum count, "
    "for example merge = { first = 1, second = 3 }",
    "export": "the name of a stage",
    "dtype": "float32, bfloat16 or float16",
}
"""What fields of a graph and of its stages take."""
_QUOTED = re.compile(r"'([^']*)'")
_OUTPUTS = {"rejection_sample": "a data set", "experience": "lessons", "eval": "only numbers"}
"""By kind of stage; every other one gives a checkpoint."""


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
            _check_models_beside(graph, name)
            _check_adapters(graph, name)
        if stage.merge:
            _check_merge(graph, name)
    return graph


def _error_of_file(file: TomlFile, errors: Sequence[ErrorDetails]) -> ConfigError:
    """Return what is wrong in a graph's file, first of all unknown keys: what they may be mistyped
    for is missing then."""
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    path = error["loc"]
    key = str(path[-1])
    owner = "the graph"
    known = list(GraphFile.model_fields)
    field = str(path[0])
    if path[0] == "stages" and len(path) > 1:
        owner = f"stage {path[1]}"
        known = list(Stage.model_fields)
        field = "stages"
        if len(path) > 2:
            field = str(path[2])
    if error["type"] == "extra_forbidden":
        message = "unknown key"
        remedy = did_you_mean(key, known)
    elif error["type"] == "missing":
        message = "is required"
        remedy = f"add {key} to {owner}"
    else:
        choices = _QUOTED.findall(error.get("ctx", {}).get("expected", ""))
        message = in_words(error, choices)
        remedy = f"{field} takes {_VALUES[field]}"
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


def _refuse_set_inputs(stage: Stage, name: str, where: str) -> None:
    """ConfigError for settings of what a stage takes from another one: the input would win, and
    nothing say so."""
    for setting in stage.settings:
        key = setting.partition("=")[0].strip()
        if key in stage.inputs:
            raise ConfigError(
                f"stage {name} sets {key!r}, and takes it from stage {stage.inputs[key]!r}",
                where=where,
                remedy="take one of both away",
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
    _check_what_makes(graph, name, stage)
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
    where_settings = graph.file.where(("stages", name, "settings"))
    _refuse_places(stage.settings, f"stage {name}", where_settings)
    _refuse_set_inputs(stage, name, where_settings)
    for text in stage.gates:
        try:
            gate = parse_gate(text)
            if stage.recipe is None and gate.name in _MEASURED_BY_MERGES:
                refuse_beyond_reach(gate)
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


def _check_what_makes(graph: Graph, name: str, stage: Stage) -> None:
    """ConfigError for a stage that says nothing of what makes it, or several things."""
    made_by = [bool(stage.recipe), bool(stage.merge), bool(stage.export)]
    if made_by.count(True) == 1:
        return
    remedy = "take the others away"
    if not any(made_by):
        remedy = _how_to_make(stage)
    raise ConfigError(
        f"stage {name} needs exactly one of recipe, merge and export",
        where=graph.file.where(("stages", name)),
        remedy=remedy,
    )


def _how_to_make(stage: Stage) -> str:
    """Return what a stage lacks that nothing makes."""
    for field in ("recipe", "merge", "export"):
        if field in stage.model_fields_set:
            return f"{field} is empty, and takes {_VALUES[field]}"
    return f"add a recipe: {_VALUES['recipe']}"


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
    """ConfigError for a reward model where a stage needs a language model, merges it with one or
    with one of other scalars, or begins with other scalars than its own."""
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
    if stage.merge:
        problem = graph.why_no_common_head(name)
        if problem:
            raise ConfigError(
                f"stage {name} merges reward models whose heads have no mean: {problem}",
                where=where,
                remedy="merge reward models with the same preferences.loss, "
                "preferences.step_token and, with preferences.scalar_per_domain, the same domains "
                "in the same order",
            )
    if stage.recipe is not None:
        problem = graph.why_other_scalars(name)
        if problem:
            raise ConfigError(
                f"model.path of stage {name} takes the reward model of stage "
                f"{stage.inputs['model.path']}: {problem}",
                where=where,
                remedy=REMEDY_OF_SCALARS,
            )


def _check_models_beside(graph: Graph, name: str) -> None:
    """ConfigError for a teacher, a reference, or what a critic begins with, that is another model
    than the policy."""
    for key, source in graph.table.stages[name].inputs.items():
        problem = graph.why_not_beside(name, key)
        if not problem:
            continue
        remedy = REMEDY
        if key == CRITIC_KEY:
            remedy = "name a stage that trains a reward model of the policy's architecture"
        raise ConfigError(
            f"{key} of stage {name} takes a model like its policy, and that of stage {source} "
            f"is another: {problem}",
            where=graph.file.where(("stages", name)),
            remedy=remedy,
        )


def _check_merge(graph: Graph, name: str) -> None:
    problem = graph.why_not_merged(name)
    if problem:
        raise ConfigError(
            f"stage {name} merges models that do not descend from one: {problem}",
            where=graph.file.where(("stages", name)),
            remedy="merge checkpoints of one model",
        )


def _check_adapters(graph: Graph, name: str) -> None:
    problem = graph.why_not_adapters(name)
    if problem:
        source = graph.table.stages[name].inputs[ADAPTERS_KEY]
        raise ConfigError(
            f"{ADAPTERS_KEY} of stage {name} takes adapters like its own, and those of stage "
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
    takes_samples = is_data(key) and graph.kind(source.stage) == "rl"
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


def _check_type(graph: Graph, name: str, key: str, parent: str) -> None:
    kind = graph.kind(parent)
    gives = _OUTPUTS.get(kind, "a checkpoint")
    wants = "a checkpoint"
    if is_data(key):
        wants = "a data set"
        if kind == "rl" and graph.takes_samples(name, key):
            return
    if key == "experience.path":
        wants = "lessons"
    if key == ADAPTERS_KEY:
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
