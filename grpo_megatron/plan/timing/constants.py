"""Constants of predicted time: one table, each with its unit, kind and source."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grpo_megatron import assets
from grpo_megatron.config.base import Strict
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError

Kind = Literal["published", "measured", "fitted", "assumed", "given"]
CPU = "cpu"


class Constant(Strict):
    """One number."""

    value: float
    """In `unit`."""
    above: float | None = None
    """Valid values are larger; None: this one is valid too, see `least`."""
    least: float | None = None
    """The smallest valid value, where no `above` is given."""
    most: float | None = None
    """The largest valid value; None: any."""
    unit: str
    """What one of it is."""
    kind: Kind
    """How it is known; `given`: on the command line."""
    source: str
    """Who says so, or why it is taken."""

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        """Refuse a table with an entry that has no lower bound, or is outside of its own bounds."""
        if (self.above is None) == (self.least is None):
            raise ValueError("a constant has `above` or `least`")
        if not self.allows(self.value):
            raise ValueError(f"{self.value:g} is not {self.valid_values}")
        return self

    def allows(self, value: float) -> bool:
        """Whether `value` is one that the constant can have."""
        is_too_small = self.least is not None and value < self.least
        if self.above is not None:
            is_too_small = value <= self.above
        is_too_large = self.most is not None and value > self.most
        return not (is_too_small or is_too_large)

    @property
    def valid_values(self) -> str:
        """Say which values it can have: `above 0 and at most 1`."""
        text = ""
        if self.above is not None:
            text = f"above {self.above:g}"
        if self.least is not None:
            text = f"at least {self.least:g}"
        if self.most is not None:
            text += f" and at most {self.most:g}"
        return text

    def nearest(self, value: float) -> float:
        """Return a valid value near to one that is not: the bound that it is beyond, or, where the
        bound is not valid either, the one that the table has."""
        if self.most is not None and value > self.most:
            return self.most
        if self.least is not None:
            return self.least
        return self.value


class DeviceSpeed(Strict):
    """What a GPU can do at most, and what connects it."""

    flops: float = Field(gt=0)
    """Operations a second of dense bfloat16 products (of a CPU, float32)."""
    memory_bytes_per_s: float = Field(gt=0)
    """Of its own memory."""
    link_bytes_per_s: float = Field(gt=0)
    """To other GPUs of its NVLink domain, in each direction."""
    network_bytes_per_s: float = Field(gt=0)
    """To other domains, in each direction."""
    domain: int = Field(ge=1)
    """GPUs that NVLink connects; a node's, where the recipe says so and they are fewer."""
    architecture: Literal["ampere", "hopper", "blackwell", "cpu"]
    """Which attention kernels it has."""
    host: Literal["x86", "arm"] = "x86"
    """What launches its kernels."""
    kind: Kind
    """How these are known."""
    source: str
    """Who says so."""


class Constants(Strict):
    """All constants and devices."""

    constants: dict[str, Constant]
    devices: dict[str, DeviceSpeed]

    def __getitem__(self, name: str) -> float:
        """Return the value of the constant `name`; KeyError for an unknown one."""
        return self.constants[name].value

    def device(self, name: str) -> DeviceSpeed:
        """Return what a device can do; ConfigError for an unknown one."""
        if name not in self.devices:
            raise ConfigError(
                f"the speed of no device called {name!r} is known",
                where="--device",
                remedy=did_you_mean(name, self.devices),
            )
        return self.devices[name]

    def with_values(self, values: dict[str, float], kind: Kind, source: str) -> "Constants":
        """Return the table with other values; ConfigError for a name that it does not have, and for
        a value that the constant cannot have."""
        changed = dict(self.constants)
        for name, value in values.items():
            if name not in changed:
                raise ConfigError(
                    f"no constant is called {name!r}",
                    where="--constant",
                    remedy=did_you_mean(name, changed),
                )
            constant = changed[name]
            if not constant.allows(value):
                raise ConfigError(
                    f"{name} = {value:g}, expected a number {constant.valid_values} "
                    f"({constant.unit})",
                    where="--constant",
                    remedy=f"for example --constant {name}={constant.nearest(value):g}",
                )
            update = {"value": value, "kind": kind, "source": source}
            changed[name] = changed[name].model_copy(update=update)
        return self.model_copy(update={"constants": changed})


@cache
def shipped_constants() -> Constants:
    """Return the table of `constants.toml`."""
    return Constants.model_validate(assets.tables(__file__, "constants.toml"))


def constants_with(texts: Iterable[str]) -> Constants:
    """Return the shipped table with `NAME=VALUE` of a command line; ConfigError where one is no
    finite number, has no known name, or is not valid for its constant."""
    values: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        values[name.strip()] = _finite(text, number)
    return shipped_constants().with_values(values, "given", "--constant on the command line")


def _finite(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"{text!r} is not NAME=VALUE with a finite number",
            where="--constant",
            remedy="for example --constant decode_efficiency=0.7",
        )
    return value


def sources(constants: Constants) -> dict[str, dict[str, Any]]:
    """Return value, unit, kind and source of every constant and device, for JSON."""
    found = {name: constant.model_dump() for name, constant in constants.constants.items()}
    for name, device in constants.devices.items():
        found[f"devices.{name}"] = device.model_dump()
    return found
