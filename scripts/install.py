"""Make the environment: a virtual environment with the package, its extras and the development tools.

    python scripts/install.py --venv .venv [pip arguments…]

On Linux the default torch wheel of the package registry is the CUDA build, several gigabytes. Where no NVIDIA GPU is
found, the resolution is looked at first and refused if it would bring CUDA; the message says how to choose the CPU
build. Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINIMUM = (3, 11)
CPU_HELP = """\
error: pip would install the CUDA build of torch ({packages}: several gigabytes), and this machine shows no NVIDIA GPU.
Choose PyTorch's CPU build: pytorch.org's install page (Linux, Pip, CPU) shows an --index-url; hand it to make as
    make {goal} PIP_ARGS="--extra-index-url <that address>"
To install the CUDA build all the same: KVBOOST_ALLOW_CUDA=1 make {goal}"""


def main(arguments: list[str] | None = None) -> int:
    """Make the environment, or say why not."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--venv", default=".venv")
    options, pip_arguments = parser.parse_known_args(arguments)
    if sys.version_info < MINIMUM:
        print(
            f"error: Python {sys.version.split()[0]} is too old, {'.'.join(map(str, MINIMUM))} or later is needed; "
            "name another interpreter: make PYTHON=python3.12 …",
            file=sys.stderr,
        )
        return 1
    try:
        python = make_environment(Path(options.venv))
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"error: no environment can be made in {options.venv}: {error}; on Debian and Ubuntu install python3-venv",
            file=sys.stderr,
        )
        return 1
    constraints = ["-c", str(ROOT / "constraints.txt"), *pip_arguments]
    packages = [] if allows_cuda() else cuda_packages(python, constraints)
    if packages:
        print(CPU_HELP.format(packages=", ".join(packages[:3]), goal="demo"), file=sys.stderr)
        return 1
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # somebody who waits wants to see that something happens
    command = [python, "-m", "pip", "install", *quiet, *constraints, "-e", f"{ROOT}[all,dev]"]
    print("installing the package and its tools, this takes a few minutes the first time", file=sys.stderr)
    return subprocess.run(command, check=False).returncode


def make_environment(folder: Path) -> str:
    """The interpreter of the environment in `folder`, made if it is missing."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True, clear=folder.is_dir())
    return str(python)


def allows_cuda() -> bool:
    """Whether the CUDA build may come: asked for, not Linux (where wheels have none), or there is an NVIDIA GPU."""
    wanted = os.environ.get("KVBOOST_ALLOW_CUDA", "") not in {"", "0"}
    return (
        wanted
        or sys.platform != "linux"
        or Path("/proc/driver/nvidia/version").exists()
        or bool(shutil.which("nvidia-smi"))
    )


def cuda_packages(python: str, constraints: list[str]) -> list[str]:
    """CUDA packages that installing torch would bring; pip only resolves, nothing is installed.

    An old pip without `--report` gives none: then the install simply runs.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--report",
            str(report),
            "--only-binary=:all:",
        ]
        done = subprocess.run([*command, *constraints, "torch"], check=False, capture_output=True, text=True)
        if done.returncode or not report.is_file():
            return []
        names = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    return sorted(name for name in names if re.match(r"(nvidia|cuda)[-_]", name, re.IGNORECASE))


if __name__ == "__main__":
    sys.exit(main())
