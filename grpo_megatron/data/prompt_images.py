"""Images of a data set's rows: read, checked, and put into the tokens of their prompts.

A row has them in `image_field`, one or a list: a path, a `file:` or `data:` URI, the bytes, or a
table of `bytes` and `path`, as Hugging Face's Parquet files have it; an empty text is none.
`<image>` in the question says where each one is; without it they come first.

What cannot be seen is refused for its row alone, with the row's name."""

import base64
import binascii
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.data.conversation import MESSAGES, last_question, with_last_question
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import digest_of, read_image
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.types import Problem, PromptImage

logger = logging.getLogger(__name__)

MARK = "<image>"
"""Stands for an image in the question of a row."""
_READERS = 4
"""Threads that decode images: Pillow works beside other threads."""
_AS_URI = 'base 64 goes into a URI: "data:image/png;base64,…" in the place of the name or the table'
_LONGEST_NAME = 255
"""Characters that messages show of a path. What is longer is likely the image itself."""
_SHOWN = 60
_NAMED = 20
"""Refused rows that the log names, of each domain."""
_DEFAULT_FIELD: str = DomainConfig.model_fields["image_field"].default


class RowImage(NamedTuple):
    """An image of a row: the digest of its bytes, and its rows and columns of tokens."""

    digest: str
    rows: int
    columns: int


SeenProblem = tuple[Problem, tuple[RowImage, ...]]
"""A problem with its images."""


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows for a model.

    keep: is given the bytes of every image that is fit, and names them."""

    settings: ImageSettings
    marker: str
    """What a prompt's text has for an image: the marks around it, and one token in between."""
    token: str
    """That token, as text."""
    token_id: int
    """Of that token, of which an image has many."""
    keep: Callable[[bytes], str] = digest_of
    num_refused: dict[str, int] = field(default_factory=dict)
    """By domain that was read: rows that were left out because of an image."""

    @classmethod
    def of_model(
        cls, model: Path, tokenizer: TextTokenizer, keep: Callable[[bytes], str] = digest_of
    ) -> "ImageReader | None":
        """For the model in a directory; None where it sees no images, or there is a tokenizer only.

        Raises ConfigError where its files do not say how."""
        if not (model / "config.json").exists():
            return None
        hf = read_config(model)
        if "vision_config" not in hf:
            return None
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        marks = [tokenizer.token_text(hf[name]) for name in names]
        return cls(ImageSettings.of_model(hf), "".join(marks), marks[1], hf["image_token_id"], keep)

    def fit(self, domain: DomainConfig, problems: Sequence[Problem]) -> Iterator[SeenProblem]:
        """Yield the problems whose images can be seen, with these; questions have markers then.

        The log names those that are left out, `num_refused` counts them. Raises DataError where
        none is left."""
        refusals: list[DataError] = []
        num_fit = 0
        for found in self.read(domain, problems):
            if isinstance(found, DataError):
                refusals.append(found)
                continue
            num_fit += 1
            yield found
        self.num_refused[domain.name] = len(refusals)
        if not refusals:
            return
        if not num_fit:
            raise refusals[0]
        for refusal in refusals[:_NAMED]:
            logger.warning("%s: left out: %s", refusal.where, refusal.message)
        logger.warning(
            "domain %r: %d of %d rows are left out, whose images cannot be seen",
            domain.name,
            len(refusals),
            len(problems),
        )

    def read(
        self, domain: DomainConfig, problems: Sequence[Problem]
    ) -> Iterator[SeenProblem | DataError]:
        """Yield each of the problems with its images, with markers in its question, or what is
        wrong with them."""
        with ThreadPoolExecutor(_READERS) as threads:
            yield from threads.map(lambda problem: self._read(domain, problem), problems)

    def _read(self, domain: DomainConfig, problem: Problem) -> SeenProblem | DataError:
        """A problem with its images; what is wrong with them, if anything is."""
        metadata = dict(problem.metadata)
        sources = _listed(metadata.pop(domain.image_field, None))
        try:
            images = tuple(self._image(domain, source) for source in sources)
            marked = self._with_markers(replace(problem, metadata=metadata), len(images))
        except DataError as error:
            error.where = problem.where or f"[[domains]] {domain.name}"
            return error
        return marked, images

    def _image(self, domain: DomainConfig, source: Any) -> RowImage:
        content = _bytes_of(source, domain)
        width, height = read_image(content).size
        rows, columns = self.settings.tokens_of(width, height)
        return RowImage(self.keep(content), rows, columns)

    def _with_markers(self, problem: Problem, num_images: int) -> Problem:
        """The problem with a marker for each image in its question, or in its conversation."""
        messages = problem.metadata.get(MESSAGES)
        texts = [problem.question]
        if messages is not None:
            texts = [str(message["content"]) for message in messages]
        if any(self.token in text for text in texts):
            raise DataError(
                f"the question has {self.token!r}, which only images may have",
                remedy=f"write {MARK} where an image is",
            )
        num_marks = sum(text.count(MARK) for text in texts)
        if num_marks not in (0, num_images):
            raise DataError(
                f"the question has {num_marks} {MARK} for {num_images} images",
                remedy="give every mark its image, or leave the marks out",
            )

        def marked(text: str) -> str:
            return text.replace(MARK, self.marker)

        def preceded(text: str) -> str:
            return self.marker * num_images + text

        if messages is None:
            if num_marks == 0:
                return replace(problem, question=preceded(problem.question))
            return replace(problem, question=marked(problem.question))
        if num_marks == 0:
            messages = with_last_question(messages, preceded)
        else:
            messages = [m | {"content": marked(m["content"])} for m in messages]
        return replace(
            problem,
            question=last_question(messages),
            metadata={**problem.metadata, MESSAGES: messages},
        )

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[RowImage], where: str
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """The tokens of a prompt with all tokens of its images, and where these are.

        Raises DataError where the prompt has another number of image tokens."""
        num_found = list(token_ids).count(self.token_id)
        if num_found != len(images):
            raise DataError(
                f"a prompt has {num_found} image tokens for {len(images)} images",
                where=where,
                remedy="the template must keep what the question has for images, "
                f"{self.marker!r}, and add none",
            )
        left = iter(images)
        ids: list[int] = []
        places = []
        for token_id in token_ids:
            if token_id != self.token_id:
                ids.append(token_id)
                continue
            digest, rows, columns = next(left)
            image = PromptImage(digest, len(ids), rows, columns)
            places.append(image)
            ids += [token_id] * image.num_tokens
        return tuple(ids), tuple(places)


