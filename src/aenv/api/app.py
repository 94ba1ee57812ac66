"""The HTTP application: routes, authentication, and errors as they look on the wire."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from aenv.config import Settings
from aenv.errors import AenvError, BadRequest, Unauthorized
from aenv.node.node import Node
from aenv.node.store import Store

log = logging.getLogger(__name__)

BODY_LIMIT = 1024 * 1024
"""Bytes of a request body; the largest legitimate one is an environment of some hundred variables."""

NODE = web.AppKey("node", Node)
SETTINGS = web.AppKey("settings", Settings)
STORE = web.AppKey("store", Store)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def answer(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """The only form an error has: some SDKs crash on anything else."""
    return answer({"code": status, "message": message}, status, headers)


async def body(request: web.Request, kind: type[T]) -> T:
    """The request's JSON as ``kind``; an empty body counts as ``{}``. BadRequest names the field at fault."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise BadRequest("Content-Encoding: only identity is understood here")
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request body is wrong: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error
    except web.RequestPayloadError as error:
        raise BadRequest("the request body is not what its headers promise") from error


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AenvError as error:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        if error.status >= 500 and error.status != 503:
            # A create that failed half-way was undone, but repeating it blindly would repeat the failure.
            headers["Should-Retry"] = "false"
            log.error("%s %s: %s", request.method, request.path, error)
        return failure(error.status, str(error), headers)
    except web.HTTPRequestEntityTooLarge:
        return failure(413, f"the request body is larger than {BODY_LIMIT} bytes")
    except web.HTTPNotFound:
        return failure(404, f"this server has no {request.method} {request.path}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return failure(405, f"{request.path} takes {allowed}, not {request.method}", {"Allow": allowed})
    except web.HTTPException as error:
        return failure(error.status, error.text or error.reason)
    except ConnectionResetError:
        raise  # the client is gone
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return failure(500, f"an error of this server that it has no name for: {error!r}", {"Should-Retry": "false"})


@web.middleware
async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path != "/health":
        keys = request.headers.getall("X-API-Key", [])
        if len(keys) != 1:
            raise Unauthorized("the header X-API-Key is missing" if not keys else "there is more than one X-API-Key")
        if not request.app[STORE].has_key(keys[0]):
            raise Unauthorized("the API key is wrong", remedy="`aenv auth create-key` on the node makes a new one")
    return await handler(request)


async def health(_: web.Request) -> web.Response:
    return web.Response(status=204)


def make_app(settings: Settings, store: Store, node: Node) -> web.Application:
    from aenv.api import sandboxes, templates

    app = web.Application(middlewares=[errors, authentication], client_max_size=BODY_LIMIT)
    app[NODE] = node
    app[SETTINGS] = settings
    app[STORE] = store
    app.router.add_get("/health", health)
    app.router.add_routes(sandboxes.routes)
    app.router.add_routes(templates.routes)
    return app
