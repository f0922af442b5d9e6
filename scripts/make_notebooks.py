"""Make the notebooks in `examples/` from the scripts beside them, which are the one source.

    python scripts/make_notebooks.py

A notebook has the cells of its script, no outputs and no execution counts, and ids that do not change from run to run.
"""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HELPER = "shared.py"  # imported by the others
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """The scripts that have a notebook."""
    return sorted(path for path in EXAMPLES.glob("*.py") if path.name != HELPER)


def notebook_of(script: Path) -> str:
    """The text of a script's notebook."""
    notebook = jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{script.stem}-{number}"
        cell.metadata = nbformat.from_dict({})
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    """Write them all."""
    for script in scripts():
        script.with_suffix(".ipynb").write_text(notebook_of(script), encoding="utf-8")


if __name__ == "__main__":
    main()
