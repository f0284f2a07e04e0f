"""The tiny example is a folder of scripts, not a package: its modules are imported by their own names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny"))
