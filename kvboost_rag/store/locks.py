"""Locks on files that the system gives back when their holder dies, however it dies."""

from __future__ import annotations

import importlib
import os
import secrets
from pathlib import Path
from typing import Any

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None


def share(fd: int) -> bool:
    """Say that an open file is being read: `lock_alone` fails elsewhere until every copy of ``fd`` is closed.

    Returns:
        False if somebody has it alone.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def lock_alone(fd: int) -> bool:
    """Take an open file for oneself if nobody else has it; True where the system knows no such locks."""
    if fcntl is None:
        return True  # Windows lets nobody rename or remove what is mapped
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class OwnerLock:
    """A file that is locked as long as its owner lives: how others tell a dead writer from a slow one.

    Args:
        folder: of all owners.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        while True:
            self.path = folder / secrets.token_hex(8)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            # Between the two steps somebody may have taken it for a dead owner's.
            if lock_alone(self._fd) and self.path.exists():
                return
            os.close(self._fd)

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            self.abandon()

    def abandon(self) -> None:
        """Close a copy of the lock that came through a fork; the parent keeps its own."""
        fd, self._fd = self._fd, -1
        os.close(fd)


def is_dead(path: Path) -> bool:
    """Whether the owner of a lock file is gone; its file is removed then."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # another user's, or too many open files: who cannot be asked may live
        return False
    try:
        if fcntl is not None and not lock_alone(fd):
            return False
        path.unlink(missing_ok=True)  # Windows refuses while the owner has it open
    except PermissionError:
        return False
    finally:
        os.close(fd)
    return True
