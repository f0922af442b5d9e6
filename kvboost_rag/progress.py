"""Progress bars: on request, and only where somebody sees them."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook


def visible() -> bool:
    """Whether a bar would be seen: in a notebook, or if standard error is a terminal."""
    return issubclass(tqdm, tqdm_notebook) or sys.stderr.isatty()


def progress(what: str, total: int | None, *, unit: str, show: bool) -> tqdm[Any]:
    """A bar on standard error; without somebody to see it, a log would fill with its pieces."""
    return tqdm(total=total, desc=what, unit=unit, disable=not (show and visible()))
