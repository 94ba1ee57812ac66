"""ext4 images made from a directory, without mounting anything."""

from __future__ import annotations

import os
from pathlib import Path

from aenv.errors import BadRequest, DiskFull, OperationFailed
from aenv.programs import system_program
from aenv.vmm import command

MIB = 1 << 20
_BLOCK = 4096

# Spelled out, and the host's mke2fs.conf ignored: an image must not differ with the distribution of the host, and every
# guest kernel since 6.1 has to mount it.
_FEATURES = (
    "none,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,"
    "extra_isize,metadata_csum,resize_inode"
)


def read_only_image(image: Path, root: Path, label: str) -> None:
    """Make ``image`` as small as fits the content of the directory ``root``. No journal: nobody writes to it."""
    blocks, inodes = _usage(root)
    # Inode tables, directory and extent blocks, bitmaps, and the slack mke2fs needs to place them.
    size = (blocks * _BLOCK + (inodes + 32) * 256) * 103 // 100 + 2 * MIB
    features = _FEATURES.replace(",resize_inode", "") + ",^has_journal"
    _mke2fs(image, size, root, label, features, ["-N", str(inodes + 32), "-E", "root_owner=0:0,nodiscard"])


def writable_image(image: Path, root: Path, size: int, label: str) -> None:
    """Make ``image`` a sparse file of ``size`` MiB with the content of the directory ``root``.

    It has a small journal: a guest may be cut off at any time and must mount what is left without a check. The image
    holds little more than its content, and a guest that mounts it writes nothing by itself. BadRequest if the content
    does not fit.
    """
    needed, inodes = _usage(root)
    if needed * _BLOCK > size * MIB or inodes > size * MIB // 16384:
        raise _too_small(needed * _BLOCK // MIB, size)
    journal = 16 if size >= 512 else 4
    features = _FEATURES + ",has_journal"
    options = ["-J", f"size={journal}", "-i", "16384"]
    # The discard makes mke2fs know that the file reads as zeros: inode tables are then neither written here nor, which
    # would be 16 MiB for each GiB of disk in every sandbox, cleared by the guest's kernel.
    options += ["-E", "root_owner=0:0,discard,lazy_itable_init=1,lazy_journal_init=1"]
    try:
        _mke2fs(image, size * MIB, root, label, features, options)
    except OperationFailed as error:
        if "Could not allocate" in str(error):
            raise _too_small(needed * _BLOCK // MIB, size) from error
        raise


def _too_small(needed: int, size: int) -> BadRequest:
    return BadRequest(
        f"the content needs about {needed} MiB and the disk of the template has {size} MiB",
        remedy="ask for a larger disk",
    )


def _mke2fs(image: Path, size: int, root: Path, label: str, features: str, options: list[str]) -> None:
    blocks = -(-size // _BLOCK)
    try:
        with image.open("wb") as file:
            os.truncate(file.fileno(), blocks * _BLOCK)
        program = system_program("mke2fs", "e2fsprogs")
        argv: list[str | Path] = [program, "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-I", "256", "-m", "0"]
        argv += ["-L", label, "-O", features, *options, "-d", root, image, str(blocks)]
        command.run(argv, f"make the disk image {image.name}", timeout=1800, environ={"MKE2FS_CONFIG": "/dev/null"})
    except BaseException:
        image.unlink(missing_ok=True)
        raise
    # mke2fs reports a short write of the host only as a warning.
    if os.statvfs(image.parent).f_bavail == 0:
        image.unlink()
        raise DiskFull(f"the disk of {image.parent} is full", remedy="free some space, then try again")


def _usage(root: Path) -> tuple[int, int]:
    """Blocks and inodes that the content of ``root`` takes; hard links count once."""
    blocks = 0
    seen: set[tuple[int, int]] = set()
    for directory, names, files in os.walk(root):
        blocks += 1
        for name in names + files:
            status = os.lstat(os.path.join(directory, name))  # noqa: PTH118 - a Path each is half of the time
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                blocks += -(-min(status.st_size, status.st_blocks * 512 + _BLOCK) // _BLOCK)
    return blocks, len(seen) + 1
