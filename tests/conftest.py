"""Settings for the whole suite; must run before torch is imported."""

import os

# Tiny tensors gain nothing from a second thread and lose much when the machine is busy. Tests that
# run the real model ask for threads themselves. Processes that tests start decide for themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
