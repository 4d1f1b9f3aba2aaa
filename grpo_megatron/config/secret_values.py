"""Secrets in a recipe: it names the environment variable that has one, `"$NAME"`.

`config.json`, reports and mirrors show the whole recipe, and overrides stand in a command line."""

import os
import re
from collections.abc import Mapping
from typing import Any

from grpo_megatron.errors import ConfigError

REFERENCE = r"^\$[A-Za-z_]\w*$"
"""What names a variable of the environment."""

_REFERENCE = re.compile(REFERENCE)
_NAME = (
    r"(?:[a-z0-9]+_)*(?:api_?key|secret|password|passwd|credentials?|private_key"
    r"|(?:access|api|auth|bearer)_token)"
    r"|(?:[A-Z0-9]+_)*(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)"
)
_SECRET_NAME = re.compile(_NAME)
_SET = re.compile(rf"""\b((?:{_NAME})["']?\s*=\s*)(?!["']?\$)("[^"]*"|'[^']*'|[^\s,}}\])]+)""")
"""A secret that is set, in TOML or as an override; not a reference."""
_WORD = re.compile(
    r"\b(sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})"
)
"""As OpenAI, Hugging Face, GitHub and AWS write theirs."""
_IN_URL = re.compile(
    r"""(://[^/\s:@]*:(?=[^\s/@"']+@)|[?&](?:api_?key|key|token|secret|password)=)[^&\s/@"']+"""
)
_HIDDEN = "…"


def is_secret_name(name: str) -> bool:
    """Whether an argument (`api_key`) or an environment variable (`HF_TOKEN`) of this name holds a
    secret."""
    return bool(_SECRET_NAME.fullmatch(name))


def is_reference(value: object) -> bool:
    """Whether it names a variable of the environment."""
    return isinstance(value, str) and bool(_REFERENCE.search(value))


def holds_secret(value: object) -> bool:
    """Whether a text looks like a key, or is a URL with one."""
    return isinstance(value, str) and bool(_WORD.search(value) or _IN_URL.search(value))


def without_secrets(text: str) -> str:
    """Return a text about a recipe, without what looks like a secret or is set under such a
    name."""
    text = _SET.sub(rf"\g<1>{_HIDDEN}", text)
    text = _IN_URL.sub(rf"\g<1>{_HIDDEN}", text)
    return _WORD.sub(_HIDDEN, text)


def from_environment(reference: str) -> str:
    """Return the variable that a reference names. Raises ConfigError where it is not set."""
    name = reference.removeprefix("$")
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(
            f"the environment variable {name} is not set",
            remedy=f"export {name} before the run starts; a job takes it along",
        )
    return value


def with_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a recipe with their references replaced, at any depth: those under the name of
    a secret. Raises ConfigError where a variable is not set."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found[name] = with_secrets(value)
        elif is_secret_name(name) and is_reference(value):
            found[name] = from_environment(value)
        else:
            found[name] = value
    return found
