"""Judges and reward models behind a server: scores, and failures that are no zeros."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
from aiohttp import web

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.judge import judge, reward_model
from grpo_megatron.rewards.registry import bind
from grpo_megatron.rewards.step_rewards import process_reward_model, steps_of

PLACE = {"url": "http://localhost", "model": "m"}


def served(replies: list, reward, **arguments):
    """`reward` against a server that gives `replies` in turn; also what it was asked. A reply is
    JSON, bytes that are to be JSON, a status, or one with the `Retry-After` of its header."""
    asked = []
    keys = arguments.pop("keys", [])
    end_of_url = arguments.pop("end_of_url", "")
    pause_s = arguments.pop("pause_s", 0.0)

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(pause_s)
        reply = replies[min(len(asked), len(replies)) - 1]
        if isinstance(reply, int):
            return web.Response(status=reply, text="overloaded")
        if isinstance(reply, tuple):
            status, retry_after = reply
            return web.Response(status=status, headers={"Retry-After": retry_after})
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type="application/json")
        if reply is None:
            await asyncio.sleep(2)
        return web.json_response(reply)

    async def run() -> float:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_post("/pooling", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            given = {"prompt": "6 * 7 = {x}", "model": "m", **arguments}
            if reward is judge:
                given.setdefault("metadata", {})
            completion = given.pop("completion", "{42}")
            url = f"http://127.0.0.1:{port}{end_of_url}"
            return await reward(completion, "42", url=url, **given)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), asked


def said(text: str, finish_reason: str = "stop") -> dict:
    return {"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]}


REWARDS = [judge, reward_model, process_reward_model]


@pytest.mark.parametrize("reward", REWARDS)
def test_servers_get_the_key_that_the_recipe_names(reward, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    bound = bind(f"{reward.__module__}:{reward.__name__}", {"api_key": "$JUDGE_KEY", **PLACE})
    assert "secret" not in repr(bound)
    keys: list = []
    reply = said("1: 10") | {"data": [{"data": [0.5]}]}
    served([reply], reward, keys=keys, api_key=bound.arguments["api_key"])
    served([reply], reward, keys=keys)
    assert keys == ["Bearer secret", None]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardError, match="variable JUDGE_KEY is not set"):
        bind(f"{reward.__module__}:{reward.__name__}", {"api_key": "$JUDGE_KEY", **PLACE})


def test_a_rubric_is_the_mean_of_its_criteria():
    value, [request] = served([said("1: 10\n2: 5")], judge, criteria=["right", "short"])
    assert value == pytest.approx(0.75)
    text = request["messages"][0]["content"]
    assert all(part in text for part in ("1. right", "2. short", "6 * 7 = {x}", "{42}"))
    json.dumps(request)


def test_a_reply_without_every_score_is_asked_for_again():
    value, asked = served([said("fine!"), said("1: 4")], judge)
    assert (value, len(asked)) == (0.4, 2)


@pytest.mark.parametrize("replies", [[said("1: 11")], [said("1: -3")], [said("no")], [503], [None]])
def test_a_failing_judge_is_an_error(replies):
    with pytest.raises(RewardError):
        served(replies, judge, timeout_s=0.5)


ANY_REPLY = said("1: 5") | {"data": [{"data": [0.5]}]}


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(reward, status):
    value, asked = served([status, ANY_REPLY], reward)
    assert value in (0.5, [(4, 0.5)])
    assert len(asked) == 2 and asked[0] == asked[1]


@pytest.mark.parametrize("reward", REWARDS)
def test_a_server_that_stays_busy_is_asked_as_often_as_it_may(reward):
    asked: list = []
    with pytest.raises(RewardError, match="503: overloaded"):
        served([503], reward, attempts=3, keys=asked)
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(RewardError, match="503: overloaded"):
        served([503], reward, attempts=1, keys=asked)
    assert len(asked) == 1


def test_what_asking_again_does_not_mend_is_asked_once():
    asked: list = []
    for status in (400, 401, 404, 501):
        with pytest.raises(RewardError, match=str(status)):
            served([status], reward_model, keys=asked)
    assert len(asked) == 4


def test_busy_and_unreadable_replies_of_a_judge_count_together():
    asked: list = []
    with pytest.raises(RewardError, match="did not score every criterion"):
        served([503, said("fine!"), said("1: 4")], judge, keys=asked)
    assert len(asked) == 2
    value, asked = served([503, said("fine!"), said("1: 4")], judge, attempts=3)
    assert (value, len(asked)) == (0.4, 3)


def test_a_judge_that_stays_unclear_is_not_asked_beyond_its_time():
    asked: list = []
    with pytest.raises(RewardError, match="no answer"):
        served([said("fine!")], judge, attempts=3, timeout_s=0.5, pause_s=0.3, keys=asked)
    assert len(asked) < 3


@pytest.mark.parametrize(
    "retry_after", ["0", "0.01", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-1"]
)
def test_a_server_says_when_to_ask_again(retry_after):
    value, asked = served([(429, retry_after), ANY_REPLY], reward_model, timeout_s=30)
    assert (value, len(asked)) == (0.5, 2)


@pytest.mark.parametrize("retry_after", ["60", "Wed, 21 Oct 2099 07:28:00 GMT", "inf", "1e400"])
def test_a_wait_that_the_time_limit_does_not_leave_is_not_begun(retry_after):
    asked: list = []
    with pytest.raises(RewardError, match="429"):
        served([(429, retry_after), ANY_REPLY], reward_model, timeout_s=20, keys=asked)
    assert len(asked) == 1


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("attempts", [0, -1, 1.5, True, "2"])
def test_attempts_are_a_whole_number(reward, attempts):
    with pytest.raises(RewardError, match="attempts") as caught:
        bind(f"{reward.__module__}:{reward.__name__}", {"attempts": attempts, **PLACE})
    assert caught.value.remedy == "set attempts to a whole number of at least 1"


OF_ALL = [
    ({"url": ""}, "url = '' is not the address", "http://HOST:8000"),
    ({"url": "http://"}, "url = 'http://' is not", "http://HOST:8000"),
    ({"url": "http://a b"}, "is not the address", "http://HOST:8000"),
    ({"url": "http://a:99999"}, "is not the address", "http://HOST:8000"),
    ({"url": "ftp://a"}, "is not the address", "http://HOST:8000"),
    ({"url": "127.0.0.1:8123"}, "'127.0.0.1:8123' is not", 'write url = "http://127.0.0.1:8123"'),
    ({"url": "judge"}, "url = 'judge' is not", 'write url = "http://judge"'),
    ({"url": 5}, "url = 5 is not", "http://HOST:8000"),
    ({"url": ["http://a", "http://b"]}, r"url = \['http://a'", "a proxy before them"),
    ({"model": ""}, "model = ''", "set model to a text that is not empty"),
    ({"model": 5}, "model = 5", "set model to a text that is not empty"),
    ({"api_key": 5}, "api_key is no text", 'api_key = "\\$NAME"'),
    ({"api_key": ""}, "api_key is no text", 'api_key = "\\$NAME"'),
    ({"timeout_s": 0}, "timeout_s = 0", "a number above 0"),
    ({"timeout_s": "9"}, "timeout_s = '9'", "a number above 0"),
]
OF_SCALARS = [
    ({"scale": math.nan}, "scale = nan", "set scale to a finite number"),
    ({"scale": "2"}, "scale = '2'", "set scale to a finite number"),
    ({"shift": None}, "shift = None", "set shift to a finite number"),
    ({"label": 1.5}, "label = 1.5", "set label to a whole number of at least 0"),
    ({"label": -1}, "label = -1", "set label to a whole number of at least 0"),
    ({"label": "good"}, "label = 'good'", "set label to a whole number of at least 0"),
    ({"label": True}, "label = True", "set label to a whole number of at least 0"),
]
OF_ONE = {
    judge: [
        ({"max_tokens": 0}, "max_tokens = 0", "a whole number of at least 1"),
        ({"max_tokens": "512"}, "max_tokens = '512'", "a whole number of at least 1"),
        ({"criteria_field": ["x"]}, r"criteria_field = \['x'\]", "a text that is not empty"),
        ({"criteria_field": ""}, "criteria_field = ''", "a text that is not empty"),
    ],
    reward_model: [
        *OF_SCALARS,
        ({"end": 3}, "end = 3", "set end to a text"),
        ({"add_special_tokens": "yes"}, "add_special_tokens = 'yes'", "to true or false"),
    ],
    process_reward_model: [
        *OF_SCALARS,
        ({"label": None}, "label = None", "set label to a whole number of at least 0"),
        ({"separator": None}, "separator = None", "set separator to a text that is not empty"),
        ({"separator": 5}, "separator = 5", "set separator to a text that is not empty"),
        ({"step_token": 5}, "step_token = 5", "set step_token to a text that is not empty"),
        ({"step_token": ""}, "step_token = ''", "set step_token to a text that is not empty"),
    ],
}
REFUSED = [(reward, *case) for reward in REWARDS for case in (*OF_ALL, *OF_ONE[reward])]


@pytest.mark.parametrize(("reward", "arguments", "message", "remedy"), REFUSED)
def test_arguments_of_another_kind_are_refused_before_anything_starts(
    reward, arguments, message, remedy
):
    with pytest.raises(RewardError, match=message) as caught:
        bind(f"{reward.__module__}:{reward.__name__}", {**PLACE, **arguments})
    assert re.search(remedy, caught.value.remedy)


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("url", ["https://judge", "http://[::1]:8000", "http://gateway/team/"])
def test_addresses_of_servers_are_taken(reward, url):
    bind(f"{reward.__module__}:{reward.__name__}", {**PLACE, "url": url, "timeout_s": None})


@pytest.mark.parametrize("reward", REWARDS)
def test_an_address_may_end_with_a_slash(reward):
    value, asked = served([ANY_REPLY], reward, end_of_url="/")
    assert value in (0.5, [(4, 0.5)]) and len(asked) == 1


NO_REPLIES_OF_A_JUDGE = [
    {"error": "overloaded"},
    {"choices": []},
    {"choices": [{"message": {"role": "assistant"}}]},
    {"choices": ["overloaded"]},
    ["overloaded"],
    b"null",
    said([{"type": "text", "text": "overloaded"}]),
    b"<html>overloaded</html>",
]


@pytest.mark.parametrize("reply", NO_REPLIES_OF_A_JUDGE)
def test_a_reply_of_another_shape_is_asked_for_again_and_told(reply):
    value, asked = served([reply, said("1: 4")], judge)
    assert (value, len(asked)) == (0.4, 2)
    keys: list = []
    with pytest.raises(RewardError, match=r"no JSON|has no choices|is no text") as caught:
        served([reply], judge, keys=keys)
    assert len(keys) == 2
    told = str(caught.value)
    assert "http://127.0.0.1:" in told and ("overloaded" in told or "overloaded" not in str(reply))


@pytest.mark.parametrize("reward", [reward_model, process_reward_model])
@pytest.mark.parametrize("reply", [{"error": "overloaded"}, {"data": []}, b"null", ["overloaded"]])
def test_a_pooling_reply_of_another_shape_is_told(reward, reply):
    with pytest.raises(RewardError, match=r"the reply has no data\[0\]\.data: ") as caught:
        served([reply], reward)
    told = str(caught.value)
    assert "http://127.0.0.1:" in told and ("overloaded" in told or "overloaded" not in str(reply))
    assert "--runner pooling" in caught.value.remedy


@pytest.mark.parametrize("data", [[], [[]]])
@pytest.mark.parametrize("label", [None, 0])
def test_a_model_without_a_scalar_is_told(data, label):
    with pytest.raises(RewardError, match="the server gives no scalar"):
        served([{"data": [{"data": data}]}], reward_model, label=label)


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("body", [b'{"choices": [{"mess', b"\xff\xfe{}", b"", b"[" * 100_000])
def test_a_reply_that_is_no_json_is_told_as_such(reward, body):
    with pytest.raises(RewardError, match="the reply is no JSON"):
        served([body], reward)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<think>\n1: 10 at first, but\n2: 9 no\n</think>\n1: 2\n2: 4", 0.3),
        ("It may be\n1: 10\n2: 10\n</think>\n\n1: 2\n2: 4", 0.3),  # the prompt began the thought
        ("1: 2\n2: 4\n2: 10 would need a proof", 0.3),
        ("1: 2\n2: 10 would need a proof, so\n2: 4", 0.3),
        ("1: 2 (weak)\n2: 4, as it lacks a proof", 0.3),
        ("**1: 2**\n**2:** 4/10", 0.3),
        ("- 1: 2.\n- 2: 4 / 10.", 0.3),
        ("1:\n2: 4\n1: 2", 0.3),
        ("1: 2\n1: 3\n2: 3", 0.3),
        ("1: 2\n2: 4\nIts <think> is never closed.", 0.3),
    ],
)
def test_what_a_judge_says_last_and_alone_is_its_verdict(reply, value):
    assert served([said(reply)], judge, criteria=["right", "short"])[0] == pytest.approx(value)


@pytest.mark.parametrize(
    "reply",
    [
        said("<think>\n1: 10 seems plausible at first, but\n2: 9", "length"),
        said("<think>\n1: 10 seems plausible at first, but\n2: 9"),
        said("1: 10 seems plausible at first, but\n2: 9", "length"),
        said("so it is</think>\n1: 10\n2: 1", "length"),  # of 10
        said("1: 8\n2: -3"),
        said("1: 8\n2: −3"),
        said("1: 8\n2:"),
    ],
)
def test_a_thought_that_does_not_end_is_no_verdict(reply):
    with pytest.raises(RewardError, match="did not score every criterion") as caught:
        served([reply], judge, criteria=["right", "short"], max_tokens=20)
    is_cut = reply["choices"][0]["finish_reason"] == "length"
    assert ("max_tokens = 20 has cut its reply" in str(caught.value)) == is_cut


def test_scores_before_the_cut_behind_a_thought_count():
    reply = said("hm</think>\n1: 2\n2: 4\nThe response is", "length")
    assert served([reply], judge, criteria=["right", "short"])[0] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{question} {completion}", "question"),
        ("{completion} {}", "index"),
        ("{completion", "'}'"),
        ("{completion.score}", "score"),
        (3, "format"),
    ],
)
def test_a_template_is_tried_before_anything_starts(template, words):
    arguments = {**PLACE, "template": template}
    with pytest.raises(RewardError, match="template cannot be filled in") as caught:
        bind("grpo_megatron.rewards.judge:judge", arguments)
    assert words in str(caught.value) and "{completion}" in caught.value.remedy


RUBRIC = [
    "It rhymes.",
    {"criterion": "It is about the sea.", "weight": 3.0, "points": None},
]


def test_a_prompt_has_its_own_criteria():
    value, [request] = served(
        [said("1: 10\n2: 2")], judge, criteria_field="rubric", metadata={"rubric": RUBRIC}
    )
    assert value == pytest.approx((10 + 3 * 2) / 40)
    assert "1. It rhymes.\n2. It is about the sea.\n" in request["messages"][0]["content"]


def test_a_mistyped_key_of_a_criterion_is_named_with_what_was_meant():
    criteria = ["It rhymes.", {"criterion": "It is short.", "weights": 2.0}]
    with pytest.raises(RewardError, match="criterion 2 has an unknown 'weights'") as caught:
        bind("grpo_megatron.rewards.judge:judge", {**PLACE, "criteria": criteria})
    assert (caught.value.where, caught.value.remedy) == ("criteria", "did you mean 'weight'?")
    criteria[1] = {"criterion": "It is short.", "points": -5}
    with pytest.raises(RewardError, match="unknown 'points'") as caught:
        bind("grpo_megatron.rewards.judge:judge", {**PLACE, "criteria": criteria})
    assert caught.value.remedy == "there are: criterion, weight"


@pytest.mark.parametrize(
    "metadata", [{}, {"rubric": None}, {"rubric": []}, {"rubric": float("nan")}, {"rubric": ""}]
)
def test_rows_without_criteria_are_judged_by_the_recipes_or_not_at_all(metadata):
    value, [request] = served(
        [said("1: 5")], judge, criteria=["It is short."], criteria_field="rubric", metadata=metadata
    )
    assert value == 0.5 and "1. It is short." in request["messages"][0]["content"]
    with pytest.raises(RewardError, match="no criteria in 'rubric'"):
        served([said("1: 5")], judge, criteria_field="rubric", metadata=metadata)


@pytest.mark.parametrize(
    "rubric",
    [
        "It rhymes.",
        [3],
        [""],
        [{"criterion": "It rhymes.", "weight": 0}],
        [{"criterion": "It rhymes.", "weight": "much"}],
        [{"criterion": "It rhymes.", "weight": float("nan")}],
        [{"text": "It rhymes."}],
        3,
        0.5,
        True,
        [{"criterion": "It rhymes.", "points": -5}],
        [{"criterion": "It rhymes.", "weights": 2.0}],
        [{"criterion": 3}],
    ],
)
def test_what_is_no_rubric_is_refused(rubric):
    with pytest.raises(RewardError, match="criteri"):
        served([said("1: 5")], judge, criteria_field="rubric", metadata={"rubric": rubric})
    with pytest.raises(RewardError, match="criteri"):
        bind("grpo_megatron.rewards.judge:judge", {**PLACE, "criteria": rubric})


def test_only_what_stands_behind_the_thought_is_judged():
    thought = {"think_tag": "think", "prompt": "6 * 7?<think>\n"}
    value, [request] = served(
        [said("1: 8")], judge, completion="hm</think>\n\nIt is 42.", **thought
    )
    text = request["messages"][0]["content"]
    assert value == 0.8 and "hm" not in text and "6 * 7?\n" in text and "It is 42." in text
    value, asked = served([said("1: 8")], judge, completion="hm, 42", **thought)
    assert (value, asked) == (0.0, [])
    reply = {"data": [{"data": [3.0]}]}
    _, [request] = served([reply], reward_model, completion="hm</think>\n42", **thought)
    assert request["input"] == "6 * 7?42"


def test_a_reward_model_is_scaled():
    value, [request] = served([{"data": [{"data": [3.0]}]}], reward_model, shift=1.0, scale=0.5)
    assert value == 1.0 and request["input"] == "6 * 7 = {x}{42}"


@pytest.mark.parametrize("reward", [reward_model, process_reward_model])
def test_a_server_puts_no_second_begin_of_text_before_a_prompt(reward):
    """The rendered prompt has the one that its template writes."""
    _, [request] = served([{"data": [{"data": [[3.0]]}]}], reward, prompt="<s>6 * 7", label=0)
    assert request["input"].startswith("<s>6 * 7") and request["add_special_tokens"] is False


def test_a_reward_model_may_want_its_special_tokens():
    """An encoder's, which no template of the policy writes."""
    reply = {"data": [{"data": [3.0]}]}
    _, [request] = served([reply], reward_model, add_special_tokens=True)
    assert request["add_special_tokens"] is True


