"""A batch that is not there is refused from Python as it is by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import api


def test_a_file_that_is_no_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match="does not exist; check the path"):
        api.replay(str(tmp_path / "none"))
