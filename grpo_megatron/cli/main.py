"""`grpo-megatron`: the command line. Bodies import what they need, so that typos answer fast."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import grpo_megatron
from grpo_megatron.cli import (
    convert_commands,
    data_commands,
    engines_commands,
    eval_command,
    inspect_commands,
    play_command,
    prove_command,
    rehearse_command,
    run_commands,
    stages_commands,
)
from grpo_megatron.errors import INTERRUPTED_EXIT_CODE, GrpoMegatronError, SetupError

app = typer.Typer(
    name="grpo-megatron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="GRPO-family reinforcement learning on Megatron-Core and vLLM.",
)
for _command in (
    run_commands.train,
    run_commands.resume,
    run_commands.submit,
    run_commands.status,
    run_commands.logs,
    run_commands.cancel,
    inspect_commands.plan,
    rehearse_command.rehearse,
    prove_command.prove,
    play_command.play,
    run_commands.replay,
    run_commands.mismatch,
    run_commands.report,
):
    app.command()(_command)
app.command("eval")(eval_command.evaluate)
app.add_typer(inspect_commands.config_app, name="config")
app.add_typer(convert_commands.app, name="convert")
app.add_typer(data_commands.app, name="data")
app.add_typer(engines_commands.app, name="engines")
app.add_typer(inspect_commands.objective_app, name="objective")
app.add_typer(stages_commands.app, name="stages")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"grpo-megatron {grpo_megatron.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: inspect_commands.Json = False) -> None:
    """Check packages, libraries, memory and disk; exit code 3 if something is missing."""
    from grpo_megatron.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error that a user can act on becomes a message and an exit code
    (`errors.py`; 130 after Ctrl-C). Set `GRPO_MEGATRON_TRACEBACK=1` for tracebacks."""
    try:
        return app(args=arguments and list(arguments), standalone_mode=False) or 0
    except (GrpoMegatronError, OSError) as error:  # of the system: a full disk, no permission
        if os.environ.get("GRPO_MEGATRON_TRACEBACK") == "1":
            raise
        _print_error(str(error))
        return getattr(error, "exit_code", SetupError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _print_error("interrupted")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a wrong command line
            error.show()
            return int(error.exit_code)
        raise


def _print_error(text: str) -> None:
    first, newline, rest = text.partition("\n")
    first = typer.style(first, fg="red", bold=True)  # only a terminal gets the colours
    typer.echo(f"error: {first}{newline}{rest}", err=True)


if __name__ == "__main__":
    sys.exit(main())
