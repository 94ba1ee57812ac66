"""Every error the product raises on purpose.

::

    AenvError
    ├── BadRequest           400   the caller said something wrong
    ├── Unauthorized         401
    ├── NotFound             404
    ├── Conflict             409   the object is in another state
    ├── TooManyRequests      429
    ├── OperationFailed      500   something that should have worked did not
    │   ├── GuestFailed            the guest did not boot, or stopped answering
    │   └── VmmFailed              QEMU or Firecracker refused, crashed or hung
    ├── Unavailable          503   try again later
    ├── DiskFull             507
    └── SetupError           500   the machine lacks something; says which command repairs it

An error says what was attempted, on what, why it failed, and what the reader can do. ``status`` is the
HTTP status it has on the wire, where it is sent as ``{"code": status, "message": str(error)}``.
"""

from __future__ import annotations

from typing import ClassVar


class AenvError(Exception):
    """Base of the tree. ``remedy`` is a sentence for the person who has to do something about it."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class BadRequest(AenvError):
    status = 400


class Unauthorized(AenvError):
    status = 401


class NotFound(AenvError):
    status = 404


class Conflict(AenvError):
    status = 409


class TooManyRequests(AenvError):
    status = 429


class OperationFailed(AenvError):
    status = 500


class GuestFailed(OperationFailed):
    """The guest did not boot, or its agent stopped answering."""


class VmmFailed(OperationFailed):
    """The VMM refused a command, crashed or hung."""


class Unavailable(AenvError):
    status = 503


class DiskFull(AenvError):
    status = 507


class SetupError(AenvError):
    """The machine lacks something this program needs."""
