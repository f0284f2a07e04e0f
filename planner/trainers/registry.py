"""The trainers that plans can be exported to, and those whose configurations can be imported, by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.trainers.areal import AREAL, read_areal
from meshwright.planner.trainers.importer import Reader
from meshwright.planner.trainers.nemo_rl import NEMO_RL, read_nemo_rl
from meshwright.planner.trainers.openrlhf import OPENRLHF, read_openrlhf
from meshwright.planner.trainers.skyrl import SKYRL, read_skyrl
from meshwright.planner.trainers.slime import SLIME, read_slime
from meshwright.planner.trainers.trainer import OtherTrainer
from meshwright.planner.trainers.verl import VERL, read_verl

TRAINERS: Mapping[str, OtherTrainer] = {
    trainer.name: trainer for trainer in (VERL, NEMO_RL, OPENRLHF, SLIME, SKYRL, AREAL)
}


READERS: Mapping[str, Reader] = {
    "verl": Reader(trainer=TRAINERS["verl"], read=read_verl),
    "nemo-rl": Reader(trainer=TRAINERS["nemo-rl"], read=read_nemo_rl),
    "openrlhf": Reader(trainer=TRAINERS["openrlhf"], read=read_openrlhf),
    "slime": Reader(trainer=TRAINERS["slime"], read=read_slime),
    "skyrl": Reader(trainer=TRAINERS["skyrl"], read=read_skyrl),
    "areal": Reader(trainer=TRAINERS["areal"], read=read_areal),
}
