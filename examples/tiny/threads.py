"""How many threads torch may use here, and how they wait. Import it before torch, which reads the wish as it loads.

OpenMP threads that spin while they wait made a step eight times slower on two cores that other programs shared.
"""

import os

NUM_THREADS = 2
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
