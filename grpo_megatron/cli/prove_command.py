"""`prove`: what works on the GPUs of this machine."""

from pathlib import Path
from typing import Annotated

import typer


def prove(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Run this part only; may be given several times."),
    ] = None,
    list_parts: Annotated[
        bool, typer.Option("--list", help="Say what the parts are, and run none.")
    ] = False,
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the page and everything else is written.")
    ] = Path("runs/prove"),
    pretend: Annotated[
        bool, typer.Option(help="On a CPU, with a device that only pretends to be a GPU.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for all parts; what does not fit is left out.")
    ] = 10.0,
) -> None:
    """Run everything that needs a GPU, tiny, and say on one page what works (docs/prove.md).

    Exit code 11 if a part failed. Nothing is downloaded."""
    from grpo_megatron.prove.parts import PARTS
    from grpo_megatron.prove.prove import chosen_parts, prove_machine

    parts = chosen_parts(only or [], PARTS)
    if list_parts:
        for part in parts:
            typer.echo(f"{part.name:14} {part.shows}")
        return
    prove_machine(parts, to, pretend=pretend, minutes=minutes, say=typer.echo)
