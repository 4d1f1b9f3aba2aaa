"""Process groups whose ranks have a GPU that only pretends, beside the plain ones."""

from __future__ import annotations

import pytest

from tests.trainer.worker_group import WorkerGroup


def _group(world_size: int):
    group = WorkerGroup(world_size, pretended=True)
    yield group
    group.close()


@pytest.fixture(scope="session")
def pretended1():
    yield from _group(1)


@pytest.fixture(scope="session")
def pretended2():
    yield from _group(2)


@pytest.fixture(scope="session")
def latent_model(tmp_path_factory, samples) -> str:
    """DeepSeek-V3's form: latent attention, sigmoid routers with a selection bias."""
    from tests.trainer.families import write_family

    directory = tmp_path_factory.mktemp("models") / "latent"
    write_family(directory, "deepseek_v3", samples)
    return str(directory)
