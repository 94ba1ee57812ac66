from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import SetupError
from aenv.model import KernelImage
from aenv.templates import base, debootstrap


def _image(directory: Path, content: bytes) -> Path:
    path = directory / "rootfs.ext4"
    path.write_bytes(content)
    return path


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    kept = base.keep(tmp_path, "key", _image(tmp_path, b"whole"))
    assert base.find(tmp_path, "key") == kept
    assert kept.read_bytes() == b"whole"
    assert base.find(tmp_path, "other") is None


@pytest.mark.parametrize("content", [b"spoilt", b"whol", b"", b"whole!"])
def test_a_spoilt_image_is_not_used(tmp_path: Path, content: bytes) -> None:
    kept = base.keep(tmp_path, "key", _image(tmp_path, b"whole"))
    kept.write_bytes(content)
    assert base.find(tmp_path, "key") is None
    assert not kept.exists()


def test_the_least_recently_used_images_go(tmp_path: Path) -> None:
    for age, key in enumerate(("a", "b", "c")):
        kept = base.keep(tmp_path, key, _image(tmp_path, key.encode()))
        os.utime(kept, (1000 + age, 1000 + age))
    assert base.find(tmp_path, "a") is not None
    base.keep(tmp_path, "d", _image(tmp_path, b"d"))
    assert sorted(path.name[0] for path in tmp_path.glob("*.ext4")) == ["a", "c", "d"]


def test_a_sandbox_installs_from_the_public_mirror() -> None:
    text = debootstrap.guest_sources(Settings(), "bookworm")
    assert "URIs: http://deb.debian.org/debian\n" in text
    assert "URIs: http://deb.debian.org/debian-security\nSuites: bookworm-security\n" in text
    assert "Signed-By" in text


@pytest.mark.parametrize("name", ["", "-o", "a b", "name/../x", "$(id)", "UPPER", "bash-"])
def test_names_that_are_no_packages(tmp_path: Path, name: str) -> None:
    kernel = KernelImage("6.1", "ab", *(Path("/nowhere"),) * 4)
    with pytest.raises(SetupError, match="not the name of a Debian package"):
        base.ensure_base(Settings(home=tmp_path), kernel, lambda _: None, packages=[name])


def test_without_root_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    kernel = KernelImage("6.1", "ab", *(Path("/nowhere"),) * 4)
    with pytest.raises(SetupError, match="root"):
        base.ensure_base(Settings(home=tmp_path), kernel, lambda _: None)
