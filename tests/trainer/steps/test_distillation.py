"""Divergences to teachers: golden numbers, float64, transformers, and every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.batching.store import SampleTable
from tests.trainer.episode_samples import random_groups, write_groups
from tests.trainer.models import MOE, write_model, write_samples
from tests.trainer.reference import reference_logits
from tests.trainer.test_layout_parity import APART, LAYOUTS_2, LAYOUTS_4, OF_PACKING, assert_same

pytestmark = pytest.mark.engine
CASES = "tests.trainer.trainer_ranks:"
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())


def kl_of(
    log_p: torch.Tensor, log_q: torch.Tensor, forward_weight: float, top_k: int | None
) -> torch.Tensor:
    """Both [m, V]; with `top_k`, the teacher's likeliest tokens and one for all others."""
    if top_k is not None:
        ids = log_q.topk(top_k).indices
        log_p, log_q = (
            torch.cat(
                [x.gather(1, ids), x.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1
            )
            for x in (log_p, log_q)
        )
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    return (1 - forward_weight) * reverse + forward_weight * forward


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("forward_weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("vocab_size", "chunk_tokens", "top_k"),
    [(93, 4, None), (96, 100, None), (93, 4, 7), (93, 1, 92), (96, 5, 1)],
)
def test_kl_and_its_gradients(request, world, forward_weight, vocab_size, chunk_tokens, top_k):
    from tests.trainer.head_inputs import head_inputs

    found = request.getfixturevalue(f"world{world}").run(
        "tests.trainer.numbers:kl",
        layout={"tensor_parallel_size": world},
        seed=3,
        vocab_size=vocab_size,
        temperature=1.3,
        chunk_tokens=chunk_tokens,
        forward_weight=forward_weight,
        top_k=top_k,
    )
    student, teacher = (head_inputs(3 + i, vocab_size) for i in range(2))
    hidden = student["hidden"][:13, 0].clone().requires_grad_()
    weight, rows = student["weight"].clone().requires_grad_(), torch.arange(1, 13, 2)
    log_p = (hidden[rows] @ weight.t() / 1.3).log_softmax(-1)
    log_q = (teacher["hidden"][rows, 0] @ teacher["weight"].t() / 1.3).log_softmax(-1)
    expected = kl_of(log_p, log_q, forward_weight, top_k)
    (expected @ student["a"][rows]).backward()
    for name, value in (
        ("kl", expected.detach()),
        ("hidden", hidden.grad),
        ("weight", weight.grad),
    ):
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("forward_weight", [0.0, 1.0])
def test_the_golden_numbers(forward_weight, top_k):
    """One token, three words: k = V - 1 is the whole vocabulary. float64."""
    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

    # isort: split
    from grpo_megatron.trainer.vocab_parallel.divergence import (
        DivergenceSettings,
        TeacherTokens,
        divergence,
        likeliest,
    )

    class Alone:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)

    golden, settings = GOLDEN["opd"], DivergenceSettings(3, 1.0, 8, forward_weight)
    hidden, rows = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    student = torch.tensor(golden["student_logits"])[:, None].requires_grad_()
    teacher = torch.tensor(golden["teacher_logits"])[:, None]
    columns = (
        {"hidden": hidden, "head": teacher}
        if top_k is None
        else dict(
            zip(
                ("ids", "logprobs", "tail"),
                likeliest(hidden, teacher, top_k, Alone, settings),
                strict=True,
            )
        )
    )
    found = divergence(hidden, student, TeacherTokens(rows, 1.0, settings, **columns), Alone)
    found.sum().backward()
    name = "forward_kl_full" if forward_weight else "reverse_kl_full"
    assert found.item() == pytest.approx(golden[name], abs=1e-6)
    if not forward_weight:
        np.testing.assert_allclose(student.grad[:, 0], golden["grad_student_logits"], atol=1e-6)
        assert columns.get("ids", torch.tensor([[0, 1]])).sort().values.tolist() == [[0, 1]]


@pytest.fixture(scope="session")
def teachers(tmp_path_factory) -> list[str]:
    return [
        write_model(tmp_path_factory.mktemp("teachers") / str(seed), MOE, seed) for seed in (21, 22)
    ]


def settings_of(teachers: list[str], **settings) -> dict:
    """The first teaches both domains, the second one of them."""
    return {
        "teachers": [
            {"path": teachers[0], "weight": 0.5},
            {"path": teachers[1], "domains": ["odd"], "weight": 2.0},
        ],
        **settings,
    }