def names_image_field(domain: DomainConfig) -> bool:
    """Whether a recipe says where the rows of a domain have their images."""
    return domain.image_field != _DEFAULT_FIELD


def lack_of_images(domain: DomainConfig, problems: Iterable[Problem]) -> str | None:
    """Return what to warn of where no problem has the default field of images, of a model that
    sees; None where one has it. Problems are read until one has it.

    Raises DataError where the recipe names the field."""
    fields: set[str] = set()
    where = ""
    for problem in problems:
        if domain.image_field in problem.metadata:
            return None
        fields.update(problem.metadata)
        where = where or problem.where
    told = f"other fields there: {', '.join(sorted(fields)) or 'none'}"
    if not names_image_field(domain):
        return (
            f"no row of domain {domain.name!r} has images, in the field {domain.image_field!r} "
            f"(image_field); {told}"
        )
    close = " or ".join(map(repr, nearest(domain.image_field, sorted(fields))))
    remedy = "set image_field of the domain to the field that has the images, or leave it out"
    if close:
        remedy = f"did you mean {close}? {remedy}"
    raise DataError(
        f"no row of domain {domain.name!r} has the field {domain.image_field!r} (image_field); "
        f"{told}",
        where=where or f"[[domains]] {domain.name}",
        remedy=remedy,
    )


