"""Reports: the page's data, and the pages themselves in a browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.running_distribution import RunningDistribution
from grpo_megatron.batching.drift_file import SampleDrift, write_drift
from grpo_megatron.cli.compare_plan import formula_lines
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import read_resolved, write_resolved
from grpo_megatron.config.objective import PRESETS, ObjectiveConfig
from grpo_megatron.plan.ppo import comparison_of
from grpo_megatron.stages.explorer_coverage import explorer_coverage
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.report import write_report
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.samples import write_samples
from tests.stages.report_runs import RESULT, RESULT_TEXT, TURNS, samples_of, write_run
from tests.stages.test_graph import GRAPH, changed, finish

ASSETS = Path(__file__).parents[2] / "grpo_megatron" / "stages" / "report_assets"


def data_of(page: Path) -> dict:
    return json.loads(
        re.search(
            r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
        )[1]
    )


def report_of(root: Path, **arguments) -> dict:
    return data_of(write_report(str(write_run(root, **arguments).root)))["runs"][0]


OTHER = {"version": "0.0.9", "digest": "ab" * 32}
"""Code that is not the code of here."""


@pytest.fixture
def finished(tmp_path) -> Path:
    """A graph whose stages are done, `one` with a closed gate, and two have the files of runs."""
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH.format(runs=tmp_path / "runs"))
    graph = load_graph(file)
    for name in ("base", "one", "two"):
        finish(graph, name, all=0.5, plus=0.7 if name != "one" else 0.5)
        run_dir = write_run(graph.run_dir(name).root, 4, domains=("plus", "minus", "mixed"))
        write_resolved(run_dir.config, graph.resolve(name))
    return file


def test_a_page_is_self_contained(tmp_path):
    run_dir = write_run(tmp_path / "a<b", result=RESULT, domains=("addition", "subtraction"))
    page = write_report(str(run_dir.root))
    text = page.read_text()
    assert page == run_dir.root / "report.html" and "<title>a&lt;b</title>" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:,)|@import|url\(|fetch\(|XMLHttp""", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "NaN" not in text[text.index('id="data"') : text.index("</script>")]
    assert sorted(ASSETS.glob("*.css")) and sorted(ASSETS.glob("*.js"))
    for file in (*ASSETS.glob("*.css"), *ASSETS.glob("*.js")):
        assert file.read_text() in text, f"page.html does not include {file.name}"


def test_metrics_are_columns(tmp_path):
    run = report_of(tmp_path / "run", num_steps=5, unscorable=[1], result=RESULT)
    assert run["metrics"]["step"] == [0, 1, 2, 3, 4] and run["result"]["before"] == 0.33
    assert [value is None for value in run["metrics"]["reward/mean"]] == [False, True] + 3 * [False]
    assert run["metrics"]["telemetry/nonfinite/count"][0] == ""  # absent
    assert run["events"] == ["kernels", "kernels", "resumed"]
    assert run["kernels"] == [{"part": "swiglu", "chosen": "separate", "why": "said"}]
    assert run["notes"] == [] and run["memory"]["weights"] > 0


def test_long_runs_are_thinned_but_keep_the_last_step_and_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_megatron.stages.run_report.CURVE_POINTS", 4)
    run_dir = write_run(tmp_path / "run", 9)
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    lines[3]["evaluation/accuracy"] = 0.5
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["every"] == 3 and run["metrics"]["step"] == [2, 3, 5, 8]


@pytest.mark.parametrize("std", ["group", "none"])
def test_samples_have_the_advantages_of_the_objective(tmp_path, std):
    run = report_of(tmp_path / "run", objective={"preset": "grpo", "advantage_std": std})
    assert [step["step"] for step in run["recorded"]] == [10, 11]
    for step in run["recorded"]:
        file = tmp_path / "run" / "samples" / f"step_{step['step']:06d}.jsonl"
        assert [s["completion"] for s in step["samples"]] == [
            s["completion"] for s in samples_of(file)
        ]
        for sample in step["samples"]:
            rewards = np.array(step["groups"][sample["group"]][1])
            wanted = sample["reward"] - rewards.mean()
            wanted /= rewards.std(ddof=1) + 1e-6 if std == "group" and rewards.std() else 1
            ids, texts, advantages = zip(*sample["tokens"], strict=True)
            assert "".join(texts) == sample["completion"] and ids[-1] == 1
            np.testing.assert_allclose(advantages, wanted, atol=1e-9)


def test_episodes_are_conversations(tmp_path):
    """Sequence by sequence, every policy token with the advantage of its episode."""
    run_dir = write_run(tmp_path / "run", 2, episodes=True)
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["notes"] == []
    for step in run["recorded"]:
        for sample in step["samples"]:
            assert "tokens" not in sample and sample["outcome"] == sample["reward"]
            assert sample["outcome_metrics"] == {"tool_calls": 1}
            first, second = sample["sequences"]
            assert first["prompt"] == "<|user|>1+2<|end|><|assistant|>"
            assert second["prompt"] == "<|user|>1+2 again<|end|><|assistant|>"
            call, result, answer = first["parts"]
            [again] = second["parts"]
            assert result == {"text": RESULT_TEXT, "length": 4}  # markers are tokens
            turns = [call, answer, again]
            texts = ["".join(text for _, text, _ in turn["tokens"]) for turn in turns]
            assert texts == list(TURNS)
            assert [turn["turn"] for turn in turns] == [0, 1, 2]
            assert [turn["reward"] for turn in turns] == [-0.5, None, None]
            assert [turn["state"] for turn in turns] == ["asked", "seen <b>", ""]
            assert [turn["call"] for turn in turns] == [len("I ask."), None, None]
            rewards = np.array(step["groups"][sample["group"]][1])
            wanted = (sample["reward"] - rewards.mean()) / (rewards.std(ddof=1) or 1)
            advantages = [token[2] for turn in turns for token in turn["tokens"]]
            np.testing.assert_allclose(advantages, wanted, atol=1e-5)


