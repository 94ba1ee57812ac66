"""One account for each VMM."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack

import pytest

from aenv.errors import SetupError, VmmFailed
from aenv.vmm.accounts import COUNT, Accounts
from aenv.vmm.process import Account

FEW = [Account(number, number) for number in range(48123, 48127)]


def test_claims_never_share_an_account() -> None:
    accounts = Accounts(FEW)
    with ExitStack() as stack:
        claimed = [stack.enter_context(accounts.claim()) for _ in FEW]
        assert {it.uid for it in claimed} == {it.uid for it in FEW}
        with pytest.raises(VmmFailed, match="all 4 accounts"), accounts.claim():
            pass
    with accounts.claim() as again:
        assert again in FEW


def test_an_account_that_a_process_has_is_taken() -> None:
    children = [
        subprocess.Popen(["setpriv", f"--reuid={it.uid}", "sh", "-c", "echo; exec sleep 100"], stdout=subprocess.PIPE)
        for it in FEW[:3]
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for _ in range(20):
            with Accounts(FEW).claim() as free:
                assert free == FEW[3]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_number_is_the_first_of_many() -> None:
    accounts = Accounts.of("61380", groups=(107,))
    with accounts.claim() as first, accounts.claim() as second:
        assert first != second
        for it in (first, second):
            assert 61380 <= it.uid < 61380 + COUNT < 65536
            assert it.gid == it.uid
            assert it.groups == (107,)


def test_a_name_is_one_account_for_all() -> None:
    accounts = Accounts.of("nobody")
    with accounts.claim() as first, accounts.claim() as second:
        assert first == second
        assert first.uid == 65534


@pytest.mark.parametrize(
    "user", ["0", "root", "00", "nobody-of-that-name", "4294967295", "-1", "99999999999", "", "\u0663", "a\0b"]
)
def test_users_that_are_refused(user: str) -> None:
    with pytest.raises(SetupError, match=r"vmm\.user"):
        Accounts.of(user)
