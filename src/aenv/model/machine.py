"""What a virtual machine is made of."""

from __future__ import annotations

from pathlib import Path

import msgspec


class MachineShape(msgspec.Struct, frozen=True):
    """Size of a machine: ``memory`` and ``disk`` in MiB."""

    vcpus: int
    memory: int
    disk: int


class KernelImage(msgspec.Struct, frozen=True):
    """A guest kernel, unpacked on this node; part of the identity of every template made with it.

    ``version`` is the kernel release (``6.1.0-40-cloud-amd64``), ``digest`` the sha256 (hex) over the digests of
    all files. ``bzimage`` is for QEMU, ``vmlinux`` (ELF) for Firecracker; ``modules`` is a read-only ext4 image of
    ``/lib/modules``.
    """

    version: str
    digest: str
    bzimage: Path
    vmlinux: Path
    initramfs: Path
    modules: Path
