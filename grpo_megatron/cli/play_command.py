"""`play`: a person takes the policy's place, in an environment or for an agent program."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.inspect_commands import Source
from grpo_megatron.cli.run_commands import Overrides


def play(
    recipe: Source,
    overrides: Overrides = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="By default the first one with an environment or an agent."
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(metavar="ID", help="Id of a prompt, or its number in the source, from 1 on."),
    ] = "1",
    tokens: Annotated[bool, typer.Option("--tokens", help="Token ids too.")] = False,
) -> None:
    """Play an episode yourself: read what the policy would read, and answer in its place.

    An answer ends with an empty line; a call of a tool may be JSON: {"name": …, "arguments": …}.
    No engine is started."""
    from grpo_megatron.cli.play import play_episode
    from grpo_megatron.cli.typed_replies import InputLines
    from grpo_megatron.config.loader import load_recipe, read_resolved

    path = Path(recipe)
    if path.is_dir() or path.suffix == ".json":
        resolved = read_resolved(path, overrides or [])
    else:
        resolved = load_recipe(recipe, overrides or [])
    play_episode(
        resolved.config,
        resolved.run_path / "model",
        InputLines(sys.stdin.fileno()),
        typer.echo,
        domain_name=domain,
        prompt=prompt,
        shows_tokens=tokens,
    )
