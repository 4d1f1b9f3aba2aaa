"""What several packages share: one process group per world size, tiny models, samples.

Processes that import torch and Megatron start slowly, so a group is started when the first test
asks for it and serves every later one.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

# A loaded machine must not fail a property.
settings.register_profile("default_without_deadline", deadline=None)
settings.load_profile("default_without_deadline")


_GROUPS = {"world1", "world2", "world4", "world8"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whatever runs in a process group is slow to start, and no part of `make test-fast`."""
    for item in items:
        if _GROUPS & set(item.fixturenames):
            item.add_marker(pytest.mark.engine)


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