def test_one_of_several_scalars_is_chosen():
    reply = {"data": [{"data": [3.0, -1.0]}]}
    assert served([reply], reward_model, label=1)[0] == -1.0
    assert served([{"data": [{"data": [[3.0, -1.0]]}]}], reward_model, label=0)[0] == 3.0
    for label in (None, 2, -1):
        with pytest.raises(RewardError, match=f"2 scalars, and `label` is {label}") as error:
            served([reply], reward_model, label=label)
        assert "one of 0 to 1" in str(error.value)


def test_scores_of_every_token_are_no_scalar():
    assert served([{"data": [{"data": [[[0.5]]]}]}], reward_model)[0] == 0.5
    with pytest.raises(RewardError, match="gives scores of every token"):
        served([{"data": [{"data": [[0.1], [0.2]]}]}], reward_model, label=1)


def check_that_a_score_is_refused(score, message):
    """Wherever it stands in a reply, of a reward model or of one of steps."""
    for data in ([score], [[score]]):
        with pytest.raises(RewardError, match=message) as error:
            served([{"data": [{"data": data}]}], reward_model)
        assert "http://127.0.0.1:" in str(error.value)
    with pytest.raises(RewardError, match=message):
        served([{"data": [{"data": [0.5, score]}]}], reward_model, label=1)
    for data in ([0.5, score], [[0.5], [score]], [[0.1, 0.9], [0.1, score]]):
        with pytest.raises(RewardError, match=message):
            served([{"data": [{"data": data}]}], process_reward_model, completion="a\n\nb")


