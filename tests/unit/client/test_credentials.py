from __future__ import annotations

import stat
from pathlib import Path

import pytest

from aenv.client import credentials
from aenv.client.credentials import Stored, resolve, write_stored
from aenv.errors import BadRequest, SetupError

FILE_KEY, ENV_KEY, E2B_KEY, ADMIN_KEY = (f"e2b_{digit * 40}" for digit in "abcd")
REMOTE = "https://aenv.example:8443"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A user with a home directory, beside a node with a home of its own."""
    node = tmp_path / "node"
    node.mkdir()
    (node / "admin.key").write_text(ADMIN_KEY + "\n")
    return {"HOME": str(tmp_path), "AENV_HOME": str(node)}


def found(environ: dict[str, str], **arguments: str) -> tuple[str, str | None]:
    result = resolve(environ=environ, **arguments)
    return result.url, result.key


def test_nothing_but_a_node_on_this_machine(environ: dict[str, str]) -> None:
    assert found(environ) == ("http://127.0.0.1:8000", ADMIN_KEY)
    assert resolve(environ=environ).key_source == f"{environ['AENV_HOME']}/admin.key"


def test_nothing_at_all(tmp_path: Path) -> None:
    assert found({"HOME": str(tmp_path), "AENV_HOME": str(tmp_path)}) == ("http://127.0.0.1:8000", None)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("0.0.0.0:9000", "http://127.0.0.1:9000"),
        ("[::]:9000", "http://[::1]:9000"),
        ("10.0.0.5:80", "http://10.0.0.5:80"),
    ],
)
def test_the_node_of_this_machine_may_listen_elsewhere(environ: dict[str, str], listen: str, url: str) -> None:
    assert resolve(environ={**environ, "AENV_LISTEN": listen}).url == url


def test_the_file_wins_over_the_node(environ: dict[str, str]) -> None:
    write_stored(Stored(REMOTE, FILE_KEY), environ)
    assert found(environ) == (REMOTE, FILE_KEY)


@pytest.mark.parametrize("url", ["AENV_URL", "E2B_API_URL"])
@pytest.mark.parametrize("key", ["AENV_API_KEY", "E2B_API_KEY"])
def test_the_environment_wins_over_the_file(environ: dict[str, str], url: str, key: str) -> None:
    write_stored(Stored(REMOTE, FILE_KEY), environ)
    environ |= {url: "http://other:1/", key: ENV_KEY}
    assert found(environ) == ("http://other:1", ENV_KEY)
    assert (resolve(environ=environ).url_source, resolve(environ=environ).key_source) == (url, key)


def test_our_own_names_win_over_those_of_e2b(environ: dict[str, str]) -> None:
    environ |= {"AENV_URL": "http://ours:1", "E2B_API_URL": "http://theirs:1"}
    environ |= {"AENV_API_KEY": ENV_KEY, "E2B_API_KEY": E2B_KEY}
    assert found(environ) == ("http://ours:1", ENV_KEY)


def test_arguments_win_over_everything(environ: dict[str, str]) -> None:
    environ |= {"AENV_URL": "http://ours:1", "AENV_API_KEY": ENV_KEY}
    assert found(environ, url="http://argument:1", key=E2B_KEY) == ("http://argument:1", E2B_KEY)


def test_a_stored_key_is_only_for_the_server_it_was_stored_for(environ: dict[str, str]) -> None:
    write_stored(Stored(REMOTE, FILE_KEY), environ)
    assert found({**environ, "AENV_URL": "https://elsewhere"}) == ("https://elsewhere", None)
    assert found({**environ, "AENV_URL": REMOTE + "/"}) == (REMOTE, FILE_KEY)


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://node:8000", "http://127.0.0.1.example:8000"])
def test_the_node_s_own_key_never_leaves_the_machine(environ: dict[str, str], url: str) -> None:
    assert found({**environ, "AENV_URL": url}) == (url, None)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.9:1", "http://[::1]:1"])
def test_this_machine_has_several_addresses(environ: dict[str, str], url: str) -> None:
    assert found({**environ, "AENV_URL": url}) == (url, ADMIN_KEY)


def test_the_file_can_only_be_read_by_its_owner(environ: dict[str, str]) -> None:
    file = write_stored(Stored(REMOTE, FILE_KEY), environ)
    assert file == Path(environ["HOME"]) / ".config/aenv/credentials"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["credentials"]


def test_writing_again_repairs_the_rights_of_the_file(environ: dict[str, str]) -> None:
    file = write_stored(Stored(REMOTE, FILE_KEY), environ)
    file.chmod(0o666)
    write_stored(Stored(REMOTE, ENV_KEY), environ)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert found(environ) == (REMOTE, ENV_KEY)


def test_xdg_config_home_is_respected(environ: dict[str, str], tmp_path: Path) -> None:
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert write_stored(Stored(REMOTE, FILE_KEY), environ) == tmp_path / "xdg/aenv/credentials"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"url": 1, "api_key": "x"}', b'{"url": "http://a"}', b"\xff"])
def test_a_damaged_file_names_its_repair(environ: dict[str, str], content: bytes) -> None:
    file = credentials.credentials_file(environ)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(SetupError, match=r"is damaged.*aenv auth login"):
        resolve(environ=environ)


def test_deleting_twice(environ: dict[str, str]) -> None:
    write_stored(Stored(REMOTE, FILE_KEY), environ)
    assert credentials.delete_stored(environ)
    assert not credentials.delete_stored(environ)


@pytest.mark.parametrize(
    "url",
    ["", "aenv", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://u:p@a", "http://a?x", "http://a#x"],
)
def test_what_is_not_a_url_is_refused_with_its_source(environ: dict[str, str], url: str) -> None:
    with pytest.raises(BadRequest, match="the command line"):
        resolve(url=url, environ=environ)


@pytest.mark.parametrize("key", ["", " ", "two words", "new\nline", "schlüssel", "x" * 513])
def test_what_cannot_be_a_header_is_no_key(environ: dict[str, str], key: str) -> None:
    with pytest.raises(BadRequest, match="from the command line is not a key"):
        resolve(key=key, environ=environ)


def test_a_broken_configuration_of_the_node_does_not_stop_a_client(environ: dict[str, str]) -> None:
    (Path(environ["AENV_HOME"]) / "config.toml").write_text("listen = 1 2 3")
    assert found(environ) == ("http://127.0.0.1:8000", ADMIN_KEY)


def test_a_key_is_in_no_representation(environ: dict[str, str]) -> None:
    assert ADMIN_KEY not in repr(resolve(environ=environ))
    assert FILE_KEY not in repr(Stored(REMOTE, FILE_KEY))
