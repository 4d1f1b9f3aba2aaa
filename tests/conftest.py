"""What several packages share: one process group per world size, tiny models, samples.

Processes that import torch and Megatron start slowly, so a group is started when the first test
asks for it and serves every later one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from tests.rollout.engines import Server

# A loaded machine must not fail a property, nor does a change that has nothing to do with it: the
# examples of a test are the same each time, and `make test-properties` looks for new ones.
settings.register_profile("same_examples", deadline=None, derandomize=True)
settings.register_profile("new_examples", deadline=None)
settings.load_profile("same_examples")


# Several sessions share the cores, and threads of OpenMP that wait for work spin: three
# references of transformers took 14 s alone and 73 s beside another session. What starts processes
# of its own says how many threads those have.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts background jobs, as `make test` has them, with SIGINT ignored, and what a test
# starts would inherit that: a Ctrl-C that it sends would be lost.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_GROUPS = {"world1", "world2", "world4", "world8"}
_WORDS_OF_ENGINE_TESTS = ("mark.engine", *sorted(_GROUPS))
_FOLDERS_THAT_SHARE_SERVERS = {"integration", "rollout"}
_FOLDERS_OF_TIERS = {"contract", "device", "learning", "slurm"}
"""Everything in `tests/NAME` has the mark NAME."""


def _may_have_engine_tests(file: Path) -> bool:
    text = file.read_text()
    return any(word in text for word in _WORDS_OF_ENGINE_TESTS)


def pytest_ignore_collect(collection_path, config):
    """No tier that is left out is imported, and the half with engines imports no file that has none
    of its tests: half of the time that its workers take to collect."""
    marks = config.option.markexpr
    tier = collection_path.name
    if tier in _FOLDERS_OF_TIERS and collection_path.is_dir() and f"not {tier}" in marks:
        return True
    is_test_file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    is_half_with_engines = marks.startswith("engine and ")
    if is_half_with_engines and is_test_file and not _may_have_engine_tests(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whatever runs in a process group is slow to start, and no part of `make test-fast`."""
    files = set()
    for item in items:
        tier = item.path.parent.name
        if tier in _FOLDERS_OF_TIERS and not item.get_closest_marker(tier):
            raise pytest.UsageError(f"{item.nodeid} has no mark {tier}: no tier would run it")
        if _GROUPS & set(item.fixturenames):
            item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("engine"):
            files.add(item.path)
    for file in files:
        if not _may_have_engine_tests(file):
            raise pytest.UsageError(
                f"{file} has a test with engines and names none of {_WORDS_OF_ENGINE_TESTS}: "
                "`make test` would leave it out"
            )


class _ByWhatTestsShare(LoadScopeScheduling):
    """A file stays with one worker, and so do all files that use the same servers."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if _FOLDERS_THAT_SHARE_SERVERS & set(Path(file).parts):
            return "servers"
        return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For `--dist loadscope`; xdist's own groups do nothing under pytest 9.2."""
    if config.getvalue("dist") == "loadscope":
        return _ByWhatTestsShare(config, log)
    return None


def _group(world_size: int):
    from tests.trainer.worker_group import WorkerGroup

    group = WorkerGroup(world_size)
    yield group
    group.close()


@pytest.fixture(scope="session")
def world1():
    yield from _group(1)


@pytest.fixture(scope="session")
def world2():
    yield from _group(2)


@pytest.fixture(scope="session")
def world4():
    yield from _group(4)


@pytest.fixture(scope="session")
def world8():
    yield from _group(8)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Of the models that `servers` have."""
    from tests.rollout.servers import make_checkpoints

    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def servers(checkpoints, tmp_path_factory):
    """Real vLLM servers: an MoE model, the same at TP 2, and a dense one."""
    from tests.rollout.servers import start_servers

    yield from start_servers(checkpoints, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def spare_servers():
    """Servers that a test has started and needs no longer: the next one may end them."""
    spare: list[Server] = []
    yield spare
    for server in spare:
        server.stop()


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory) -> str:
    from tests.trainer.models import MOE, write_model

    return write_model(tmp_path_factory.mktemp("models") / "moe", MOE, 1)


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory) -> str:
    from tests.trainer.models import DENSE, write_model

    return write_model(tmp_path_factory.mktemp("models") / "dense", DENSE, 2)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory) -> str:
    from tests.trainer.models import DENSE, write_model

    hf = DENSE | {"tie_word_embeddings": True}
    return write_model(tmp_path_factory.mktemp("models") / "tied", hf, 3)


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> str:
    """24 samples in groups of 4."""
    from tests.trainer.models import write_samples

    return write_samples(tmp_path_factory.mktemp("store") / "step_000001")


@pytest.fixture(scope="session")
def three_updates(tmp_path_factory) -> str:
    """The same samples, of two domains, split into three optimizer steps."""
    from tests.trainer.models import write_samples

    return write_samples(
        tmp_path_factory.mktemp("store") / "step_000001", num_updates=3, num_domains=2
    )


@pytest.fixture(scope="session")
def routed(tmp_path_factory) -> tuple[str, str]:
    """A model whose first and third layers are dense, and samples with random routes."""
    from tests.trainer.models import INTERLEAVED, write_model, write_samples

    directory = tmp_path_factory.mktemp("routed")
    model = write_model(directory / "model", INTERLEAVED, 4)
    return model, write_samples(directory / "step_000001", hf=INTERLEAVED)
