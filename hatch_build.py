"""Build hook: generates the protobuf and gRPC stubs beside their .proto files.

Also run by hand after editing a .proto: ``python hatch_build.py``.
The stubs are git-ignored and part of the wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTOS = ROOT / "protos"


def generate() -> list[Path]:
    """Generates all stubs into ``protos/`` and returns the .proto files read."""
    import grpc_tools
    from grpc_tools import protoc

    # The mypy plugins are programs: found beside this interpreter also when it is not activated.
    scripts = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), scripts])
    sources = sorted(PROTOS.glob("legato/**/*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{include}",
        f"--python_out={PROTOS}",
        f"--grpc_python_out={PROTOS}",
        f"--mypy_out=quiet:{PROTOS}",
        f"--mypy_grpc_out=quiet,only_async:{PROTOS}",
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    return sources


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without hatchling
    pass
else:

    class StubsBuildHook(BuildHookInterface):  # type: ignore[misc, type-arg]
        """Runs the generator before each build, editable ones included."""

        def initialize(self, version: str, build_data: dict) -> None:  # type: ignore[type-arg]
            generate()


if __name__ == "__main__":
    for source in generate():
        print(source.relative_to(ROOT), file=sys.stderr)