@pytest.mark.parametrize("score", [math.nan, math.inf, 10**400])
def test_a_score_that_is_no_finite_number_is_a_failure(score):
    """Of a broken checkpoint. NaN of a reward would be left out of the sum, and the sample trained
    by the others."""
    check_that_a_score_is_refused(score, f"score .*{str(score)[:80]}.* is no finite number")


@pytest.mark.parametrize(
    ("score", "told"),
    [
        ("0.7", '"0.7"'),
        ("NaN", '"NaN"'),
        ("x", '"x"'),
        (True, "true"),
        (False, "false"),
        (None, "null"),
        ({"score": 1}, "{"),
    ],
)
def test_a_score_of_another_type_is_a_failure(score, told):
    """Of a server that answers otherwise: what float() makes of it is a guess."""
    check_that_a_score_is_refused(score, f"the score {told}.* is no number")


def test_steps_end_before_their_separator():
    text = "\n\n 6 * 7\n\n\n\nis 42 \n\n"
    steps = steps_of(text, "\n\n")
    assert [step.text for step in steps] == ["6 * 7", "is 42"]
    assert [text[: step.end].endswith(step.text) for step in steps] == [True, True]
    assert steps_of(" \n\n", "\n\n") == []


def test_each_step_gets_the_score_of_its_token():
    reply = {"data": [{"data": [[0.75, 0.25], [0.5, 0.5]]}]}
    text = "6 * 7<extra_0>\n\nis 42"
    value, [request] = served([reply], process_reward_model, completion=text, shift=0.25, scale=2.0)
    assert value == [(len("6 * 7<extra_0>"), 0.0), (len(text), 0.5)]
    assert request["input"] == "6 * 7 = {x}6 * 7<extra_0>is 42<extra_0>"
    value, _ = served([reply], process_reward_model, completion=text, label=0)
    assert [score for _, score in value] == [0.75, 0.5]
    value, asked = served([reply], process_reward_model, completion=" ")
    assert (value, asked) == ([], [])


