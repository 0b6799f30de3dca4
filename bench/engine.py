"""An inference engine that does nothing, fast: for measuring what stands in front of it.

    python -m bench.engine PORT [--events 100] [--interval 0.01]

A request with C{"stream":true} gets that many events, one write each, that far apart; any other a small answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import httptools
import uvloop

JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}


def body(kind: str, choice: dict, **more) -> bytes:
    return json.dumps({"id": "c-1", "object": kind, "created": 1, "model": "m", "choices": [choice], **more}).encode()


MESSAGE = {"role": "assistant", "content": "once upon a time there was a fox"}
ANSWER = body("chat.completion", {"index": 0, "finish_reason": "stop", "message": MESSAGE}, usage=USAGE)
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}], "model_path": "m"}).encode()
DELTA = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
PAYLOAD = b"data: " + body("chat.completion.chunk", DELTA).replace(b": ", b":").replace(b", ", b",") + b"\n\n"
EVENT = b"%x\r\n%b\r\n" % (len(PAYLOAD), PAYLOAD)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, events: int, interval: float) -> None:
        self.events, self.interval = events, interval
        self.parser = httptools.HttpRequestParser(self)
        self.streaming = False

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.close()

    def on_body(self, data):
        self.streaming = b'"stream": true' in data or b'"stream":true' in data or self.streaming

    def on_message_complete(self):
        if self.streaming:
            self.streaming = False
            self.transport.write(STREAM)
            self.left = self.events
            self.tick()
        else:
            answer = MODELS if self.parser.get_method() == b"GET" else ANSWER
            self.transport.write(JSON % (len(answer), answer))

    def tick(self):
        if self.transport.is_closing():
            return
        self.transport.write(EVENT)
        self.left -= 1
        if self.left:
            asyncio.get_running_loop().call_later(self.interval, self.tick)
        else:
            self.transport.write(DONE)


async def serve(args):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(args.events, args.interval), "127.0.0.1", args.port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("port", type=int)
    options.add_argument("--events", type=int, default=100)
    options.add_argument("--interval", type=float, default=0.01)
    uvloop.run(serve(options.parse_args()))


if __name__ == "__main__":
    main()