def refuse_images(domain: DomainConfig, problems: Sequence[Problem]) -> None:
    """Raise DataError for a question with marks and images, where the model reads text only.

    A row that only has such a field is what it always was."""
    for problem in problems:
        if MARK in problem.question and _listed(problem.metadata.get(domain.image_field)):
            raise DataError(
                f"a question has {MARK} and images, and the model sees none",
                where=problem.where or f"[[domains]] {domain.name}",
                remedy="use a model that sees, for example model.preset=tiny-qwen2.5-vl, or leave "
                "the mark out",
            )


def _listed(value: Any) -> list[Any]:
    """The images of a field: none (in CSV an empty text), one or several."""
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _bytes_of(source: Any, domain: DomainConfig) -> bytes:
    """The bytes of an image's file. DataError names what it should be and is not."""
    if isinstance(source, Mapping):
        content = source.get("bytes")
        if content is not None:
            return _of_bytes(content)
        source = source.get("path")
        if source is None or source == "":
            raise DataError(
                "an image is a table with neither bytes nor a path",
                remedy="leave the image or the row out, or give it its bytes or its path",
            )
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source:
        found = type(source).__name__
        if source == "":
            found = "an empty text in a list"
        raise DataError(
            f"an image is {found}, expected a path, bytes or a data: URI",
            remedy="leave the row out, or mend the image",
        )
    if source.startswith("data:"):
        return _of_data_uri(source)
    if source.startswith("file:"):
        return _of_file(domain, _path_of_uri(source))
    if "://" in source:
        raise DataError(
            f"an image is at {_beginning(source)!r}, and a run loads nothing from the network",
            remedy="download the images and give their paths",
        )
    return _of_file(domain, source)


def _path_of_uri(uri: str) -> str:
    """Return the path in a `file:` URI. Raises DataError where it is none of this machine."""
    path = uri.removeprefix("file:")
    host = ""
    if path.startswith("//"):  # else there is no host: "file:/data/a.png"
        host, slash, rest = path.removeprefix("//").partition("/")
        path = slash + rest
    if host not in ("", "localhost") or not path.startswith("/"):
        raise DataError(
            f"an image is at {_beginning(uri)!r}, which is no whole path of this machine",
            remedy="write file:/// and all of the path, or the path itself",
        )
    return unquote(path)


def _beginning(name: str) -> str:
    """A name as messages show it."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_SHOWN]}… ({len(name)} characters)"


def _of_bytes(content: Any) -> bytes:
    """Of the field `bytes` of a table: bytes, or numbers as JSON has them."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, list) and all(_is_byte(value) for value in content):
        return bytes(content)
    remedy = "leave the row out, or mend the image"
    if isinstance(content, str):
        remedy = _AS_URI
    raise DataError(
        f"the bytes of an image are {type(content).__name__}, expected bytes or a list of numbers "
        "from 0 to 255",
        remedy=remedy,
    )


def _is_byte(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 255


def _of_data_uri(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(
            f"an image is {head[:60]!r}, expected data:image/...;base64,...",
            remedy="leave the row out, or mend the image",
        )
    with raised_as(
        DataError,
        "an image is no base 64",
        (binascii.Error, ValueError),
        remedy="leave the row out, or mend the image",
    ):
        return base64.b64decode(data, validate=True)


def _of_file(domain: DomainConfig, name: str) -> bytes:
    """Of a path, which is relative to `image_folder`, else to where the data file is."""
    folder = domain.image_folder
    if folder is None and domain.path is not None:
        folder = domain.path
        if not folder.is_dir():
            folder = folder.parent
    path = (folder or Path()) / name
    shown = str(path)
    remedy = (
        "set image_folder of the domain to the folder that paths begin in, or leave the row out"
    )
    if len(name) > _LONGEST_NAME:
        shown = _beginning(name)
        remedy = f"{remedy}; {_AS_URI}"
    causes = (OSError, ValueError)  # ValueError: of a path with a NUL
    with raised_as(DataError, f"no image at {shown}", causes, remedy=remedy):
        return path.read_bytes()
