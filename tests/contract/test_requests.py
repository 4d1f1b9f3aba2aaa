"""The server of the CUDA build has every route that is asked, and takes what is sent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import grpo_megatron
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rollout import replica
from grpo_megatron.rollout.generate import GenerateRequest
from tests.contract.pretended_gpus import in_a_process_of_its_own

pytestmark = pytest.mark.contract

ROLLOUT = Path(grpo_megatron.__file__).parent / "rollout"
RECIPE = "demo/gspo-moe-cpu"
_ASKING = {"control", "_control", "_call"}


def requests() -> Iterator[tuple[str, str]]:
    """Method and route of every request to a replica that stands in the library."""
    for file in sorted(ROLLOUT.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in _ASKING or not isinstance(node.args[0], ast.Constant):
                continue
            given = {word.arg: word.value for word in node.keywords}
            yield getattr(given.get("method"), "value", "POST"), node.args[0].value


def routes_of_a_server(tasks: tuple[str, ...]) -> set[tuple[str, str]]:
    """Method and route of whatever a server answers that was started as a replica is.

    tasks: what its model can do; a reward model's server looks for the one to do by itself."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as patch:
        argv, environment = replica.serve_command(
            resolve(RECIPE).config, "/model", 0, 8000, token="t"
        )
        for name, value in environment.items():
            patch.setenv(name, value)
        words = argv[argv.index("grpo_megatron.rollout.serve") + 1 :]
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        model = SimpleNamespace(get_pooling_task=lambda tasks: tasks[0], num_labels=2)
        app = build_app(arguments, tasks, model)
    return {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }


def test_every_request_has_its_route():
    asked = set(requests())
    assert ("POST", "/inference/v1/generate") in asked and len(asked) >= 14
    assert sorted(asked - in_a_process_of_its_own(routes_of_a_server, ("generate",))) == []


def test_teachers_and_reward_models_have_theirs():
    assert ("POST", "/v1/completions") in in_a_process_of_its_own(routes_of_a_server, ("generate",))
    pooling = in_a_process_of_its_own(routes_of_a_server, ("token_classify",))
    assert ("POST", "/pooling") in pooling


def test_a_request_to_generate_is_one_of_vllms():
    """Its record refuses unknown fields of sampling; others it would leave out in silence."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol
    from vllm.sampling_params import SamplingParams

    body = GenerateRequest(
        [1, 2, 3],
        max_tokens=4,
        seed=7,
        stop_token_ids=[0],
        record_routes=True,
        routes_from=2,
        truncation={"top_p": 0.9, "top_k": 5},
    ).body()
    assert body.keys() <= protocol.GenerateRequest.model_fields.keys()
    assert body["sampling_params"].keys() <= set(SamplingParams.__struct_fields__)
    request = protocol.GenerateRequest.model_validate(body)
    assert request.token_ids == [1, 2, 3]
    for name, value in body["sampling_params"].items():
        assert getattr(request.sampling_params, name) == value
