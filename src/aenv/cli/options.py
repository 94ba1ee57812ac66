"""Types and options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from aenv.client import Client
    from aenv.config import Settings

T = TypeVar("T")

_COMPLETION_SECONDS = 1.0


def with_client(work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` with a client of the chosen server."""
    import asyncio

    from aenv.client import Client

    async def session() -> T:
        async with Client() as client:
            return await work(client)

    return asyncio.run(session())


def load_settings(**overrides: Any) -> Settings:
    """The node's settings; ``config`` is the file, everything else replaces a field unless None."""
    from aenv import config

    file = overrides.pop("config", None)
    return config.load(file, overrides=overrides)


class SandboxId(click.ParamType[str]):
    """An identifier of a sandbox, completed from what runs."""

    name = "id"
    _shape = re.compile(r"[a-z0-9]{1,64}")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not isinstance(value, str) or not self._shape.fullmatch(value):
            self.fail(f"{value!r} is not the id of a sandbox: lower-case letters and digits", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def found(client: Client) -> list[CompletionItem]:
            return [
                CompletionItem(info.sandbox_id, help=info.alias or info.template_id)
                async for info in client.sandboxes()
                if info.sandbox_id.startswith(incomplete)
            ]

        return _complete(found)


class TemplateName(click.ParamType[str]):
    """A template by name or id, completed from what exists."""

    name = "template"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not isinstance(value, str) or not value.strip():
            self.fail("the name of a template is empty", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def found(client: Client) -> list[CompletionItem]:
            names = [name for info in await client.templates() for name in (info.names or [info.template_id])]
            return [CompletionItem(name) for name in names if name.startswith(incomplete)]

        return _complete(found)


class Pair(click.ParamType[tuple[str, str]]):
    """``KEY=VALUE``; the value may hold further ``=`` and may be empty."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, separator, rest = value.partition("=")
        if not key or not separator:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        if "\0" in value:
            self.fail("a value holds a NUL byte", param, ctx)
        return key, rest


SANDBOX_ID = SandboxId()
TEMPLATE = TemplateName()
PAIR = Pair()

home_option = click.option(
    "--home", type=click.Path(path_type=Path), help="Directory of the node's data.  [default: /var/lib/aenv]"
)
config_option = click.option(
    "--config", type=click.Path(path_type=Path), help="Configuration file.  [default: <home>/config.toml, if it exists]"
)
env_option = click.option(
    "-e", "--env", type=PAIR, multiple=True, metavar="KEY=VALUE", help="Set an environment variable; repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, as is the default when piped.")


def _complete(found: Callable[[Client], Coroutine[Any, Any, list[CompletionItem]]]) -> list[CompletionItem]:
    """Whatever goes wrong while completing, the user who is typing must not see it or wait for it."""
    import asyncio

    async def bounded(client: Client) -> list[CompletionItem]:
        async with asyncio.timeout(_COMPLETION_SECONDS):
            return await found(client)

    try:
        return with_client(bounded)
    except Exception:
        return []
