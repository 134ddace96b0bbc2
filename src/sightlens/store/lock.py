"""One writer per folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from sightlens.errors import StoreError


def unusable(folder: Path, error: OSError | ValueError) -> StoreError:
    """Return the error for a folder that the system will not let us read or write."""
    return StoreError("a folder that can be read and written", f"{folder}: {error}", "Choose another place for the store.")


class WriterLock:
    """Holds a folder for one process.

    The lock is the operating system's, so it ends with the process that holds it, however that process ends; the file
    beside it only says who that is.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            StoreError: when a living process holds it, or the folder cannot be written to.
        """
        self._lock = FileLock(str(folder / ".lock"), is_singleton=False)
        writer = folder / ".writer"
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            who = writer.read_text(encoding="utf-8") if writer.is_file() else "another process"
            do = "Wait until it is done, stop it, close() the other store, or use another folder."
            raise StoreError(f"to be the only writer of {folder}", f"a store held by {who}", do) from error
        except OSError as error:
            raise unusable(folder, error) from error
        try:
            writer.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        except OSError as error:
            self._lock.release()
            raise unusable(folder, error) from error

    def release(self) -> None:
        """Let another writer in."""
        self._lock.release()
