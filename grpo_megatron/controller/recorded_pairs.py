"""Preferences from the store of a finished or running RL run: of each group that it recorded two
samples, with the very tokens that the policy sampled."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import DomainConfig, PairChoice, RunConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.controller.recorder import steps_in
from grpo_megatron.data.dataset_answers import unsampled
from grpo_megatron.data.preference_pairs import pair_of
from grpo_megatron.data.preferences import (
    LabelledAnswer,
    Preference,
    RecordedAnswers,
    pair_preference,
)
from grpo_megatron.data.sources import known_arguments
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Completion, Prompt

_CHOICES: tuple[PairChoice, ...] = ("best_worst", "correct_incorrect")


def refuse_no_recording(domain: DomainConfig) -> None:
    """DataError where a domain's run has recorded nothing, or its arguments are no good."""
    run = _Recording(domain)
    if not run.steps:
        raise DataError(
            "no recorded step",
            where=str(run.directory.store),
            remedy="name the directory of an RL run; checkpoint.keep_steps keeps more of its steps",
        )


def recorded_answers(config: RunConfig, tokenizer: TextTokenizer) -> dict[str, RecordedAnswers]:
    """Return what the domains with `source = "run"` have, by name. Raises DataError: another
    tokenizer, or nothing is recorded."""
    found = {}
    for domain in config.domains:
        if domain.source == "run":
            refuse_no_recording(domain)
            run = _Recording(domain)
            run.refuse_other_tokenizer(tokenizer)
            found[domain.name] = run.answers(tokenizer, is_paired=config.compares_pairs)
    return found


