"""A server of tools for `test_mcp.py`, over standard input and output."""

from __future__ import annotations

import os

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")
kept: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def fail(text: str) -> str:
    """Raise an error."""
    raise ToolError(text)


@server.tool()
def refuse(text: str) -> str:
    """Raise an error of the protocol."""
    raise MCPError(-32602, text)


@server.tool()
def keep(value: str) -> str:
    """Remember a value."""
    kept.append(value)
    return "kept"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "")


if __name__ == "__main__":
    server.run("stdio")
