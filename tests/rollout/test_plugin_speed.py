"""What the plugin makes faster computes and answers the same."""

from __future__ import annotations

import json
import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.rollout.plugin import cpu_eager_layers, lean_logprobs, whole_outputs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_cpu_engine(), reason="fixes of vLLM's CPU build"),
]


class Requests:
    """An engine core around a script: `steps[i]` is request to tokens (or a finish reason)."""

    def __init__(self, steps: list[dict], **params):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, **params})
        names = dict.fromkeys(name for step in steps for name in step)
        request = SimpleNamespace(sampling_params=params, client_index=0, resumable=False)
        self.scheduler = SimpleNamespace(requests=dict.fromkeys(names, request))
        self.output_queue, self._weight_version, self._steps = queue.Queue(), "0", iter(steps)

    def step(self):
        from vllm.v1.engine import EngineCoreOutputs

        outputs = [_output(name, *what) for name, what in next(self._steps).items()]
        for output in outputs:
            if output.finished:
                del self.scheduler.requests[output.request_id]
        return {0: EngineCoreOutputs(outputs=outputs, weight_version=self._weight_version)}, True

    def set_weight_version(self, version: str):
        self._weight_version = version

    def abort_requests(self, request_ids):
        pass

    step = whole_outputs._holding(step)
    set_weight_version = whole_outputs._releasing(set_weight_version)
    abort_requests = whole_outputs._forgetting(abort_requests)


def _output(name: str, tokens: list[int], reason=None, mask=None):
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    ids = np.array(tokens)
    return EngineCoreOutput(
        name,
        list(tokens),
        finish_reason=reason,
        new_sampling_mask=mask,
        routed_experts=ids[:, None, None].repeat(2, 1),
        new_logprobs=LogprobsLists(ids[:, None], -ids[:, None] / 8, ids + 1),
    )


def _sent(messages) -> list[tuple[str, list[int], str]]:
    return [
        (output.request_id, output.new_token_ids, message.weight_version)
        for message in messages.values()
        for output in message.outputs
    ]


def test_a_completion_is_sent_whole():
    from vllm.v1.engine import FinishReason

    core = Requests(
        [
            {"a": ([1],), "b": ([7],)},
            {"a": ([2, 3],), "b": ([8], FinishReason.LENGTH)},
            {"a": ([4], FinishReason.STOP)},
        ]
    )
    assert core.step() == ({}, True)
    assert _sent(core.step()[0]) == [("b", [7, 8], "0")]
    (message,) = core.step()[0].values()
    (output,) = message.outputs
    assert output.new_token_ids == [1, 2, 3, 4] and output.finish_reason == FinishReason.STOP
    np.testing.assert_array_equal(output.routed_experts[:, 0, 0], [1, 2, 3, 4])
    ids, logprobs, ranks, _ = output.new_logprobs
    np.testing.assert_array_equal(ids[:, 0], [1, 2, 3, 4])
    np.testing.assert_array_equal(logprobs[:, 0], [-1 / 8, -2 / 8, -3 / 8, -4 / 8])
    np.testing.assert_array_equal(ranks, [2, 3, 4, 5])


def test_what_is_held_leaves_under_the_version_that_sampled_it():
    from vllm.v1.engine import FinishReason

    core = Requests([{"a": ([1],)}, {"a": ([2],)}, {"a": ([3],)}, {"a": ([4], FinishReason.STOP)}])
    core.step(), core.step()
    core.set_weight_version("1")
    assert _sent(dict([core.output_queue.get_nowait()])) == [("a", [1, 2], "0")]
    core.step()
    assert _sent(core.step()[0]) == [("a", [3, 4], "1")]


def test_aborted_requests_leave_nothing_behind():
    core = Requests([{"a": ([1],), "b": ([2],)}])
    core.step()
    core.abort_requests(["a"])
    core.set_weight_version("1")
    assert _sent(dict([core.output_queue.get_nowait()])) == [("b", [2], "0")]
    assert core.output_queue.empty()


def test_streams_and_stop_strings_get_every_token():
    from vllm.sampling_params import RequestOutputKind

    for params in ({"output_kind": RequestOutputKind.DELTA}, {"stop": ["x"]}):
        core = Requests([{"a": ([1],)}, {"a": ([2],)}], **params)
        assert [_sent(core.step()[0]) for _ in range(2)] == [[("a", [1], "0")], [("a", [2], "0")]]


