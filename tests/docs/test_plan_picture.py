"""The picture of a plan is one small SVG file that shows its stages, nodes and colours."""

from __future__ import annotations

from xml.etree import ElementTree

from docs.plan_picture import picture_of
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.docs.named import ROOT
from tests.planner.plans import random_plan
from tests.seeds import seeds

MOST_BYTES = 150 * 2**10


def texts(picture: str) -> set[str]:
    return {text.strip() for element in ElementTree.fromstring(picture).iter() if (text := element.text)}


@seeds(2, all=4)
def test_a_plan_is_drawn_with_its_nodes_and_the_names_of_its_colours(seed: int) -> None:
    plan = random_plan(seed)
    found = texts(picture_of(plan))
    assert {"refit", *(stage.name for stage in PPO_GRAPH.stages)} <= found
    assert sum(text.startswith("node") for text in found) == plan.facts.cluster.nodes
    assert any(text.startswith("actor_train on ranks") for text in found)


def test_the_picture_in_the_readme_is_small_and_whole() -> None:
    picture = (ROOT / "docs" / "plan.svg").read_text()
    assert len(picture.encode()) < MOST_BYTES
    assert {"actor_generate", "actor_train", "step n+1"} <= texts(picture)
