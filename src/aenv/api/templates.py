"""The template calls of the E2B API that need no build."""

from __future__ import annotations

import asyncio

from aiohttp import web

from aenv.api import wire
from aenv.api.app import NODE, answer
from aenv.errors import BadRequest

routes = web.RouteTableDef()


@routes.get("/templates")
@routes.get("/v2/templates")
async def list_templates(request: web.Request) -> web.Response:
    return answer([wire.template_answer(template) for template in request.app[NODE].templates.list()])


@routes.get("/templates/aliases/{alias}")
async def get_alias(request: web.Request) -> web.Response:
    template = request.app[NODE].templates.get(request.match_info["alias"])
    return answer({"templateID": template.template_id, "public": False})


@routes.get("/templates/{id}")
async def get(request: web.Request) -> web.Response:
    return answer(wire.template_answer(request.app[NODE].templates.get(request.match_info["id"])))


@routes.delete("/templates/{id}")
async def remove(request: web.Request) -> web.Response:
    node = request.app[NODE]
    template = node.templates.get(request.match_info["id"])
    users = [record.sandbox_id for record in node.all() if record.template_id == template.template_id]
    if users:
        raise BadRequest(f"the template is in use by {len(users)} sandboxes, {users[0]} among them")
    await asyncio.to_thread(node.templates.remove, template.template_id)
    return web.Response(status=204)