def sampled_terms(
    table: SampleTable, row: int, log_p: torch.Tensor, log_q: torch.Tensor
) -> torch.Tensor:
    """The policy gradient's loss of a sample by token, with `log q - log p` as advantages.

    IcePop: tokens weigh by the ratio to the engine's log-probs, those outside of [0.5, 2] by 0."""
    completion, rollout_logprobs = table.completion(row)
    ids = torch.from_numpy(completion.astype(np.int64))[:, None]
    log_p = log_p.gather(1, ids)[:, 0]
    advantages = log_q.gather(1, ids)[:, 0] - log_p
    ratio = (log_p - torch.from_numpy(rollout_logprobs).double()).exp()
    is_inside = (ratio >= 0.5) & (ratio <= 2.0)
    return -torch.where(is_inside, ratio * advantages, 0.0) * log_p


@pytest.mark.parametrize(
    ("mode", "top_k", "forward_weight"),
    [
        pytest.param("full", 1, 0.0, marks=pytest.mark.matrix),
        ("full", 1, 0.3),
        ("topk_tail", 5, 0.0),
        ("sampled", 1, 0.0),
    ],
)
def test_the_first_loss_is_that_of_transformers(
    world1, moe_model, teachers, three_updates, mode, top_k, forward_weight
):
    """Each sample to the teachers of its domain, a mean over the update's tokens."""
    found = world1.run(
        CASES + "distil",
        model=moe_model,
        samples=three_updates,
        layout={},
        distillation=settings_of(teachers, mode=mode, top_k=top_k, forward_weight=forward_weight),
    )
    assert found["unchanged"]
    table = SampleTable(Path(three_updates))
    total = size = 0.0
    tokens = 0
    student, *taught = (
        [logits.double() for logits in reference_logits(model, table)]
        for model in (moe_model, *teachers)
    )
    for row in np.flatnonzero(table.update == 0):
        tokens += len(student[row])
        log_p = student[row].log_softmax(-1)
        for number, weight in ((0, 0.5), (1, 2.0 * (table.domain[row] == 1))):
            log_q = taught[number][row].log_softmax(-1)
            if mode == "sampled":
                terms = sampled_terms(table, row, log_p, log_q)
            else:
                terms = kl_of(log_p, log_q, forward_weight, top_k if mode == "topk_tail" else None)
            total += weight * terms.sum()
            size += weight * terms.abs().sum()
    # terms of a divergence are positive, those of a policy gradient nearly cancel
    tolerance = 1e-5 * float(size) / tokens
    assert found["losses"][0] == pytest.approx(float(total) / tokens, abs=tolerance)


@pytest.fixture(scope="session")
def spoilt_episodes(tmp_path_factory) -> str:
    """Of one to three sequences; about a third of the turns are spoilt."""
    directory = tmp_path_factory.mktemp("episodes")
    return write_groups(directory / "step_000001", random_groups(5, forks=True, spoilt=True))


@pytest.mark.parametrize("layout", ["one", "cp2"])
def test_the_policys_turns_of_episodes_are_taught(
    request, moe_model, teachers, spoilt_episodes, layout
):
    """In every sequence, by the teachers of its episode's domain; what the environment says is read
    only, and spoilt turns count without a loss."""
    world = request.getfixturevalue("world1" if layout == "one" else "world2")
    found = world.run(
        CASES + "distil",
        model=moe_model,
        samples=spoilt_episodes,
        layout={} if layout == "one" else LAYOUTS_2[layout],
        distillation=settings_of(teachers, mode="full"),
    )
    assert found["unchanged"]
    table = SampleTable(Path(spoilt_episodes))
    student, *taught = (
        [logits.double() for logits in reference_logits(model, table)]
        for model in (moe_model, *teachers)
    )
    total = 0.0
    num_tokens = 0
    for row in range(len(table)):
        log_p = student[row].log_softmax(-1)
        has_loss = np.zeros(len(log_p), bool)
        for turn in table.turns(row):
            num_tokens += turn.end - turn.start
            has_loss[turn.start : turn.end] = not turn.spoilt
        for number, weight in ((0, 0.5), (1, 2.0 * (table.domain[row] == 1))):
            divergence = kl_of(log_p, taught[number][row].log_softmax(-1), 0.0, None)
            total += weight * float(divergence[torch.from_numpy(has_loss)].sum())
    assert len(table) > len(np.unique(table.episode)) > 0
    assert found["losses"][0] == pytest.approx(total / num_tokens, rel=1e-5)


@pytest.mark.parametrize("mode", ["full", "topk_tail"])
def test_half_precision_is_the_same_but_for_rounding(
    world1, moe_model, teachers, two_domains, alone, mode
):
    """The last stage's states come in float32 there, the output layer does not."""
    found = world1.run(
        CASES + "distil",
        model=moe_model,
        samples=two_domains,
        layout={"precision": "bfloat16"},
        distillation=settings_of(teachers, mode=mode, top_k=5),
    )
    assert found["losses"][0] == pytest.approx(alone[mode]["losses"][0], rel=0.05)


