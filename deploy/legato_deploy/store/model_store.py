"""The model store: a folder of whole models, each with its manifest, found by name.

Layout: ROOT/models/NAME/{config.json, model.safetensors, tokenizer.json, ..., legato.json}.
A model appears by one rename and is never changed afterwards, so readers need no lock.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from legato_deploy.store.catalogue import CATALOGUE
from legato_deploy.store.errors import StoreError
from legato_deploy.store.manifest import FileRecord, Manifest, describe, fingerprint
from legato_deploy.store.model_folder import model_files

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A whole model on disk. ``fingerprint`` is equal where weights, config and tokenizer are."""

    name: str
    path: Path
    fingerprint: str
    num_bytes: int


def default_root() -> Path:
    """$LEGATO_HOME, or ~/.cache/legato."""
    home = os.environ.get("LEGATO_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "legato"


def check_name(name: str) -> str:
    """``name`` if it is a name, not a path: lower-case letters, digits, and . _ - between them.
    Raises StoreError."""
    if _NAME.fullmatch(name) is None:
        raise StoreError(
            f"{name[:100]!r} is not a model name: up to 96 lower-case letters, digits, and . _ - "
            "between them."
        )
    return name


class ModelStore:
    """Reads the store under ``root``, which need not exist yet. ``pull`` is what writes it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.models = self.root / "models"

    def list(self) -> list[StoredModel]:
        """All whole models, by name. Damaged and half-made ones are left out."""
        found = []
        for path in sorted(self.models.iterdir()) if self.models.is_dir() else []:
            if _NAME.fullmatch(path.name) and not path.is_symlink():
                manifest = self.manifest(path.name)
                if manifest is not None and not manifest.missing_from(path):
                    found.append(self._stored(manifest))
        return found

    def get(self, name: str) -> StoredModel:
        """The model of that name. Costs a few file-status calls; contents are not read (see
        ``verify``).

        Raises StoreError for a bad name, for one that is not here (telling what is, and how to
        pull), and for a model with files missing.
        """
        manifest = self.manifest(name)
        if manifest is None:
            raise self._unknown(name)
        if missing := manifest.missing_from(self.models / name):
            raise StoreError(
                f"Model {name} in {self.models} is damaged: {', '.join(missing)} missing or of the "
                f"wrong size. Repair it with: legato pull {self._what_to_pull(manifest)}"
            )
        return self._stored(manifest)

    def resolve(self, name_or_path: str | Path) -> StoredModel:
        """The stored model of that name, or the model in the folder of that path, used in place.

        A folder outside the store has no manifest, so its files are hashed here: about a second
        per gigabyte. Where a word is both, the stored model wins. Raises StoreError.
        """
        text = os.fspath(name_or_path)
        if "\0" in text:
            raise StoreError("A path cannot hold a NUL character.")
        folder = Path(text).expanduser().absolute()
        if _NAME.fullmatch(text) and (self.manifest(text) or not folder.is_dir()):
            return self.get(text)
        if folder.parent == self.models:
            return self.get(folder.name)
        if not folder.is_dir():
            raise StoreError(
                f"{text[:200]!r} is neither a folder nor a model name. {self._available()}"
            )
        files = _read(folder, model_files(folder))
        num_bytes = sum(file.num_bytes for file in files)
        return StoredModel(folder.name.lower(), folder, fingerprint(files), num_bytes)

    def verify(self, name: str) -> StoredModel:
        """Reads and hashes every file of a stored model. Raises StoreError naming those that are
        not as they were when pulled."""
        stored = self.get(name)
        manifest = self.manifest(name)
        assert manifest is not None
        now = _read(stored.path, (file.name for file in manifest.files))
        changed = sorted(file.name for file in set(manifest.files) - set(now))
        if changed or fingerprint(now) != manifest.fingerprint:
            raise StoreError(
                f"Model {name} is damaged: the content of {', '.join(changed) or 'legato.json'} "
                f"has changed since it was pulled. Remove it and pull again: "
                f"rm -r {shlex.quote(str(stored.path))} && legato pull "
                f"{self._what_to_pull(manifest)}"
            )
        return stored

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a stored model, None where there is none that can be read.
        Raises StoreError for a bad name or a folder that is a link."""
        path = self.models / check_name(name)
        if path.is_symlink():
            raise StoreError(f"{path} is a link. The store holds models, not links to them.")
        try:
            manifest = Manifest.read(path)
        except (OSError, ValueError):
            return None
        return manifest if manifest.name == name else None

    def _stored(self, manifest: Manifest) -> StoredModel:
        path = self.models / manifest.name
        return StoredModel(manifest.name, path, manifest.fingerprint, manifest.num_bytes)

    def _unknown(self, name: str) -> StoreError:
        if name in CATALOGUE:
            return StoreError(f"Model {name} is not in the store yet. Run: legato pull {name}")
        return StoreError(f"There is no model {name} in {self.models}. {self._available()}")

    def _available(self) -> str:
        here = ", ".join(model.name for model in self.list()) or "none yet"
        return (
            f"Here: {here}. More with: legato pull NAME, where NAME is {', '.join(CATALOGUE)}, "
            "a folder, or a Hugging Face id such as org/model."
        )

    @staticmethod
    def _what_to_pull(manifest: Manifest) -> str:
        if manifest.name in CATALOGUE:
            return manifest.name
        return f"{shlex.quote(manifest.source)} --name {manifest.name}"


def _read(folder: Path, names: Iterable[str]) -> tuple[FileRecord, ...]:
    try:
        return describe(folder, names, advance=lambda _: None)
    except OSError as error:
        raise StoreError(f"Cannot read {error.filename or folder}: {error.strerror}") from error
