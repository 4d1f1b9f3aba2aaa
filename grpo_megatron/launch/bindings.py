"""What a recipe names outside of itself, in Python and in data files, is tried before processes
start or a job waits in a queue."""

import contextlib
from pathlib import Path

from grpo_megatron.algorithms.custom import import_functions
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.config.secret_values import from_environment, with_secrets
from grpo_megatron.controller.recorded_pairs import refuse_no_recording
from grpo_megatron.data.chat_template import read_chat_template
from grpo_megatron.data.prompt_images import lack_of_images, names_image_field
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.data.step_rows import id_of_step_token
from grpo_megatron.data.tokenizer import load_tokenizer, token_with_another_id
from grpo_megatron.data.tool_calls import AUTO, FORMATS, format_of
from grpo_megatron.environments.python import refuse_long_programs
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import (
    ConfigError,
    DataError,
    EpisodeError,
    GrpoMegatronError,
    RewardError,
)
from grpo_megatron.launch.prompt_counts import refuse_too_few_rows
from grpo_megatron.launch.row_checks import KnownModel, refuse_bad_rows
from grpo_megatron.plan.model_facts import config_fields
from grpo_megatron.rewards.pool import components_of
from grpo_megatron.rewards.time_limits import refuse_long_rewards
from grpo_megatron.rollout.agent_command import find_program
from grpo_megatron.rollout.tool_parsers import ToolCallReader, require_format

SKIP_REMEDY = "if only the cluster has it, give --skip-reward-check"


def refuse_unbound_code(config: RunConfig, *, remedy: str = "") -> None:
    """Import or find what the recipe names in Python and in this environment: objective, rewards,
    environments, keys. Raises as the functions for each. remedy: what else would help."""
    refuse_unbound_objective(config, remedy=remedy)
    refuse_unbound_rewards(config, remedy=remedy)
    refuse_unbound_environments(config, remedy=remedy)
    refuse_unset_keys(config, remedy=remedy)


def refuse_unfit_data(config: RunConfig) -> None:
    """Read every row, compare tokenizers, count rows. Raises as the functions for each."""
    refuse_unreadable_problems(config)
    refuse_other_tokens(config)
    refuse_too_few_rows(config)


def refuse_unbound_rewards(config: RunConfig, *, remedy: str = "") -> None:
    """Import every domain's rewards and check their arguments against their signatures.

    Raises RewardError as the controller would when it starts: one that cannot be imported, or
    that cannot be called with the recipe's arguments; and for tests of programs and judges that
    may take longer than a reward. remedy: what else would help."""
    for domain in config.domains:
        try:
            components = components_of(domain, config.max_new_tokens_of(domain.name))
            refuse_long_rewards(components, config.data.reward_timeout_s)
        except RewardError as error:
            _add_remedy(error, remedy)
            raise


def _add_remedy(error: GrpoMegatronError, remedy: str) -> None:
    """Say what else would help; empty: nothing."""
    if remedy:
        error.remedy = f"{error.remedy or 'correct the recipe'}; {remedy}"


def refuse_unbound_environments(config: RunConfig, *, remedy: str = "") -> None:
    """Find every domain's environment or agent, and check its arguments and its format of calls.

    Raises EpisodeError as its processes would when they start, ConfigError where a variable of the
    environment is not set that the recipe names. remedy: what else would help."""
    for domain in config.domains:
        try:
            if domain.hosted is not None:
                bound = bind(domain.hosted.name, domain.hosted.arguments)
                refuse_long_programs(bound, domain.hosted.step_s)
            elif domain.agent is not None:
                find_program(domain.agent.command)
                with_secrets(domain.agent.variables)
            if domain.episodes is not None:
                _refuse_unknown_format(domain.episodes.tool_format)
                _refuse_unserved_format(domain.episodes.tool_format, config.model)
        except (EpisodeError, ConfigError) as error:
            error.where = f"[[domains]] {domain.name}, {domain.episodes_table}"
            _add_remedy(error, remedy)
            raise


def refuse_unset_keys(config: RunConfig, *, remedy: str = "") -> None:
    """Look up the keys of served teachers and of the writer of lessons.

    Raises ConfigError as the controller would: the environment has no such variable. remedy: what
    else would help."""
    references: dict[str, str | None] = {}
    if config.distillation is not None:
        for number, teacher in enumerate(config.distillation.teachers):
            references[f"distillation.teachers.{number}.api_key"] = teacher.api_key
    if config.experience is not None:
        references["experience.writer_api_key"] = config.experience.writer_api_key
    for key, reference in references.items():
        if reference is None:
            continue
        try:
            from_environment(reference)
        except ConfigError as error:
            error.where = key
            _add_remedy(error, remedy)
            raise


