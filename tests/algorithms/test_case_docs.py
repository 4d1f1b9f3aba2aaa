"""docs/cases.md says what a case may hold."""

import json
import re
from pathlib import Path

from grpo_megatron.algorithms.case import _Document, parse_case
from tests.algorithms.evaluation import evaluated

PAGE = (Path(__file__).parents[2] / "docs/cases.md").read_text()
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])


def test_every_field_is_in_a_table_and_nothing_else():
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(_Document.model_fields)


def test_the_example_is_complete():
    assert set(evaluated("grpo", **EXAMPLE)) >= {"loss", "grad_logprobs", "advantages", "metrics"}


def test_defaults_are_what_the_tables_say():
    case = parse_case({"logprobs": [[-1.0], [-2.0]], "rewards": [1.0, None]})
    assert case.domains == ("all",) and case.batch.group_ids.tolist() == [0, 0]
    assert case.columns["rollout_logprobs"] is case.columns["logprobs"]
