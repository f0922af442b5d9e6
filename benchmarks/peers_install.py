"""Environments of the peers of `peers.py`: one per peer in the cache folder, never in the checkout, versions pinned.

A peer gets its own packages without dependencies; torch and transformers are the ones of the environment that runs the
benchmark, so that all Hugging Face arms run the same kernels. Wheels only: nothing is compiled.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

STAMP = ".installed"


class NotInstalled(Exception):
    """A peer cannot be had here; the message is the reason that the report shows."""


def environment(cache: Path, requirement: str, *, shares_torch: bool) -> Path:
    """The interpreter of a peer's own environment, made if it is not there.

    Args:
        cache: folder of all peers' environments.
        requirement: what to install, pinned with ``==``.
        shares_torch: whether it also sees the packages of the environment that runs this, behind its own.

    Raises:
        NotInstalled: pip found no wheel for this platform, or cannot reach a registry.
    """
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache / f"{requirement.replace('==', '-')}-{version}"
    python = folder / "bin" / "python"
    stamp = f"{requirement} {sys.executable} {shares_torch}"
    if python.exists() and (folder / STAMP).is_file() and (folder / STAMP).read_text() == stamp:
        return python
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    if shares_torch:
        inside = next((folder / "lib").glob("python*/site-packages"))
        (inside / "benchmark.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _pip(python, requirement)
    (folder / STAMP).write_text(stamp)
    return python


def _pip(python: Path, requirement: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", requirement], check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:].strip()]
        raise NotInstalled(f"not installed: pip found no usable wheel of {requirement} ({said[-1]})")
