"""A user without a home folder, as in a container whose user id is not in /etc/passwd."""

from __future__ import annotations

import pwd

import pytest


def leave_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset HOME, and hide this user from the table of users."""

    def fail(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", fail)
