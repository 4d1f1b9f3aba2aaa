"""Teachers behind vLLM servers: at every token of a completion, their likeliest ones.

vLLM scores a prompt whole (`prompt_logprobs`, at temperature 1), so prompt and completion are sent
as one. The answers are stored with the step. A server that would teach nonsense is found out: by
other tokens for the same text, by scores that are no log-probs."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_megatron.config.run import RunConfig, TeacherConfig
from grpo_megatron.config.secret_values import from_environment
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError, EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.types import Prompt, RolloutGroup, StoredCompletion


class ServedTeachers:
    """The teachers of `config` that have a `url`; `close` it when done."""

    def __init__(self, config: RunConfig):
        rollout = config.rollout
        self._k = 0
        teachers: Sequence[TeacherConfig] = ()
        if config.distillation is not None:
            self._k = config.distillation.top_k
            teachers = config.distillation.teachers
        self._teachers: dict[int, TeacherConfig] = {}
        self._pools: dict[int, ReplicaPool] = {}
        for number, teacher in enumerate(teachers):
            if teacher.url is None:
                continue
            key = ""
            if teacher.api_key is not None:
                key = from_environment(teacher.api_key)
            client = EngineClient(teacher.url, f"the teacher at {teacher.url}", token=key)
            self._teachers[number] = teacher
            self._pools[number] = ReplicaPool(
                [client], max_attempts=rollout.max_attempts, called="server of the teacher"
            )
        self._names = [d.name for d in config.domains]
        self._turn = asyncio.Semaphore(rollout.max_concurrent_requests)
        self._timeout_s = rollout.request_timeout_s

    async def close(self) -> None:
        """Close the connections to all servers."""
        for pool in self._pools.values():
            await pool.replicas[0].client.close()

    async def meet(self, prompts: Sequence[Prompt]) -> None:
        """Ask every teacher to tokenise those of `prompts` that it teaches.

        Raises ConfigError where a server has no model of the teacher's name; MismatchError where it
        has other tokens for a prompt than the student."""
        for number in self._pools:
            await self._find_model(number)
            for prompt in prompts:
                if self._teaches(number, prompt):
                    await self._compare_tokens(number, prompt)

    async def _find_model(self, number: int) -> None:
        """Check that the teacher's server has a model or an adapter of its name, if it has one."""
        teacher = self._teachers[number]
        if teacher.model is None:
            return
        answer = await self._ask(number, "/v1/models", method="GET")
        served = [model["id"] for model in answer["data"]]
        if teacher.model not in served:
            raise ConfigError(
                f"the server at {teacher.url} has no model {teacher.model!r}",
                where=f"distillation.teachers.{number}.model",
                remedy=f"{did_you_mean(teacher.model, served)} (vLLM's --lora-modules "
                "NAME=DIRECTORY adds one)",
            )

    async def _compare_tokens(self, number: int, prompt: Prompt) -> None:
        body = {"prompt": prompt.text, "add_special_tokens": False}
        answer = await self._post(number, "/tokenize", body)
        told = answer["tokens"]
        if told != list(prompt.token_ids):
            raise MismatchError(
                f"{prompt.text[:60]!r} begins with the tokens {told[:8]} for the teacher and "
                f"with {list(prompt.token_ids[:8])} for the student",
                where=f"distillation.teachers.{number}.url",
                remedy="teacher and student must share their tokenizer",
            )

    async def answers(
        self, groups: Sequence[RolloutGroup[StoredCompletion]]
    ) -> dict[str, np.ndarray]:
        """Return `N/ids` int32 and `N/logprobs` float32 [n, k] of teacher N, for the n policy
        tokens of those groups that it teaches. Raises EngineError: it does not answer, or not with
        log-probs."""
        found: dict[str, np.ndarray] = {}
        for number in self._teachers:
            questions = []
            for group in groups:
                if self._teaches(number, group.prompt):
                    questions += self._questions(number, group)
            answers = await finish_or_cancel(questions)
            flat = np.concatenate([np.empty((0, self._k, 2)), *answers])
            found[f"{number}/ids"] = flat[..., 0].astype(np.int32)
            found[f"{number}/logprobs"] = flat[..., 1].astype(np.float32)
        return found

    def _questions(
        self, number: int, group: RolloutGroup[StoredCompletion]
    ) -> list[Awaitable[np.ndarray]]:
        """Return what asks teacher `number` about each sequence of a group."""
        questions: list[Awaitable[np.ndarray]] = []
        for completion in group.completions:
            for sequence in completion.sequences:
                questions.append(self._likeliest(number, group.prompt, sequence))
        return questions

    def _teaches(self, number: int, prompt: Prompt) -> bool:
        return prompt.domain in (self._teachers[number].domains or self._names)

    async def _likeliest(
        self, number: int, prompt: Prompt, completion: StoredCompletion
    ) -> np.ndarray:
        """Return (id, log-prob) of the k most likely tokens at every policy token of a sequence,
        float64 [n, k, 2]."""
        prompt_ids = completion.prompt_ids(prompt)
        answer = await self._post(
            number,
            "/v1/completions",
            {
                "prompt": [*prompt_ids, *completion.token_ids.tolist()],
                "max_tokens": 1,
                "prompt_logprobs": self._k,
            },
        )
        places = (answer["choices"][0]["prompt_logprobs"] or [])[len(prompt_ids) :]
        best = []
        for place, is_policy in zip(places, completion.policy_mask, strict=False):
            if is_policy:
                best.append(_likeliest(place, self._k))
        sizes = [len(of_token) for of_token in best]
        if len(places) == completion.num_tokens and set(sizes) <= {self._k}:
            found = np.array(best).reshape(-1, self._k, 2)
            if (np.exp(found[..., 1]).sum(-1) <= 1.01).all():  # bfloat16
                return found
        raise EngineError(
            f"a teacher did not answer with log-probs of {self._k} tokens at every "
            f"place of {prompt.prompt_id}",
            where=f"distillation.teachers.{number}.url",
            remedy="start it with vLLM's defaults and --max-logprobs of top_k",
        )

    async def _post(self, number: int, path: str, body: dict[str, Any]) -> Any:
        """Ask teacher `number` by the name that its server knows it by."""
        model = self._teachers[number].model
        if model is not None:
            body = {**body, "model": model}
        return await self._ask(number, path, body)

    async def _ask(self, number: int, path: str, *arguments: Any, **options: Any) -> Any:
        """Make a request to the server of teacher `number`, as `EngineClient.control`."""
        async with self._turn:  # what waits here does not run into the time limit
            answer, _ = await self._pools[number].call(
                lambda replica: replica.client.control(
                    path, *arguments, timeout_s=self._timeout_s, **options
                )
            )
        return answer


def _likeliest(place: Mapping[str, Mapping[str, float]], k: int) -> list[tuple[int, float]]:
    """(id, log-prob) of the k likeliest tokens at one place, as vLLM answers them by id. The
    prompt's own token comes besides, where it is not among them."""
    found = [(int(token), entry["logprob"]) for token, entry in place.items()]
    found.sort(key=lambda pair: -pair[1])
    return found[:k]
