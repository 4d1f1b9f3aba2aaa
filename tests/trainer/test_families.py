"""Every family: transformers' logits, and its tensors back bit for bit, at every kind of layout."""

from __future__ import annotations

import pytest

from tests.trainer.families import MODELS, write_family

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]

PARITY = "tests.trainer.family_cases:parity"


@pytest.fixture(scope="session")
def family_model(tmp_path_factory, samples):
    """Checkpoint of a name in `MODELS`, made when it is first asked for."""
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp("families") / name, name, samples)
        return made[name]
    return get


def assert_parity(group, model: str, samples: str, **layout: int) -> None:
    found = group.run(PARITY, model=model, samples=samples, layout=layout)
    assert found["wrong"] == []
    assert found["error"] < 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_one_rank(world1, family_model, samples, name):
    assert_parity(world1, family_model(name), samples)
