"""The model store: ``legato pull`` and everything that finds a model by name."""

from legato_deploy.store.catalogue import CATALOGUE, CatalogueEntry
from legato_deploy.store.errors import StoreError
from legato_deploy.store.model_store import ModelStore, StoredModel, default_root
from legato_deploy.store.progress import Progress, console_progress
from legato_deploy.store.pull import pull

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "ModelStore",
    "Progress",
    "StoreError",
    "StoredModel",
    "console_progress",
    "default_root",
    "pull",
]
