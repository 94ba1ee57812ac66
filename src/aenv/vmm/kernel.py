"""Guest kernels: a Debian cloud kernel, unpacked, with an initramfs around ``aenv-envd``.

``<home>/kernels/<release>/`` holds what one release needs, and ``manifest.json`` names it. The initramfs contains
``aenv-envd``; when that program changes, a new initramfs is written beside the old one, which stays for machines that
are just starting, and the manifest is replaced.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import NotFound, OperationFailed, SetupError
from aenv.model import KernelImage
from aenv.programs import own_program
from aenv.vmm import cpio, debian, durable, ext4, modules, vmlinux
from aenv.vmm.durable import Progress

_MANIFEST = "manifest.json"
# Raised when the way these files are made changes, so that older ones are made again.
_FORMAT = 1
# Initramfs files of older agents that are kept, beside the current one.
_OLD_INITRAMFS = 2

# Emulation by QEMU 7.2 crashes 6.12 kernels in one boot of twenty; from QEMU 10 on 6.12 is clean, and it has VMGENID.
_SERIES = {"6.1": "bookworm", "6.12": "trixie"}


class Manifest(msgspec.Struct, frozen=True):
    """``files`` maps file names to sha256 (hex). ``package`` is the Debian version and ``package_digest`` the sha256 of
    the .deb; ``agent`` (sha256) and ``early`` (file names, in loading order) say what is in the initramfs."""

    format: int
    version: str
    series: str
    package: str
    package_digest: str
    initramfs: str
    agent: str
    early: tuple[str, ...]
    files: dict[str, str]


def series_for(qemu_version: tuple[int, int]) -> str:
    return "6.1" if qemu_version < (10, 0) else "6.12"


def ensure_kernel(
    settings: Settings, qemu_version: tuple[int, int], progress: Progress, *, refresh: bool = False
) -> KernelImage:
    """The newest kernel of the series that suits ``qemu_version``; Firecracker counts as (10, 0).

    One that is already in the home is used without asking the network, unless ``refresh`` is true. Blocks, for a
    minute or more when something is to be fetched. Safe to call from several processes: the second waits, then finds
    the work done. Raises SetupError (missing tools, network), DiskFull, OperationFailed; nothing half-done stays.
    """
    series = series_for(qemu_version)
    directory = settings.home / "kernels"
    with durable.lock(directory / ".ensure", lambda: progress("waiting for another process to prepare the kernel")):
        installed = [manifest for manifest in _manifests(directory, progress) if manifest.series == series]
        if installed and not refresh:
            manifest = max(installed, key=lambda manifest: _release_key(manifest.version))
        else:
            manifest = _install(settings, series, progress)
        manifest = _current_agent(directory / manifest.version, manifest, progress)
        return _image(directory / manifest.version, manifest)


def load_kernel(settings: Settings, version: str) -> KernelImage:
    """The kernel of release ``version`` as it is in the home; NotFound if it is not there."""
    if re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+~_-]*", version) is None:
        raise NotFound(f"{version!r} is not a kernel release")
    directory = settings.home / "kernels" / version
    return _image(directory, _read(directory))


def _manifests(directory: Path, progress: Progress) -> list[Manifest]:
    found = []
    for path in directory.glob(f"*/{_MANIFEST}"):
        if not path.parent.name.startswith("."):
            try:
                manifest = _read(path.parent)
            except OperationFailed as error:
                progress(f"{error.message}; it is not used")
                continue
            if manifest.format == _FORMAT:
                found.append(manifest)
    return found


def _read(directory: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise NotFound(f"the guest kernel {directory.name} is not on this node", remedy="run `aenv setup`") from error
    except (OSError, msgspec.DecodeError) as error:
        raise OperationFailed(
            f"the guest kernel {directory} is damaged: {error}", remedy=f"rm -r {directory}, then run `aenv setup`"
        ) from error
    missing = [name for name in manifest.files if not (directory / name).is_file()]
    if missing:
        raise OperationFailed(
            f"the guest kernel {directory} is damaged: {', '.join(missing)} missing",
            remedy=f"rm -r {directory}, then run `aenv setup`",
        )
    return manifest


def _release_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _image(directory: Path, manifest: Manifest) -> KernelImage:
    # mke2fs leaves the time and chance in the modules image, so what it was made from stands for it here: nodes that
    # have the same package and agent agree on the digest.
    digests = {name: digest for name, digest in manifest.files.items() if name != "modules.ext4"}
    digests["package"] = manifest.package_digest
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return KernelImage(
        version=manifest.version,
        digest=hashlib.sha256(lines.encode()).hexdigest(),
        bzimage=directory / "bzImage",
        vmlinux=directory / "vmlinux",
        initramfs=directory / manifest.initramfs,
        modules=directory / "modules.ext4",
    )


def _install(settings: Settings, series: str, progress: Progress) -> Manifest:
    release = _SERIES[series]
    archive = debian.Archive(debian.sources(settings, (release, f"{release}-security")), progress)
    with durable.lock(archive.lock, lambda: progress("waiting for another process to fetch packages")):
        archive.update()
        try:
            package, version = _newest(archive, series)
            deb = archive.download(package, version)
        except SetupError:
            # The mirror may have dropped what a day-old index names.
            archive.update(force=True)
            package, version = _newest(archive, series)
            deb = archive.download(package, version)
    directory = settings.home / "kernels"
    name = package.removeprefix("linux-image-")
    final = directory / name
    for manifest in _manifests(directory, progress):
        if (manifest.version, manifest.package) == (name, version):
            return manifest
    progress(f"preparing the guest kernel {name}")
    with durable.staging(directory) as staging:
        manifest = _build(staging, deb, name, series, version)
        shutil.rmtree(staging / "package")
        durable.write(staging / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        staging.chmod(0o755)
        durable.remove_tree(final)
        durable.publish(staging, final)
    return manifest


def _newest(archive: debian.Archive, series: str) -> tuple[str, str]:
    """Name and version of the kernel package behind the meta package."""
    depends = archive.candidate("linux-image-cloud-amd64").get("depends", "")
    match = re.search(r"(linux-image-(\d+\.\d+)[^ ,]*-cloud-amd64) \(= ([^ )]+)\)", depends)
    if match is None or match.group(2) != series:
        raise SetupError(f"the mirror has no {series} cloud kernel (linux-image-cloud-amd64 depends on {depends!r})")
    return match.group(1), match.group(3)


def _build(directory: Path, deb: Path, name: str, series: str, version: str) -> Manifest:
    package = directory / "package"
    package.mkdir()
    debian.unpack(deb, package)
    if not (package / "lib").exists():
        # Newer packages carry the merged layout; depmod looks below /lib.
        (package / "lib").symlink_to("usr/lib")
    tree = package / "lib" / "modules"
    boot = package / "boot" / f"vmlinuz-{name}"
    if not boot.is_file() or not (tree / name).is_dir():
        raise OperationFailed(f"the package {deb.name} does not hold the kernel {name}")
    modules.index(package, name)
    bzimage = boot.read_bytes()
    # QEMU opens its kernel by itself, under its own account.
    durable.write(directory / "bzImage", bzimage)
    durable.write(directory / "vmlinux", vmlinux.extract(bzimage))
    ext4.read_only_image(directory / "modules.ext4", tree, "aenv-modules")
    (directory / "early").mkdir()
    early = []
    for file_name, data in modules.early(tree / name):
        (directory / "early" / file_name).write_bytes(data)
        early.append(file_name)
    agent = own_program("aenv-envd").read_bytes()
    initramfs = _write_initramfs(directory, tuple(early), agent)
    files = ["bzImage", "vmlinux", "modules.ext4", initramfs, *(f"early/{file_name}" for file_name in early)]
    return Manifest(
        format=_FORMAT,
        version=name,
        series=series,
        package=version,
        package_digest=durable.sha256(deb),
        initramfs=initramfs,
        agent=hashlib.sha256(agent).hexdigest(),
        early=tuple(early),
        files={file: durable.sha256(directory / file) for file in files},
    )


def _current_agent(directory: Path, manifest: Manifest, progress: Progress) -> Manifest:
    agent = own_program("aenv-envd").read_bytes()
    digest = hashlib.sha256(agent).hexdigest()
    if digest == manifest.agent:
        return manifest
    progress("updating the agent in the initramfs")
    initramfs = _write_initramfs(directory, manifest.early, agent)
    files = {name: value for name, value in manifest.files.items() if name != manifest.initramfs}
    files[initramfs] = durable.sha256(directory / initramfs)
    manifest = msgspec.structs.replace(manifest, initramfs=initramfs, agent=digest, files=files)
    durable.write(directory / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    others = [path for path in directory.glob("initramfs-*.img") if path.name != initramfs]
    for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[_OLD_INITRAMFS:]:
        old.unlink(missing_ok=True)
    return manifest


def _write_initramfs(directory: Path, early: tuple[str, ...], agent: bytes) -> str:
    """Write the initramfs into ``directory`` and return its name, which is derived from its content."""
    modules_ = [(name, (directory / "early" / name).read_bytes()) for name in early]
    data = initramfs(agent, modules_)
    name = f"initramfs-{hashlib.sha256(data).hexdigest()[:16]}.img"
    durable.write(directory / name, data)
    return name


def initramfs(agent: bytes, early: list[tuple[str, bytes]]) -> bytes:
    """The archive: ``/init``, the modules and their list, and the directories and nodes ``/init`` starts with.

    Not compressed: unpacking costs the guest more than reading.
    """
    if not agent.startswith(b"\x7fELF"):
        raise SetupError(
            "aenv-envd is not a program", remedy="run `make setup` in a checkout, or reinstall the package"
        )
    names = ("dev", "proc", "sys", "run", "tmp", "newroot", "modules")
    entries = [cpio.directory(name, 0o1777 if name == "tmp" else 0o755) for name in names]
    entries += [cpio.character_device("dev/console", 5, 1), cpio.character_device("dev/null", 1, 3, 0o666)]
    entries.append(cpio.Entry("init", stat.S_IFREG | 0o755, agent))
    entries.append(cpio.file("modules.list", "".join(f"/modules/{name}\n" for name, _ in early).encode()))
    entries += [cpio.file(f"modules/{name}", data) for name, data in early]
    return cpio.archive(entries)
