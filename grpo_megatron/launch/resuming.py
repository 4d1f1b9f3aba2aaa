"""What a resume may change of a run, and what it may not."""

import shlex
from collections.abc import Sequence

from grpo_megatron.config.loader import ResolvedConfig, read_resolved
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir


def resolve_resumed(run_dir: RunDir, overrides: Sequence[str]) -> ResolvedConfig:
    """Return the configuration with which a run goes on. Raises as `resolve_run`; ConfigError also
    where its name or runs_dir would be those of another directory."""
    resolved = resolve_run(run_dir.config, overrides)
    _refuse_another_place(run_dir, resolved)
    return resolved


def _refuse_another_place(run_dir: RunDir, resolved: ResolvedConfig) -> None:
    """ConfigError for another name or runs_dir than the run's, unless they say where it is now."""
    old = read_resolved(run_dir.config)
    if resolved.run_path in (old.run_path, run_dir.root):
        return
    if resolved.run_path.resolve() == run_dir.root.resolve():
        return
    export = shlex.quote(str(run_dir.export))
    raise ConfigError(
        f"a run that is resumed stays where it is, and not in {resolved.run_path}",
        where="overrides",
        remedy=f"leave out name=… and runs_dir=…, which are those of {old.run_path}; or train "
        f"another run with model.path={export}",
    )
