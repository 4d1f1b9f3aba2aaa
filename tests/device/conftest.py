"""Process groups whose ranks have a GPU that only pretends, beside the plain ones."""

from __future__ import annotations

import pytest

from tests.trainer.models import DENSE, MOE, write_model
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


SMALL_WEIGHTS = {"initializer_range": 0.03}
"""Two devices round differently, and so weights do after a step. Rounding all of these once more
moved no gradient norm by more than 4e-7 of it; with the larger weights of other tests it was
1.6e-6, more than the bound of what is compared."""


@pytest.fixture(scope="session")
def small_moe_model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "moe", MOE | SMALL_WEIGHTS, 1)


@pytest.fixture(scope="session")
def small_dense_model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "dense", DENSE | SMALL_WEIGHTS, 2)


@pytest.fixture(scope="session")
def small_latent_model(tmp_path_factory, samples) -> str:
    """DeepSeek-V3's form: latent attention, sigmoid routers with a selection bias."""
    from tests.trainer.families import write_family

    directory = tmp_path_factory.mktemp("models") / "latent"
    write_family(directory, "deepseek_v3", samples, **SMALL_WEIGHTS)
    return str(directory)