def test_masks_of_what_could_be_sampled_are_sent_at_once():
    from vllm.v1.outputs import SamplingMaskLists

    mask = SamplingMaskLists(np.array([1, 2]), None)
    core = Requests([{"a": ([1], None, mask)}, {"a": ([2], None, mask)}])
    assert [_sent(core.step()[0]) for _ in range(2)] == [[("a", [1], "0")], [("a", [2], "0")]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_by_kernel(dtype, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)
    generator = torch.Generator().manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(64, eps=1e-6, dtype=dtype)
    norm.weight.data.normal_(generator=generator)
    packed = torch.randn(5, 3 * 64, generator=generator).to(dtype)
    heads = packed.split(64, dim=-1)[1]  # strided, as queries are inside packed projections
    residual = torch.randn(5, 64, generator=generator).to(dtype)
    # as where sequence-parallel parts of both were gathered together
    strided_residual = torch.cat([residual, residual], dim=-1).split(64, dim=-1)[1]
    expected = norm.forward_native(heads), norm.forward_native(heads.clone(), residual.clone())
    cpu_eager_layers._norm_by_kernel()
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(norm.forward_cpu(heads), expected[0], **tolerance)
    for states, added in ((heads, strided_residual), (heads.contiguous(), residual)):
        torch.testing.assert_close(norm.forward_cpu(states, added), expected[1], **tolerance)


@pytest.fixture
def lean(monkeypatch):
    """What `lean_logprobs` replaces: as it is, and put back afterwards."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving
    from vllm.v1.engine.logprobs import LogprobsProcessor

    for owner, name in (
        (LogprobsProcessor, "from_new_request"),
        (LogprobsProcessor, "_update_sample_logprobs"),
        (serving.ServingTokens, "_create_tokens_logprobs"),
        (protocol.GenerateTokensResponse, "model_dump"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__.get(name, getattr(owner, name)))


def _answer(tables, **params) -> dict:
    """What the API server answers where the engine core sends these tables, one after another."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    settings = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, **params})
    processor = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=settings))
    for ids, values in tables:
        processor._update_sample_logprobs(LogprobsLists(ids, values, np.ones(len(ids), int)))
    tokens = [int(row[0]) for ids, _ in tables for row in ids]
    logprobs = serving.ServingTokens._create_tokens_logprobs(
        None,
        token_ids=tokens,
        top_logprobs=processor.logprobs,
        num_output_top_logprobs=settings.logprobs,
    )
    choice = protocol.GenerateTokensChoice(index=0, token_ids=tokens, logprobs=logprobs)
    answer = json.loads(
        json.dumps(
            protocol.GenerateTokensResponse(request_id="a", choices=[choice]).model_dump(),
            allow_nan=False,
        )
    )
    return answer | {"cumulative": processor.cumulative_logprob}


@pytest.mark.parametrize(
    "params, columns",
    [({"logprobs": 0}, 1), ({"logprobs": 0}, 3), ({"logprobs": 2}, 3), ({"logprobs": -1}, 5)],
)
def test_lean_logprobs_are_the_same(params, columns, lean):
    random = np.random.default_rng(0)
    tables = [
        (
            np.stack([random.permutation(9)[:columns] for _ in range(n)]),
            np.log(random.random((n, columns), np.float32)),
        )
        for n in (1, 4, 2)
    ]
    odd = [(ids, values.copy()) for ids, values in tables]
    odd[0][1][0, 0], odd[1][1][2, 0] = np.nan, -np.inf
    expected = [_answer(some, **params) for some in (tables, odd)]
    lean_logprobs.apply()
    found = [_answer(some, **params) for some in (tables, odd)]
    assert [*map(_told, found)] == [*map(_told, expected)]
    assert found[0]["cumulative"] == pytest.approx(expected[0]["cumulative"], abs=1e-6)
    assert _told(found[0]) != _told(found[1])


def _told(answer: dict) -> tuple:
    """Without the ranks, which nobody here reads."""
    (choice,) = answer["choices"]
    rest = {name: value for name, value in choice.items() if name != "logprobs"}
    entries = [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    return rest, {n: v for n, v in answer.items() if n not in ("choices", "cumulative")}, entries


def test_who_asks_for_more_than_the_sampled_gets_it(lean):
    table = [(np.array([[3, 5, 3], [4, 4, 6]]), -np.array([[1.0, 0.5, 1.0], [0.25, 0.25, 2.0]]))]
    expected = _answer(table, logprobs=2)
    lean_logprobs.apply()
    assert _answer(table, logprobs=2) == expected
    assert len(expected["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
