"""Whatever a part does, the others run and the page says what happened."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo_megatron.errors import ConfigError, GateError
from grpo_megatron.prove import prove as proving
from grpo_megatron.prove.child import CONDITIONS_FILE
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.page import JSON_FILE, PAGE_FILE
from grpo_megatron.prove.part import Part, a_gpu, fp8_in_blocks, transformer_engine, two_gpus
from grpo_megatron.prove.parts import PARTS
from grpo_megatron.prove.prove import chosen_parts, prove_machine, take_folder
from grpo_megatron.prove.runner import Outcome, run_parts
from tests.prove import bad_parts

ROOT = Path(__file__).parents[2]
GPU = Conditions(device="cuda", num_gpus=1, gpu_name="a GPU", capability=(9, 0))


def part(function, *, limit_s: float = 60.0, usual_s: float = 0.0, needs=()) -> Part:
    return Part(function.__name__, "shows nothing", function, needs, usual_s, limit_s)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run parts on a machine that is said to have a GPU; outcomes by name, and the page."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def look(folder: Path, *, pretend: bool) -> Conditions:
        import msgspec

        (folder / CONDITIONS_FILE).write_bytes(msgspec.json.encode(GPU))
        return GPU

    monkeypatch.setattr(proving, "look_at_machine", look)

    def run_these(*parts: Part, minutes: float = 5.0) -> tuple[dict[str, dict], str]:
        folder = tmp_path / "prove"
        try:
            prove_machine(parts, folder, minutes=minutes, say=lambda line: None)
        except GateError as error:
            assert error.exit_code == 11
        found = json.loads((folder / JSON_FILE).read_text())
        by_name = {outcome["part"]: outcome for outcome in found["outcomes"]}
        return by_name, (folder / PAGE_FILE).read_text()

    return run_these


def test_a_part_that_passes_leaves_its_figures_on_the_page(run):
    found, page = run(part(bad_parts.good))
    assert found["good"]["status"] == "passed"
    assert found["good"]["evidence"]["figures"][0] == {
        "what": "speed",
        "value": "12.3",
        "unit": "tokens/s",
        "expected": "more than 10",
    }
    assert "12.3" in page and "as it should" in page and "1 passed, 0 failed" in page


def test_a_check_that_does_not_hold_fails_its_part_only(run):
    found, page = run(part(bad_parts.wrong), part(bad_parts.good))
    assert found["wrong"]["status"] == "failed"
    assert found["wrong"]["problem"] == "does not hold: another thing"
    assert found["good"]["status"] == "passed"
    assert "7 and not 8" in page


def test_a_part_that_raises_keeps_what_it_had_found_and_gets_a_cause(run):
    found, page = run(part(bad_parts.raises), part(bad_parts.good))
    failed = found["raises"]
    assert failed["status"] == "failed" and "Tried to allocate" in failed["problem"]
    assert failed["cause"] == "the GPU's memory did not suffice"
    assert failed["evidence"]["figures"][0]["what"] == "before"
    assert any("RuntimeError" in line for line in failed["last_lines"])
    assert found["good"]["status"] == "passed"
    assert "nvidia-smi" in page


def test_an_engine_that_ended_shows_its_last_words(run):
    found, page = run(part(bad_parts.raises_ours))
    assert found["raises_ours"]["cause"] == "vLLM's engine ended"
    assert "rollout-0| last words" in page


def test_a_part_that_hangs_is_ended_with_all_that_it_started(run, tmp_path):
    found, page = run(part(bad_parts.hangs, limit_s=4.0), part(bad_parts.good))
    failed = found["hangs"]
    assert failed["status"] == "failed" and "had not ended after 4 s" in failed["problem"]
    assert failed["evidence"]["checks"][0]["what"] == "it began"
    assert "waiting for a rank that never comes" in failed["last_lines"]
    assert "wait for each other" in page
    assert found["good"]["status"] == "passed"
    child = int((tmp_path / "prove" / "hangs" / "child.pid").read_text())
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_part_that_is_killed_is_said_to_be(run):
    found, _ = run(part(bad_parts.killed), part(bad_parts.good))
    assert found["killed"]["problem"] == "its process was killed (SIGKILL)"
    assert "ran out of memory" in found["killed"]["cause"]
    assert found["killed"]["evidence"]["figures"][0]["what"] == "before"
    assert found["good"]["status"] == "passed"


def test_garbage_is_shown_as_text(run):
    found, page = run(part(bad_parts.prints_garbage), part(bad_parts.good))
    assert found["prints_garbage"]["status"] == "failed"
    assert "<script>" not in page and "<b>markup" not in page
    assert "&lt;script&gt;alert(2)" in page
    assert "\x1b" not in page and "\x00" not in page
    assert found["good"]["status"] == "passed"


def test_evidence_that_is_garbage_fails_the_part(run):
    found, _ = run(part(bad_parts.writes_garbage), part(bad_parts.good))
    assert "cannot be read" in found["writes_garbage"]["problem"]
    assert found["good"]["status"] == "passed"


def test_a_part_that_ends_without_a_word_has_failed(run):
    found, _ = run(part(bad_parts.ends_silently))
    assert found["ends_silently"]["problem"] == "it ended without having said what it shows"


def test_what_the_machine_lacks_is_not_possible_and_no_failure(run):
    impossible = part(bad_parts.good, needs=(two_gpus,))
    found, page = run(impossible)
    assert found["good"]["status"] == "impossible"
    assert found["good"]["problem"] == "it needs 2 GPUs, and there are 1"
    assert "Not possible here" in page


def test_what_does_not_fit_into_the_time_says_so(run):
    found, _ = run(part(bad_parts.good, usual_s=90.0), part(bad_parts.wrong), minutes=1.0)
    assert found["good"]["status"] == "impossible"
    assert "it takes about 90 s" in found["good"]["problem"]
    assert found["wrong"]["status"] == "failed"  # it was run: it fits


def test_the_page_is_there_before_the_last_part_has_ended(tmp_path):
    seen: list[list[str]] = []

    def after_each(outcomes: list[Outcome]) -> None:
        seen.append([outcome.part for outcome in outcomes])

    parts = [part(bad_parts.good, needs=(two_gpus,)), part(bad_parts.wrong, needs=(two_gpus,))]
    run_parts(parts, GPU, tmp_path, 1.0, lambda line: None, after_each)
    assert seen == [["good"], ["good", "wrong"]]


def test_needs_say_what_is_missing():
    nothing = Conditions(
        device="none", why_no_transformer_engine="Transformer Engine is not installed"
    )
    ampere = Conditions(device="cuda", num_gpus=1, capability=(8, 0))
    assert a_gpu(nothing) == "torch sees no GPU"
    assert transformer_engine(nothing) == "Transformer Engine is not installed"
    assert "8.0" in fp8_in_blocks(ampere) and not fp8_in_blocks(GPU)


def test_parts_have_names_of_their_own_and_time_to_end():
    names = [one.name for one in PARTS]
    assert len(set(names)) == len(names)
    for one in PARTS:
        assert one.usual_s <= one.limit_s
        assert one.function.startswith("grpo_megatron.prove.parts.")


def test_parts_run_in_their_own_order_whatever_is_named_first():
    chosen = chosen_parts(["layouts", "machine"], PARTS)
    assert [one.name for one in chosen] == ["machine", "layouts"]


def test_a_folder_with_other_things_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no folder of an earlier"):
        take_folder(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_an_earlier_folder_is_replaced(tmp_path):
    folder = tmp_path / "p"
    take_folder(folder)
    (folder / "device").mkdir()
    take_folder(folder)
    assert os.listdir(folder) == [".prove"]
