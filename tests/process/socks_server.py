"""A SOCKS5 proxy for tests: `python -m tests.process.socks_server HOST PORT LOG`. It writes each
destination into LOG."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from pathlib import Path


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def destination(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, int]:
    _, count = await reader.readexactly(2)
    await reader.readexactly(count)
    writer.write(b"\x05\x00")
    _, _, _, kind = await reader.readexactly(4)
    if kind == 3:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode()
    else:
        family, size = (socket.AF_INET, 4) if kind == 1 else (socket.AF_INET6, 16)
        host = socket.inet_ntop(family, await reader.readexactly(size))
    (port,) = struct.unpack("!H", await reader.readexactly(2))
    return host, port


async def serve(host: str, port: int, log: Path) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            to = await destination(reader, writer)
            with log.open("a") as file:
                file.write(f"{to[0]}:{to[1]}\n")
            try:
                there, back = await asyncio.open_connection(*to)
            except OSError:
                writer.write(b"\x05\x05\x00\x01" + bytes(6))
                writer.close()
                return
            writer.write(b"\x05\x00\x00\x01" + bytes(6))
            await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(client, host, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
