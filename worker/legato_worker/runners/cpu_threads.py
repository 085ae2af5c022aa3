"""How torch's CPU threads wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

_SPINS = "1000"


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Makes OpenMP threads sleep after a short wait. Takes effect only before torch is imported.

    By default GNU OpenMP lets a thread that waits burn its core for milliseconds. A step has
    hundreds of waits, and as soon as anything else wants one of the cores (router, client, another
    worker) each of them costs a time slice. Measured on 2 cores: with one busy neighbour, decoding
    was 20 to 30 times slower by default and 2 to 3 times slower like this; on an idle machine this
    costs 10 to 20 %.

    A waiting policy that the operator has set stays.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", _SPINS)
