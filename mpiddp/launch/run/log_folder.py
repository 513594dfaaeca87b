"""The files of a launch in --log-dir on its own host: records, mpirun's output, the stderr of all ranks.

    logs/launch_2026-11-29_11.40.05_4711/    attempt_1.jsonl    mpirun.log    rank_00003.err

A thread writes the files, because a disk may hang. Then text is lost, and the job goes on.
"""

from __future__ import annotations

import threading
from pathlib import Path

from mpiddp.launch import log

_MOST_UNWRITTEN = 64 << 20  # bytes; any more text is lost
_TOGETHER_S = 0.1  # the thread writes the texts of this time together
_PATIENCE_S = 3.0  # at the end, with a disk that writes nothing


class LogFolder:
    """The folder of one launch. It is made if it does not exist.

    The first complaint waits in `complaints` for the thread that owns the screen, else for `close`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.complaints: list[str] = []
        self.complains = True  # at the end; False if the ranks have said why
        self._lock = threading.Lock()
        self._texts: dict[str, bytearray] = {}  # by the names of their files
        self._unwritten = 0  # bytes
        self._has_gap = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def add(self, name: str, text: bytes) -> None:
        """Append a text to the file of this name, soon."""
        with self._lock:
            if self._unwritten > _MOST_UNWRITTEN:
                self._has_gap = True
                return
            self._texts.setdefault(name, bytearray()).extend(text)
            self._unwritten += len(text)

    def close(self) -> None:
        """Return when everything is written, or when the disk has written nothing for some seconds."""
        self._is_over.set()
        before = -1
        while self._thread.is_alive() and self._unwritten != before:
            before = self._unwritten
            self._thread.join(_PATIENCE_S)
        if self._thread.is_alive() or self._has_gap:
            self.complaints.append(
                f"{self._folder} is too slow for the logs, so some of their lines are lost."
            )
        for sentence in self.complaints if self.complains else ():
            log.error(sentence)

    def _write(self) -> None:
        has_complained = is_over = False
        while not is_over:
            is_over = self._is_over.wait(_TOGETHER_S)
            with self._lock:
                texts, self._texts = self._texts, {}
            for name, text in texts.items():
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    with (self._folder / name).open("ab") as file:
                        file.write(text)
                except (
                    OSError
                ) as error:  # a full disk may have room again, and a file server come back
                    if not has_complained:
                        self.complaints.append(
                            f"{error.filename or name}: {error.strerror}. Its log has a gap."
                        )
                    has_complained = True
                with self._lock:
                    self._unwritten -= len(text)
