"""What the engine process has to say, held in bounded memory until it is sent."""

from __future__ import annotations

import threading
from collections import deque

import zmq

from tandem.serve import messages
from tandem.serve.messages import FromEngine, Piece, Pieces


class Outbox:
    """Sends messages from a thread of its own, so that the engine thread never waits for a reader.

    What a request gains while the channel is full is joined into one piece, so there is at most one per running
    request, whatever the speed of the other side.

    Args:
        socket: connected, of type PUSH; used by the sending thread alone.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._changed = threading.Condition()
        self._pieces: dict[int, Piece] = {}
        self._messages: deque[FromEngine] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tandem-outbox", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine) -> None:
        """Send a message soon; from any thread."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def put_piece(self, piece: Piece) -> None:
        """Send what a request gained; from any thread."""
        with self._changed:
            waiting = self._pieces.get(piece.request_id)
            if waiting is None:
                self._pieces[piece.request_id] = piece
            else:
                waiting.append(piece)
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._messages or self._closing)
                if not self._pieces and not self._messages:
                    return
                pieces, self._pieces = self._pieces, {}
                others, self._messages = self._messages, deque()
            for message in others:
                self._socket.send(messages.encode(message))
            if pieces:
                self._socket.send(messages.encode(Pieces(list(pieces.values()))))
