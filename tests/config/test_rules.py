"""Each rule between keys, broken once, and the shipped recipe, which breaks none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.engine_words import without_option
from grpo_megatron.config.gates import parse_gate
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.rules.allocation import ALLOCATION_RULES
from grpo_megatron.config.rules.check import check_rules
from grpo_megatron.config.rules.critic import CRITIC_RULES
from grpo_megatron.config.rules.distillation import DISTILLATION_RULES
from grpo_megatron.config.rules.domain import DOMAIN_RULES
from grpo_megatron.config.rules.engines import ENGINE_RULES
from grpo_megatron.config.rules.environment import ENVIRONMENT_RULES
from grpo_megatron.config.rules.experience import EXPERIENCE_RULES
from grpo_megatron.config.rules.lora import LORA_RUN_RULES
from grpo_megatron.config.rules.objective import BATCH_RULES, OBJECTIVE_RULES
from grpo_megatron.config.rules.placement import PLACEMENT_RULES
from grpo_megatron.config.rules.preferences import PREFERENCE_RULES
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.rules.run import RUN_RULES, gates_can_be_read
from grpo_megatron.config.rules.secrets import SECRET_RULES
from grpo_megatron.config.run import RolloutConfig
from tests.config.conftest import unchecked_config
from tests.controller.scored_groups import recipe

LORA = ["lora.rank=4"]
BY_DOMAIN = [
    'domains=[{name="a", source="file", path="x", rewards=[{function="m:f"}]},'
    '{name="b", source="file", path="y", rewards=[{function="m:f"}]}]',
    *LORA,
    "lora.per_domain=true",
    "lora.publish=adapter",
]
OFFLOADED = "trainer.offload_optimizer=true"
OFFLOADED_BF16 = [OFFLOADED, "trainer.precision=bfloat16"]
GRPO_KL = ["objective.preset=grpo"]
SEQUENCE_MEAN = ["objective.aggregation=seq_mean_token_mean"]
DISTIL = ["kind=distil", "cold_start=null"]
ALLOCATED = ["allocation={}", "objective.preset=grpo"]
SEEDED = [*ALLOCATED, "seeding={}", "domains.0.template={question}"]
AGENT = ["domains.0.template=chat", "domains.0.environment.name=calculator", "cold_start=null"]
ALL_RULES = (
    RUN_RULES,
    ENGINE_RULES,
    ALLOCATION_RULES,
    DISTILLATION_RULES,
    PREFERENCE_RULES,
    EXPERIENCE_RULES,
    PLACEMENT_RULES,
    LORA_RUN_RULES,
    SECRET_RULES,
    CRITIC_RULES,
    DOMAIN_RULES,
    ENVIRONMENT_RULES,
    OBJECTIVE_RULES,
    BATCH_RULES,
)

PROGRAM = ["domains.0.template=chat", "cold_start=null"]
COMMAND = 'domains.0.agent.command=["python", "x.py"]'
AHEAD = ["batch.max_staleness=1", "publish.pause=keep"]
PREFERENCES = [
    "kind=preferences",
    "cold_start=null",
    'domains=[{name="a", source="file", path="x"}]',
    "trainer.max_tokens_per_microbatch=100000",
]
REWARD_MODEL = [*PREFERENCES, "kind=reward_model", "preferences.loss=bradley_terry"]
LESSONS = ["kind=experience", "experience={}", "cold_start=null", "domains.0.template={question}"]
LESSONS += ["rollout.max_model_len=2048"]
SERVED_WRITER = ["experience.writer_url=http://127.0.0.1:1", "experience.writer_model=m"]
BROKEN = [
    ("secrets", ["domains.0.arguments.api_key=x"]),
    ("experience", [*LESSONS, "experience=null"]),
    ("experience", ["experience={}", "domains.0.template={question}"]),
    ("experience", [*LESSONS, "kind=eval", "num_steps=0"]),
    ("experience", [*LESSONS, SERVED_WRITER[0]]),
    ("experience", [*LESSONS, SERVED_WRITER[1]]),
    ("experience", [*LESSONS, "experience.writer_max_tokens=2048"]),
    ("experience", [*LESSONS, "batch.max_staleness=1"]),
    ("experience_layout", [*LESSONS, "experience.layout={question}"]),
    ("experience_template", [*LESSONS, "domains.0.template={metadata[expression]}"]),
    ("experience_template", [*LESSONS, *AGENT]),
    ("rewards", ["domains.0.rewards=[]"]),
    ("preferences", ["preferences.loss=ipo"]),
    ("domain_source", ["domains.0.dataset=null", "domains.0.source=run", "domains.0.path=x"]),
    ("preferences", [*PREFERENCES, "preferences.gamma=1"]),
    ("preferences", [*PREFERENCES, "kind=reward_model"]),
    ("preferences", [*PREFERENCES, "preferences.loss=stepwise"]),
    ("preferences", [*REWARD_MODEL, "preferences.step_token=."]),
    ("preferences", [*PREFERENCES, "preferences.scalar_per_domain=true"]),
    (
        "preferences",
        [*REWARD_MODEL, "preferences.loss=stepwise", "domains.0.source=run"],
    ),
    ("preferences", [*PREFERENCES, "preferences.loss=bradley_terry"]),
    ("preferences", [*REWARD_MODEL, "lora.rank=4"]),
    ("preferences", [*REWARD_MODEL, "preferences.label_smoothing=0.1"]),
    ("preferences", [*REWARD_MODEL, "preferences.beta=0.5"]),
    ("preferences", [*REWARD_MODEL, "preferences.loss=stepwise", "preferences.beta=0.5"]),
    ("preferences", [*PREFERENCES, "preferences.loss=ipo", "preferences.label_smoothing=0.1"]),
    ("preferences", [*PREFERENCES, "preferences.loss=simpo", "preferences.reference=/x"]),
    ("preferences", [*PREFERENCES, "preferences.undesirable_weight=2"]),
    ("preferences", ["kind=preferences", "cold_start=null"]),
    ("preferences", [*PREFERENCES, "evaluation.num_samples=4"]),
    ("preferences", [*PREFERENCES, "placement.rollout_nodes=1"]),
    ("preference_length", [*PREFERENCES, "trainer.max_tokens_per_microbatch=100"]),
    ("critic", ["objective.preset=ppo"]),
    ("critic", ["critic={}"]),
    ("critic", ["critic={}", "objective.preset=ppo", "kind=sft", "cold_start=null"]),
    ("critic", ["critic={}", "objective.preset=ppo", "lora.rank=4"]),
    ("critic_warmup", ["critic.warmup_steps=220", "objective.preset=ppo"]),
    ("critic_trunk", ["critic.trunk=policy", "critic.path=/x", "objective.preset=ppo"]),
    ("critic_trunk", ["critic.trunk=policy", "critic.warmup_steps=2", "objective.preset=ppo"]),
    ("critic_trunk", ["critic.trunk=policy", "critic.optimizer.lr=1e-3", "objective.preset=ppo"]),
    ("critic_loss_weight", ["critic.loss_weight=0.5", "objective.preset=ppo"]),
    ("model_source", ["model.path=/x"]),
    ("model_source", ["model.preset=null"]),
    ("model_preset", ["model.preset=other"]),
    ("lora_trains", ["lora.rank=4", "kind=eval", "num_steps=0", "cold_start=null"]),
    ("lora_start", ["lora.rank=4", "lora.path=x"]),
    (
        "lora_reference",
        [*LORA, *GRPO_KL, "objective.reference_ema=0.9", "objective.reference_interval=5"],
    ),
    ("lora_routers", ["lora.rank=4", "routing.router_policy=none"]),
    ("lora_publish", [*LORA, "lora.publish=adapter", "publish.method=file"]),
    ("lora_publish", [*LORA, "lora.publish=adapter", "rollout.fp8=blockwise"]),
    ("fp8_of_files", ["rollout.fp8=blockwise", "publish.method=file"]),
    ("lora_dora", [*LORA, "lora.dora=true", "lora.experts=shared"]),
    ("lora_dora", [*LORA, "lora.dora=true", "lora.publish=adapter"]),
    ("lora_per_domain", [*BY_DOMAIN, "kind=sft", "cold_start=null"]),
    ("lora_per_domain", ["lora.rank=4", "lora.per_domain=true", "lora.publish=adapter"]),
    ("lora_per_domain", [*BY_DOMAIN, "lora.publish=merged"]),
    ("lora_per_domain", [*BY_DOMAIN, "lora.path=x", "cold_start=null"]),
    ("lora_per_domain", [*BY_DOMAIN, *GRPO_KL, "objective.reference_interval=5"]),
    ("lora_per_domain", [*BY_DOMAIN, "critic.trunk=policy", "objective.preset=ppo"]),
    ("lora_per_domain", [*BY_DOMAIN, 'domains.1.name="code/hard"']),
    ("lora_per_domain", [*BY_DOMAIN, f'domains.1.name="{"ü" * 101}"']),
    ("lora_precision", ["lora.rank=4", "trainer.fp8=blockwise", "trainer.precision=bfloat16"]),
    (
        "domain_names",
        [
            'domains=[{name="a", source="file", path="x", rewards=[{function="m:f"}]},'
            '{name="a", source="file", path="x", rewards=[{function="m:f"}]}]'
        ],
    ),
    ("domain_names", ["domains.0.name=all"]),
    ("domain_names", ['domains.0.name="math.v2"']),
    ("domain_names", ['domains.0.name=" a"']),
    ("domain_names", ['domains.0.name="a\\nb"']),
    ("domain_names", ['domains.0.name=""']),
    ("domain_names", ['domains.0.name="@"']),
    ("domain_source", ["domains.0.dataset=null"]),
    ("domain_source", ["domains.0.path=x.jsonl"]),
    ("template", ["domains.0.template={question"]),
    ("template", ["domains.0.template={question} {answer}"]),
    ("template", ["domains.0.template=chat", "domains.0.question_template={answer}"]),
    ("template", ["domains.0.response_template=so it is"]),
    ("chat_template", ["domains.0.system_prompt=x"]),
    ("chat_template", ["domains.0.template_arguments.enable_thinking=false"]),
    ("chat_template", ["domains.0.template=chat", "domains.0.template_arguments.messages=[]"]),
    ("reward_function", ["domains.0.rewards.0.function=exact_match"]),
    ("environment_template", ["domains.0.environment.name=calculator", "cold_start=null"]),
    (
        "environment_demonstration",
        ["domains.0.template=chat", "domains.0.environment.name=calculator"],
    ),
    ("environment_demonstration", [*AGENT, 'domains.0.environment.demonstration=["yes"]']),
    ("environment_alone", [*AGENT, *ALLOCATED]),
    ("environment_alone", [*AGENT, "kind=sft", "cold_start=null"]),
    ("environment_alone", [*AGENT, "kind=rejection_sample", "cold_start=null", "num_steps=0"]),
    ("environment_reward", ["domains.0.rewards.0.function=environment"]),
    ("environment_tokens", [*AGENT, "domains.0.environment.episode_tokens=100000"]),
    ("environment_tokens", [*AGENT, "domains.0.environment.turn_tokens=100000"]),
    (
        "environment_tokens",
        [*AGENT, "domains.0.max_new_tokens=5", "domains.0.environment.episode_tokens=6"],
    ),
    (
        "environment_tokens",
        [
            *AGENT,
            "domains.0.environment.episode_tokens=4",
            "domains.0.environment.turn_tokens=5",
        ],
    ),
    ("environment_template", [COMMAND, "cold_start=null"]),
    ("environment_alone", ["domains.0.template=chat", COMMAND]),
    ("environment_alone", [*PROGRAM, COMMAND, "kind=sft"]),
    ("environment_alone", [*PROGRAM, COMMAND, "objective.preset=deepseekmath_process"]),
    ("environment_tokens", [*PROGRAM, COMMAND, "domains.0.agent.episode_tokens=100000"]),
    ("environment_tokens", [*PROGRAM, COMMAND, "domains.0.agent.turn_tokens=100000"]),
    ("agent_or_environment", [*AGENT, COMMAND]),
    ("agent_program", [*PROGRAM, "domains.0.agent.max_turns=2"]),
    ("agent_program", [*PROGRAM, COMMAND, "domains.0.agent.function=m:f"]),
    ("agent_program", [*PROGRAM, COMMAND, "domains.0.agent.arguments.a=1"]),
    ("agent_program", [*PROGRAM, "domains.0.agent.function=m:f", "domains.0.agent.variables.A=b"]),
    ("agent_program", [*PROGRAM, "domains.0.agent.function=m"]),
    ("environment_time", [*AGENT, "domains.0.environment.step_s=1000"]),
    ("problem_counts", ["domains.0.num_problems=1536"]),
    ("group_size", ["batch.num_samples_per_prompt=1"]),
    ("objective", ["objective.kl_beta=0.1"]),
    ("objective", ["domains.0.objective.kl_beta=0.1"]),
    ("objective", ["objective.preset=two_grpo"]),
    ("objective", ["objective.preset=gagpo"]),
    ("objective", ["objective.preset=gigpo"]),
    ("objective", ["objective.preset=gfpo", "objective.subset_size=20"]),
    ("objective", ["objective.llds_weight=0.1"]),
    ("updates_per_rollout", ["batch.num_prompts=4", "batch.updates_per_rollout=5"]),
    ("completion_length", ["rollout.max_new_tokens=64"]),
    ("length_budget", ["domains.0.max_new_tokens=7"]),
    ("reward_clip", ["objective.preset=deepseekmath_process", "domains.0.reward_clip=2"]),
    ("reward_clip", ["objective.preset=mo_grpo", "domains.0.reward_clip=2"]),
    ("accuracy_component", ["domains.0.accuracy=exact_matc"]),
    ("accuracy_component", ["domains.0.accuracy=zzz"]),
    ("zero_variance_resample", ["sampling.zero_variance=resample"]),
    (
        "dropped_rewards",
        [
            "objective.preset=lite_ppo",
            "sampling.dynamic=true",
            "objective.reward_shaping=per_token",
        ],
    ),
    ("deterministic_surplus", ["sampling.surplus_staleness=1", "rollout.deterministic=true"]),
    ("microbatch_length", ["trainer.max_tokens_per_microbatch=63"]),
    ("deterministic_staleness", ["batch.max_staleness=1", "rollout.deterministic=true"]),
    ("deterministic_staleness", ["batch.max_staleness=4", "rollout.deterministic=true"]),
    ("too_old_on_policy", ["batch.too_old=mask"]),
    ("adapted_staleness", ["batch.adapt_staleness=true"]),
    ("pause_in_flight", ["publish.pause=keep"]),
    ("publish_carrier", ["publish.method=nccl"]),
    (
        "publish_carrier",
        ["publish.method=nccl", "placement.gpus_per_node=2", "placement.mode=colocated"],
    ),
    ("delta_of_files", ["publish.delta=true", "publish.method=file"]),
    ("beside_decoding", ["publish.beside_decoding=true"]),
    ("beside_decoding", [*AHEAD, "publish.beside_decoding=true", "publish.pause=wait"]),
    ("beside_decoding", [*AHEAD, "publish.beside_decoding=true", "publish.method=file"]),
    (
        "beside_decoding",
        [*AHEAD, "publish.beside_decoding=true", "placement.gpus_per_node=3"],
    ),
    ("canary_tolerance", ["rollout.dtype=bfloat16", "publish.canary_tolerance=0.001"]),
    ("validation_prompts", ["data.num_validation=0"]),
    ("evaluated_prompts", ["kind=eval", "num_steps=0", "cold_start=null", "data.num_heldout=0"]),
    ("validation_prompts", ["data.num_validation=0", "cold_start=null", "evaluation.interval=5"]),
    ("environment_nodes", ["placement.environment_nodes=1"]),
    ("placement", ["placement.trainer_nodes=3"]),
    ("placement", ["placement.gpus_per_node=1", "placement.rollout_nodes=1"]),
    ("placement", ["placement.gpus_per_node=2"]),
    (
        "placement",
        ["placement.gpus_per_node=2", "placement.rollout_nodes=1", "rollout.num_replicas=3"],
    ),
    (
        "placement",
        [
            "placement.gpus_per_node=2",
            "placement.rollout_nodes=3",
            "rollout.tensor_parallel_size=4",
            "rollout.num_replicas=2",
        ],
    ),
    (
        "placement",
        [
            "placement.gpus_per_node=4",
            "placement.rollout_nodes=3",
            "rollout.tensor_parallel_size=3",
            "rollout.data_parallel_size=4",
        ],
    ),
    (
        "placement",
        ["placement.gpus_per_node=4", "placement.rollout_nodes=1", "rollout.data_parallel_size=8"],
    ),
    # two nodes have 2 GPUs left each, and an engine of 4 is on one node
    (
        "placement",
        [
            "trainer.num_ranks=4",
            "placement.trainer_nodes=2",
            "placement.gpus_per_node=4",
            "rollout.tensor_parallel_size=4",
        ],
    ),
    (
        "placement",
        [
            "trainer.num_ranks=4",
            "placement.trainer_nodes=2",
            "placement.gpus_per_node=4",
            "rollout.data_parallel_size=3",
        ],
    ),
    (
        "placement",
        [
            "placement.gpus_per_node=3",
            "placement.rollout_nodes=2",
            "rollout.tensor_parallel_size=4",
        ],
    ),
    ("allocation_sizes", ["allocation={base_samples_per_prompt=8}"]),
    (
        "allocation_sizes",
        ["allocation.base_samples_per_prompt=2", "batch.num_samples_per_prompt=2"],
    ),
    ("allocation_sizes", ["allocation={max_samples_per_prompt=7}"]),
    (
        "allocation_objective",
        [
            "allocation={}",
            "objective.advantage=passk",
            "objective.advantage_std=none",
            "objective.passk_k=5",
        ],
    ),
    ("allocation_objective", ["allocation={}", "objective.preset=gfpo"]),
    ("seeding_rounds", ["seeding={}", "domains.0.template={question}"]),
    ("seeding_layout", [*SEEDED, "seeding.exemplar=Q: {question}"]),
    ("seeding_layout", [*SEEDED, "seeding.question=Q:"]),
    ("seeding_layout", [*SEEDED, "seeding.question=Q: {question} A: {answer}"]),
    ("seeding_template", [*SEEDED, "domains.0.template={metadata[expression]}"]),
    ("rl_only", ["kind=sft", "cold_start=null", "allocation={}"]),
    ("min_lr", ["optimizer.min_lr=1"]),
    ("min_lr", ["cold_start.optimizer.min_lr=1"]),
    ("rl_only", ["kind=sft"]),
    ("rl_only", ["kind=sft", "cold_start=null", "batch.epochs=2"]),
    ("rl_only", ["kind=sft", "cold_start=null", "correction={probability=0.5}"]),
    ("distillation", ["kind=distil", "cold_start=null"]),
    (
        "teacher_domains",
        [*DISTIL, 'distillation={teachers=[{path="t"}, {path="u", domains=["sums"]}]}'],
    ),
    (
        "sampled_tokens",
        [*DISTIL, 'distillation={teachers=[{path="t"}], mode="sampled", samples="dataset"}'],
    ),
    (
        "sampled_tokens",
        [*DISTIL, 'distillation={teachers=[{path="t"}], mode="sampled", temperature=0.5}'],
    ),
    (
        "sampled_tokens",
        [*DISTIL, 'distillation={teachers=[{path="t"}], mode="sampled", forward_weight=0.5}'],
    ),
    ("likeliest_tokens", [*DISTIL, 'distillation={teachers=[{path="t"}], top_k=8}']),
    ("teacher_source", [*DISTIL, "distillation={teachers=[{}]}"]),
    (
        "teacher_source",
        [*DISTIL, 'distillation={mode="topk_tail", teachers=[{path="t", url="http://u"}]}'],
    ),
    ("teacher_model", [*DISTIL, 'distillation={teachers=[{path="t", model="math"}]}']),
    ("served_teacher", [*DISTIL, 'distillation={teachers=[{url="http://u"}]}']),
    (
        "served_teacher",
        [*DISTIL, 'distillation={mode="topk_tail", teachers=[{url="http://u"}], temperature=0.5}'],
    ),
    (
        "served_teacher",
        [
            *DISTIL,
            'distillation={mode="topk_tail", teachers=[{url="http://u"}]}',
            "rollout.temperature=0.5",
        ],
    ),
    (
        "colocated_staleness",
        ['placement.shared_servers=["http://judge:8000"]', "batch.max_staleness=1"],
    ),
    ("token_routing", ["kind=sft", "cold_start=null", "routing.replay=r3"]),
    ("token_routing", [*DISTIL, 'distillation={teachers=[{path="t"}]}', "routing.replay=r2"]),
    ("gate", ['gates=["eval.additoin.accuracy >= 0.5"]']),
    ("gate", ['gates=["eval.addition.acuracy >= 0.5"]']),
    ("gate", ['gates=["eval.all.pass_at_4 >= 0.5"]']),
    ("gate", ['gates=["eval.addition.accuracy >= 1.6"]']),
    ("gate", ['gates=["seconds <= -5"]']),
    ("gate", ['gates=["seconds < 0"]']),
    ("gate", ['gates=["eval.addition.prompts <= -1"]']),
    ("gate", ["data.num_heldout=8", 'gates=["eval.all.prompts >= 9"]']),
    ("gate", ["data.num_heldout=8", 'gates=["eval.all.prompts > 8"]']),
    ("gate", ["data.num_heldout=8", 'gates=["eval.all.prompts <= 7"]']),
    ("gate", ["data.num_heldout=8", 'gates=["eval.addition.prompts < 8"]']),
    ("gate", ["data.num_heldout=8", 'gates=["eval.addition.accuracy_unscorable > 8"]']),
    ("gate", ['gates=["eval.all.accuracy_unscorable < 0"]']),
    ("gate", ["data.num_heldout=0", 'gates=["eval.all.prompts >= 1"]']),
    ("gate", ["num_steps=2", 'gates=["steps >= 1000"]']),
    ("gate", ["num_steps=2", 'gates=["steps > 2"]']),
    ("gate", ["data.num_heldout=0", 'gates=["eval.addition.accuracy >= 0.5"]']),
    ("gate", ["data.num_heldout=0", 'gates=["no domain drops more than 0.1 against runs/a"]']),
    (
        "untaught_domain",
        [
            *DISTIL,
            'distillation={teachers=[{path="t", domains=["b"]}]}',
            'domains=[{name="a", source="file", path="x", rewards=[{function="m:f"}]},'
            '{name="b", source="file", path="x", rewards=[{function="m:f"}]}]',
        ],
    ),
    ("kind_steps", ["kind=eval", "cold_start=null"]),
    ("dataset_staleness", ["kind=sft", "cold_start=null", "batch.max_staleness=1"]),
    ("domain_weights", ["domains.0.weight=0"]),
    ("offload_optimizer", [OFFLOADED, "trainer.precision=float32"]),
    ("offload_optimizer", [*OFFLOADED_BF16, "trainer.distributed_optimizer=false"]),
    ("offload_optimizer", [*OFFLOADED_BF16, "lora.rank=4"]),
    ("keep_routing", ["routing.keep_loss=kl"]),
    ("keep_routing", ["routing.keep_weight=0.1"]),
    ("routing_replay", ["routing.keep_loss=set_mass", "routing.keep_weight=0.1"]),
    ("routing_replay", ["routing.balance_weight=0.1"]),
    ("objective", ["objective.preset=gspoo"]),
    ("objective", ["objective.kl=k1"]),
    ("objective", ["objective.reference_ema=0.9", "objective.kl=is_k3"]),
    ("objective", ["objective.aggregation=token_mean"]),
    (
        "objective",
        [
            "objective.preset=grpo",
            "objective.shaping=eda",
            "objective.advantage=process",
            "objective.advantage_std=none",
        ],
    ),
    (
        "objective",
        ["objective.preset=gspo", "objective.advantage=process", "objective.advantage_std=none"],
    ),
    ("objective", ["objective.preset=gspo", "objective.clip=gmpo", "objective.ratio=token"]),
    ("objective", ["objective.clip=cispo"]),
    ("objective", ["objective.preset=cispo", "objective.ratio_min=9"]),
    ("objective", ["objective.preset=cispo", "objective.dual_clip=3"]),
    ("objective", ["objective.proximal=rollout", "objective.mismatch=tis"]),
    ("objective", ["objective.mismatch=icepop", "objective.mismatch_min=3"]),
    ("objective", ["objective.advantage=rloo"]),
    ("objective", ["objective.advantage=components", "objective.advantage_std=none"]),
    ("objective", ["objective.ratio=turn_geo"]),
    ("objective", ["objective.preset=grpo", "objective.advantage=opo"]),
    (
        "objective",
        ["objective.advantage=best_minus_second", "objective.advantage_std=batch_raw"],
    ),
    ("objective", ["objective.preset=grpo", "objective.otb_zero_tail=true"]),
    ("objective", ["objective.preset=otb", "objective.ratio=sequence_geo", *SEQUENCE_MEAN]),
    ("group_size", ["objective.preset=otb", "batch.num_samples_per_prompt=1"]),
    ("token_baseline_sampling", ["objective.preset=otb", "rollout.top_p=0.9"]),
    ("token_baseline_sampling", ["objective.preset=vcpo", "rollout.top_p=0.9"]),
    ("objective", ["objective.preset=vcpo", "objective.advantage_std=batch_raw"]),
    ("group_size", ["objective.preset=vcpo", "batch.num_samples_per_prompt=1"]),
    ("objective", ["objective.preset=dppo", "objective.ratio=sequence_geo", *SEQUENCE_MEAN]),
    ("objective", ["objective.preset=clip_cov", "objective.ratio=sequence_geo", *SEQUENCE_MEAN]),
    ("objective", ["objective.preset=vespo", "objective.ratio=token"]),
    ("objective", ["objective.preset=gspo", "objective.top_entropy_share=0.2"]),
    ("objective", ["objective.preset=gspo", "objective.off_policy_mask=m2po"]),
    ("objective", ["objective.preset=m2po", "objective.ratio=sequence_mean", *SEQUENCE_MEAN]),
    ("objective", ["objective.preset=m2po", "objective.ratio=sequence_product", *SEQUENCE_MEAN]),
    ("objective", ["objective.preset=gagpo", *AGENT, "objective.off_policy_mask=m2po"]),
    ("objective", ["objective.preset=drpo", "objective.ratio=sequence_geo", *SEQUENCE_MEAN]),
    ("objective", ["objective.preset=minpro", "objective.clip=drpo"]),
    ("objective", ["objective.preset=topr", "objective.topr_min_negative=2"]),
    ("objective", ["objective.preset=dppo", "objective.router_shift_floor=0.8"]),
    (
        "objective",
        ["objective.preset=tic_grpo", "objective.router_shift_floor=0.8"],
    ),
    ("objective", ["objective.preset=fipo", "objective.future_kl_min=2"]),
    ("objective", ["objective.preset=gspo", "objective.credit=future_kl"]),
    ("objective", ["objective.preset=topr", "objective.topr_max_positive=0.5"]),
    (
        "objective",
        ["objective.preset=trm", "objective.trm_max=null", "objective.trm_mean=null"],
    ),
    ("objective", ["objective.preset=clip_cov", "objective.covariance_min=5"]),
    ("objective", ["objective.mismatch=icepop", "objective.mismatch_floor=0.5"]),
    ("objective", ["objective.mismatch_floor=0.5"]),
    ("objective", ["objective.mismatch=tis", "objective.mismatch_floor=3"]),
    ("objective", ["objective.preset=luspo", "objective.ratio=sequence_product"]),
    (
        "objective",
        [
            "objective.preset=grpo",
            "objective.shuffle_advantages=true",
            "objective.advantage=process",
            "objective.advantage_std=none",
        ],
    ),
    (
        "objective",
        ["objective.advantage=passk", "objective.advantage_std=none", "objective.passk_k=17"],
    ),
]


@pytest.mark.parametrize(("rule", "overrides"), BROKEN)
def test_each_rule(rule, overrides):
    violations = check_rules(unchecked_config(*overrides))
    assert [violation.rule for violation in violations] == [rule]
    assert all(violation.remedy or violation.nearest for violation in violations)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("math.v2", "math-v2"), ("a\tb ", "a-b"), ("Übung@1", "Übung-1"), ("@all", "domain0")],
)
def test_a_name_of_a_domain_that_is_near(name, nearest):
    [violation] = check_rules(unchecked_config(f"domains.0.name={as_toml(name)}"))
    assert violation.nearest == (nearest,)
    assert check_rules(unchecked_config(f"domains.0.name={as_toml(nearest)}")) == []


@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1))
def test_an_accepted_name_of_a_domain_can_be_asked_for(name):
    named = f"domains.0.name={as_toml(name)}"
    gate = f"eval.{name}.accuracy >= 0.5"
    if check_rules(unchecked_config(named)) == []:
        assert check_rules(unchecked_config(named, f"gates={as_toml([gate])}")) == []
        assert parse_gate(gate).check({"eval": {name: {"accuracy": 0.5}}}) is None


@pytest.mark.parametrize("name", ["Counting & Probability", "code/c++", "übung", "-", "[bold]"])
def test_names_of_topics_are_names_of_domains(name):
    gates = as_toml([f"eval.{name}.accuracy>=0.5"])
    named = f"domains.0.name={as_toml(name)}"
    assert check_rules(unchecked_config(named, f"gates={gates}")) == []


@pytest.mark.parametrize("preset", ["gagpo", "gigpo"])
def test_turns_are_trained_where_every_domain_has_an_environment(preset):
    assert check_rules(unchecked_config(f"objective.preset={preset}", *AGENT)) == []


def test_every_rule_is_broken_by_a_case_above():
    named = {name for rules in ALL_RULES for name in rules.names}
    assert named == {rule for rule, _ in BROKEN}


def test_every_check_finds_something_in_a_case_above():
    unbroken = {check for rules in ALL_RULES for _, check in rules._checks}
    for _, overrides in BROKEN:
        run = unchecked_config(*overrides)
        of_runs = ALL_RULES[: ALL_RULES.index(DOMAIN_RULES)]
        subjects = [(rules, (run,)) for rules in of_runs]
        for index, domain in enumerate(run.domains):
            subjects.append((DOMAIN_RULES, (run, domain, index)))
            subjects.append((ENVIRONMENT_RULES, (run, domain, index)))
        subjects += [(OBJECTIVE_RULES, (run.objective,)), (BATCH_RULES, (run.objective, run.batch))]
        for rules, subject in subjects:
            unbroken -= {check for _, check in rules._checks if check(*subject)}
    assert unbroken == set()


def test_a_rule_set_fills_in_names_and_values():
    rules = RuleSet()

    @rules.rule("few_prompts")
    def few_prompts(run):
        return Violation("batch.num_prompts", "too few", nearest=(64,))

    run = unchecked_config("batch.num_prompts=7")
    (violation,) = rules.violations(run, config=run)
    assert (violation.rule, violation.value) == ("few_prompts", 7)
    assert list(rules.broken_names(run)) == ["few_prompts"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["batch.num_prompts=4", "batch.updates_per_rollout=4"],
        ["batch.max_staleness=1"],
        ["batch.max_staleness=1", "publish.pause=abort"],
        ["batch.max_staleness=8", "publish.pause=keep", "batch.too_old=mask"],
        ["rollout.deterministic=true"],
        ["rollout.max_new_tokens=63"],
        ["trainer.max_tokens_per_microbatch=64"],
        ["domains.0.num_problems=1537"],
        ["domains.0.num_problems=null"],
        ["data.num_validation=0", "cold_start=null"],
        ["rollout.dtype=bfloat16", "publish.canary_tolerance=0.1"],
        ["rollout.dtype=bfloat16", "publish.canary=false"],
        ["batch.num_samples_per_prompt=1", "num_steps=0"],
        ["batch.num_samples_per_prompt=1", "kind=sft", "cold_start=null"],
        ["publish.method=nccl", "placement.gpus_per_node=3"],
        ["publish.method=ipc"],  # through host memory
        ["publish.num_senders=3"],  # of earlier versions: without effect
        [*PREFERENCES, "rollout.max_new_tokens=64"],  # nothing is sampled
        [*PREFERENCES, "publish.pause=keep"],
        [*PREFERENCES, "publish.delta=true", "publish.method=file", "rollout.fp8=blockwise"],
        [*REWARD_MODEL, "rollout.dtype=bfloat16", "publish.canary_tolerance=0.001"],
        ["model.preset=qwen3-8b", "model.path=/x"],
        ["num_steps=2", 'gates=["steps >= 2", "seconds >= 3", "steps < 1", "seconds <= 60"]'],
        ["data.num_heldout=8", 'gates=["eval.all.prompts >= 8", "eval.addition.prompts <= 8"]'],
        [
            "evaluation.num_samples=2",
            'gates=["eval.all.accuracy_unscorable <= 0", "eval.all.pass_at_2_unscorable < 9"]',
        ],
        ["placement.gpus_per_node=3"],
        ["placement.gpus_per_node=2", "placement.mode=colocated", "rollout.num_replicas=2"],
        [
            "placement.gpus_per_node=2",
            "placement.rollout_nodes=4",
            "rollout.tensor_parallel_size=4",
            "rollout.num_replicas=2",
        ],
        [
            "placement.gpus_per_node=2",
            "placement.rollout_nodes=4",
            "rollout.tensor_parallel_size=2",
            "rollout.data_parallel_size=2",
            "rollout.num_replicas=2",
        ],
        ["domains.0.template={{}} {metadata[expression]} ="],
        [
            "domains.0.template=chat",
            "domains.0.question_template={question}!",
            "domains.0.system_prompt=x",
            "domains.0.template_date=2026-01-31",
            "domains.0.template_arguments.enable_thinking=false",
            "domains.0.assistant_prefix=<think>",
        ],
        ["domains.0.max_new_tokens=6"],
        ["objective.preset=luspo"],
        ["objective.llds_weight=0.1", "batch.epochs=2"],
        ["objective.preset=vespo", "objective.top_entropy_share=0.5"],
        ["objective.preset=topr", "objective.top_entropy_share=0.5"],
        ["objective.preset=topr", "objective.ratio=token"],
        ["objective.preset=gspo", "objective.router_shift_floor=0.8"],
        ["objective.preset=topr", "objective.credit=future_kl"],
        ["objective.preset=a3po", "objective.mismatch=tis", "batch.max_staleness=2"],
        ["objective.preset=gspo_token", "objective.credit=future_kl"],
        ["objective.preset=minpro", "objective.clip=ppo"],
        ["objective.preset=trm", "objective.trm_max=null"],
        ["objective.preset=gspo_token", "objective.top_entropy_share=0.5"],
        ["objective.preset=gspo_token", "objective.off_policy_mask=m2po"],
        ["objective.preset=vespo", "objective.off_policy_mask=m2po"],
        ["objective.mismatch=tis", "objective.mismatch_floor=2"],
        ["objective.mismatch=mis_sequence", "objective.mismatch_floor=0.1"],
        ["objective.advantage=best_minus_second", "objective.advantage_std=group"],
        [
            "objective.advantage=batch",
            "objective.advantage_std=none",
            "batch.num_samples_per_prompt=1",
        ],
        ["domains.0.accuracy=exact_match", "sampling.dynamic=true", "curriculum.floor=0.1"],
        ["objective.preset=grpo", "domains.0.reward_clip=2"],
        # nothing is trained of rewards, and the sum is what is told
        [
            "kind=eval",
            "num_steps=0",
            "cold_start=null",
            "objective.preset=deepseekmath_process",
            "domains.0.reward_clip=2",
        ],
        ["allocation={max_samples_per_prompt=8}", "sampling.dynamic=true", "correction={}"],
        [*SEEDED, "batch.max_staleness=1", "allocation.samples_per_round=1"],
        # without engines nobody asks how wide one would be
        [*PREFERENCES, "placement.gpus_per_node=3", "rollout.tensor_parallel_size=4"],
        LESSONS,
        [*LESSONS, *SERVED_WRITER, "experience.writer_max_tokens=9000"],
        [*LESSONS, "kind=eval", "num_steps=0", "experience.path=/x/experience.json"],
        ["allocation={}", "seeding={}", "domains.0.template=chat"],
    ],
)
def test_valid_settings(overrides):
    assert check_rules(unchecked_config(*overrides)) == []


def test_a_domain_without_a_name_is_asked_for_one():
    [found] = check_rules(unchecked_config('domains.0.name=""'))
    assert found.nearest == ("domain0",) and found.remedy.startswith("give it a name")
    [found] = check_rules(unchecked_config('domains.0.name=" a"'))
    assert found.nearest == ("a",) and found.remedy.startswith("leave out")


def test_a_clip_of_rewards_that_are_trained_apart_is_told_with_its_domain():
    clipped = ["objective.preset=deepseekmath_process", "domains.0.reward_clip=2"]
    [found] = check_rules(unchecked_config(*clipped))
    assert found.key == "domains.0.reward_clip"
    assert (
        found.message
        == "advantage process trains rewards of steps, which reward_clip does not bound"
    )
    assert found.remedy == "remove it, and clip in the reward functions"


def test_a_reward_named_with_a_dot_is_told_with_a_colon():
    [found] = check_rules(unchecked_config("domains.0.rewards.0.function=my.rewards.short"))
    assert found.key == "domains.0.rewards.0.function" and found.nearest == ("my.rewards:short",)
    [found] = check_rules(unchecked_config("domains.0.rewards.0.function=short"))
    assert found.nearest == () and "for example" in found.remedy


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), None),
        (("--other",), None),
        (("--wanted",), ""),
        (("--wanted=3", "4"), "3"),
        (("--other", "--wanted", "4"), "4"),
        (("--other", "--wan_ted=4"), None),
        (("--wanted", "--other"), ""),
        (("--wanted=", "4"), ""),
        (("--wanted=3", "--wanted=4"), "4"),
        (("--wanted", "-0.5"), "-0.5"),
    ],
)
def test_an_argument_of_the_engine_is_found(arguments, found):
    assert RolloutConfig(engine_arguments=arguments).engine_argument("--wanted") == found


def test_arguments_of_the_engine_may_have_underscores():
    rollout = RolloutConfig(engine_arguments=("--most_wanted_key=a_b", "--x_y.z_w", "1"))
    assert rollout.engine_argument("--most-wanted-key") == "a_b"
    assert rollout.engine_argument("--x-y") == "1"


@pytest.mark.parametrize(
    "arguments", [["--gone", "0.4"], ["--gone=0.4"], ["--gone"], ["--gone", "-0.4"]]
)
def test_an_argument_of_the_engine_is_left_out_with_its_value(arguments):
    assert without_option(["--a", "1", *arguments, "--b=2"], "--gone") == ["--a", "1", "--b=2"]


@pytest.mark.parametrize("name", ["--device-memory-utilization", "--device_memory_utilization"])
def test_an_argument_of_the_engine_may_have_its_second_name(name):
    share = "--gpu-memory-utilization"
    rollout = RolloutConfig(engine_arguments=(f"{share}=0.9", name, "0.2"))
    assert rollout.engine_argument(share) == "0.2"
    assert without_option([*rollout.engine_arguments, "--b"], share) == ["--b"]


GATES_ON_PROMPTS = [
    # (domains, held-out prompts, gate, what is said; "": it may be open)
    (1, 8, "eval.all.prompts >= 1000000", "is at most 8"),
    (1, 8, "eval.all.prompts < 8", "never below 8"),
    (1, 8, "eval.d0.prompts <= 8", ""),
    (3, 8, "eval.d1.prompts >= 6", ""),
    (3, 8, "eval.d1.prompts >= 7", "is at most 6"),
    (3, 8, "eval.d1.prompts <= 1", ""),
    (3, 8, "eval.d1.prompts < 1", "never below 1"),
    (3, 8, "eval.all.prompts <= 7", "never below 8"),
    (3, 2, "eval.d1.prompts >= 2", ""),
    (3, 2, "eval.d1.prompts >= 3", "is at most 2"),
    (3, 8, "eval.d1.accuracy_unscorable <= 0", ""),
    (1, 0, "eval.all.prompts >= 1", "is at most 0"),
    (1, 0, "eval.all.prompts <= 0", ""),
]


@pytest.mark.parametrize(("num_domains", "num_heldout", "gate", "told"), GATES_ON_PROMPTS)
def test_a_gate_on_more_or_fewer_prompts_than_are_evaluated(num_domains, num_heldout, gate, told):
    names = [f"d{number}" for number in range(num_domains)]
    run = recipe(names, data={"num_heldout": num_heldout}, gates=[gate])
    found = gates_can_be_read(run)
    assert [told in violation.message for violation in found] == [True] * bool(told)
    assert all(violation.remedy for violation in found)


@pytest.mark.parametrize("loss", ["dpo", "stepwise"])
def test_preferences_of_equal_prompts_are_evaluated_together_and_may_be_more(loss):
    kind = "preferences"
    if loss == "stepwise":
        kind = "reward_model"
    settings = {"kind": kind, "preferences": {"loss": loss}, "data": {"num_heldout": 8}}
    for gate, is_refused in (
        ("eval.all.prompts >= 12", False),
        ("eval.d.prompts >= 12", False),
        ("eval.all.prompts < 8", True),
    ):
        run = recipe(("d", "e"), **settings, gates=[gate])
        assert bool(gates_can_be_read(run)) == is_refused


@pytest.mark.parametrize(("num_steps", "raises_steps"), [(0, False), (2, True)])
def test_a_gate_on_steps_is_not_reached_by_steps_that_nothing_trains(num_steps, raises_steps):
    gate = f'gates=["steps >= {num_steps + 1}"]'
    [found] = check_rules(unchecked_config(f"num_steps={num_steps}", gate))
    assert f"num_steps = {num_steps}" in found.message
    assert ("raise num_steps" in found.remedy) == raises_steps
