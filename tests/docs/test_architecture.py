"""The drawing in docs/architecture.md is that of the imports, and the folders named there are the contracts'."""

from __future__ import annotations

import configparser
import re

import networkx as nx

from docs.picture import PAGE, drawing, folder_imports, with_picture
from tests.docs.named import ROOT


def test_the_drawing_is_current() -> None:
    page = PAGE.read_text()
    assert with_picture(page) == page, "the imports have changed; run `make picture`"


def test_a_new_import_between_folders_makes_the_drawing_old() -> None:
    page = PAGE.read_text()
    arrow = "  planner_report --> planner_analysis\n"
    assert arrow in page
    assert with_picture(page.replace(arrow, "")) == page


def test_an_arrow_that_others_imply_is_left_out() -> None:
    imports = nx.DiGraph([(("planner", "a"), ("planner", "b")), (("planner", "b"), ("c",)), (("planner", "a"), ("c",))])
    drawn = drawing(imports)
    assert "planner_a --> planner_b\n" in drawn
    assert "planner_b --> c\n" in drawn
    assert "planner_a --> c\n" not in drawn


def test_imports_between_folders_go_one_way() -> None:
    assert nx.is_directed_acyclic_graph(folder_imports())


def test_the_folders_are_listed_in_the_order_of_their_contract() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for package in ("planner", "runtime"):
        contract = re.findall(r"\w+", config[f"importlinter:contract:{package}"]["layers"])
        listed = re.findall(rf"^\| `{package}/(\w+)[/.]", PAGE.read_text(), re.M)
        assert listed == contract