def test_the_loss_of_a_step_is_the_mean_over_its_updates(world1, moe_model, three_updates):
    """Also of a run that replays routes: nobody sampled these, so none are missing."""
    found = world1.run(
        CASES + "supervise",
        model=moe_model,
        samples=three_updates,
        routing={"replay": "r3", "on_missing": "fail"},
    )
    assert found["updates"] == 3
    assert found["metrics"]["loss/value"] == pytest.approx(np.mean(found["losses"]), rel=1e-6)


def test_recorded_experts_are_replayed_and_compared(world1, moe_model, tmp_path):
    """As in reinforcement learning, also where the live experts are taken."""
    samples = write_samples(tmp_path / "step_000001", hf=MOE)
    flips, losses = {}, {}
    for replay in ("none", "r3"):
        found = world1.run(
            CASES + "supervise", model=moe_model, samples=samples, routing={"replay": replay}
        )
        flips[replay] = found["metrics"]["routing/rollout_slot_flip_rate"]
        losses[replay] = found["losses"][0]
    assert flips["none"] == pytest.approx(flips["r3"]) and flips["r3"] > 0.1  # routes are random
    assert losses["none"] != pytest.approx(losses["r3"], rel=1e-5)


def test_sampled_mode_has_the_gradient_of_reverse_kl_on_average():
    """Every word as if it had been sampled, weighed by its probability."""
    from types import SimpleNamespace

    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

    # isort: split
    from grpo_megatron.algorithms.stats import MetricRecorder
    from grpo_megatron.config.objective import ObjectiveConfig
    from grpo_megatron.config.run import DistillationConfig
    from grpo_megatron.trainer.steps.token_update import _distillation_loss
    from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens

    golden = GOLDEN["opd"]
    logits = torch.tensor(golden["student_logits"]).requires_grad_()
    log_p, words = logits.log_softmax(-1), torch.arange(3)
    log_q = torch.tensor(golden["teacher_logits"]).log_softmax(-1)
    config = SimpleNamespace(
        objective=ObjectiveConfig(),
        distillation=DistillationConfig(teachers=[{"path": "t"}], mode="sampled"),
    )
    total = 0.0
    for word in words:
        part = SimpleNamespace(
            rollout_logprobs=log_p.detach()[word : word + 1],
            teachers=[TeacherTokens(torch.tensor([0]), 1.0, None, logprobs=log_q[word : word + 1])],
        )
        meter = MetricRecorder(None, None, ())
        loss = _distillation_loss(config, part, log_p[word].expand(2, 1), 1.0, meter)
        assert meter.stats.result()["distillation/kl"] == pytest.approx(
            -golden["sampled_token_adv log q - log p"][word], abs=1e-6
        )
        total = total + log_p[word].exp().detach() * loss
    total.backward()
    np.testing.assert_allclose(logits.grad, golden["grad_student_logits"], atol=1e-6)


def test_a_teacher_like_the_student_teaches_nothing_where_sampling_truncates(
    world1, moe_model, tmp_path
):
    """Both are asked for log-probs over the whole vocabulary; ratios are over the kept ids."""
    samples = write_samples(
        tmp_path / "step_000001", num_updates=3, num_domains=2, seed=5, truncated=True
    )
    found = world1.run(
        CASES + "distil",
        model=moe_model,
        samples=samples,
        layout={},
        distillation={"mode": "sampled", "teachers": [{"path": moe_model}]},
    )
    assert found["metrics"]["mismatch/rejected"] < 0.9  # some tokens are in the loss
    # of the first update: after it Adam has made steps of what rounding has left
    assert found["losses"][0] == pytest.approx(0, abs=1e-6)
    assert found["grad_norms"][0] == pytest.approx(0, abs=1e-5)


