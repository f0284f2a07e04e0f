"""Adds to a wheel the bill of materials and the licences of what it requires (PEP 770); all else is in setup.cfg."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).parent / "requirements"))

from sbom import bill_of_materials, licences


class WheelWithMaterials(bdist_wheel):
    """Builds a wheel with `sboms/meshwright.cdx.json` and `licenses/requirements.csv` among its metadata."""

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        super().write_wheelfile(wheelfile_base, *arguments)
        for name, text in (
            ("sboms/meshwright.cdx.json", bill_of_materials(self.distribution.get_version())),
            ("licenses/requirements.csv", licences()),
        ):
            path = Path(wheelfile_base, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


setup(cmdclass={"bdist_wheel": WheelWithMaterials})
