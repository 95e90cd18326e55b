"""How many tokens a vocabulary may have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# More than there are characters in Unicode, and 40 times GPT-2's.
LARGEST = 1 << 21
Vocabulary = Annotated[int, Field(ge=1, le=LARGEST)]