def _refuse_unknown_format(name: str) -> None:
    """EpisodeError where nothing reads calls in this format.

    vLLM is imported for a name that only its own list can have; where it is not installed, the
    rollout workers look there."""
    if name == AUTO or name in FORMATS:
        return
    try:
        with contextlib.suppress(ImportError):
            require_format(name)
    except ConfigError as error:
        raise EpisodeError(f"tool_format: {error.message}", remedy=error.remedy) from error


def _refuse_unserved_format(name: str, model: ModelConfig) -> None:
    """EpisodeError where the checkpoint is on this machine and its tokenizer lacks what the format
    needs.

    vLLM's parsers, which take ten seconds, are loaded for a name that is not that of the chat
    template; without vLLM the rollout workers find out."""
    if name == AUTO:
        return
    with tokenizer_directory(model) as directory:
        if directory is None or not (directory / "tokenizer.json").is_file():
            return
        template = read_chat_template(directory)
        if template is None or format_of(template) == name:
            return
        try:
            with contextlib.suppress(ImportError):
                ToolCallReader(name, directory)
        except DataError as error:
            raise EpisodeError(f"tool_format: {error.message}", remedy=error.remedy) from error


def refuse_unbound_objective(config: RunConfig, *, remedy: str = "") -> None:
    """Import what `[objective]` names as `module:function`.

    Raises ConfigError as the trainer would: no such module or function. remedy: what else would
    help."""
    try:
        import_functions(config.objective)
    except ConfigError as error:
        _add_remedy(error, remedy)
        raise


def refuse_other_tokens(config: RunConfig) -> None:
    """Compare the tokenizers of checkpoints that are asked about the policy's tokens: teachers,
    references, a critic's first weights. Those that are not on this machine, or not there yet, are
    left out.

    Raises DataError for the first that has another id for a token."""
    with tokenizer_directory(config.model) as directory:
        if directory is None:
            return
        for key, path in config.paths_of_other_models.items():
            if not path.is_dir():
                continue
            found = token_with_another_id(path, directory)
            if found is None:
                continue
            token, their_id, our_id = found
            raise DataError(
                f"{key}: its tokenizer has the id {their_id} for {token!r}, the policy's {our_id}",
                where=str(path / "tokenizer.json"),
                remedy="give a checkpoint with the policy's tokenizer; a teacher with another one "
                "cannot say what it thinks of the policy's tokens",
            )


def refuse_unreadable_problems(config: RunConfig) -> None:
    """Read every row of the domains' files and render its prompt, see `row_checks`; files that do
    not exist (yet) are left to `refuse_missing`.

    Raises DataError as the controller would: a field of images that the recipe names and no row
    has, where the model sees; a row without a field, a template or a demonstrated
    turn that asks for metadata that the problem does not have, responses that are no texts, an
    unknown data set, a chat template that is not there or refuses the conversation, a step token
    that is no token. Chat templates and tokenizers of checkpoints that are not on this machine are
    left to the controller."""
    with tokenizer_directory(config.model) as directory:
        model = _known_model(directory)
        if config.trains_preferences and config.preferences.rows == "steps" and directory:
            id_of_step_token(load_tokenizer(directory), config.preferences.step_token)
        for index, domain in enumerate(config.domains):
            if domain.path is not None and not domain.path.exists():
                continue
            if model is not None and model.sees_images and names_image_field(domain):
                lack_of_images(domain, iterate_problems(domain, config.seed))
            if domain.source == "run":
                refuse_no_recording(domain)
                continue
            refuse_bad_rows(config, index, model)


def _known_model(directory: Path | None) -> KnownModel | None:
    """Return what a model's directory has for rows; None where it is not on this machine."""
    if directory is None:
        return None
    tokenizer = None
    if (directory / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(directory)
    return KnownModel(read_chat_template(directory), tokenizer, _sees_images(directory))


def _sees_images(model: Path) -> bool:
    """Whether the model in a directory sees; False where there is a tokenizer only."""
    return (model / "config.json").exists() and "vision_config" in config_fields(model)
