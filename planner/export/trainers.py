"""The trainers that plans can be exported to, by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.export.to_nemo_rl import NEMO_RL
from meshwright.planner.export.to_openrlhf import OPENRLHF
from meshwright.planner.export.to_slime import SLIME
from meshwright.planner.export.to_verl import VERL
from meshwright.planner.export.trainer import OtherTrainer

TRAINERS: Mapping[str, OtherTrainer] = {trainer.name: trainer for trainer in (VERL, NEMO_RL, OPENRLHF, SLIME)}
