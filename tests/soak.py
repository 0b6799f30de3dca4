"""For the soak test: an engine that misbehaves at random, and clients that do so, too, but know what became of each request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections import Counter

import uvloop

PLAIN = b'{"id":"1","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = 8


def event(number: int) -> bytes:
    body = b'data: {"n":%d,"choices":[{"delta":{"content":"%b"}}]}\n\n' % (number, b"x" * 200)
    return b"%x\r\n%b\r\n" % (len(body), body)


async def serve_one(reader, writer, chance):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            what = chance.random()
            if what < 0.02:
                writer.transport.abort()
                return
            if what < 0.03:
                reset(writer)
                return
            if what < 0.06:
                status = chance.choice([b"500 Oops", b"503 Busy", b"429 Full", b"400 Bad"])
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)
            elif b'"stream":true' in body:
                if not await stream(writer, chance):
                    return
            else:
                if what > 0.98:
                    await asyncio.sleep(0.05)
                writer.write(HEAD % (len(PLAIN), PLAIN))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def reset(writer):
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def stream(writer, chance) -> bool:
    writer.write(STREAM)
    dies = chance.randrange(EVENTS) if chance.random() < 0.05 else None
    for number in range(EVENTS):
        if number == dies:
            writer.write(event(number)[:40])
            reset(writer)
            return False
        writer.write(event(number))
        if chance.random() < 0.3:
            await writer.drain()
            await asyncio.sleep(0.001)
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return True


async def engine(port: int) -> None:
    chance = random.Random(port)
    server = await asyncio.start_server(lambda r, w: serve_one(r, w, chance), "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


class Soak:
    """C{count} requests from C{clients} at once; C{ends} says how they ended, C{lost} those that did not end at all."""

    def __init__(self, port: int, count: int, clients: int, seed: int) -> None:
        self.port, self.left, self.clients, self.chance = port, count, clients, random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        uvloop.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.clients)))

    async def _client(self) -> None:
        reader = writer = None
        while self.left > 0:
            self.left -= 1
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                end, keep = await asyncio.wait_for(self._one(reader, writer), 20)
            except TimeoutError:
                self.wrong.append("not answered within 20 s")
                end, keep = "lost", False
            except ConnectionRefusedError:
                self.wrong.append("connection refused")
                end, keep = "refused", False
            except (ConnectionError, asyncio.IncompleteReadError):
                end, keep = "broken", False
            self.ends[end] += 1
            if not keep and writer is not None:
                writer.transport.abort()
                writer = None
        if writer is not None:
            writer.close()

    async def _one(self, reader, writer):
        kind = self.chance.random()
        streaming = kind > 0.7
        body = json.dumps({"model": "m", "stream": streaming}, separators=(",", ":")).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        if kind < 0.02:
            await asyncio.sleep(self.chance.random() * 0.003)
            return "left", False
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split()[1])
        keep = b"connection: close" not in head
        if b"transfer-encoding: chunked" not in head:
            answer = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            if status == 200 and answer != PLAIN:
                self.wrong.append(f"wrong answer {answer!r}")
            return f"{status}", keep
        return await self._stream(reader, kind), keep and kind < 0.95

    async def _stream(self, reader, kind):
        count = 0
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            chunk = await reader.readexactly(size + 2)
            if not size:
                if count != EVENTS:
                    self.wrong.append(f"a stream of {count} events ended well")
                return "stream"
            for one in chunk.split(b"\n\n"):
                if one.startswith(b'data: {"n":'):
                    if not one.startswith(b'data: {"n":%d,' % count) or not one.endswith(b"}"):
                        self.wrong.append(f"event {count} is {one[:60]!r}")
                    count += 1
            if b'"error"' in chunk:
                return "stream broken"
            if kind > 0.98 and count == 2:
                return "stream left"
            if 0.96 < kind < 0.98:
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(engine(int(sys.argv[1])))
