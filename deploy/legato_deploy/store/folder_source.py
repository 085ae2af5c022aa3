"""A model in a folder of this machine, or in a repository of the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from legato_deploy.store.errors import StoreError
from legato_deploy.store.manifest import Manifest, describe, fingerprint
from legato_deploy.store.model_folder import model_files
from legato_deploy.store.progress import Progress
from legato_deploy.store.publish import Workspace, require_space

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,96}))?"
)
_CHUNK_BYTES = 1 << 22


class FolderSource:
    """Copies a folder's model files. A copy, not hard links: a training script that overwrites its
    output in place would change a linked model under the workers that serve it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def same_as(self, manifest: Manifest) -> bool:
        files = describe(self._folder, model_files(self._folder), advance=lambda _: None)
        return fingerprint(files) == manifest.fingerprint

    def fill(self, workspace: Workspace, progress: Progress) -> str:
        names = model_files(self._folder)
        num_bytes = sum((self._folder / name).stat().st_size for name in names)
        require_space(workspace.model, num_bytes)
        progress.stage("Copying the model's files", num_bytes)
        for name in names:
            with (
                (self._folder / name).open("rb") as old,
                (workspace.model / name).open("wb") as new,
            ):
                while chunk := old.read(_CHUNK_BYTES):
                    new.write(chunk)
                    progress.advance(len(chunk))
        return str(self._folder)


class HubSource:
    """Downloads into the Hugging Face cache, which resumes and shares downloads, then copies.

    ``model_id`` is org/name or org/name@revision. Raises StoreError when it is neither.
    """

    def __init__(self, model_id: str) -> None:
        match = _HUB_ID.fullmatch(model_id)
        if match is None:
            raise StoreError(f"{model_id[:200]!r} is no Hugging Face id such as org/model.")
        self._repo: str = match["repo"]
        self._revision: str | None = match["revision"]

    def same_as(self, manifest: Manifest) -> bool:
        repo, _, commit = manifest.source.partition("@")
        return repo == self._repo and self._revision in (None, commit)

    def fill(self, workspace: Workspace, progress: Progress) -> str:
        progress.say(f"Downloading {self._repo} into the Hugging Face cache")
        folder = self._download()
        FolderSource(folder).fill(workspace, progress)
        return f"{self._repo}@{folder.name}"  # the cache names a snapshot by its commit

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            folder = snapshot_download(
                self._repo,
                revision=self._revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"],
                ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            )
        except GatedRepoError as error:
            raise StoreError(
                f"{self._repo} asks for its licence to be accepted first. Accept it on the model's "
                "page, log in with: hf auth login, and pull again."
            ) from error
        except RepositoryNotFoundError as error:
            raise StoreError(
                f"The hub has no public model {self._repo}. Check the id; for a private one log in "
                "with: hf auth login"
            ) from error
        except LocalEntryNotFoundError as error:
            raise StoreError(
                f"{self._repo} is not in the local Hugging Face cache, and the hub cannot be "
                "reached from here. Nothing was stored. Pull again when online (and "
                "HF_HUB_OFFLINE is not set), or copy the model's folder to this machine and run: "
                "legato pull FOLDER"
            ) from error
        except OSError as error:
            if error.errno is not None:  # of this machine's disk, not of the network
                raise
            raise StoreError(
                f"The download of {self._repo} failed: {error}. Pull again."
            ) from error
        return Path(folder)
