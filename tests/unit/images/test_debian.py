from __future__ import annotations

from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import SetupError
from aenv.vmm import debian
from aenv.vmm.debian import Host, Source

ARCHIVE_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"

ONE_LINE = f"""\
# deb http://old.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib  # comment
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by={ARCHIVE_KEY}] https://mirror.example/debian-security  bookworm-security  main
deb http://flat.example/repo ./
nonsense
"""

DEB822 = f"""\
# comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
 non-free-firmware
Signed-By: {ARCHIVE_KEY}

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYBBAHaRw8BAQdAd7Z0srwuhlB6JKFkcf4HU4SSS/xcRfwEQWzr
 -----END PGP PUBLIC KEY BLOCK-----
"""

UBUNTU = """\
Types: deb
URIs: http://archive.ubuntu.com/ubuntu/
Suites: noble noble-updates noble-backports
Components: main restricted universe multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""


def test_the_one_line_format() -> None:
    assert debian.parse_list(ONE_LINE) == [
        Source("http://mirror.example/debian", "bookworm", ("main", "contrib")),
        Source("https://mirror.example/debian-security", "bookworm-security", ("main",), ARCHIVE_KEY),
        Source("http://flat.example/repo", "./", ()),
    ]


def test_the_deb822_format() -> None:
    components = ("main", "non-free-firmware")
    assert debian.parse_deb822(DEB822) == [
        Source("http://mirror.example/debian", "bookworm", components, ARCHIVE_KEY),
        Source("http://mirror.example/debian", "bookworm-updates", components, ARCHIVE_KEY),
        Source("http://mirror.example/debian-security", "bookworm-security", ("main",), None),
    ]


def test_a_line_reads_back() -> None:
    for source in debian.parse_list(ONE_LINE):
        assert debian.parse_list(source.line()) == [source]


def _machine(root: Path, os_release: str, **files: str) -> Path:
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    (root / "etc/os-release").write_text(os_release)
    for name, text in files.items():
        path = root / "etc/apt" / name.replace("__", "/").replace("_", ".")
        path.write_text(text)
    return root


DEBIAN = 'NAME="Debian GNU/Linux"\nID=debian\nVERSION_CODENAME=bookworm\n'


@pytest.mark.parametrize("files", [{"sources_list": ONE_LINE}, {"sources_list_d__debian_sources": DEB822}])
def test_a_debian_host_gives_its_own_mirror(tmp_path: Path, files: dict[str, str]) -> None:
    files = {name.replace("sources_list_d", "sources.list.d"): text for name, text in files.items()}
    host = debian.read_host(_machine(tmp_path, DEBIAN, **files))
    assert host.release == "bookworm"
    assert host.main is not None
    assert host.main.uri == "http://mirror.example/debian"
    assert host.security is not None
    assert host.security.uri.endswith("://mirror.example/debian-security")
    found = debian.sources(Settings(), ("trixie", "trixie-security"), host)
    assert [(source.uri.split("/")[-1], source.suite) for source in found] == [
        ("debian", "trixie"),
        ("debian-security", "trixie-security"),
    ]
    assert all(source.signed_by == ARCHIVE_KEY for source in found)


def test_a_vendor_with_the_same_suite_name_is_not_the_mirror(tmp_path: Path) -> None:
    vendor = "deb [signed-by=/usr/share/keyrings/vendor.gpg] https://pkgs.vendor.example/debian bookworm main\n"
    root = _machine(tmp_path, DEBIAN, sources_list=vendor + ONE_LINE)
    host = debian.read_host(root)
    assert host.main is not None
    assert host.main.uri == "http://mirror.example/debian"


def test_a_mirror_with_its_own_key_keeps_it(tmp_path: Path) -> None:
    line = "deb [signed-by=/etc/apt/keyrings/company.gpg] https://apt.company.example/debian bookworm main\n"
    host = debian.read_host(_machine(tmp_path, DEBIAN, sources_list=line))
    found = debian.sources(Settings(), ("bookworm", "bookworm-security"), host)
    assert found == [
        Source("https://apt.company.example/debian", "bookworm", ("main",), "/etc/apt/keyrings/company.gpg")
    ]


@pytest.mark.parametrize("os_release", ['ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME="noble"\n', "", 'ID="broken'])
def test_other_hosts_use_the_configured_mirror(tmp_path: Path, os_release: str) -> None:
    root = _machine(tmp_path, os_release, **{"sources.list.d__ubuntu_sources": UBUNTU})
    host = debian.read_host(root)
    assert host == Host(None, None, None)
    settings = Settings(debian_mirror="http://mirror.example/debian/")
    assert debian.sources(settings, ("bookworm", "bookworm-security"), host) == [
        Source("http://mirror.example/debian", "bookworm", ("main",), ARCHIVE_KEY),
        Source("http://mirror.example/debian-security", "bookworm-security", ("main",), ARCHIVE_KEY),
    ]


def test_without_any_file_nothing_is_known(tmp_path: Path) -> None:
    assert debian.read_host(tmp_path) == Host(None, None, None)


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    assert debian.cache_directory({"AENV_CACHE": str(path)}) == path
    path.chmod(0o777)
    with pytest.raises(SetupError, match="other users can write"):
        debian.cache_directory({"AENV_CACHE": str(path)})


def test_the_proxies_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "apt.conf"
    monkeypatch.setenv("APT_CONFIG", str(config))
    config.write_text("")
    before = debian.host_proxies()
    config.write_text('Acquire::http::Proxy "http://proxy.example:3142/";\nAcquire::https::Proxy "DIRECT";\n')
    assert debian.host_proxies() == before | {"http_proxy": "http://proxy.example:3142/"}


def test_an_unreachable_mirror_is_named(tmp_path: Path) -> None:
    source = Source("http://127.0.0.1:9/debian", "bookworm", ("main",), ARCHIVE_KEY)
    archive = debian.Archive([source], lambda _: None, tmp_path)
    with pytest.raises(SetupError, match=r"fetch the package indexes.*127\.0\.0\.1:9/debian"):
        archive.update()
    with pytest.raises(SetupError):
        archive.candidate("bash")
