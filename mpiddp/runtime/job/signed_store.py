"""The job's store, with a MAC on every value that the ranks act on.

torch's store has no password: every user of a host that reaches its port can read, write and delete keys.
A written exit code or request to stop must not end a job, so each value carries a MAC over its key, the
attempt and itself. What a stranger writes counts as missing.

Only the ranks know the MAC's key. Without one (srun, torchrun and env:// without `mpiddp launch`) the values
are plain, and only their ranges are checked.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

NEWS = "news"  # a key that is set with every other key for which the ranks poll
_MAC_BYTES = 16
_AT_ONCE = 64  # keys of one request; a request for all would be repeated until the last is there
_LARGEST_STEP = 1 << 53


class SignedStore:
    """Strings by key, in `store`. `secret` is the ranks' common secret, "" for plain values."""

    def __init__(self, store: Store, secret: str) -> None:
        self._store = store
        self._secret = secret
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def clone(self) -> SignedStore:
        """The same store over a connection of its own, for another thread."""
        return SignedStore(self._store.clone(), self._secret)  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> str | None:
        """The value; None if there is none, or a stranger has written it. Does not wait."""
        values = self.get_all([key])
        return values[0] if values else None

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        """The values of all keys, None if any is missing. Does not wait."""
        if not self._store.check(list(keys)):
            return None
        stored = self._store.multi_get(list(keys))
        values = [self._verified(key, value) for key, value in zip(keys, stored, strict=True)]
        found = [value for value in values if value is not None]
        return found if len(found) == len(keys) else None

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, str]:
        """The values of the keys, once all are set or the timeout has passed; without missing ones.

        Polls, because the store's own wait() logs its timeouts on stderr.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[str, str] = {}
        for first in range(0, len(keys), _AT_ONCE):
            part = keys[first : first + _AT_ONCE]
            pause_s = 0.001
            while (values := self.get_all(part)) is None and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
            if values is not None:
                found.update(zip(part, values, strict=True))
            else:
                each = {key: self.get(key) for key in part}
                found.update({key: value for key, value in each.items() if value is not None})
        return found

    def set_if_missing(self, key: str, value: str) -> str:
        """Set the value unless a rank has set one, and return the one that counts."""
        signed = self._signed(key, value)
        current = self._store.compare_set(key, "", signed)
        valid = self._verified(key, current)
        if valid is None:
            self._store.set(key, signed)
        return value if valid is None else valid

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _signed(self, key: str, value: str) -> str:
        return self._mac(key, value) + value

    def _verified(self, key: str, stored: bytes) -> str | None:
        try:
            text = stored.decode()
        except UnicodeDecodeError:
            return None
        length = 2 * _MAC_BYTES if self._secret else 0
        mac, value = text[:length], text[length:]
        return value if hmac.compare_digest(mac.encode(), self._mac(key, value).encode()) else None

    def _mac(self, key: str, value: str) -> str:
        if not self._secret:
            return ""
        text = f"{len(key)} {key} {self._attempt} {value}"
        secret = self._secret.encode()
        return blake2b(text.encode(), key=secret, digest_size=_MAC_BYTES).hexdigest()


def whole_number(value: str | None, low: int, high: int = _LARGEST_STEP) -> int | None:
    """The number of a value within [low, high], None for any other text."""
    if value is None or not (value.isascii() and value.isdigit() and len(value) <= 16):
        return None
    return int(value) if low <= int(value) <= high else None