class _Recording:
    """The recorded steps of the run that a domain names."""

    def __init__(self, domain: DomainConfig):
        assert domain.path is not None  # rule domain_source
        arguments = known_arguments(domain, ("pairs", "domain"))
        self._domain = domain
        self._how: PairChoice = arguments.get("pairs", "best_worst")
        if self._how not in _CHOICES:
            raise DataError(
                f"arguments.pairs is {self._how!r}",
                where=f"[[domains]] {domain.name}",
                remedy=did_you_mean(str(self._how), _CHOICES),
            )
        self.directory = RunDir(domain.path)
        if not self.directory.config.exists():
            raise DataError(
                "no run is there",
                where=str(domain.path),
                remedy='source = "run" takes the directory of a run, with its config.json',
            )
        self._config = read_resolved(self.directory.config).config
        self._name: str | None = arguments.get("domain")
        names = [one.name for one in self._config.domains]
        if self._name is not None and self._name not in names:
            raise DataError(
                f"the run has no domain {self._name!r}",
                where=f"[[domains]] {domain.name}, arguments.domain",
                remedy=did_you_mean(self._name, names),
            )

    @property
    def steps(self) -> list[Path]:
        """Directories of the recorded steps, in order."""
        return [path for _, path in sorted(steps_in(self.directory.store))]

    def refuse_other_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """DataError where the run's tokens are not those of `tokenizer`."""
        model = self._config.model.path or self.directory.model
        if load_tokenizer(model).fingerprint == tokenizer.fingerprint:
            return
        raise DataError(
            "the run's policy has another tokenizer than the model that is trained",
            where=str(self.directory.root),
            remedy="have the policy sample with kind=rejection_sample and rejection.pairs, which "
            "writes texts",
        )

    def answers(self, tokenizer: TextTokenizer, *, is_paired: bool) -> RecordedAnswers:
        """Return pairs, or labelled answers, and what was left out, by reason."""
        pairs: list[Preference] = []
        labelled: list[LabelledAnswer] = []
        dropped: Counter[str] = Counter()
        for path in self.steps:
            table = SampleTable(path)
            for rows in self._groups(table, dropped):
                if not is_paired:
                    labelled += self._labelled(table, rows, tokenizer)
                    continue
                comparable = _behind_one_prompt(table, rows)
                num_others = len(rows) - len(comparable)
                if num_others:
                    dropped["samples behind another prompt than most of their group"] += num_others
                pair = self._pair(table, comparable, tokenizer)
                if pair is None:
                    dropped[f"groups without a pair ({self._how})"] += 1
                else:
                    pairs.append(pair)
        return RecordedAnswers(pairs, labelled, dropped)

    def _groups(self, table: SampleTable, dropped: Counter[str]) -> Iterator[np.ndarray]:
        """Yield rows of every group of the domains that are wanted, int64."""
        names = table.manifest.domains
        for group in np.unique(table.group).tolist():
            rows = np.flatnonzero(table.group == group)
            name = names[int(table.domain[rows[0]])]
            if self._name is not None and name != self._name:
                continue
            is_one_sequence = len(np.unique(table.episode[rows])) == len(rows)
            has_turns = any(table.turns(row) for row in rows.tolist())
            if not is_one_sequence or has_turns:
                dropped["groups of episodes with several turns"] += 1
                continue
            yield rows

    def _pair(
        self, table: SampleTable, rows: np.ndarray, tokenizer: TextTokenizer
    ) -> Preference | None:
        """Return the pair of samples with one prompt, None where there is none. rows: int64."""
        answers = [_answer(table, row, tokenizer) for row in rows.tolist()]
        usable = [bool(answer.text.strip()) for answer in answers]
        rewards = table.reward[rows]
        correct = self._correct(table, rows)
        pair = pair_of(rewards, correct, usable, self._how)
        if pair is None:  # one with an empty answer is left out, and counted as such
            pair = pair_of(rewards, correct, [True] * len(rows), self._how)
        if pair is None:
            return None
        prompt = self._prompt(table, int(rows[0]), tokenizer)
        return pair_preference(prompt, (answers[pair.chosen], answers[pair.rejected]), pair.margin)

    def _labelled(
        self, table: SampleTable, rows: np.ndarray, tokenizer: TextTokenizer
    ) -> list[LabelledAnswer]:
        """Return the samples of which it is known whether they are correct, each behind the prompt
        that it answers. rows: of one group, int64 [G]."""
        found = []
        prompts: dict[bytes, Prompt] = {}  # equal ones are kept once
        for row, label in zip(rows.tolist(), self._correct(table, rows).tolist(), strict=True):
            if np.isnan(label):
                continue
            key = table.prompt_ids(row).tobytes()
            if key not in prompts:
                prompts[key] = self._prompt(table, row, tokenizer)
            found.append((prompts[key], _answer(table, row, tokenizer), label))
        return found

    def _prompt(self, table: SampleTable, row: int, tokenizer: TextTokenizer) -> Prompt:
        """Return what the engine read before a sample. Samples of a group differ in that where they
        are retries or have exemplars."""
        ids = tuple(table.prompt_ids(row).tolist())
        return Prompt("", self._domain.name, tokenizer.decode_exactly(ids), ids, "")

    def _correct(self, table: SampleTable, rows: np.ndarray) -> np.ndarray:
        """1, 0 or NaN by the run's own accuracy component, float64 [G]."""
        of_run = self._config.domains[int(table.domain[rows[0]])]
        values = table.components[of_run.accuracy_component][rows]
        return np.where(np.isnan(values), np.nan, values >= of_run.least_correct)


def _behind_one_prompt(table: SampleTable, rows: np.ndarray) -> np.ndarray:
    """Return the rows of a group with the prompt that most of them have, the first of equally
    frequent ones; int64."""
    prompts = [table.prompt_ids(row).tobytes() for row in rows.tolist()]
    [(most_common, _)] = Counter(prompts).most_common(1)
    return rows[[prompt == most_common for prompt in prompts]]


def _answer(table: SampleTable, row: int, tokenizer: TextTokenizer) -> Completion:
    token_ids = table.completion(row)[0].tolist()
    return unsampled(token_ids, 0, "stop", tokenizer.decode(token_ids))
