from __future__ import annotations

import os
import subprocess
import sys

import pytest
from legato_worker.runners.cpu_threads import limit_spinning

SCRIPT = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from legato_worker.runners.cpu_threads import limit_spinning
limit_spinning(os.environ)
import torch
"""


def test_openmp_takes_the_limit_over() -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environ = {k: v for k, v in os.environ.items() if k not in names} | {
        "OMP_DISPLAY_ENV": "verbose"
    }
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    ).stderr
    if "GOMP_" not in shown:
        pytest.skip("this torch is not built with GNU OpenMP")
    assert "GOMP_SPINCOUNT = '1000'" in shown
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown


@pytest.mark.parametrize(
    "chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}], ids=["policy", "count"]
)
def test_the_operators_choice_stays(chosen: dict[str, str]) -> None:
    environ = dict(chosen)
    limit_spinning(environ)
    assert environ == chosen
