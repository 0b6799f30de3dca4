"""An inference engine without inference: C{python -m llmgw.testing.fake_engine --port P --name M}, for tests and demos.

It speaks OpenAI's HTTP (chat, completions, embeddings, models), C{/health} and C{/metrics}, enforces the key in
C{$LLMGW_ENGINE_KEY} where that is set, and misbehaves on request: it dies, hangs, lies, floods, ignores SIGTERM, leaves
children. Its start is printed in the lines that the C{command} adapter reads. C{POST /fake/hang}, C{/fake/stall} (it answers
all but inference), C{/fake/fail} (requests fail; again: no more) and C{/fake/exit} act later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

WORDS = ("once", "upon", "a", "time", "there", "was", "an", "engine", "that", "said", "so")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    add = (parser := argparse.ArgumentParser("fake_engine", description=__doc__)).add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--name", action="append", help="a model name to serve; may be repeated (default: fake)")
    add("--events", type=int, default=10, help="events in a stream")
    add("--interval", type=float, default=0.0, help="seconds between events")
    add("--first-token", type=float, default=0.0, help="seconds before any answer")
    add("--load-seconds", type=float, default=0.0)
    add("--503-while-loading", dest="answer_503", action="store_true", help="default: refuse connections while loading")
    add("--refuse-while-loading", dest="answer_503", action="store_false")
    add("--exit-after", type=float, help="seconds after which to exit by itself, counted from the start")
    add("--exit-code", type=int, default=1)
    add("--say", action="append", default=[], help="a line to print just before such an exit; may be repeated")
    add("--ignore-term", action="store_true")
    add("--fork-setsid", action="store_true", help="leave a child in a session of its own; its pid is printed")
    add("--flood", type=float, default=0.0, help="bytes of output a second")
    add("--hang-after-ready", action="store_true", help="accept connections but answer none")
    add("--health-lies", action="store_true", help="healthy while every request fails with 500")
    add("--fail-requests", type=int, metavar="STATUS", help="answer requests with this status")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    """One line of output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Engine:
    """The server and its misbehaviour; a subclass may answer more paths in C{get}.

    @ivar turns: where a POST puts it to sleep and wakes it; empty where it cannot sleep.
    """

    prefix = "llmgw"
    turns: tuple[str, ...] = ("/fake/sleep", "/fake/wake")

    def __init__(self, settings: argparse.Namespace, key: str | None) -> None:
        self.settings = settings
        self.names: list[str] = settings.name or ["fake"]
        self.key = key
        self.loaded = self.hanging = self.stalled = self.asleep = False
        self.running = self.tokens = self.aborted = self.served = 0

    async def run(self) -> None:
        """Load, then serve for ever."""
        if self.settings.fork_setsid:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
            say(f"left a child: {child.pid}")
        jobs = [asyncio.ensure_future(job) for job in (self.exit_later(), self.flood())]
        if self.settings.answer_503:
            await self.listen()
        await self.load()
        if not self.settings.answer_503:
            await self.listen()
        self.loaded, self.hanging = True, self.settings.hang_after_ready
        say(f"{self.prefix}: ready")
        await asyncio.gather(*jobs, asyncio.Event().wait())

    async def listen(self) -> None:
        """Open the port."""
        await asyncio.start_server(self.connection, self.settings.host, self.settings.port, backlog=1024)

    async def load(self) -> None:
        """Pretend to read weights, telling how far it is."""
        begin, length = time.monotonic(), self.settings.load_seconds
        while length and (spent := time.monotonic() - begin) < length:
            say(f"{self.prefix}: loading {int(100 * spent / length)} %")
            await asyncio.sleep(min(length - spent, max(0.05, length / 20)))

    async def exit_later(self) -> None:
        """Die as told."""
        if self.settings.exit_after is not None:
            await asyncio.sleep(self.settings.exit_after)
            self.exit(self.settings.exit_code)

    def exit(self, code: int) -> None:
        """Die now."""
        for line in self.settings.say:
            say(line)
        os._exit(code)

    def end(self) -> None:
        """What SIGTERM does."""
        os._exit(0)

    async def flood(self) -> None:
        """Print a lot."""
        while self.settings.flood:
            say("x" * int(self.settings.flood / 20))
            await asyncio.sleep(0.05)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        try:
            while await self.request(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and answer it; whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.hanging:
            await asyncio.Event().wait()
        path = path.partition("?")[0]
        if self.guards(path) and self.key and headers.get("authorization") != f"Bearer {self.key}":
            return self.error(writer, 401, "Unauthorized")
        if method == "GET":
            found = self.get(path)
            return self.answer(writer, *found) if found else self.error(writer, 404, "Not Found")
        return await self.post(path, body, reader, writer)

    def guards(self, path: str) -> bool:
        """Whether the key is asked for there."""
        return path.startswith("/v1")

    def get(self, path: str) -> tuple[int, str, str] | None:
        """Status, content type and text of a GET."""
        if path == "/health":
            return (
                (200, "application/json", '{"status":"ok"}')
                if self.loaded
                else (503, "application/json", '{"error":"Loading model"}')
            )
        if path == "/v1/models":
            models = [{"id": name, "object": "model", "owned_by": "fake"} for name in self.names]
            return 200, "application/json", json.dumps({"object": "list", "data": models})
        if path == "/metrics":
            return 200, "text/plain", "".join(f"{name} {value}\n" for name, value in self.metrics().items())
        return None

    def metrics(self) -> Mapping[str, float]:
        """The samples of C{/metrics}."""
        counts = {"requests_running": self.running, "tokens_total": self.tokens, "aborted_total": self.aborted}
        return {f"{self.prefix}:{name}": value for name, value in (*counts.items(), ("requests_total", self.served))}

    async def post(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a POST."""
        if path == "/fake/hang":
            self.hanging = True
            return self.answer(writer, 200, "text/plain", "hanging")
        if path in self.turns:
            self.asleep = path == self.turns[0]
            say("asleep" if self.asleep else "awake")
            return self.answer(writer, 200, "text/plain", "")
        if path == "/fake/stall":
            self.stalled = True
            return self.answer(writer, 200, "text/plain", "stalled")
        if path == "/fake/fail":
            self.settings.fail_requests = None if self.settings.fail_requests else 500
            return self.answer(writer, 200, "text/plain", "")
        if path == "/fake/exit":
            self.exit(self.settings.exit_code)
        asked: dict[str, Any] = json.loads(body)
        status = self.settings.fail_requests or (500 if self.settings.health_lies else 0 if self.loaded else 503)
        status = 503 if self.asleep else status
        if status:
            say(f"{path} {status}")
            return self.error(writer, status, "told to fail" if self.loaded else "Loading model")
        if asked.get("model") not in self.names:
            return self.error(writer, 404, f"The model `{asked.get('model')}` does not exist.")
        self.running, self.served = self.running + 1, self.served + 1
        gone = asyncio.ensure_future(self.client_left(reader))
        work = asyncio.ensure_future(self.infer(path, asked, writer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            return work.done() and work.result()
        finally:
            self.running -= 1
            gone.cancel()
            work.cancel()

    async def client_left(self, reader: asyncio.StreamReader) -> None:
        """Returns when the client has closed; then nobody reads the answer."""
        while not reader.at_eof():
            await asyncio.sleep(0.05)
        self.aborted += 1
        say("client left")

    async def infer(self, path: str, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """The answer itself."""
        await asyncio.sleep(self.settings.first_token)
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]
            return self.answer(
                writer, 200, "application/json", json.dumps({"object": "list", "data": data, "model": asked["model"]})
            )
        chat = path == "/v1/chat/completions"
        count = min(self.settings.events, int(asked.get("max_tokens") or self.settings.events))
        if not asked.get("stream"):
            words = [word async for word in self.words(count)]
            part = {"message": {"role": "assistant", "content": " ".join(words)}} if chat else {"text": " ".join(words)}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            return self.answer(
                writer,
                200,
                "application/json",
                self.completion(chat, "", asked, part, "stop")[:-1] + f', "usage": {json.dumps(usage)}}}',
            )
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async for word in self.words(count):
            part = {"delta": {"role": "assistant", "content": word + " "}} if chat else {"text": word + " "}
            self.event(writer, self.completion(chat, ".chunk" if chat else "", asked, part, None))
            await writer.drain()
        self.event(
            writer, self.completion(chat, ".chunk" if chat else "", asked, {"delta": {}} if chat else {"text": ""}, "stop")
        )
        self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True

    async def words(self, count: int) -> AsyncIterator[str]:
        """The words of an answer, as slowly as told."""
        for index in range(count):
            if index and self.settings.interval:
                await asyncio.sleep(self.settings.interval)
            if self.stalled:
                await asyncio.Event().wait()
            self.tokens += 1
            yield WORDS[index % len(WORDS)]

    @staticmethod
    def completion(chat: bool, suffix: str, asked: dict[str, Any], part: dict[str, Any], finish: str | None) -> str:
        """One completion object."""
        kind = f"chat.completion{suffix}" if chat else "text_completion"
        choice = {"index": 0, "finish_reason": finish, **part}
        return json.dumps(
            {"id": "cmpl-1", "object": kind, "created": int(time.time()), "model": asked["model"], "choices": [choice]}
        )

    @staticmethod
    def event(writer: asyncio.StreamWriter, data: str) -> None:
        """One server-sent event as one chunk."""
        text = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(text), text))

    def error(self, writer: asyncio.StreamWriter, status: int, message: str) -> bool:
        """An OpenAI error object."""
        return self.answer(writer, status, "application/json", json.dumps({"error": {"message": message, "code": status}}))

    @staticmethod
    def answer(writer: asyncio.StreamWriter, status: int, kind: str, text: str) -> bool:
        """A whole answer; the connection goes on."""
        body = text.encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind.encode(), len(body), body)
        )
        return True


def serve(engine: Engine) -> None:
    """Run until somebody ends it; SIGTERM ends it at once with status 0."""

    async def run() -> None:
        term = (lambda: say("ignored SIGTERM")) if engine.settings.ignore_term else engine.end
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, term)
        await engine.run()

    asyncio.run(run())


def main() -> None:
    """The program."""
    serve(Engine(options(), os.environ.get("LLMGW_ENGINE_KEY")))


if __name__ == "__main__":
    main()
