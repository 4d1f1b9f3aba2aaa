"""`doctor`: prints the checks of `doctor_checks`."""

import json
from dataclasses import asdict

from grpo_megatron.cli.doctor_checks import Finding, all_findings
from grpo_megatron.errors import SetupError

_STYLE = {"ok": "green", "missing": "bold red", "warning": "yellow", "optional": "dim"}


def run_doctor(*, as_json: bool = False) -> int:
    """Check the machine and print what was found.

    Returns:
        0, or the exit code of `SetupError` if something required is missing.
    """
    findings = all_findings()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    missing = any(finding.status == "missing" for finding in findings)
    return SetupError.exit_code if missing else 0


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        line = Text(f"{finding.status:<9}", style=_STYLE[finding.status])
        line.append(f"{finding.what:<24}{finding.found}", style="not bold default")
        console.print(line)
        if finding.status != "ok" and finding.remedy:
            console.print(Text(f"{'':<9}  {finding.remedy}", style="dim"))
    missing = [finding.what for finding in findings if finding.status == "missing"]
    console.print("\nmissing: " + ", ".join(missing) if missing else
                  "\nnothing required is missing")
