"""The trainers whose configurations can be imported, by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.export.trainers import TRAINERS
from meshwright.planner.imports.costed import Reader
from meshwright.planner.imports.from_nemo_rl import read_nemo_rl
from meshwright.planner.imports.from_openrlhf import read_openrlhf
from meshwright.planner.imports.from_slime import read_slime
from meshwright.planner.imports.from_verl import read_verl

READERS: Mapping[str, Reader] = {
    "verl": Reader(trainer=TRAINERS["verl"], read=read_verl),
    "nemo-rl": Reader(trainer=TRAINERS["nemo-rl"], read=read_nemo_rl),
    "openrlhf": Reader(trainer=TRAINERS["openrlhf"], read=read_openrlhf),
    "slime": Reader(trainer=TRAINERS["slime"], read=read_slime),
}
