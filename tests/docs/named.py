"""What a page names in links and in code, as far as it can be looked up in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer.main

from meshwright.runtime.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
_MADE_BY_MAKE = "examples/tiny/build/", "build/engines/"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.M | re.S)
_PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]*|(?<![\w./*-])[\w-]+\.py\b")
_MODULE = re.compile(r"python -m ([\w.]+)|\b(meshwright\.[\w.]*\w)")
_COMMAND = re.compile(r"^`?\$? *meshwright (\w+)(.*(?:\n {6,}.*)*)", re.M)
_OPTION = re.compile(r"(?<!\S)\[?(--?[a-z][a-z-]*)")
_NAME = re.compile(r"(?<![^`\n])([A-Za-z]*_\w+|[A-Z]\w*[a-z]\w*)(?![^`\n])")
_MAKE = re.compile(r"^`?make ([a-z ]+)", re.M)


def missing(text: str, folder: Path) -> list[str]:
    """Links, files, modules, names, commands, options and targets that a page in `folder` has and that do not exist."""
    code = "\n".join(found[0].removeprefix("```").removesuffix("```") for found in _CODE.finditer(text))
    return [*_links(text, folder), *_files(code), *_modules(code), *_names(code), *_commands(code), *_targets(code)]


def _links(text: str, folder: Path) -> Iterator[str]:
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        page = folder / path
        if "://" in link:
            continue
        if not page.exists() or (anchor and anchor not in _anchors(page)):
            yield link


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def _files(code: str) -> Iterator[str]:
    """A path is looked up if it begins in the repository or is of a Python file; a file's name alone, anywhere."""
    for path in _PATH.findall(code):
        is_ours = path.endswith(".py") or (ROOT / path.split("/")[0]).exists()
        if is_ours and not path.startswith(_MADE_BY_MAKE):
            found = (ROOT / path).exists() if "/" in path else path in {file.name for file in _python_files()}
            if not found:
                yield path


@cache
def _python_files() -> tuple[Path, ...]:
    folders = ("benchmarks", "cost_models", "docs", "examples", "planner", "profiles", "runtime", "tests")
    return tuple(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _modules(code: str) -> Iterator[str]:
    for run, imported in _MODULE.findall(code):
        name = (run or imported).replace(".", "/")
        path = ROOT / "src" / name if name.startswith("meshwright") else ROOT / name
        is_module, is_package = path.with_suffix(".py").exists(), path.is_dir()
        if not is_module and not (path / "__main__.py").exists() and not (imported and is_package):
            yield run or imported


def _names(code: str) -> Iterator[str]:
    """Names that stand alone in code and look like ones of ours."""
    yield from (name for name in _NAME.findall(code) if name not in _words())


@cache
def _words() -> frozenset[str]:
    """Of all code but the tests of documents, which name what does not exist."""
    files = (ROOT / "setup.cfg", *(path for path in _python_files() if path.parent != Path(__file__).parent))
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


def _commands(code: str) -> Iterator[str]:
    known = _options_of_commands()
    for command, given in _COMMAND.findall(code):
        if command not in known:
            yield f"meshwright {command}"
            continue
        for option in _OPTION.findall(given):
            if option not in known[command]:
                yield f"meshwright {command} {option}"


@cache
def _options_of_commands() -> dict[str, frozenset[str]]:
    commands = typer.main.get_group(app).commands
    return {
        name: frozenset({"--help", *(option for parameter in command.params for option in parameter.opts)})
        for name, command in commands.items()
    }


def _targets(code: str) -> Iterator[str]:
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for targets in _MAKE.findall(code):
        yield from (f"make {target}" for target in targets.split() if target not in known)
