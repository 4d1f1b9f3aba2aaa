"""Teachers behind a server: what is asked and stored, and servers that would teach nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import ConfigError, EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan
from tests.episodes import sequence_of

TOP_K = 3
DOMAIN = {"source": "file", "path": "x", "rewards": [{"function": "a:b"}]}


def config_of(*teachers: dict, **rollout) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "case",
            "kind": "distil",
            "model": {"preset": "tiny-qwen3-moe"},
            "domains": [DOMAIN | {"name": "a"}, DOMAIN | {"name": "b"}],
            "rollout": rollout,
            "distillation": {"mode": "topk_tail", "top_k": TOP_K, "teachers": teachers},
        }
    )


def group_of(domain: str, prompt: tuple[int, ...], *completions: tuple[int, ...]) -> RolloutGroup:
    return RolloutGroup(
        Prompt(f"{domain}-1", domain, "1+2=", prompt, ""),
        tuple(
            Completion(
                np.array(ids, np.int32),
                np.zeros(len(ids), np.float32),
                (VersionSpan(0, 0, len(ids)),),
                "stop",
                "",
            )
            for ids in completions
        ),
        0,
    )


def place(token: int, **changes) -> dict:
    """The likeliest are the token's next ones; its own comes besides."""
    best = {str(token + 1 + i): {"logprob": -1.0 - i, "rank": i + 1} for i in range(TOP_K)}
    return {str(token): {"logprob": -9.0, "rank": 50}, **best, **changes}


def served(
    ask, answer_place=place, status: int = 200, teacher=None, keys=None, delay_s=0.0, **rollout
):
    """`ask(teachers)` of a recipe whose domain b has a server; also what it was asked. The keys
    that it was shown are put into `keys`."""
    asked = []
    keys = [] if keys is None else keys

    async def complete(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(delay_s)
        asked.append(body := await request.json())
        places = [None, *map(answer_place, body["prompt"][1:])]
        return web.json_response({"choices": [{"prompt_logprobs": places}]}, status=status)

    async def tokenize(request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [ord(c) for c in text]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base"}, {"id": "plus"}]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def run():
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", complete),
                web.post("/tokenize", tokenize),
                web.get("/v1/models", models),
                web.get("/health", health),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        teachers = ServedTeachers(
            config_of(
                {"path": "somewhere", "domains": ["a"]},
                {"url": f"http://127.0.0.1:{port}", "domains": ["b"], **(teacher or {})},
                **rollout,
            )
        )
        try:
            return await ask(teachers)
        finally:
            await teachers.close()
            await runner.cleanup()

    return asyncio.run(run()), asked


GROUPS = [
    group_of("a", (1, 2), (3,)),
    group_of("b", (10, 20), (30, 40), (50,)),
    group_of("b", (11,), (31,)),
]


def test_a_teacher_gets_the_key_that_the_recipe_names(monkeypatch):
    def ask(teachers):
        return teachers.answers(GROUPS[1:])

    monkeypatch.setenv("TEACHER_KEY", "secret")
    keys: list = []
    served(ask, teacher={"api_key": "$TEACHER_KEY"}, keys=keys)
    assert set(keys) == {"Bearer secret"}
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match="variable TEACHER_KEY is not set"):
        served(ask, teacher={"api_key": "$TEACHER_KEY"})


def test_answers_are_those_of_its_domains_in_the_order_of_the_table():
    found, asked = served(lambda teachers: teachers.answers(GROUPS))
    assert sorted(body["prompt"] for body in asked) == [[10, 20, 30, 40], [10, 20, 50], [11, 31]]
    assert all(body["prompt_logprobs"] == TOP_K for body in asked)
    assert found.keys() == {"1/ids", "1/logprobs"}
    np.testing.assert_array_equal(found["1/ids"], [[t + 1, t + 2, t + 3] for t in (30, 40, 50, 31)])
    np.testing.assert_array_equal(found["1/logprobs"], [[-1, -2, -3]] * 4)


def test_a_step_is_asked_a_bounded_number_at_a_time():
    """What waits for its turn costs no file descriptor and no time of its request's limit."""

    async def ask(teachers):
        started, most = 0, 0
        client = teachers._pools[1].replicas[0].client
        control = client.control

        async def counted(*args, timeout_s, **options):
            nonlocal started, most
            assert timeout_s == 77.0
            started, most = started + 1, max(most, started + 1)
            try:
                return await control(*args, timeout_s=timeout_s, **options)
            finally:
                started -= 1

        client.control = counted
        await teachers.answers([group_of("b", (1,), *[(30,)] * 9)])
        return most

    most, asked = served(ask, max_concurrent_requests=2, request_timeout_s=77.0)
    assert (most, len(asked)) == (2, 9)


def test_a_step_without_its_domains_asks_nothing():
    found, asked = served(lambda teachers: teachers.answers(GROUPS[:1]))
    assert not asked and found["1/ids"].shape == (0, TOP_K)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda token: {},  # too few
        lambda token: place(token, **{"7": {"logprob": 0.5}}),  # logits
        lambda token: place(token, **{"7": {"logprob": -1e-3}}),  # more than everything
    ],
)
def test_what_is_no_distribution_is_refused(wrong):
    with pytest.raises(EngineError, match=r"log-probs of 3 tokens.*b-1") as error:
        served(lambda teachers: teachers.answers(GROUPS), wrong)
    assert "distillation.teachers.1.url" in str(error.value)


