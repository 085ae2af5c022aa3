"""A worker process whose simulated runner fails as told: PORT MODEL_DIR KIND TOKEN_ID."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from legato_worker.config import WorkerConfig
from legato_worker.runners.simulated import Fault, FaultKind
from legato_worker.serve import ModelSource, serve

from tests.local_fleet import with_faults
from tests.tiny_model import VOCAB_SIZE


def main() -> int:
    port, model_dir, kind, token_id = sys.argv[1:]
    config = WorkerConfig(
        runner="simulated",
        listen=f"127.0.0.1:{port}",
        simulated_vocab_size=VOCAB_SIZE,
        simulated_base_ms=2.0,
    )
    load = with_faults(Fault(FaultKind(kind), token_id=int(token_id)))
    return asyncio.run(
        serve(config, ModelSource("tiny", Path(model_dir), "fingerprint"), load=load)
    )


if __name__ == "__main__":
    sys.exit(main())
