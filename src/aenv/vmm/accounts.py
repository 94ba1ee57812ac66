"""The accounts that VMMs run as: one each.

A guest that broke out of its VMM is still a process like any other, and may do to processes of its own account what it
likes: trace them, read their memory, kill them. So no two VMMs that run at the same time share an account. Nothing on
disk belongs to these accounts, so nothing has to be kept about them: one is free if no process has it.
"""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv.errors import SetupError, VmmFailed
from aenv.vmm.process import Account

COUNT = 1024  # accounts from a number on; from 61380 they end below 65536, like the user namespaces of containers


class Accounts:
    """Accounts to choose from. Several control planes on one machine may share them."""

    def __init__(self, accounts: list[Account]) -> None:
        self._accounts = accounts
        self._claimed: set[int] = set()

    @classmethod
    def of(cls, user: str, groups: tuple[int, ...] = ()) -> Accounts:
        """For the setting ``vmm.user``: a number is the first of COUNT accounts, none of which needs an entry in
        /etc/passwd; a name is the only one, which all VMMs then share. Each has the supplementary ``groups``.
        SetupError if there is no such user, or if it is root."""
        if user.isascii() and user.isdigit() and len(user) < 10:
            first = int(user)
            found = [Account(number, number, groups) for number in range(first, first + COUNT)]
        else:
            try:
                entry = pwd.getpwnam(user)
            except (KeyError, ValueError):
                raise SetupError(
                    f"there is no user {user[:80]!r} to run virtual machines as",
                    remedy="set vmm.user to a name or a number",
                ) from None
            found = [Account(entry.pw_uid, entry.pw_gid, groups)]
        if any(account.uid == 0 or account.gid == 0 for account in found):
            raise SetupError(f"virtual machines must not run as {user!r}", remedy="set vmm.user to another account")
        return cls(found)

    @contextmanager
    def claim(self) -> Iterator[Account]:
        """One that no process has. Whoever starts a process with it must hold the claim until the process has become
        that account; from then on the process itself is the claim."""
        account = self._choose()
        self._claimed.add(account.uid)
        try:
            yield account
        finally:
            self._claimed.discard(account.uid)

    def _choose(self) -> Account:
        if len(self._accounts) == 1:
            return self._accounts[0]
        taken = self._claimed | _users()
        free = [account for account in self._accounts if account.uid not in taken]
        if not free:
            raise VmmFailed(f"all {len(self._accounts)} accounts for virtual machines are in use")
        # Not the first: another control plane may be choosing at this very moment.
        return secrets.choice(free)


def _users() -> set[int]:
    """The user ids of all processes."""
    found = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                try:
                    found.add(Path(entry.path).stat().st_uid)
                except FileNotFoundError:
                    continue
    return found