def test_a_server_that_is_too_slow_is_named():
    with pytest.raises(EngineError, match=r"the teacher at http"):
        served(
            lambda teachers: teachers.answers(GROUPS),
            delay_s=2.0,
            request_timeout_s=0.2,
            max_attempts=2,
        )


def test_a_server_that_fails_is_named():
    with pytest.raises(EngineError, match=r"the teacher at http.*503"):
        served(lambda teachers: teachers.answers(GROUPS), status=503)


def test_another_tokenizer_is_found_out():
    same = Prompt("1", "b", "1+2=", tuple(map(ord, "1+2=")), "")
    served(lambda teachers: teachers.meet([same]))
    other = Prompt("1", "b", "1+2=", (5, 6, 7, 8), "")
    served(lambda teachers: teachers.meet([Prompt("1", "a", "1+2=", (5,), "")]))  # not its domain
    with pytest.raises(MismatchError, match=r"\[49, 43, 50, 61\] for the teacher") as error:
        served(lambda teachers: teachers.meet([other]))
    assert "share their tokenizer" in str(error.value)


def test_a_teacher_is_asked_by_its_name():
    def ask(teachers):
        return teachers.answers(GROUPS[1:])

    _, asked = served(ask, teacher={"model": "plus"})
    assert {body["model"] for body in asked} == {"plus"}
    _, asked = served(ask)
    assert not any("model" in body for body in asked)
    served(lambda teachers: teachers.meet([]), teacher={"model": "plus"})
    with pytest.raises(ConfigError, match="has no model 'plos'") as error:
        served(lambda teachers: teachers.meet([]), teacher={"model": "plos"})
    assert "distillation.teachers.1.model" in str(error.value)
    assert "did you mean 'plus'?" in str(error.value)


@contextmanager
def scoring_server(folder: Path, model: Path, *flags: str) -> Iterator[str]:
    """The address of vLLM's own server, as a user starts one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "server.log"
    options = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "64",
        "--max-logprobs": str(TOP_K),
        "--block-size": "32",
        "--kv-cache-memory-bytes": "33554432",
    }
    words = [word for option in options.items() for word in option]
    environment = {
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*program, *words, *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )

    async def ready() -> None:
        async with EngineClient(url) as client:
            await client.wait_ready(1200, lambda: server.poll() is None)

    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(ready())
        yield url
    except Exception as error:
        raise RuntimeError(log.read_text()[-3000:]) from error
    finally:
        server.terminate()
        server.wait(30)


def asked_of(*teachers: dict, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]) -> dict:
    """What real servers answer."""

    async def ask():
        served = ServedTeachers(config_of(*teachers))
        try:
            await served.meet(prompts)
            return await served.answers(groups)
        finally:
            await served.close()

    return asyncio.run(ask())


def assert_as_transformers(found: dict, number: int, model, groups: Sequence[RolloutGroup]) -> None:
    """The answers of a teacher are the model's likeliest tokens."""
    import torch

    expected = []
    for group in groups:
        prompt_ids = group.prompt.token_ids
        for completion in group.completions:
            ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
            expected.append(logits.log_softmax(-1))
    best, ids = torch.cat(expected).topk(TOP_K)
    np.testing.assert_array_equal(found[f"{number}/ids"], ids.numpy())
    np.testing.assert_allclose(found[f"{number}/logprobs"], best.numpy(), atol=1e-4)