def test_advantages_are_over_the_vocabulary_and_ratios_over_the_kept_ids():
    from types import SimpleNamespace

    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

    # isort: split
    from grpo_megatron.algorithms.stats import MetricRecorder
    from grpo_megatron.config.objective import ObjectiveConfig
    from grpo_megatron.config.run import DistillationConfig
    from grpo_megatron.trainer.steps.token_update import _distillation_loss
    from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens

    config = SimpleNamespace(
        objective=ObjectiveConfig(),
        distillation=DistillationConfig(teachers=[{"path": "t"}], mode="sampled"),
    )
    over_kept = torch.tensor([-0.5, -1.0, -0.3], requires_grad=True)
    over_vocabulary = torch.tensor([-0.9, -1.6, -0.3])
    output = torch.stack([over_kept, torch.ones(3), over_vocabulary])
    of_teacher = torch.tensor([-0.7, -1.6, -0.8])
    rho = torch.tensor([1.2, 0.8, 1.0])
    microbatch = SimpleNamespace(
        rollout_logprobs=over_kept.detach() - rho.log(),
        teachers=[TeacherTokens(torch.arange(3), 1.0, None, logprobs=of_teacher)],
    )
    meter = MetricRecorder(None, None, ())
    _distillation_loss(config, microbatch, output, 1.0, meter).backward()
    expected = -rho * torch.tensor([0.2, 0.0, -0.5])
    np.testing.assert_allclose(over_kept.grad, expected, atol=1e-6)
    assert meter.stats.result()["distillation/kl"] == pytest.approx(0.1)


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.matrix), "topk_tail"])
def test_a_student_approaches_its_teacher(world1, moe_model, teachers, samples, mode):
    """On samples that are not its own."""

    def kl(mode: str, repeats: int) -> float:
        return world1.run(
            CASES + "distil",
            model=moe_model,
            samples=samples,
            layout={},
            repeats=repeats,
            distillation={"teachers": [{"path": teachers[0]}], "mode": mode, "top_k": 3},
        )["last_kl"]

    assert kl(mode, 12) < 0.85 * kl(mode, 0)


@pytest.fixture(scope="session")
def two_domains(tmp_path_factory) -> str:
    """One update: what follows an optimizer step amplifies rounding."""
    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", num_domains=2)


@pytest.fixture(scope="session")
def alone(world1, moe_model, teachers, two_domains):
    return {
        mode: world1.run(
            CASES + "distil",
            model=moe_model,
            samples=two_domains,
            layout=APART,
            distillation=settings_of(teachers, mode=mode, top_k=5),
        )
        for mode in ("full", "topk_tail", "sampled")
    }


@pytest.mark.parametrize("mode", ["full", "topk_tail", "sampled"])
@pytest.mark.parametrize(
    "layout",
    [
        "tp2_sp",
        "ep2",
        "cp2",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("cp2_tp2", "cp2_pp2", "pp2", "dp2", "pp2_vpp2", "tp2_sp_pp2")
        ),
    ],
)
def test_layouts(request, alone, moe_model, teachers, two_domains, mode, layout):
    world, layouts = ("world2", LAYOUTS_2) if layout in LAYOUTS_2 else ("world4", LAYOUTS_4)
    found = request.getfixturevalue(world).run(
        CASES + "distil",
        model=moe_model,
        samples=two_domains,
        layout=layouts[layout],
        distillation=settings_of(teachers, mode=mode, top_k=5),
    )
    assert_same(found, alone[mode])
    for name, value in alone[mode]["metrics"].items():
        if name in OF_PACKING:
            continue
        assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="session")
def with_answers(tmp_path_factory, teachers, two_domains) -> str:
    """The same samples with what two servers would have said; the first knows one word more."""
    table, answers = SampleTable(Path(two_domains)), {}
    for number, teacher in enumerate(teachers):
        rows = [row for row in range(len(table)) if number == 0 or table.domain[row] == 1]
        logits = list(reference_logits(teacher, table))
        log_q = torch.cat([logits[row].double().log_softmax(-1) for row in rows])
        best, ids = log_q.topk(5)
        if number == 0:
            unknown = torch.full_like(best[:, :1], -np.inf)
            best, ids = torch.cat([unknown, best], 1), torch.cat([ids[:, :1] * 0 + 93, ids], 1)
        answers[f"{number}/ids"] = ids.int().numpy()
        answers[f"{number}/logprobs"] = best.float().numpy()
    return write_samples(
        tmp_path_factory.mktemp("answers") / "step_000001", num_domains=2, teacher_logprobs=answers
    )


@pytest.mark.parametrize("layout", ["alone", "tp2_sp", "pp2", "cp2"])
@pytest.mark.parametrize("first", ["url", "path"])
def test_answers_of_a_server_teach_as_its_checkpoint_does(
    request, alone, moe_model, teachers, with_answers, layout, first
):
    """Also one server beside one checkpoint, each with its domains and weight."""
    settings = settings_of(teachers, mode="topk_tail", top_k=5)
    for number, teacher in enumerate(settings["teachers"]):
        if number or first == "url":
            teacher["url"] = "http://nobody:1"
            del teacher["path"]
    world = request.getfixturevalue("world1" if layout == "alone" else "world2")
    found = world.run(
        CASES + "distil",
        model=moe_model,
        samples=with_answers,
        layout=LAYOUTS_2.get(layout, {}),
        distillation=settings,
    )
    assert found["unchanged"]
    assert_same(found, alone["topk_tail"])
