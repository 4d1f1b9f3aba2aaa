"""`config.json`: exact round trip with provenance, damage, overrides on top."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.keys import dotted, leaves
from grpo_megatron.config.loader import load_recipe, read_resolved, write_resolved
from grpo_megatron.config.problems import InvalidConfigError
from grpo_megatron.errors import ConfigError
from tests.config.conftest import DEMO, inline_toml

_TEXT = st.text(st.characters(exclude_categories=("C",)), max_size=5)  # TOML: no control codes
_JSON = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**60), 2**60),
        _TEXT,
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=5,
)


@given(lr=st.floats(1e-12, 1.0), seed=st.integers(0, 2**31 - 1), arguments=_JSON)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_round_trip_is_exact(tmp_path, lr, seed, arguments):
    inline = inline_toml({"x": arguments}).replace("\n", " ").replace("# ] comment", "")
    resolved = load_recipe(
        DEMO, [f"optimizer.lr={lr!r}", f"seed={seed}", f"domains.0.arguments={inline}"]
    )
    assert resolved.config.optimizer.lr == lr
    write_resolved(tmp_path / "config.json", resolved)
    assert read_resolved(tmp_path / "config.json") == resolved
    assert read_resolved(tmp_path) == resolved


def test_every_leaf_has_an_origin():
    resolved = load_recipe(DEMO, ["domains.0.arguments.deep.er=1"])
    keys = {dotted(path) for path, _ in leaves(resolved.config.model_dump(mode="json"))}
    assert keys == set(resolved.provenance)
    assert {origin.kind for origin in resolved.provenance.values()} == {
        "default",
        "preset",
        "recipe",
        "flag",
    }


def test_recipe_lines_point_at_the_key():
    resolved = load_recipe(DEMO)
    from grpo_megatron.config.toml_file import find_recipe

    rows = find_recipe(DEMO).read_text().splitlines()
    for key, origin in resolved.provenance.items():
        if origin.kind == "recipe":
            assert key.split(".")[-1] in rows[int(origin.where.rsplit(":")[-1]) - 1]


def test_overrides_on_a_stored_run_keep_the_other_origins(tmp_path):
    before = load_recipe(DEMO, ["seed=4"])
    write_resolved(tmp_path / "config.json", before)
    after = read_resolved(tmp_path, ["num_steps=500", "cold_start=null"])
    assert (after.config.num_steps, after.config.cold_start) == (500, None)
    assert after.provenance["num_steps"].where == "num_steps=500"
    assert after.provenance["seed"] == before.provenance["seed"]
    assert after.provenance["trainer.num_ranks"] == before.provenance["trainer.num_ranks"]


def test_another_objective_on_a_stored_run_takes_its_own_values(tmp_path):
    """What the old preset had set goes with it; what was set by hand stays."""
    write_resolved(tmp_path / "config.json", load_recipe(DEMO, ["objective.dual_clip=4.0"]))
    after = read_resolved(tmp_path, ["objective.preset=dapo"])
    expected = load_recipe(DEMO, ["objective.dual_clip=4.0", "objective.preset=dapo"])
    assert after.config.objective == expected.config.objective
    assert after.config.objective.clip_high == 0.28
    assert after.provenance["objective.clip_high"].where == "objective preset dapo"


def test_a_run_of_a_version_without_a_setting_takes_overrides(tmp_path):
    write_resolved(tmp_path / "config.json", load_recipe(DEMO, ["objective.clip_low=0.1"]))
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["config"]["objective"]["kl_beta"]
    del stored["provenance"]["objective.kl_beta"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    after = read_resolved(tmp_path, ["objective.preset=grpo"]).config.objective
    assert (after.preset, after.clip_low) == ("grpo", 0.1)


def test_wrong_overrides_on_a_stored_run(tmp_path):
    write_resolved(tmp_path / "config.json", load_recipe(DEMO))
    with pytest.raises(InvalidConfigError, match="num_steps") as caught:
        read_resolved(tmp_path, ["num_step=500"])
    headline = f"1 problem in {tmp_path / 'config.json'} with the settings given; nothing was"
    assert caught.value.message.startswith(headline)
    with pytest.raises(InvalidConfigError, match=f"in .*{DEMO}.* with the settings given"):
        load_recipe(DEMO, ["num_step=500"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("config"),
        lambda data: data.update(format=99),
        lambda data: data["config"].update(unknown=1),
        lambda data: data["config"].pop("name"),
        lambda data: data["provenance"].update(seed={"king": "flag"}),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "config.json"
    write_resolved(path, load_recipe(DEMO))
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_resolved(path)


def test_truncated_and_missing_files(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot read"):
        read_resolved(path)
    path.write_text('{"format": 1, "con')
    with pytest.raises(ConfigError, match="damaged"):
        read_resolved(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_resolved(path)


def test_what_is_no_json_is_told_without_a_place_in_it(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="configuration is damaged: Invalid JSON"):
        read_resolved(path)


def test_the_configuration_of_a_model_is_told_as_such(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ConfigError, match="it configures a model, not a run"):
        read_resolved(tmp_path)


def test_a_configuration_that_is_a_link_to_itself_is_told(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot read the run's configuration"):
        read_resolved(path)
