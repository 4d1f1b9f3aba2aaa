"""Estimators for rewards inside samples: steps of a solution, turns of an agent. All [n]."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algorithms.batch import Events, SampleBatch, by_groups, suffix_sums
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.errors import DataError


def process(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """Process supervision (DeepSeekMath, arXiv:2402.03300): all step rewards of a group are
    standardised together; a token's advantage is the sum over the steps that end at it or later.

    Tokens after the last step, and samples without steps, get 0."""
    events = _events(batch, "steps")
    valid = groups.valid[events.sample]
    pool = Groups(groups.ids[events.sample], valid)
    return _credit(batch, events, pool.standardised(events.reward, o.std_kind, o.advantage_eps))


def gagpo(o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> Tensor:
    """GAGPO (arXiv:2605.13217): `V(s)` is the mean return-to-go of the group's visits to s;
    `delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`, `A_t = sum_l (gamma lambda)^l delta_{t+l}`,
    standardised over the turns of the group. All tokens of a turn share its advantage.

    A state seen once is its own value: its advantage comes from later turns only."""
    events = _events(batch, "turns")
    order = torch.argsort(events.end, stable=True)
    order = order[torch.argsort(events.sample[order], stable=True)]
    events = replace(events, sample=events.sample[order], end=events.end[order],
                     reward=events.reward[order], state=events.state[order])
    last = _last(events)
    returns = _discounted(events.reward, last, o.gagpo_gamma)
    states = int(events.state.max()) + 1 if len(events.state) else 1
    _, visit = torch.unique(groups.ids[events.sample] * states + events.state, return_inverse=True)
    value = Groups(visit, groups.valid[events.sample]).mean(returns)
    following = torch.where(last, 0.0, value.roll(-1))
    delta = events.reward + o.gagpo_gamma * following - value
    advantage = _discounted(delta, last, o.gagpo_gamma * o.gagpo_lambda)
    pool = Groups(groups.ids[events.sample], groups.valid[events.sample])
    return _of_turns(batch, events, pool.standardised(advantage, o.std_kind, o.advantage_eps))


def turn_index(batch: SampleBatch) -> Tensor:
    """int32 [n]: a number for every turn; tokens after the last turn form one of their own."""
    events = _events(batch, "turns")
    starts = torch.zeros(batch.num_tokens + 1, dtype=torch.int32)
    starts[batch.offsets[:-1]] = 1
    starts[batch.offsets[events.sample] + events.end + 1] = 1
    return starts[:-1].cumsum(0, dtype=torch.int32)


def _events(batch: SampleBatch, what: str) -> Events:
    if batch.events is None or (what == "turns" and batch.events.state is None):
        raise DataError(f"the samples have no {what}", where=what,
                        remedy=f"give {what}, or choose an outcome-level advantage")
    return batch.events


def _credit(batch: SampleBatch, events: Events, values: Tensor) -> Tensor:
    """Every token gets the sum of the values of events that end at it or later."""
    def of_groups(part: SampleBatch) -> Tensor:
        marks = torch.zeros(part.num_tokens, dtype=torch.float64)
        marks.index_add_(0, part.offsets[part.events.sample] + part.events.end, part.events.reward)
        return suffix_sums(marks, part)

    return by_groups(replace(batch, events=replace(events, reward=values)), of_groups)


def _of_turns(batch: SampleBatch, events: Events, values: Tensor) -> Tensor:
    """Every token takes the value of its turn: differences of values at the turns' ends."""
    return _credit(batch, events, values - torch.where(_last(events), 0.0, values.roll(-1)))


def _last(events: Events) -> Tensor:
    """Whether an event is the last of its sample, bool [K]."""
    return torch.diff(events.sample, append=events.sample.new_tensor([-1])) != 0


def _discounted(values: Tensor, last: Tensor, factor: float) -> Tensor:
    """Backward discounted sums that restart after every `last`."""
    out, running = [], 0.0
    for value, is_last in zip(values.flip(0).tolist(), last.flip(0).tolist(), strict=True):
        running = value + (0.0 if is_last else factor * running)
        out.append(running)
    return torch.tensor(out[::-1], dtype=values.dtype)
