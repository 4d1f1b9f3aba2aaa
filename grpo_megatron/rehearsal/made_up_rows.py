"""Rows in the format that a domain reads, where its own file is not on this machine."""

import base64
import io
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from grpo_megatron import assets
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.launch.bindings import refuse_unbound_environments

_NUM_ROWS = 64
_METADATA = re.compile(r"\{metadata\[([^\[\]]+)\]\}")
_SPECIAL_TOKEN = re.compile(r"<[|｜][^<>\s]*?[|｜]>")
_PROGRAM_TESTS = "code_tests"
_IOU = "box_iou"
_SIDE = 56
"""Pixels of a made-up picture's side."""
_RUBRIC = [
    {"criterion": "It is a number.", "weight": 1.0},
    {"criterion": "It is short.", "weight": 0.5},
]


def missing_files(config: RunConfig) -> list[int]:
    """Return numbers of the domains whose file does not exist."""
    missing = []
    for number, domain in enumerate(config.domains):
        if domain.path is not None and not domain.path.exists():
            missing.append(number)
    return missing


def missing_corpora(config: RunConfig) -> list[int]:
    """Return numbers of the domains whose environment searches a file that does not exist."""
    missing = []
    for number, domain in enumerate(config.domains):
        if domain.environment is None:
            continue
        corpus = domain.environment.arguments.get("corpus")
        if corpus is not None and not assets.input_path(Path(corpus)).exists():
            missing.append(number)
    return missing


def refuse_unbound_environments_here(config: RunConfig) -> None:
    """Check as `refuse_unbound_environments` does, with made-up documents where those of the recipe
    are not on this machine."""
    missing = missing_corpora(config)
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        documents = Path(folder) / "documents.jsonl"
        write_corpus(documents)
        domains = list(config.domains)
        for number in missing:
            environment = domains[number].environment
            assert environment is not None  # it has a corpus
            arguments = {**environment.arguments, "corpus": str(documents), "index": None}
            searches = environment.model_copy(update={"arguments": arguments})
            domains[number] = domains[number].model_copy(update={"environment": searches})
        refuse_unbound_environments(config.model_copy(update={"domains": tuple(domains)}))


def write_corpus(path: Path) -> None:
    """Write documents for an environment that searches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(_NUM_ROWS):
        total = index + index % 7
        document = {
            "id": str(index),
            "title": f"Sum {index}",
            "text": f"{index} + {index % 7} is {total}.",
        }
        lines.append(json.dumps(document) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def write_rows(path: Path, config: RunConfig, number: int, *, sees_images: bool = False) -> None:
    """Write problems for domain `number`, with a picture each for a model that sees: JSONL, or
    Parquet where `path` says so."""
    domain = config.domains[number]
    rows = [_row(config, domain, index) for index in range(_NUM_ROWS)]
    if sees_images:
        for index, row in enumerate(rows):
            row[domain.image_field] = [_picture(index)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def special_tokens_of(config: RunConfig) -> list[str]:
    """Control tokens that the recipe's templates write, as `<|im_start|>`, and the one that marks
    steps."""
    found: list[str] = []
    if config.preferences.rows == "steps":
        found.append(config.preferences.step_token)
    for domain in config.domains:
        for text in (domain.template, domain.question_template, domain.assistant_prefix):
            found += _SPECIAL_TOKEN.findall(text)
    return list(dict.fromkeys(found))


def _row(config: RunConfig, domain: DomainConfig, index: int) -> dict[str, Any]:
    total = index + index % 7
    question, answer = _problem(domain, index, total)
    row: dict[str, Any] = {domain.prompt_field: question, domain.answer_field: answer}
    if domain.prompt_field == "messages":
        row["messages"] = [{"role": "user", "content": question}]
    domain_field = domain.arguments.get("domain_field")
    if domain_field is not None:
        row[domain_field] = domain.name
    if config.trains_preferences:
        return _preference(config, row, total, index)
    if config.uses_dataset:
        row["responses"] = _responses(total)
    return row | _metadata(domain, row, index)


def _problem(domain: DomainConfig, index: int, total: int) -> tuple[str, str]:
    """Return a question and its answer, of the kind that the domain's rewards can score."""
    # With the domain's name: prompts of equal templates would be duplicates of each other.
    question = f"What is {index} + {index % 7} in {domain.name}?"
    answer = str(total)
    functions = [reward.function.rpartition(":")[2] for reward in domain.rewards]
    if _PROGRAM_TESTS in functions:
        question = (
            f"Write a program of {domain.name} that reads a number and prints it plus {index}."
        )
        answer = _program_tests(index)
    if _IOU in functions:
        question = f"Where in the picture is number {index} of {domain.name}?"
        answer = f"[{index % 8}, {index // 8}, {_SIDE // 2 + index % 8}, {_SIDE}]"
    marker = domain.arguments.get("answer_after")
    if marker is not None:
        answer = f"It is {answer}.\n{marker} {answer}"
    return question, answer


def _metadata(domain: DomainConfig, row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the other fields that the domain's template and its rewards read."""
    fields: dict[str, Any] = {}
    for name in _METADATA.findall(domain.template):
        if name not in row:
            fields[name] = f"{name} {index}"
    for reward in domain.rewards:
        for name in reward.arguments.get("size_fields") or ():
            fields[name] = _SIDE
        criteria_field = reward.arguments.get("criteria_field")
        if criteria_field is not None:
            fields[criteria_field] = _RUBRIC
    return fields


def _picture(index: int) -> str:
    """A square of one colour, as a `data:` URI."""
    file = io.BytesIO()
    colour = (4 * index, 255 - 4 * index, 128)
    Image.new("RGB", (_SIDE, _SIDE), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _preference(config: RunConfig, row: dict[str, Any], total: int, index: int) -> dict[str, Any]:
    """Return the same row with a chosen and a rejected answer, with one answer and its label, or
    with two steps and theirs."""
    right, wrong = (f"It is {total}.", f"It is {total + 1}.")
    if config.preferences.rows == "steps":
        return row | {"completions": [right, wrong], "labels": [True, False]}
    if config.compares_pairs:
        return row | {"chosen": right, "rejected": wrong}
    if index % 2 == 0:
        return row | {"completion": right, "label": True}
    return row | {"completion": wrong, "label": False}


def _program_tests(index: int) -> str:
    return json.dumps({"inputs": ["1", "2"], "outputs": [str(1 + index), str(2 + index)]})


def _responses(total: int) -> Sequence[str]:
    return [f"It is {total}.", f"{total}"]
