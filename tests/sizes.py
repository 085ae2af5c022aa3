"""Size of the product's modules: prints the totals, fails when one has outgrown a single head."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protos", "router", "worker", "kernels", "deploy")
MAX_LINES = 400


def main() -> int:
    too_long = []
    for folder in FOLDERS:
        total = 0
        files = [path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
        for path in files:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            total += lines
            if lines > MAX_LINES:
                too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, limit {MAX_LINES}")
        print(f"{folder:8} {len(files):4} modules {total:7} lines")
    print("\n".join(too_long))
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
