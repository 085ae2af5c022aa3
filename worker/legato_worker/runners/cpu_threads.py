"""How torch's CPU threads wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

_SPINS = "1000"


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Makes OpenMP threads wait awake for some microseconds, and then sleep. Takes effect only
    before torch is imported.

    GNU OpenMP knows two extremes. Alone on the machine, a thread that waits burns its core for
    milliseconds; a step has hundreds of waits, and as soon as anything else wants one of the cores
    (router, client, another worker) each of them costs a time slice. But when a process has more
    than one pool of threads (here: that of the loading thread and that of the engine's), it lets
    threads sleep almost at once, and then a step has hundreds of wake-ups: measured on 2 cores, 15
    ms instead of 10 for one decoding row.

    A waiting policy that the operator has set stays.
    """
    if "OMP_WAIT_POLICY" not in environ and "GOMP_SPINCOUNT" not in environ:
        environ["GOMP_SPINCOUNT"] = _SPINS
        environ["OMP_WAIT_POLICY"] = "active"  # with a spin count: also for the second pool
