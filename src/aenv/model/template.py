"""A template: what sandboxes start from."""

from __future__ import annotations

from datetime import datetime

import msgspec

from aenv.model.machine import MachineShape


class Template(msgspec.Struct, frozen=True):
    """``rootfs`` is the file name of the root file system inside the template's directory, ``kernel`` the release of
    the guest kernel it was made with. ``user`` and ``workdir`` are the defaults of commands; an empty ``workdir`` is
    the home directory of the user."""

    template_id: str
    build_id: str
    names: tuple[str, ...]
    shape: MachineShape
    kernel: str
    kernel_digest: str
    rootfs: str
    created_at: datetime
    user: str = "user"
    workdir: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