@pytest.mark.parametrize(
    ("completion", "passed_on", "ends"),
    [
        # a part with nothing else would have the score of the step before
        ("a\n\n<extra_0>\n\nb", ["a", "b"], [1, 15]),
        ("a\n\n<extra_0> <extra_0>\n\nb <extra_0>", ["a", "b"], [1, 35]),
        # one more score than steps, which nobody could train on
        ("a<ext<extra_0>ra_0>\n\nb", ["a", "b"], [19, 22]),
        ("<e<ext<extra_0>ra_0>xtra_0>a", ["a"], [28]),
    ],
)
def test_the_policy_marks_no_steps_itself(completion, passed_on, ends):
    """Neither to be scored more often, nor to be unscorable where it expects a low score."""
    reply = {"data": [{"data": [[0.0, 0.5]] * len(passed_on)}]}
    value, [request] = served([reply], process_reward_model, completion=completion)
    assert value == [(end, 0.5) for end in ends]
    assert request["input"] == "6 * 7 = {x}" + "".join(f"{text}<extra_0>" for text in passed_on)


def test_a_completion_of_step_tokens_alone_has_no_steps():
    value, asked = served([], process_reward_model, completion="<extra_0>\n\n<extra_0>")
    assert (value, asked) == ([], [])


def test_a_prompt_has_no_step_tokens():
    """Those of an exemplar would be scored too."""
    reply = {"data": [{"data": [[0.0, 0.5]]}]}
    _, [request] = served(
        [reply], process_reward_model, completion="a", prompt="4<extra_0> + <ext<extra_0>ra_0>5 = "
    )
    assert request["input"] == "4 + 5 = a<extra_0>"


@pytest.mark.parametrize("data", [[[0.1, 0.9]], [0.1, 0.2, 0.3], 0.4, [[0.1], []]])
def test_scores_that_are_not_one_a_step_are_refused(data):
    reply = {"data": [{"data": data}]}
    with pytest.raises(RewardError, match="score"):
        served([reply], process_reward_model, completion="a\n\nb")


def test_a_step_without_an_end_is_refused_before_anything_starts():
    arguments = {**PLACE, "separator": ""}
    with pytest.raises(RewardError, match="separator"):
        bind("grpo_megatron.rewards.step_rewards:process_reward_model", arguments)


def test_an_empty_line_ends_as_lines_do():
    """Also with a carriage return, which a policy may write too."""
    text = "a\r\n\r\nb\n\r\nc\r\nd"
    steps = steps_of(text, "\n\n")
    assert [step.text for step in steps] == ["a", "b", "c\r\nd"]
    assert [text[: step.end].endswith(step.text) for step in steps] == [True] * 3
    assert [step.text for step in steps_of(text, "\r\n\r\n")] == ["a", "b\n\r\nc\r\nd"]
    assert [step.text for step in steps_of("a.b*c", ".")] == ["a", "b*c"]