def test_episodes_that_have_left_the_store_keep_their_texts(tmp_path):
    run_dir = write_run(tmp_path / "run", 2, stored=0, episodes=True)
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["recorded"] == []
    for sample in run["samples"]:
        assert sample["completion"] == "3" and sample["earlier"] == [""]
        assert sample["outcome"] == sample["reward"]


def test_episodes_in_a_browser(browser, tmp_path):
    """Tokens of the policy are coloured, what the environment said is text, calls are folded."""
    page = write_report(str(write_run(tmp_path / "run", 1, episodes=True).root))
    plots_of(browser, page)
    samples = data_of(page)["runs"][0]["recorded"][0]["samples"]
    found = browser.run("""return [...document.querySelectorAll('.conversation')].map(shown => ({
        sequences: shown.querySelectorAll('.sequence').length,
        turns: [...shown.querySelectorAll('.turn')].map(turn => [...turn.querySelectorAll('.token')]
            .map(token => token.textContent).join('')),
        facts: [...shown.querySelectorAll('.turn-facts')].map(node => node.textContent),
        coloured: shown.querySelectorAll('.token.plus, .token.minus').length,
        uncoloured: shown.querySelectorAll('.environment .token').length,
        said: [...shown.querySelectorAll('.environment')].map(node => node.textContent),
        folded: [...shown.querySelectorAll('details:not([open])')].map(node => node.className),
        call: shown.querySelector('.fold.call pre').textContent,
        outcome: shown.querySelector('.outcome').textContent}))""")
    assert len(found) == len(samples) == 4
    for shown, sample in zip(found, samples, strict=True):
        assert shown["sequences"] == 2 and shown["said"] == [RESULT_TEXT]
        assert shown["turns"] == [text.replace("\n", "⏎\n") for text in TURNS]
        facts = ["turn 1 · reward -0.5 · state asked", "turn 2 · state seen <b>", "turn 3"]
        assert shown["facts"] == facts
        assert shown["folded"] == ["fold call", "fold result", "fold history"]
        assert shown["call"].startswith("<tool_call>")
        assert shown["outcome"].endswith(" · tool_calls 1")
        parts = [part for sequence in sample["sequences"] for part in sequence["parts"]]
        moved = [token for part in parts for token in part.get("tokens", []) if token[2] != 0]
        assert shown["coloured"] == len(moved) and shown["uncoloured"] == 0
    assert any(shown["coloured"] for shown in found)


def test_samples_without_turns_are_no_conversations(browser, tmp_path):
    plots_of(browser, write_report(str(write_run(tmp_path / "run", 1).root)))
    assert browser.run("return document.querySelectorAll('.conversation').length") == 0
    assert browser.run("return document.querySelectorAll('.sample > pre.completion').length") == 4


def test_estimators_of_the_trainer_become_plain_ones(tmp_path):
    run = report_of(tmp_path / "run", objective={"preset": "grpo", "shaping": "eda"})
    assert {tuple(step["lacks"]) for step in run["recorded"]} == {("entropies",)}
    assert all(len(step["samples"]) == 4 for step in run["recorded"])


