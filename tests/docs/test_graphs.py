"""The graph in the page on graphs of one's own is PPO's, as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from meshwright.planner.plan.own_graph import OwnGraph
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import parse

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


def test_the_graph_in_the_page_is_that_of_ppo() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    stated = yaml.safe_load(block)["algorithm"]
    assert parse(OwnGraph, json.dumps(stated), "page").graph() == PPO_GRAPH
