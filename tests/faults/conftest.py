"""What all fault tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a chat template."""
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")