def of_domain(domain: str, path: Path) -> tuple[Prompt, RolloutGroup]:
    """A prompt in the model's tokens, and two completions of it."""
    tokenizer = load_tokenizer(path)
    ids = tuple(tokenizer.encode("12+34="))
    prompt = Prompt(f"{domain}-1", domain, "12+34=", ids, "")
    return prompt, group_of(domain, ids, tuple(tokenizer.encode("46")), (7, 8, 9))


@pytest.mark.engine
@pytest.mark.recipes
def test_a_real_server_answers_as_transformers_does(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model"
    write_tiny_model(path, load_preset("tiny-qwen3-moe"))
    init_weights(path, 3)
    prompt, group = of_domain("b", path)
    with scoring_server(tmp_path, path) as url:
        found = asked_of({"url": url}, prompts=[prompt], groups=[group])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert_as_transformers(found, 0, model, [group])


def write_adapter(folder: Path, model: Path, seed: int) -> dict:
    """Write an adapter of the attention as PEFT has them; returns what it adds to the weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    rank, alpha = 4, 8
    tensors, added = {}, {}
    for name, weight in AutoModelForCausalLM.from_pretrained(model).named_parameters():
        if "self_attn" not in name or "_proj" not in name:
            continue
        layer = name.removesuffix(".weight")
        rows, columns = weight.shape
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) / 4
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b
        added[name] = b @ a * (alpha / rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


@pytest.mark.engine
@pytest.mark.recipes
def test_one_server_has_the_experts_of_all_domains_as_adapters(tmp_path):
    """Two experts and the weights themselves are asked at the same time."""
    import torch
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model"
    write_tiny_model(path, load_preset("tiny-qwen3-moe"))
    init_weights(path, 3)
    added = {"plus": write_adapter(tmp_path / "plus", path, 1)}
    added["minus"] = write_adapter(tmp_path / "minus", path, 2)
    experts = [f"{name}={tmp_path / name}" for name in added]
    attention = ("--lora-target-modules", "qkv_proj", "o_proj")
    slots = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", *attention)
    of_a, of_b = of_domain("a", path), of_domain("b", path)
    prompts, groups = zip(of_a, of_b, strict=True)
    with scoring_server(tmp_path, path, *slots, "--lora-modules", *experts) as url:
        found = asked_of(
            {"url": url, "model": "plus", "domains": ["a"]},
            {"url": url, "model": "minus", "domains": ["b"]},
            {"url": url},
            prompts=prompts,
            groups=groups,
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert_as_transformers(found, 2, model, groups)
    for number, (name, group) in enumerate(zip(("plus", "minus"), groups, strict=True)):
        changed = {key: weights[key] + of_layer for key, of_layer in added[name].items()}
        model.load_state_dict({**weights, **changed})
        assert_as_transformers(found, number, model, [group])


def test_a_teacher_is_asked_about_sequences_and_answers_for_policy_tokens():
    """Of each sequence behind its own prompt; what the environment said is sent and not kept."""
    rng = np.random.default_rng(0)
    first = sequence_of([(2, True), (2, False), (1, True)], rng)
    last = sequence_of([(1, False), (2, True)], rng, answered_ids=(7, 8, 9))
    group = group_of("b", (1, 2), ())
    group = replace(group, completions=(replace(last, earlier=(first,)),))
    answers, asked = served(lambda teachers: teachers.answers([group]))
    prompts = sorted((body["prompt"] for body in asked), key=len)
    assert sorted(map(tuple, prompts)) == sorted(
        [(1, 2, *first.token_ids.tolist()), (7, 8, 9, *last.token_ids.tolist())]
    )
    of_policy = [*first.token_ids[first.policy_mask], *last.token_ids[last.policy_mask]]
    [ids] = [values for name, values in answers.items() if name.endswith("/ids")]
    expected = [[token + 1 + i for i in range(TOP_K)] for token in of_policy]
    np.testing.assert_array_equal(ids, expected)
