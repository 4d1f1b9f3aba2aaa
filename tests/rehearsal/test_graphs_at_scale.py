"""What a rehearsal says of a graph at its own size, where none of its stages has run."""

from __future__ import annotations

import pytest

from grpo_megatron.rehearsal import rehearse_graph
from grpo_megatron.rehearsal.rehearse import write_site
from grpo_megatron.stages.loading import load_graph


@pytest.mark.parametrize("name", ["r1", "r1_distill"])
def test_stages_are_planned_with_the_model_that_they_descend_from(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without runs of earlier graphs
    graph = load_graph(name)
    findings = rehearse_graph._at_scale(graph, write_site(tmp_path / "site.env"))
    assert [finding.what for finding in findings if not finding.holds] == []
    assert {finding.detail for finding in findings} == {f"{len(graph.order)} stages"}
    assert "its memory fits by the plan" in [finding.what for finding in findings]
