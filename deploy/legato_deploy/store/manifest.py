"""legato.json: what a stored model consists of, and the fingerprint that tells models apart."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MANIFEST_NAME = "legato.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a model. ``name`` has no folder part."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of legato.json."""

    name: str
    source: str
    fingerprint: str
    created_by: str
    files: tuple[FileRecord, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @classmethod
    def of(cls, name: str, source: str, files: tuple[FileRecord, ...]) -> Manifest:
        return cls(name, source, fingerprint(files), f"legato {_version()}", files)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises OSError when there is none and ValueError when it is not a manifest."""
        raw = json.loads((folder / MANIFEST_NAME).read_bytes())
        try:
            files = tuple(FileRecord(**file) for file in raw.pop("files"))
            manifest = cls(**raw, files=files)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error}") from error
        if any(Path(file.name).name != file.name for file in files):
            raise ValueError("a file name points outside the model's folder")
        return manifest

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def missing_from(self, folder: Path) -> list[str]:
        """Files that ``folder`` lacks, or holds as a link or with another size. Reads no file."""
        missing = []
        for file in self.files:
            try:
                status = (folder / file.name).lstat()
            except OSError:
                missing.append(file.name)
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.num_bytes:
                missing.append(file.name)
        return missing


def describe(
    folder: Path, names: Iterable[str], advance: Callable[[int], None]
) -> tuple[FileRecord, ...]:
    """Reads and hashes the named files; ``advance`` is told the bytes read as they are read."""
    records = []
    for name in sorted(names):
        digest, num_bytes = hashlib.sha256(), 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                advance(len(chunk))
        records.append(FileRecord(name, num_bytes, digest.hexdigest()))
    return tuple(records)


def fingerprint(files: Iterable[FileRecord]) -> str:
    """One hash over the names and digests of weights, config and tokenizer files. It does not
    depend on where a model lies or what it is called, so replicas on other machines agree."""
    lines = "".join(f"{file.sha256}  {file.name}\n" for file in sorted(files, key=_by_name))
    return hashlib.sha256(lines.encode()).hexdigest()


def _by_name(file: FileRecord) -> str:
    return file.name


def _version() -> str:
    try:
        return version("legato")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "from source"
