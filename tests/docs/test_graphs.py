"""The graphs in the pages are those of the presets that the pages name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from meshwright.planner.job.custom_graph import OwnGraph, is_same_graph
from meshwright.profiles.algorithms import PPO_GRAPH, graph_of
from meshwright.profiles.documents import parse

DOCS = Path(__file__).parents[2] / "docs"


def stated_in(page: str) -> OwnGraph:
    """The one graph of a page."""
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (stated,) = (found["algorithm"] for found in map(yaml.safe_load, blocks) if "algorithm" in found)
    return parse(OwnGraph, json.dumps(stated), page)


def test_the_graph_in_the_page_is_that_of_ppo() -> None:
    assert stated_in("graphs.md").graph() == PPO_GRAPH


def test_the_graph_with_a_filter_is_that_of_grpo_on_the_best_samples() -> None:
    assert is_same_graph(stated_in("dynamic_sampling.md").graph(), graph_of("grpo", has_filter=True))
