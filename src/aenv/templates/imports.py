"""Templates from what somebody else made: a directory or a tar archive of a root file system."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from aenv.config import Settings
from aenv.errors import BadRequest
from aenv.model import KernelImage, MachineShape, Template, new_template_id
from aenv.templates import rootfs
from aenv.templates.store import TemplateStore
from aenv.vmm import durable
from aenv.vmm.durable import Progress

IMAGE = "rootfs.ext4"
MIN_DISK = 16


def import_template(
    settings: Settings,
    source: Path,
    name: str,
    shape: MachineShape,
    kernel: KernelImage,
    progress: Progress,
    *,
    user: bool = True,
    workdir: str = "",
    env: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Template:
    """Make the template ``name`` from ``source``, a directory or a tar archive (plain, gzip, xz, zstd).

    ``user`` adds the account ``user`` (uid 1000 if free, sudo without password where there is sudo) and makes it the
    default; else commands run as root. ``replace`` takes the name from a template that has it. Blocks; safe beside a
    running server. Raises BadRequest, Conflict, DiskFull, SetupError; on any error nothing stays.
    """
    rootfs.require_root()
    if shape.disk < MIN_DISK:
        raise BadRequest(f"a disk of {shape.disk} MiB is too small", remedy=f"ask for at least {MIN_DISK} MiB")
    store = TemplateStore(settings)
    template = new_template(name, shape, kernel, user="user" if user else "root", workdir=workdir, env=env)
    if not replace:
        store.check_free(template.names)
    with store.building() as directory:
        workspace = directory / "work"
        workspace.mkdir(mode=0o700)
        rootfs.build(directory / IMAGE, source, shape.disk, progress, workspace=workspace, user=user)
        durable.remove_tree(workspace)
        return store.add(directory, template, replace=replace)


def new_template(
    name: str,
    shape: MachineShape,
    kernel: KernelImage,
    *,
    user: str,
    workdir: str = "",
    env: Mapping[str, str] | None = None,
) -> Template:
    """The record of a template that is made now."""
    return Template(
        template_id=new_template_id(),
        build_id=str(uuid.uuid4()),
        names=(name,),
        shape=shape,
        kernel=kernel.version,
        kernel_digest=kernel.digest,
        rootfs=IMAGE,
        created_at=datetime.now(UTC),
        user=user,
        workdir=workdir,
        env=dict(env or {}),
    )
