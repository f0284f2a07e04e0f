"""The configuration keys of other trainers, with their defaults.

`data/` has a file for each trainer, extracted by `docs/trainer_keys.py` from the package or repository that `source`
and `version` name.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from pydantic import JsonValue

from meshwright.profiles.documents import Document, read_json


class KnownKeys(Document):
    """Every key with its default; a default that is an empty mapping takes keys of any name below it."""

    trainer: str
    version: str
    source: str
    keys: dict[str, JsonValue]

    def knows(self, key: str) -> bool:
        """True if the trainer accepts this key. A key that begins with + is new, below a mapping that takes any
        name."""
        if not key.startswith("+"):
            return key in self.keys
        parents = key.removeprefix("+").split(".")[:-1]
        prefixes = (".".join(parents[: n + 1]) for n in range(len(parents)))
        return any(self.keys.get(prefix) == {} or prefix in self._overridden for prefix in prefixes)

    @property
    def _overridden(self) -> frozenset[str]:
        """Mappings called `override_...`, which take keys of any name."""
        parents = (key.rpartition(".")[0] for key in self.keys)
        return frozenset(parent for parent in parents if parent.rpartition(".")[2].startswith("override_"))


@cache
def known_keys(trainer: str) -> KnownKeys:
    """Read the keys of a trainer by the name of its file."""
    with as_file(files("meshwright.planner.export") / "data" / f"{trainer}.json") as path:
        return read_json(KnownKeys, path, "keys of another trainer")
