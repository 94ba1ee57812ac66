"""Templates on disk: ``<home>/templates/<id>/`` with ``template.json`` and the root file system.

A template is built in a staging directory and appears by one rename, so readers see all of it or nothing. Several
processes may use a store at once; writers take turns. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import BadRequest, Conflict, NotFound, OperationFailed
from aenv.model import Template
from aenv.vmm import durable

_log = logging.getLogger(__name__)
_RECORD = "template.json"
_ID = re.compile(r"[a-z0-9]{1,64}")
_NAME = re.compile(r"[a-z0-9_-]{1,128}(:[a-z0-9_.-]{1,128})?")
_DEFAULT_TAG = ":default"


class TemplateStore:
    """All methods block for the time of a few small file operations. Names are unique; ``name`` and ``name:default``
    are the same name."""

    def __init__(self, settings: Settings) -> None:
        self.directory = settings.home / "templates"

    def list(self) -> list[Template]:
        """Every template, newest first. A damaged one is logged and left out."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if _ID.fullmatch(path.name):
                try:
                    found.append(self._read(path))
                except NotFound:
                    continue  # removed a moment ago
                except OperationFailed as error:
                    _log.warning("%s", error)
        return sorted(found, key=lambda template: (template.created_at, template.template_id), reverse=True)

    def get(self, reference: str) -> Template:
        """The template with this id, ``name`` or ``name:tag``. NotFound if there is none."""
        wanted = reference.lower()
        if _ID.fullmatch(wanted) and (self.directory / wanted / _RECORD).is_file():
            return self._read(self.directory / wanted)
        wanted = wanted.removesuffix(_DEFAULT_TAG)
        for template in self.list():
            if wanted in template.names:
                return template
        raise NotFound(f"the template {reference!r} does not exist", remedy="`aenv template list` shows those that do")

    def rootfs(self, template: Template) -> Path:
        """The image of the root file system; never written to."""
        return self.directory / template.template_id / template.rootfs

    def check_free(self, names: tuple[str, ...]) -> None:
        """Conflict if one of ``names`` is taken, BadRequest if one is none; asked before a long build, not instead of
        the check that ``add`` makes."""
        wanted = set(_checked(names))
        for template in self.list():
            for name in wanted.intersection(template.names):
                raise Conflict(f"the template {name!r} exists already ({template.template_id})")

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """A private directory to build a template in; removed at the end unless ``add`` was called with it."""
        with durable.staging(self.directory) as directory:
            yield directory

    def add(self, directory: Path, template: Template, *, replace: bool = False) -> Template:
        """Make what was built in ``directory`` the ``template``; every other file there but its image must be gone.

        Conflict if one of its names is taken, unless ``replace``: then the older template loses the name.
        """
        if _ID.fullmatch(template.template_id) is None:
            raise BadRequest(f"{template.template_id!r} is not an id of a template")
        template = msgspec.structs.replace(template, names=_checked(template.names))
        if sorted(path.name for path in directory.iterdir()) != [template.rootfs]:
            raise OperationFailed(f"{directory} does not hold the image {template.rootfs} alone")
        with self._lock():
            owners = self._owners(template)
            if owners and not replace:
                taken = sorted({name for owner in owners for name in owner.names} & set(template.names))
                raise Conflict(f"the template {taken[0]!r} exists already ({owners[0].template_id})")
            if (self.directory / template.template_id).exists():
                raise Conflict(f"the template {template.template_id} exists already")
            durable.write(directory / _RECORD, _encode(template))
            directory.chmod(0o755)
            # Until the older one has lost its name both have it, and ``list`` puts the newer one first.
            durable.publish(directory, self.directory / template.template_id)
            for owner in owners:
                names = tuple(name for name in owner.names if name not in template.names)
                self._write(msgspec.structs.replace(owner, names=names))
        return template

    def update(self, template: Template) -> Template:
        """Replace the record of a template: its names, defaults or kernel. NotFound, or Conflict for a taken name."""
        template = msgspec.structs.replace(template, names=_checked(template.names))
        with self._lock():
            self._read(self.directory / template.template_id)
            owners = self._owners(template)
            if owners:
                raise Conflict(f"a name of {template.template_id} is taken by {owners[0].template_id}")
            self._write(template)
        return template

    def remove(self, template_id: str) -> None:
        """Remove a template by id. NotFound if there is none. Whoever has its image open keeps it."""
        if _ID.fullmatch(template_id) is None:
            raise NotFound(f"the template {template_id!r} does not exist")
        with durable.staging(self.directory) as trash, self._lock():
            path = self.directory / template_id
            if not (path / _RECORD).is_file():
                raise NotFound(f"the template {template_id!r} does not exist")
            path.rename(trash / template_id)
            durable.sync(self.directory)

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        return durable.lock(self.directory / ".writers")

    def _owners(self, template: Template) -> Sequence[Template]:
        return [
            other
            for other in self.list()
            if other.template_id != template.template_id and set(other.names) & set(template.names)
        ]

    def _write(self, template: Template) -> None:
        durable.write(self.directory / template.template_id / _RECORD, _encode(template))

    def _read(self, directory: Path) -> Template:
        try:
            template = msgspec.json.decode((directory / _RECORD).read_bytes(), type=Template)
        except FileNotFoundError as error:
            raise NotFound(f"the template {directory.name!r} does not exist") from error
        except (OSError, msgspec.DecodeError) as error:
            raise OperationFailed(
                f"the template {directory} is damaged: {error}", remedy=f"rm -r {directory}"
            ) from error
        if template.template_id != directory.name or "/" in template.rootfs:
            raise OperationFailed(
                f"the template {directory} is damaged: it names other files", remedy=f"rm -r {directory}"
            )
        return template


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise BadRequest(
                f"{name!r} is not a name of a template", remedy="use a-z, 0-9, - and _, then perhaps : and a tag"
            )
    return tuple(dict.fromkeys(name.removesuffix(_DEFAULT_TAG) for name in names))


def _encode(template: Template) -> bytes:
    return msgspec.json.format(msgspec.json.encode(template), indent=2)
