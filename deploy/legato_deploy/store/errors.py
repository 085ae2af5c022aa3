"""The one exception of the model store, and how operating-system errors become it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StoreError(Exception):
    """The store could not do what was asked, and is as whole as before.

    The text is for people: what happened, and what to do next.
    """


@contextmanager
def readable_os_errors(root: Path) -> Iterator[None]:
    """Turns an OSError of the block into a StoreError that says what to do about it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"Free some space under {root}, or set LEGATO_HOME to a folder on another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"Check that you may read the model and write {root} (LEGATO_HOME changes it)"
        else:
            advice = f"Check {root} and its disk"
        raise StoreError(
            f"{reason}{where}. Nothing was stored. {advice}, then pull again."
        ) from error
