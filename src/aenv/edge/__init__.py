"""The control plane's side of ``aenv-edge``: starting it, and telling it where sandboxes are."""

from __future__ import annotations

from aenv.edge.client import EdgeClient, Route
from aenv.edge.process import EdgeProcess

__all__ = ["EdgeClient", "EdgeProcess", "Route"]
