"""Draws the imports between folders into docs/architecture.md: `make picture`.

An arrow goes from the importing folder to the imported one. An arrow that a chain of others implies is omitted.
"""

from __future__ import annotations

from pathlib import Path

import grimp
import networkx as nx

PAGE = Path(__file__).with_name("architecture.md")
_WITH_FOLDERS = ("runtime", "planner")
"""The packages whose folders are drawn as nodes of their own."""

_PACKAGES = ("meshwright.runtime", "meshwright.planner", "meshwright.cost_models", "meshwright.profiles")
_BEGIN, _END = "```mermaid\n", "```\n"


def with_picture(page: str) -> str:
    """The text of the page with a drawing of the current imports."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{drawing(folder_imports())}{_END}{after}"


def folder_imports() -> nx.DiGraph[tuple[str, ...]]:
    """A graph of which folder imports which. A node is (package, folder), or (package,) without folders."""
    modules = grimp.build_graph(*_PACKAGES, cache_dir=None)
    found: nx.DiGraph[tuple[str, ...]] = nx.DiGraph()
    for importer in modules.modules:
        for imported in modules.find_modules_directly_imported_by(importer):
            if _folder(importer) != _folder(imported):
                found.add_edge(_folder(importer), _folder(imported))
    return found


def drawing(imports: nx.DiGraph[tuple[str, ...]]) -> str:
    """A Mermaid flowchart of the imports that no chain of others implies."""
    lines = ["flowchart TB"]
    for package in _WITH_FOLDERS:
        inside = sorted(node for node in imports if node[0] == package)
        lines += [f"  subgraph {package}", *(f'    {_name(node)}["{node[-1]}"]' for node in inside), "  end"]
    arrows = sorted(nx.transitive_reduction(imports).edges)
    lines += [f"  {_name(importer)} --> {_name(imported)}" for importer, imported in arrows]
    return "\n".join(lines) + "\n"


def _folder(module: str) -> tuple[str, ...]:
    _, package, *inside = module.split(".")
    return (package, inside[0]) if package in _WITH_FOLDERS and inside else (package,)


def _name(node: tuple[str, ...]) -> str:
    return "_".join(node)


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
