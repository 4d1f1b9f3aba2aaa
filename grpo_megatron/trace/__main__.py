"""`python -m grpo_megatron.trace RECIPE [key=value ...] [--json]`: `plan --trace` starts it."""

import json
import logging
import os
import sys
import warnings

from grpo_megatron.errors import GrpoMegatronError, MismatchError
from grpo_megatron.orphans import die_with_parent


def main(arguments: list[str]) -> int:
    """Trace a recipe, print the report; return the exit code."""
    die_with_parent(os.getppid())
    as_json = "--json" in arguments
    source, *overrides = [text for text in arguments if text != "--json"]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of torch and Megatron, about packages that are not there
    from grpo_megatron.trace import report
    from grpo_megatron.trace.recipe import trace_recipe

    try:
        found = trace_recipe(source, overrides, say=_say)
    except GrpoMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if as_json:
        values = report.as_json(found.traces, found.compared, on_gpu=found.on_gpu)
        print(json.dumps(values, indent=2))
    else:
        for line in report.as_text(found.traces, found.compared, on_gpu=found.on_gpu):
            print(line)
    if report.all_agree(found.compared):
        return 0
    print("error: the plan and the trace disagree", file=sys.stderr)
    return MismatchError.exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
