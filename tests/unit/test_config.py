"""Where settings come from, and which source wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv import config
from aenv.errors import SetupError


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'listen = "file:1"\ndomain = "file"\nlog_level = "debug"\n[network]\nsubnet = "10.9.0.0/16"\n'
    )
    environ = {"AENV_HOME": str(tmp_path), "AENV_LISTEN": "env:2", "AENV_DOMAIN": "env", "AENV_MACHINE_MEMORY": "1024"}
    settings = config.load(environ=environ, overrides={"listen": "flag:3", "domain": None})
    assert settings.listen == "flag:3"
    assert settings.domain == "env"
    assert settings.log_level == "debug"
    assert settings.network.subnet == "10.9.0.0/16"
    assert settings.machine.memory == 1024
    assert settings.home == tmp_path


def test_lists_in_the_environment(tmp_path: Path) -> None:
    settings = config.load(environ={"AENV_HOME": str(tmp_path), "AENV_NETWORK_DNS": "9.9.9.9, 1.1.1.1"})
    assert settings.network.dns == ("9.9.9.9", "1.1.1.1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sandbox]\nbogus = 1", "bogus"),
        ("[machine]\nvcpus = 'many'", "vcpus"),
        ("listen = ", "TOML"),
        ("colour = 'red'", "colour"),
        ("log_level = 'loud'", "log_level"),
        ("[sandbox]\nconcurrent_starts = 0", "concurrent_starts"),
        ("[sandbox]\nmax_running = -1", "max_running"),
        ("[sandbox]\ndefault_timeout = 100\nmax_timeout = 99", "default_timeout"),
        ("[vmm]\naccelerator = 'xen'", "accelerator"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SetupError, match=said):
        config.load(environ={"AENV_HOME": str(tmp_path)})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"nowhere\.toml"):
        config.load(file=tmp_path / "nowhere.toml", environ={})


def test_two_homes_do_not_share_sockets() -> None:
    assert config.Settings(home=Path("/a")).run != config.Settings(home=Path("/b")).run
    assert config.Settings().run == Path("/run/aenv")
