"""Which engines a run has, by number, and what may come and go: the supervisor's account of it."""

from collections.abc import Iterable

from grpo_megatron.errors import ConfigError
from grpo_megatron.rollout.members import Membership, write_members
from grpo_megatron.rundir import RunDir, engine_name


class EngineMembers:
    """Begins with the engines of the recipe, and writes every change down (`rollout.members`)."""

    def __init__(self, run_dir: RunDir, indices: Iterable[int]):
        self._run_dir = run_dir
        self._members: dict[int, Membership] = dict.fromkeys(indices, "present")
        self._write()

    def is_leaving(self, index: int) -> bool:
        """Whether an engine gets no new requests and ends after those that it has."""
        return self._members.get(index) == "leaving"

    def free_number(self) -> int:
        """Return the lowest number that no engine has."""
        index = 0
        while index in self._members:
            index += 1
        return index

    def add(self, index: int) -> None:
        """Count an engine that starts."""
        self._members[index] = "present"
        self._write()

    def forget(self, index: int) -> None:
        """Count an engine no more: it has left, or has died for good."""
        self._members.pop(index, None)
        self._write()

    def begin_leaving(self, index: int) -> None:
        """Let an engine get no new requests.

        Raises ConfigError: there is none of this number, it leaves already, or is the only one."""
        name = engine_name(index)
        present = []
        for other, membership in sorted(self._members.items()):
            if membership == "present":
                present.append(other)
        if self.is_leaving(index):
            raise ConfigError(f"{name} is leaving already", where="ENGINE")
        if index not in present:
            raise ConfigError(
                f"the run has no engine {index}",
                where="ENGINE",
                remedy="engines that it has: " + ", ".join(map(str, present)),
            )
        if len(present) == 1:
            raise ConfigError(
                f"{name} is the only engine of the run",
                where="ENGINE",
                remedy="add another one first; Ctrl-C, or of a job "
                f"`{self._run_dir.command('cancel')}`, ends the run with a checkpoint",
            )
        self._members[index] = "leaving"
        self._write()

    def _write(self) -> None:
        write_members(self._run_dir, self._members)
