"""Pictures of shapes to be counted, drawn by this module: the smallest task for a model that sees.

`source = "shapes"`: on a white square lie circles, squares and triangles, apart from each other;
the question is how many of one kind there are. Equal seeds draw equal pictures."""

import io
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from PIL import Image, ImageDraw
from pydantic import Field, ValidationError, model_validator

from grpo_megatron.config.base import Strict
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.config.templates import PromptTemplate
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem

Kind = Literal["circle", "square", "triangle"]
_CELL_MARGIN = 2
"""Pixels that a cell is wider than its shape."""
_COLOURS = ((200, 30, 30), (30, 140, 40), (30, 60, 200), (190, 130, 20), (120, 40, 150))


class KindTemplate(PromptTemplate):
    """`KindTemplate("How many {kind}s?").of("circle")` gives `"How many circles?"`."""

    _field = re.compile("kind")
    _fields = "{kind}"
    _leaks = ()
    _requires_field = False

    def of(self, kind: Kind) -> str:
        """Return the question for a kind of shapes."""
        return self._filled({}, {"kind": kind})


class ShapesConfig(Strict):
    """`arguments` of a domain with the source `shapes`."""

    side: int = Field(112, ge=28, le=1024)
    """Pixels of the picture's side."""
    shape_side: int = Field(24, ge=6, le=512)
    """Pixels of a shape's side."""
    fewest: int = Field(1, ge=0)
    """Shapes of the asked kind, at least."""
    most: int = Field(5, ge=0)
    """Shapes of the asked kind, at most."""
    most_others: int = Field(0, ge=0)
    """Shapes of other kinds, at most."""
    kinds: tuple[Kind, ...] = ("circle",)
    """Kinds that are asked for, and drawn among the others."""
    question: str = "How many {kind}s?"
    """Of `{kind}`; what a row of a file has as its question."""
    seed: int | None = None
    """Wins over the recipe's."""

    @model_validator(mode="after")
    def _there_is_room(self) -> "ShapesConfig":
        if self.most < self.fewest:
            raise ValueError(f"most = {self.most} is less than fewest = {self.fewest}")
        if not self.kinds:
            raise ValueError("kinds has none")
        repeated = [kind for kind in self.kinds if self.kinds.count(kind) > 1]
        if repeated:
            raise ValueError(f"kinds has {repeated[0]!r} several times")
        if self.most_others and len(self.kinds) == 1:
            raise ValueError("most_others needs more kinds than the one that is asked for")
        if self.num_cells == 0:
            raise ValueError(
                f"a shape of {self.shape_side} pixels does not fit into a picture of {self.side}: "
                f"shape_side is at most {self.side - _CELL_MARGIN}"
            )
        room = self.num_cells**2
        if self.most + self.most_others > room:
            raise ValueError(
                f"{self.most + self.most_others} shapes of {self.shape_side} pixels do not fit "
                f"into a picture of {self.side}: it has room for {room}"
            )
        return self

    @property
    def num_cells(self) -> int:
        """Cells of a row of the grid in which shapes lie, one in a cell."""
        return self.side // (self.shape_side + _CELL_MARGIN)


def shape_problems(domain: DomainConfig, seed: int) -> Iterator[Problem]:
    """Draw `num_problems` pictures, 1000 by default; the answer is the number.

    Raises DataError for arguments that are not those of `ShapesConfig`."""
    where = f"[[domains]] {domain.name}, arguments"
    for name in domain.arguments:
        if name not in ShapesConfig.model_fields:
            raise DataError(
                f"pictures of shapes have no argument {name!r}",
                where=where,
                remedy=did_you_mean(name, ShapesConfig.model_fields),
            )
    try:
        settings = ShapesConfig.model_validate(domain.arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{name + ': ' if name else ''}{first['msg']}",
            where=where,
            remedy=f"known: {', '.join(ShapesConfig.model_fields)}",
        ) from error
    question = KindTemplate(settings.question, where=f"{where}.question")
    if settings.seed is not None:
        seed = settings.seed
    for number in range(domain.num_problems or 1000):
        # a seed for each, so that a picture does not depend on how many come before
        yield _problem(settings, question, random.Random(f"{seed}/{number}"), domain.image_field)


def _problem(
    settings: ShapesConfig, question: KindTemplate, rng: random.Random, image_field: str
) -> Problem:
    asked = rng.choice(settings.kinds)
    others = [kind for kind in settings.kinds if kind != asked]
    count = rng.randint(settings.fewest, settings.most)
    kinds = [asked] * count
    for _ in range(rng.randint(0, settings.most_others)):
        kinds.append(rng.choice(others))
    metadata: Mapping[str, Any] = {
        image_field: [draw_shapes(settings, kinds, rng)],
        "kind": asked,
        "num_shapes": len(kinds),
    }
    return Problem(question.of(asked), str(count), metadata)


def draw_shapes(settings: ShapesConfig, kinds: Sequence[Kind], rng: random.Random) -> bytes:
    """Draw shapes of these kinds at places of the grid that `rng` chooses: a PNG file."""
    picture = Image.new("RGB", (settings.side, settings.side), "white")
    pen = ImageDraw.Draw(picture)
    cell = settings.side // settings.num_cells
    places = rng.sample(range(settings.num_cells**2), len(kinds))
    for kind, place in zip(kinds, places, strict=True):
        row, column = divmod(place, settings.num_cells)
        slack = cell - settings.shape_side - 1
        left = column * cell + rng.randint(0, slack)
        top = row * cell + rng.randint(0, slack)
        _draw(pen, kind, left, top, settings.shape_side, rng.choice(_COLOURS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _draw(
    pen: ImageDraw.ImageDraw,
    kind: Kind,
    left: int,
    top: int,
    side: int,
    colour: tuple[int, int, int],
) -> None:
    right = left + side - 1
    bottom = top + side - 1
    if kind == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif kind == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    else:
        pen.polygon(((left + right) / 2, top, right, bottom, left, bottom), fill=colour)
