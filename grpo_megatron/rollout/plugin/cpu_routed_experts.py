"""CPU: return the experts of every token (`--enable-return-routed-experts`).

Gap (vLLM 0.32.0, config/vllm.py:1144): the option is refused unless model runner V2 is used, which
needs Triton; the CPU has runner V1 only (v1/worker/cpu_model_runner.py). V1 lacks just the three
calls that V2's runner makes (v1/worker/gpu/model_runner.py:1740 and :2181), added here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

ModelOutput = Any
"""vLLM's ModelRunnerOutput, or what a runner answers in its place."""


def apply() -> None:
    """Allow the option on a CPU, and give its runner the calls that collect routes."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    verify = VllmConfig._verify_aux_output_compatibility

    def _verify_aux_output_compatibility(self: VllmConfig) -> None:
        # every other incompatibility is still refused
        with patch.object(VllmConfig, "use_v2_model_runner", True):
            verify(self)

    VllmConfig._verify_aux_output_compatibility = _verify_aux_output_compatibility
    initialize = Runner.initialize_kv_cache
    execute = Runner.execute_model
    sample = Runner.sample_tokens

    def initialize_kv_cache(
        self: Runner, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        initialize(self, kv_cache_config, *args, **kwargs)
        self._routes = None
        self._pending_routes = None
        if self.vllm_config.aux_output_config.enabled:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self._routes = get_aux_output_connector(
                self.get_model(), self.vllm_config, kv_cache_config
            )

    def execute_model(
        self: Runner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> ModelOutput:
        if self._routes is None:
            return execute(self, scheduler_output, *args, **kwargs)
        self._routes.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._pending_routes = self._routes.prepare_output(_batch_view(self))
        return result

    def sample_tokens(self: Runner, *args: Any, **kwargs: Any) -> ModelOutput:
        output = sample(self, *args, **kwargs)
        pending = self._pending_routes
        self._pending_routes = None
        if pending is not None:
            _attach(pending, output)
        return output

    for method in (initialize_kv_cache, execute_model, sample_tokens):
        setattr(Runner, method.__name__, method)


def _batch_view(runner: Runner) -> SimpleNamespace:
    """Copy what `prepare_output` reads of runner V2's batch: V1 reuses its arrays."""
    batch = runner.input_batch
    return SimpleNamespace(
        req_ids=list(batch.req_ids[: batch.num_reqs]),
        query_start_loc_np=runner.query_start_loc.np[: batch.num_reqs + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
    )


def _attach(pending: Any, output: ModelOutput) -> None:
    """Put the routes `pending` of a step into its `output`. Raises RuntimeError for another's."""
    from vllm.v1.outputs import ModelRunnerOutput

    # CPU scheduling is synchronous, so neither a future nor another batch order can occur.
    if not isinstance(output, ModelRunnerOutput) or output.req_ids != pending.request_ids:
        raise RuntimeError("expert routes cannot be matched with the sampled tokens")
    sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
    pending.enqueue_cpu_copy(num_sampled=sampled, num_rejected=np.zeros_like(sampled))
    output.aux_output_connector_output = pending.process_output()
