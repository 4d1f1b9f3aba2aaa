"""Preferences from the store of a finished or running RL run: of each group that it recorded two
samples, with the very tokens that the policy sampled."""

from collections import Counter
from collections.abc import Iterator, Sequence
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
                prompt, answers = self._read(table, rows, tokenizer)
                correct = self._correct(table, rows)
                if not is_paired:
                    labelled += _labelled(prompt, answers, correct)
                    continue
                usable = [True] * len(rows)
                pair = pair_of(table.reward[rows], correct, usable, self._how)
                if pair is None:
                    dropped[f"groups without a pair ({self._how})"] += 1
                    continue
                both = answers[pair.chosen], answers[pair.rejected]
                pairs.append(pair_preference(prompt, both, pair.margin))
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

    def _read(
        self, table: SampleTable, rows: np.ndarray, tokenizer: TextTokenizer
    ) -> tuple[Prompt, list[Completion]]:
        ids = tuple(table.prompt_ids(int(rows[0])).tolist())
        name = self._domain.name
        prompt = Prompt("", name, tokenizer.decode_exactly(ids), ids, "")
        answers = []
        for row in rows.tolist():
            token_ids, _ = table.completion(row)
            text = tokenizer.decode(token_ids.tolist())
            answers.append(unsampled(token_ids.tolist(), 0, "stop", text))
        return prompt, answers

    def _correct(self, table: SampleTable, rows: np.ndarray) -> np.ndarray:
        """1, 0 or NaN by the run's own accuracy component, float64 [G]."""
        of_run = self._config.domains[int(table.domain[rows[0]])]
        values = table.components[of_run.accuracy_component][rows]
        return np.where(np.isnan(values), np.nan, values >= of_run.least_correct)


def _labelled(
    prompt: Prompt, answers: Sequence[Completion], correct: np.ndarray
) -> list[LabelledAnswer]:
    """Return the answers with a label. correct: 1 right, 0 wrong, NaN not known; [G]."""
    found = []
    for answer, label in zip(answers, correct, strict=True):
        if not np.isnan(label):
            found.append((prompt, answer, float(label)))
    return found