@pytest.mark.parametrize("lost", ["store", "model", "metrics.jsonl", "samples", "shard"])
def test_what_is_lost_is_left_out(tmp_path, lost):
    run_dir = write_run(tmp_path / "run", 2)
    for path in (
        [run_dir.root / lost] if lost != "shard" else run_dir.store.glob("*/rollout-0.safetensors")
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert bool(run.get("recorded")) == (lost not in ("store", "shard"))
    assert len(run["notes"]) == 2 * (lost == "shard")  # of samples, and of what moved
    if lost == "model":
        assert {
            token[1] for step in run["recorded"] for s in step["samples"] for token in s["tokens"]
        } == {""}


@pytest.mark.parametrize(
    ("damaged", "content", "note"),
    [
        ("result.json", b'{"eval": {"all"', "result: result.json is damaged"),
        ("result.json", b"[" * 200_000, "result: result.json is damaged"),
        ("result.json", b"[1]", "result: result.json is damaged: no table"),
        ("result.json", b"{}", "result: result.json is damaged: no seconds"),
        ("metrics.jsonl", b"\xff no step", "steps: left out of metrics.jsonl: nothing in metrics"),
        ("metrics.jsonl", b"a\nb\n", "steps: left out of metrics.jsonl: line 1 is no metrics"),
        ("samples/step_000001.jsonl", None, "samples: step_000001.jsonl cannot be read to its"),
        ("samples/step_000001.jsonl", b"[" * 200_000, "samples: step_000001.jsonl cannot be read"),
        ("samples/step_000001.jsonl", b"\xff\xfe", "samples: step_000001.jsonl cannot be read"),
    ],
)
def test_what_is_damaged_is_a_note(tmp_path, damaged, content, note):
    """None: the second half is lost."""
    run_dir = write_run(tmp_path / "run", 2, stored=0, result=RESULT)
    file = run_dir.root / damaged
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    [told] = run["notes"]
    assert told.startswith(note)
    assert bool(run["result"]) == (damaged != "result.json")
    assert bool(run["metrics"]) == (damaged != "metrics.jsonl")
    num_whole = len(samples_of(run_dir.samples / "step_000000.jsonl"))
    assert len(run["samples"]) >= num_whole


def lose_lines(run_dir, lost: dict[int, str]) -> None:
    """Put other texts in the place of lines of metrics, by their number."""
    lines = run_dir.metrics.read_text().splitlines(keepends=True)
    for number, text in lost.items():
        lines[number - 1] = text
    run_dir.metrics.write_text("".join(lines))


def test_curves_go_on_around_a_damaged_line(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", 7, stored=0)
    lose_lines(run_dir, {3: '{"step": 2, "rew\n'})
    page = write_report(str(run_dir.root))
    run = data_of(page)["runs"][0]
    assert run["metrics"]["step"] == [0, 1, 3, 4, 5, 6]
    assert run["notes"] == [
        "steps: left out of metrics.jsonl: line 3 is no metrics record",
        "steps: metrics.jsonl lacks step 2: curves are broken there",
    ]
    plots = plots_of(browser, page)
    assert plots["Entropy"]["curves"] == 2 and plots["Entropy"]["points"] == 0
    assert "line 3 is no metrics record" in browser.run(ABSENT)


def test_curves_are_broken_where_steps_are_missing(browser, tmp_path):
    """Thinned curves too; of a heat map the missing steps are one grey column."""
    run_dir = write_run(tmp_path / "run", 12, stored=0)
    lose_lines(run_dir, {1: "", 4: "", 5: "", 6: "", 8: ""})
    page = write_report(str(run_dir.root))
    [note] = data_of(page)["runs"][0]["notes"]
    assert note == (
        "steps: metrics.jsonl lacks step 0; steps 3 to 5; step 7: curves are broken there"
    )
    plots = plots_of(browser, page)
    assert plots["Entropy"]["curves"] == 2 and plots["Entropy"]["points"] == 1  # 1-2, 6, 8-11
    assert browser.run("return document.querySelector('.heat canvas').width") == 7 + 2
    chosen = """const select = [...document.querySelectorAll('select')].find(
            select => [...select.options].some(option => option.text === 'policy/entropy'));
        select.value = 'policy/entropy';
        select.dispatchEvent(new Event('change'));
        const figures = [...document.querySelectorAll('figure.plot')];
        return figures[figures.length - 1].querySelectorAll('polyline').length"""
    assert browser.run(chosen) == 2
    read = """const canvas = document.querySelector('.heat canvas');
        const move = key => canvas.dispatchEvent(new KeyboardEvent('keydown', {key}));
        arguments[0].forEach(move);
        return document.querySelector('[role=status]').textContent"""
    assert browser.run(read, ["ArrowLeft"] * 4) == "layer 0, step 7: –"
    assert browser.run(read, ["ArrowLeft"] * 2) == "layer 0, steps 3 to 5: –"
    assert browser.run(read, ["ArrowLeft"]).startswith("layer 0, step 2: 0")


def change_metrics(run_dir, changed: dict[int, dict], absent: dict[int, str]) -> None:
    """Set values of steps, and remove the metrics of others that begin with a text."""
    lines = []
    for line in run_dir.metrics.read_text().splitlines():
        record = json.loads(line)
        step = record["step"]
        prefix = absent.get(step)
        if prefix is not None:
            record = {name: value for name, value in record.items() if not name.startswith(prefix)}
        lines.append(json.dumps(record | changed.get(step, {})) + "\n")
    run_dir.metrics.write_text("".join(lines))


def test_curves_are_broken_where_steps_lack_a_metric(browser, tmp_path):
    """Nothing was correct there, or nothing could be scored: no value lies between its neighbours'.
    No value is missing, so none is counted as not finite."""
    run_dir = write_run(tmp_path / "run", 7, stored=0)
    change_metrics(run_dir, {}, {2: "policy/", 5: "policy/"})
    plots = plots_of(browser, write_report(str(run_dir.root)))
    assert plots["Entropy"]["curves"] == 2 and plots["Entropy"]["points"] == 1  # 0-1, 3-4, 6
    assert plots["Entropy"]["notes"] == []
    assert plots["Gradient norm"]["curves"] == 1


@pytest.mark.parametrize("counts_unscorable", [True, False])
def test_curves_of_evaluations_go_on_over_steps_that_were_not_evaluated(
    browser, tmp_path, counts_unscorable
):
    """And end where one could score nothing. Earlier versions did not count that."""
    run_dir = write_run(tmp_path / "run", 9, stored=0)
    changed = {step: {"evaluation/accuracy": 0.1 * step} for step in (0, 2, 4, 6, 8)}
    pieces = 1
    if counts_unscorable:
        for values in changed.values():
            values["evaluation/unscorable"] = 0.0
        del changed[4]["evaluation/accuracy"]
        pieces = 2
    change_metrics(run_dir, changed, dict.fromkeys(range(9), "evaluation/"))
    found = plots_of(browser, write_report(str(run_dir.root)))["Accuracy"]
    others = 2  # pass_at_1, pass_at_group
    assert found["curves"] == others + pieces and found["points"] == 0


def test_thinned_curves_are_broken_where_steps_are_missing(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_megatron.stages.run_report.CURVE_POINTS", 4)
    run_dir = write_run(tmp_path / "run", 12, stored=0)
    lose_lines(run_dir, {7: ""})
    page = write_report(str(run_dir.root))
    run = data_of(page)["runs"][0]
    assert run["every"] == 3 and run["metrics"]["step"] == [1, 4, 8, 11]
    plots = plots_of(browser, page)
    assert plots["Entropy"]["curves"] == 2


def test_damaged_events_are_a_note(tmp_path):
    run_dir = write_run(tmp_path / "run", 1, stored=0)
    append_event(run_dir.events, "kernels", kernels=[])
    before = data_of(write_report(str(run_dir.root)))["runs"][0]
    with run_dir.events.open("ab") as file:
        file.write(b'{"time_s": 1, "ki\n[1]\n')
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["events"] == before["events"] and before["notes"] == []
    assert run["notes"] == ["events: 2 line(s) of events.jsonl are no events"]


def test_an_event_without_its_kernels_tells_none(tmp_path):
    run_dir = write_run(tmp_path / "run", 1, stored=0)
    append_event(run_dir.events, "kernels")
    [kernel] = data_of(write_report(str(run_dir.root)))["runs"][0]["kernels"]
    assert kernel["chosen"] == "separate"  # of the last that has some


def test_completions_with_separators_of_lines_are_shown(tmp_path):
    run_dir = write_run(tmp_path / "run", 1, stored=0)
    [file] = run_dir.samples.glob("*.jsonl")
    samples = [{**sample, "completion": "a\u2028b"} for sample in samples_of(file)]
    write_samples(run_dir, 0, samples)
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["notes"] == [] and run["samples"][0]["completion"] == "a\u2028b"


def test_a_damaged_result_of_a_stage_is_one_message(finished, capsys):
    graph = load_graph(finished)
    graph.run_dir("base").result.write_text('{"eval"')
    for command in (["report"], ["stages", "status"]):
        assert main([*command, str(finished)]) == 2
        said = capsys.readouterr().err
        assert "result.json is damaged" in said and "Traceback" not in said


def test_the_last_token_of_a_character_shows_it(tmp_path, monkeypatch):
    def decode(ids: list[int]) -> str:
        return ("é" * len(ids)).encode()[: len(ids)].decode(errors="replace")

    monkeypatch.setattr(
        "grpo_megatron.stages.token_text.load_tokenizer",
        lambda path: SimpleNamespace(decode=decode),
    )
    for step in report_of(tmp_path / "run", num_steps=2)["recorded"]:
        for sample in step["samples"]:
            texts = [text for _, text, _ in sample["tokens"]]
            assert texts == ["", "é", "", "é"][: len(texts)]


def test_a_graph_has_states_gates_and_runs(finished):
    page = write_report(str(finished))
    data = data_of(page)
    assert page.parent.name == "tiny" and data["levels"][1] == ["one", "two"]
    assert [stage["state"] for stage in data["graph"].values()] == [
        "done",
        "gate closed",
        "done",
        "waiting",
        "waiting",
    ]
    assert any("seen: 0.5" in text for text in data["graph"]["one"]["closed"])
    assert [run["name"] for run in data["runs"]] == ["base", "one", "two"]


def test_a_graph_says_what_made_its_stages_and_what_has_changed(browser, finished):
    """Below the state of the stage that it is about, and nothing below that of others."""
    append_event(load_graph(finished).run_dir("base").events, "code", **OTHER)
    changed(finished, "optimizer.lr=1e-4", "optimizer.lr=2e-4")
    page = write_report(str(finished))
    stages = data_of(page)["graph"]
    [note] = stages["base"]["notes"]
    assert note.startswith("made by other code: 0.0.9, code ababababab; now ")
    assert stages["one"]["changed"] == "changed: optimizer.lr"
    assert [stages[name]["changed"] for name in ("base", "two", "final")] == ["", "", ""]
    assert [stages[name]["notes"] for name in ("one", "two", "final")] == [[], [], []]
    plots_of(browser, page)
    rows = browser.run("""const table = document.querySelector('.stages').closest('section')
            .querySelector('table');
        return [...table.querySelectorAll('tbody tr')].map(row => [
            row.cells[0].textContent,
            row.cells[2].firstChild.textContent,
            [...row.cells[2].querySelectorAll('li')].map(line => line.textContent)])""")
    assert rows == [
        ["base", "✓ done", [note]],
        ["one", "○ ready", ["changed: optimizer.lr"]],
        ["two", "✓ done", []],
        ["soup", "– waiting", []],
        ["final", "– waiting", []],
    ]


def test_the_help_tells_of_runs_and_graphs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Directory of a run" in said and "of a graph its file" in said


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/mine"), 1)
    assert main(["report", "runs/mine", "--to", "pages/x.html"]) == 0
    assert capsys.readouterr().out.strip() == "pages/x.html" and Path("pages/x.html").exists()
    (tmp_path / "file").touch()
    for arguments, words in (
        (["runs"], "not a run"),
        (["mine"], "runs/mine"),
        (["lost.toml"], "lost.toml"),
        (["runs/mine", "--to", "file/x.html"], "cannot write the page"),
    ):
        assert main(["report", *arguments]) == 2
        assert words in capsys.readouterr().err


PLOTS = """
return [...document.querySelectorAll('figure.plot')].map(figure => ({
  title: figure.querySelector('h4').textContent,
  points: figure.querySelectorAll('circle.point').length,
  curves: figure.querySelectorAll('polyline').length,
  broken: [...figure.querySelectorAll('svg *')].some(node => node.outerHTML.includes('NaN')),
  notes: [...figure.querySelectorAll('figcaption')].map(node => node.textContent)}))"""
ABSENT = "return [...document.querySelectorAll('.absent')].map(node => node.textContent).join('|')"


def plots_of(browser, page: Path) -> dict[str, dict]:
    """By title; none is empty, and the page says nothing on the console."""
    browser.open(page)
    assert browser.console() == []
    found = browser.run(PLOTS)
    assert all(plot["points"] + plot["curves"] and not plot["broken"] for plot in found), found
    return {plot["title"]: plot for plot in found}


def idle_shares_of(browser) -> list[str]:
    """Rows of the table."""
    return browser.run("return document.querySelector('.idle table').innerText").split("\n")[1:]


def test_one_step_in_a_browser(browser, tmp_path):
    plots = plots_of(browser, write_report(str(write_run(tmp_path / "run", 1).root)))
    assert plots["Reward"]["points"] == 3 and plots["Reward"]["curves"] == 0
    assert {"Entropy", "Gradient norm", "Seconds by phase", "Clipped tokens"} <= plots.keys()
    assert "no metric reference/k1" in browser.run(ABSENT)
    assert browser.run("return document.querySelector('.heat canvas').height") == 6
    assert idle_shares_of(browser) == ["trainer\t\t40 %", "engines\t\t60 %", "rewards\t\t90 %"]


def test_unscorable_steps_in_a_browser(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", 6, unscorable=[0, 2, 5])
    plots = plots_of(browser, write_report(str(run_dir.root)))
    assert plots["Reward"]["curves"] == 3 and plots["Reward"]["points"] == 3
    assert any("3 of 6 values of reward/mean are not finite" in n for n in plots["Reward"]["notes"])
    run_dir = write_run(tmp_path / "none", 2, unscorable=[0, 1])
    plots = plots_of(browser, write_report(str(run_dir.root)))
    assert "Reward" not in plots and "Entropy" in plots
    assert "no value of reward/mean is finite (2 skipped)" in browser.run(ABSENT)


def test_an_idle_share_that_is_not_known_is_no_zero(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", 3, stored=0)
    text = run_dir.metrics.read_text().replace('"idle/engines": 0.6', '"idle/engines": null')
    first, others = text.split("\n", 1)
    run_dir.metrics.write_text(
        first.replace('"idle/trainer": 0.4', '"idle/trainer": null')
        + "\n"
        + others.replace('"idle/rewards": 0.9', '"other": 1')
    )
    plots_of(browser, write_report(str(run_dir.root)))
    assert idle_shares_of(browser) == [
        "trainer\t\t40 %, unknown in 1 of 3 steps",
        "engines\t\tunknown",
        "rewards\t\t90 %, unknown in 2 of 3 steps",
    ]


PREFERENCE_STEP = {
    "response/length_mean": 3.5,
    "preference/loss": 0.5,
    "preference/accuracy": 0.9,
    "preference/reward_chosen": -0.03,
    "preference/reward_rejected": -0.48,
    "loss/value": 0.5,
    "grad/norm": 0.6,
    "time/train_s": 0.2,
    "time/step_s": 0.2,
    "idle/trainer": 0.06,
}
PAIR_STEP = {**PREFERENCE_STEP, "preference/margin": 0.45, "preference/logprob_chosen": -17.0}
IDLE = {"idle/engines": 1.0, "idle/rewards": 1.0}  # as older runs have them


@pytest.mark.parametrize(
    ("tables", "metrics", "titles"),
    [
        (
            {"kind": "preferences", "preferences": {"loss": "dpo"}},
            PAIR_STEP | IDLE,
            {
                "Margin between chosen and rejected answers",
                "Log-probs of chosen and rejected answers",
            },
        ),
        (
            {"kind": "reward_model", "preferences": {"loss": "stepwise"}},
            PREFERENCE_STEP | {"evaluation/accuracy": 0.5},
            set(),
        ),
    ],
)
def test_runs_of_preferences_in_a_browser(browser, tmp_path, tables, metrics, titles):
    """Curves of what they have, no word of what they cannot have, samples without advantages."""
    run_dir = write_run(tmp_path / "run", 2, stored=0, **tables)
    run_dir.metrics.unlink()
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        for step in range(3):
            writer.write(step, metrics)
    plots = plots_of(browser, write_report(str(run_dir.root)))
    assert plots.keys() == titles | {
        "Accuracy",
        "Rewards of chosen and rejected answers",
        "Loss",
        "Gradient norm",
        "Seconds by phase",
        "Idle share",
    }
    assert plots["Idle share"]["curves"] == 1 and plots["Loss"]["curves"] == 2
    assert plots["Accuracy"]["curves"] == 1 + ("evaluation/accuracy" in metrics)
    assert idle_shares_of(browser) == ["trainer\t\t6 %"]
    told = browser.run("return document.querySelector('main').innerText")
    assert "the run has no metric routing" in browser.run(ABSENT)
    assert browser.run(ABSENT).count("the run has no metric") == 1
    assert tables["preferences"]["loss"] in told and "dvantage" not in told


@pytest.mark.parametrize("lost", ["store", "metrics.jsonl"])
def test_a_young_run_in_a_browser(browser, tmp_path, lost):
    run_dir = write_run(tmp_path / "run", 2)
    shutil.rmtree(run_dir.store)
    shutil.rmtree(run_dir.samples) if lost != "store" else None
    (run_dir.root / lost).unlink(missing_ok=True)
    plots = plots_of(browser, write_report(str(run_dir.root)))
    assert bool(plots) == (lost == "store")
    assert browser.run("return document.querySelectorAll('.explorer td.bar').length") == 8 * len(
        ESTIMATORS
    )


def test_a_finished_graph_in_a_browser(browser, finished):
    plots = plots_of(browser, write_report(str(finished)))
    assert "Reward" in plots
    edges = browser.run("return [...document.querySelectorAll('.edge')].map(e => e.dataset.edge)")
    assert sorted(edges) == ["base one", "base two", "one soup", "soup final", "two soup"]
    links = browser.run(
        "return [...document.querySelectorAll('svg.stages a')].map("
        "a => document.querySelector(a.getAttribute('href')).dataset.run)"
    )
    assert sorted(links) == ["base", "one", "two"]
    browser.run(
        "document.querySelector('svg.stages a[href=\"#stage-two\"]').dispatchEvent("
        "new MouseEvent('click', {bubbles: true}))"
    )
    assert browser.run(
        "return [...document.querySelectorAll('details[open] [data-run]')].map("
        "section => section.dataset.run)"
    ) == ["two"]
    assert "seen: 0.5" in browser.run("return document.querySelector('.closed').textContent")


def test_memory_of_ppo_and_grpo(browser, tmp_path):
    page = write_report(str(write_run(tmp_path / "run", 1).root))
    plots_of(browser, page)
    rows = browser.run(
        "return [...document.querySelectorAll('.memory tbody tr')].map("
        "row => [...row.cells].map(cell => cell.textContent))"
    )
    ppo = data_of(page)["runs"][0]["ppo"]
    assert [row[0] for row in rows] == [
        *(model["model"] for model in ppo["models"]),
        *(algorithm["algorithm"] for algorithm in ppo["algorithms"]),
    ]
    assert rows[0][1] == f"{ppo['models'][0]['parameters']:,}" and rows[2][3:5] == ["–", "–"]
    assert rows[-1][-1] == f"{ppo['algorithms'][-1]['share_of_ppo'] * 100:.1f} %"


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_who_shares_the_optimizer_state_is_said_as_plan_says_it(
    browser, tmp_path, expert_parallel_size
):
    trainer = {"num_ranks": 2, "expert_parallel_size": expert_parallel_size}
    run_dir = write_run(tmp_path / "run", 1, stored=0, trainer=trainer)
    comparison = comparison_of(read_resolved(run_dir.config).config)
    [line] = [line for line in formula_lines(comparison) if "shared" in line]
    words = line[line.index("is shared by") :]
    assert ("of experts by" in words) == (expert_parallel_size == 2)
    plots_of(browser, write_report(str(run_dir.root)))
    assert f"{words}." in browser.run("return document.querySelector('.memory').textContent")


def test_kernels_are_listed_with_their_reason(browser, tmp_path):
    page = write_report(str(write_run(tmp_path / "run", 1).root))
    plots_of(browser, page)
    rows = browser.run(
        "return [...document.querySelectorAll('.kernels tbody tr')].map("
        "row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows == [["swiglu", "separate", "said"]]


def test_hover_and_keys_show_values(browser, tmp_path):
    page = write_report(str(write_run(tmp_path / "run", 12).root))
    plots_of(browser, page)
    step = "return document.querySelector('figure.plot .legend li').textContent"
    assert browser.run(step) == "step 11"
    for key, wanted in (("ArrowLeft", 10), ("Home", 0), ("ArrowRight", 1)):
        browser.run(
            "document.querySelector('figure.plot svg').dispatchEvent(new KeyboardEvent("
            "'keydown', {key: arguments[0], bubbles: true}))",
            key,
        )
        assert browser.run(step) == f"step {wanted}"
    browser.run("""const svg = document.querySelector('figure.plot svg');
        const box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 6}));""")
    assert browser.run(step) == "step 11" and browser.console() == []
    rewards = data_of(page)["runs"][0]["metrics"]["reward/mean"]
    shown = browser.run("return document.querySelector('figure.plot .legend b').textContent")
    assert float(shown) == pytest.approx(rewards[-1], rel=1e-3)


ESTIMATORS = {
    "GRPO": {"advantage_std": "group"},
    "Dr. GRPO": {"advantage_std": "none"},
    "RLOO": {"advantage": "rloo"},
    "Lite PPO": {"advantage_std": "batch_raw"},
    "MaxRL": {"advantage": "maxrl"},
    "Residual": {"advantage_std": "batch_residual"},
    "pass@k": {"advantage": "passk"},
    "PKPO": {"advantage": "pkpo"},
    "Best minus second": {"advantage": "best_minus_second", "advantage_std": "none"},
    "Best minus second / std": {"advantage": "best_minus_second", "advantage_std": "group"},
    "OPO": {"advantage": "opo", "advantage_std": "none"},
    "Batch mean": {"advantage": "batch", "advantage_std": "none"},
    "REINFORCE": {"advantage": "reward"},
}
GROUPS = [
    [1, 0, 0, 1, 0.5],
    [0, 0, 0, 0],
    [1, None, 0.25],
    [None, None],
    [2.5],
    [0.1, 0.7, 0.7],
    [1, 1 + 1e-9],
]


LENGTHS = [[5, 3, 9, 3, 1], [4, 4, 2, 8], [3, 1, 2], [7, 7], [6], [9, 2, 4], [1, 2]]
# name in the explorer, settings of the objective, mean rewards that the run has seen
SUBSETS = [
    ("none", {}, None),
    ("shortest", {"subset": "shortest", "subset_size": 2}, None),
    ("token_efficiency", {"subset": "token_efficiency", "subset_size": 2}, None),
    ("adaptive, hard group", {"subset": "adaptive", "subset_size": 3}, 9.0),
    ("adaptive, easy group", {"subset": "adaptive", "subset_size": 3}, -9.0),
]
COMPUTE = """const [name, subset, groups, lengths, settings] = arguments;
const trained = groups.map((group, i) => SUBSETS[subset](group, lengths[i], settings.size));
return trained.flatMap((group, i) =>
  advantagesBy(name, group, trained.filter((_, j) => j !== i), settings, lengths[i]))"""


def explored_batch(groups=GROUPS, lengths=LENGTHS) -> SampleBatch:
    """Groups, in one domain."""
    flat = [np.nan if reward is None else reward for group in groups for reward in group]
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return SampleBatch(
        torch.tensor(flat, dtype=torch.float64),
        ids,
        torch.tensor([length for of_group in lengths for length in of_group]),
        torch.arange(len(ids)),
        torch.zeros(len(ids)).long(),
        torch.ones(len(ids), dtype=torch.bool),
    )


def seen_before(mean_reward: float | None) -> dict:
    """The state of an objective whose groups had this mean reward."""
    if mean_reward is None:
        return {}
    earlier = RunningDistribution.from_state([]).with_values(np.full(1000, mean_reward))
    return {"success@all": earlier.state}


def require_explored(browser, column: str, subset: str, config: ObjectiveConfig, state: dict):
    objective = Objective(config, state=state)
    wanted = advantages_of(objective, explored_batch()).values
    settings = {
        "eps": config.advantage_eps,
        "std": config.std_kind,
        "k": config.passk_k,
        "baseline": config.pkpo_baseline,
        "right": config.correct_threshold,
        "size": config.subset_size,
        "clip": config.advantage_clip,
    }
    found = browser.run(COMPUTE, column, subset, GROUPS, LENGTHS, settings)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-9, atol=1e-9, err_msg=column)


@pytest.mark.parametrize(("std", "clip"), [("sample", None), ("population", None), ("sample", 0.3)])
def test_the_explorer_computes_what_the_library_does(browser, tmp_path, std, clip):
    plots_of(browser, write_report(str(write_run(tmp_path / "run", 1).root)))
    for name, choices in ESTIMATORS.items():
        for subset, of_subset, mean_reward in SUBSETS:
            config = ObjectiveConfig.model_validate(
                {
                    "preset": "grpo",
                    "advantage": "group",
                    "whiten": "none",
                    "std_kind": std,
                    "advantage_clip": clip,
                    **choices,
                    **of_subset,
                }
            )
            require_explored(browser, name, subset, config, seen_before(mean_reward))
    assert set(browser.run("return Object.keys(ESTIMATORS)")) == set(ESTIMATORS)


EQUAL = [[1.0] * 5, [0.0] * 5, [0.25] * 5]


@pytest.mark.parametrize("pkpo_baseline", [True, False])
def test_what_groups_of_equal_rewards_get_is_said_by_estimator(browser, tmp_path, pkpo_baseline):
    """Beside another group."""
    objective = {"preset": "grpo", "pkpo_baseline": pkpo_baseline, "passk_k": 2}
    run_dir = write_run(tmp_path / "run", 1, stored=0, objective=objective)
    plots_of(browser, write_report(str(run_dir.root)))
    told = browser.run("return document.querySelector('.explorer > p:last-child').textContent")
    batch = explored_batch([*EQUAL, [1.0, 0.0]], [[3, 1, 4, 1, 5]] * 3 + [[2, 7]])
    not_zero = set()
    for name, choices in ESTIMATORS.items():
        config = ObjectiveConfig.model_validate(
            {"advantage": "group", "whiten": "none", **objective, **choices}
        )
        advantages = advantages_of(Objective(config, state={}), batch).values
        if advantages[:15].any():
            not_zero.add(name)
    said = re.search(r"all equal gets exactly 0, but from (.*?)\. Adaptive", told)[1]
    assert {re.sub(r" \(.*", "", part) for part in said.split("), ")} == not_zero
    assert ("PKPO" in not_zero) != pkpo_baseline and len(not_zero) >= 2


def test_every_objective_is_in_the_explorer_or_says_what_it_lacks(browser, tmp_path):
    plots_of(browser, write_report(str(write_run(tmp_path / "run", 1).root)))
    complete = []
    for preset in PRESETS:
        config = ObjectiveConfig(preset=preset)
        found = explorer_coverage(config)
        assert found["column"] in (*ESTIMATORS, None)
        assert found["column"] or found["lacks"]
        if not found["lacks"]:
            complete.append(preset)
            require_explored(browser, found["column"], found["subset"], config, {})
    assert {"grpo", "gspo", "dr_grpo", "rloo", "lite_ppo", "gfpo", "dapo"} <= set(complete)
    assert "opo" in complete


def test_the_page_says_what_could_not_be_scored(browser, tmp_path):
    """One column a share, also where it is not known."""
    counts = {"accuracy_unscorable": 0.0, "pass_at_2_unscorable": 8.0}
    shares = {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, **counts}
    evaluation = {
        "sums": {"prompts": 8.0, **shares},
        "poems": {"prompts": 8.0, "accuracy_unscorable": 8.0, "pass_at_2": 1.0},
        "all": {"prompts": 16.0, "accuracy": 0.5, "accuracy_unscorable": 8.0},
    }
    run_dir = write_run(tmp_path / "run", 2, result=RESULT | {"eval": evaluation})
    browser.open(write_report(str(run_dir.root)))
    rows = browser.run(
        """const title = [...document.querySelectorAll('h3')].find(
            one => one.textContent === 'Held-out accuracy');
        return [...title.parentNode.querySelectorAll('tr')].map(
            row => [...row.children].map(cell => cell.textContent));"""
    )
    assert rows == [
        ["domain", "prompts", "accuracy", "pass_at_2"],
        ["sums", "8", "0.5 (0.25 to 0.75)", "– (8 not scored)"],
        ["poems", "8", "– (8 not scored)", "1"],
        ["all", "16", "0.5 (8 not scored)", "–"],
    ]


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"preset": "gspo"}, "gspo, is the column GRPO."),
        ({"preset": "mo_grpo"}, 'is in no column; the explorer lacks advantage = "components"'),
        ({"preset": "edge_grpo"}, "is the column GRPO; the explorer lacks shaping = eda"),
        ({"preset": "gfpo", "subset": "adaptive"}, "lacks quartiles of all groups of the run"),
        ({"preset": "opo", "advantage_clip": 0.5}, "opo, is the column OPO."),
        ({"preset": "otb"}, 'is in no column; the explorer lacks advantage = "otb"'),
        (
            {"preset": "grpo", "advantage": "batch", "statistics_scope": "global"},
            "is the column Batch mean; the explorer lacks statistics_scope = global",
        ),
    ],
)
def test_the_page_says_what_the_explorer_lacks(browser, tmp_path, objective, words):
    page = write_report(str(write_run(tmp_path / "run", 1, objective=objective).root))
    browser.open(page)
    assert words in browser.run("return document.querySelector('.coverage').textContent")
    chosen = browser.run("return document.querySelector('.explorer select.subset').value")
    assert chosen == explorer_coverage(ObjectiveConfig(**objective))["subset"]


def test_a_moved_slider_shows_at_once(browser, tmp_path):
    plots_of(browser, write_report(str(write_run(tmp_path / "run", 1, stored=0).root)))
    move = """const input = document.querySelectorAll('.explorer tbody input')[arguments[0]];
        input.value = arguments[1];
        input.dispatchEvent(new Event('input'));
        return [...document.querySelectorAll('.explorer tbody tr')].map(
            row => Number(row.querySelectorAll('td.bar')[1].dataset.advantage))"""
    rewards = np.array([0.25, 0, 0, 1, 0, 0, 0, 0.5])  # of the example, the first one moved
    np.testing.assert_allclose(browser.run(move, 0, "0.25"), rewards - rewards.mean(), atol=1e-12)
    found = browser.run(move, 1, "")  # unscorable
    np.testing.assert_allclose(found, [0, *(rewards[1:] - rewards[1:].mean())], atol=1e-12)
    assert "unscorable" in browser.run("return document.querySelector('.explorer tbody').innerText")
    assert browser.console() == []


def test_a_bound_of_advantages_holds_at_once(browser, tmp_path):
    objective = {"preset": "dr_grpo", "advantage_clip": 0.25}
    plots_of(browser, write_report(str(write_run(tmp_path / "r", 1, objective=objective).root)))
    values = """const field = document.querySelector('.explorer input.clip');
        if (arguments[0] !== null) {
            field.value = arguments[0];
            field.dispatchEvent(new Event('input'));
        }
        return [...document.querySelectorAll('.explorer td.bar')].map(
            cell => Math.abs(Number(cell.dataset.advantage)))"""
    assert max(browser.run(values, None)) == 0.25  # of the run
    assert max(browser.run(values, "0.125")) == 0.125
    assert max(browser.run(values, "")) > 0.25


def test_a_subset_leaves_samples_out_at_once(browser, tmp_path):
    plots_of(browser, write_report(str(write_run(tmp_path / "run", 1, stored=0).root)))
    texts = """const choice = document.querySelector('.explorer select.subset');
        choice.value = arguments[0];
        choice.dispatchEvent(new Event('change'));
        return [...document.querySelectorAll('.explorer tbody tr')].map(
            row => row.querySelector('td.bar').innerText)"""
    assert browser.run(texts, "adaptive, easy group").count("not trained") == 4  # of 8, size 8
    assert browser.run(texts, "none").count("not trained") == 0


TOKENS = """return [...document.querySelectorAll('.step-token')].map(
    token => Number(token.dataset.probability))"""


def test_tokens_move_from_before_the_step_to_after_it(browser, tmp_path):
    page = write_report(str(write_run(tmp_path / "run", 2).root))
    plots_of(browser, page)
    moved = data_of(page)["runs"][0]["moved"]
    assert [sample["step"] for sample in moved] == [1] * 5 + [0] * 5
    movements = []
    for sample in moved[:5]:
        _, _, engine, before, after, advantages = zip(*sample["tokens"], strict=True)
        assert engine == before and set(advantages) == {0.5 - sample["row"] / 20}
        movements.append(np.abs(np.subtract(after, before)).mean())
    assert movements == sorted(movements, reverse=True)
    first = np.exp([token[3:5] for token in moved[0]["tokens"]])
    np.testing.assert_allclose(browser.run(TOKENS), first[:, 0], rtol=1e-6)
    browser.run("""const slider = document.querySelector('.step-update input');
        slider.value = 0.5;
        slider.dispatchEvent(new Event('input'));""")
    np.testing.assert_allclose(browser.run(TOKENS), first.mean(axis=1), rtol=1e-6)
    browser.run("document.querySelector('.step-update button').click()")
    wait_for(browser, "return document.querySelector('.step-update [role=status]').textContent")
    np.testing.assert_allclose(browser.run(TOKENS), first[:, 1], rtol=1e-6)
    browser.run("""const select = document.querySelector('.step-update select');
        select.value = 7;
        select.dispatchEvent(new Event('change'));""")
    other = np.exp([token[3] for token in moved[7]["tokens"]])
    np.testing.assert_allclose(browser.run(TOKENS), other, rtol=1e-6)
    assert browser.console() == []


def wait_for(browser, script: str, wanted: str = "after the step") -> None:
    deadline = time.monotonic() + 300
    while browser.run(script) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_log_probs_after_the_step_the_page_says_why(browser, tmp_path):
    run_dir = write_run(tmp_path / "run", 1)
    for file in run_dir.store.glob("*/drift-*.safetensors"):
        file.unlink()
    plots_of(browser, write_report(str(run_dir.root)))
    assert "objective.monitor_share" in browser.run(ABSENT)


def test_drift_of_another_step_is_a_note(tmp_path):
    run_dir = write_run(tmp_path / "run", 1)
    [directory] = run_dir.store.glob("step_*")
    write_drift(directory, 0, 1, {999: SampleDrift(*np.zeros((3, 2), np.float32))})
    run = data_of(write_report(str(run_dir.root)))["runs"][0]
    assert run["recorded"] and [note.partition(":")[0] for note in run["notes"]] == ["moved"]
