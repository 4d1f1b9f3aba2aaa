"""Rules of what engines do: lengths, publishing. A run without engines (supervised fine-tuning,
preferences, reward models) is not asked: its `[rollout]` and `[publish]` have no effect."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig

ENGINE_RULES = RuleSet()
"""Their checks take a run with engines."""

_BFLOAT16_GAP = 0.02
"""Mean difference of the log-probs of a trainer and an engine that agree, in bfloat16."""


@ENGINE_RULES.rule("completion_length")
def prompts_have_room(run: RunConfig) -> Violation | None:
    """Refuse completions that are as long as the context."""
    whole = run.rollout.max_model_len
    if run.rollout.max_new_tokens < whole:
        return None
    return Violation(
        "rollout.max_new_tokens",
        f"prompt and completion share max_model_len ({whole}): nothing is left for the prompt",
        nearest=(whole - 1,),
        remedy="lower rollout.max_new_tokens or raise rollout.max_model_len",
        related=("rollout.max_model_len",),
    )


@ENGINE_RULES.rule("pause_in_flight")
def only_rollouts_ahead_are_in_flight(run: RunConfig) -> Violation | None:
    """Refuse to pause requests where none can be in flight."""
    if run.publish.pause == "wait" or run.batch.max_staleness > 0:
        return None
    return Violation(
        "publish.pause",
        "nothing is in flight while weights are published: with max_staleness=0 a step is "
        "sampled, trained and published in turn",
        nearest=("wait",),
        remedy="set publish.pause=wait or batch.max_staleness=1",
        related=("batch.max_staleness",),
    )


@ENGINE_RULES.rule("publish_carrier")
def nccl_joins_gpus_of_their_own(run: RunConfig) -> Violation | None:
    """Refuse NCCL for weights without GPUs, and where trainer and engines share them."""
    if run.publish.method != "nccl":
        return None
    if run.placement.gpus_per_node == 0:
        return Violation(
            "publish.method",
            "NCCL sends from GPU to GPU, and placement.gpus_per_node = 0 says that there are none",
            nearest=("auto", "gloo"),
            remedy="set publish.method=auto, or placement.gpus_per_node",
            related=("placement.gpus_per_node",),
        )
    if not run.shares_gpus:
        return None
    return Violation(
        "publish.method",
        "trainer and engines share GPUs, and a GPU cannot be twice in a group of NCCL",
        nearest=("auto", "ipc"),
        related=("placement.mode",),
    )


@ENGINE_RULES.rule("beside_decoding")
def weights_come_beside_something(run: RunConfig) -> Violation | None:
    """Refuse to bring weights beside decoding where nothing is decoded then, or where they would
    need room on the engines' GPUs."""
    publish = run.publish
    if not publish.beside_decoding:
        return None
    if publish.pause == "wait":  # also with rollouts that are not ahead, by `pause_in_flight`
        return Violation(
            "publish.beside_decoding",
            "nothing is decoded while weights come: a publish waits for the end of all requests "
            "(publish.pause=wait)",
            nearest=(False,),
            remedy="set batch.max_staleness >= 1 and publish.pause=keep",
            related=("publish.pause", "batch.max_staleness"),
        )
    if publish.method == "file":
        carrier = "files"
    elif run.shares_gpus:
        carrier = "memory that trainer and engines share"
    elif run.publish_carrier != "gloo":
        carrier = f"the memory of GPUs ({run.publish_carrier})"
    else:
        return None
    return Violation(
        "publish.beside_decoding",
        f"weights go through {carrier}, where engines cannot take them while they decode",
        nearest=(False,),
        remedy="set publish.method=gloo with GPUs of their own for engines",
        related=("publish.method", "placement.mode"),
    )


@ENGINE_RULES.rule("delta_of_files")
def files_have_no_changes(run: RunConfig) -> Violation | None:
    """Refuse changes where weights travel as files."""
    if not run.publish.delta or run.publish.method != "file":
        return None
    return Violation(
        "publish.delta",
        "weights go through files, which are written whole (publish.method=file)",
        nearest=(False,),
        remedy="set publish.delta=false, or another publish.method",
        related=("publish.method",),
    )


@ENGINE_RULES.rule("fp8_of_files")
def files_have_no_fp8(run: RunConfig) -> Violation | None:
    """Refuse weights in FP8 where they travel as files, which an export writes."""
    if run.rollout.fp8 == "none" or run.publish.method != "file":
        return None
    return Violation(
        "rollout.fp8",
        "weights go through files, which have the trainer's numbers (publish.method=file)",
        nearest=("none",),
        remedy="set rollout.fp8=none, or another publish.method",
        related=("publish.method",),
    )


@ENGINE_RULES.rule("canary_tolerance")
def tolerance_allows_for_rounding(run: RunConfig) -> Violation | None:
    """Refuse a canary tolerance below what bfloat16 rounds."""
    tolerance = run.publish.canary_tolerance
    rounded = "bfloat16" in (run.trainer.precision, run.rollout.dtype)
    if not run.publish.canary or not rounded:
        return None
    if tolerance is None or tolerance >= _BFLOAT16_GAP:
        return None
    return Violation(
        "publish.canary_tolerance",
        "bfloat16 log-probs of a trainer and an engine that agree differ by "
        f"{_BFLOAT16_GAP} on average: the first step would end the run",
        nearest=(0.1,),
        related=("trainer.precision", "rollout.dtype"),
    )
