"""Where a model can come from."""

from __future__ import annotations

from typing import Protocol

from legato_deploy.store.manifest import Manifest
from legato_deploy.store.progress import Progress
from legato_deploy.store.publish import Workspace


class Source(Protocol):
    """One model that can be put into the store."""

    def same_as(self, manifest: Manifest) -> bool:
        """Whether the stored model of this manifest is the one that this source would give. Asks
        no network."""

    def fill(self, workspace: Workspace, progress: Progress) -> str:
        """Makes the model's files in ``workspace.model`` and returns where they came from, for the
        manifest. Raises StoreError or OSError; what it leaves behind does not matter."""
