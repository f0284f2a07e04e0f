"""Ties multiprocessing's fork server to the launcher: the kernel ends it when the launcher ends, and the ranks with it.

The fork server imports this module first. It runs nothing of ours but such imports, so importing has this effect.
"""

from __future__ import annotations

import os

from meshwright.planner.search.parent_death import end_with_parent

end_with_parent(os.getppid())
