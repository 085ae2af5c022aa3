"""Settings for the whole suite; must run before torch is imported."""

import os
from pathlib import Path

# Tiny tensors gain nothing from a second thread and lose much when the machine is busy. Tests that
# run the real model ask for threads themselves. Processes that tests start decide for themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start run this tree too, installed or not.
_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = [str(_ROOT / name) for name in ("protos", "router", "worker", "kernels", "deploy")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")])
