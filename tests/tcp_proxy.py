"""A TCP connection's bad days: a proxy in threads whose every piece can be late, lost, or the end.

It stands between real processes and a real server, so it must go on while the test itself waits for something.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 65_536


class Proxy:
    """Listens at C{port} of loopback and passes everything on to the port C{target} there.

    @ivar delay: seconds that each piece on its way to the target waits.
    @ivar silent: nothing passes in either direction, and nobody is told: what was sent stays where it is.
    """

    def __init__(self, target: int, port: int) -> None:
        self.port, self.target = port, target
        self.delay, self.silent = 0.0, False
        self._refusing = self._over = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError):
                self._take(self._listener.accept()[0])

    def _take(self, near: socket.socket) -> None:
        if self._refusing or self._over:
            near.close()
            return
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 5)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._open |= {near, far}
        threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
        threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, late: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                if late and self.delay:
                    time.sleep(self.delay)
                while self.silent:
                    time.sleep(0.02)
                sink.sendall(piece)
        self._end(source, sink)

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)

    def cut(self) -> None:
        """End every connection, and each new one at once."""
        self._refusing = True
        self._end(*list(self._open))

    def heal(self) -> None:
        """Everything passes again."""
        self._refusing = self.silent = False
        self.delay = 0.0

    def close(self) -> None:
        """Let go of everything."""
        self._over, self.silent = True, False
        self._end(self._listener, *list(self._open))
