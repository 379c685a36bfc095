"""An origin of other people's making: aioquic serves HTTP/3.

In: certificate and key by arguments, with `--no-datagrams` perhaps. Out: on standard output a line with its port when
it listens. Requests are answered with what they were: /echo gives the body back with trailers, /told says as JSON what
came, /bytes/N gives N bytes. Tunnels by CONNECT are an echo; those by CONNECT-UDP give each datagram back as it came.
"""

import asyncio
import json
import sys

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.buffer import Buffer, BufferReadError, encode_uint_var
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, DatagramReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ProtocolNegotiated

# A longer one would wait for ever at the head of aioquic's queue: its packets do not grow.
LARGEST = 1000
DATAGRAMS = "--no-datagrams" not in sys.argv


class Origin(QuicConnectionProtocol):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.http = None
        self.requests = {}

    def quic_event_received(self, event):
        if isinstance(event, ProtocolNegotiated):
            self.http = H3Connection(self._quic, enable_webtransport=DATAGRAMS)
        if self.http is None:
            return
        for known in self.http.handle_event(event):
            self.take(known)
        self.transmit()

    def take(self, event):
        if isinstance(event, DatagramReceived):
            if len(event.data) <= LARGEST:
                self.http.send_datagram(event.stream_id, event.data)
            else:
                capsule = encode_uint_var(0) + encode_uint_var(len(event.data)) + event.data
                self.http.send_data(event.stream_id, capsule, end_stream=False)
            return
        if isinstance(event, HeadersReceived):
            if event.stream_id in self.requests:
                self.requests[event.stream_id]["trailers"] = fields(event.headers)
            else:
                self.requests[event.stream_id] = {"head": fields(event.headers), "body": b"", "trailers": None}
                if self.requests[event.stream_id]["head"][":method"] == "CONNECT":
                    self.answer(event.stream_id, 200, [("capsule-protocol", "?1")], False)
        elif isinstance(event, DataReceived):
            request = self.requests[event.stream_id]
            if request["head"][":method"] == "CONNECT":
                self.echo(event, request)
                return
            request["body"] += event.data
        if event.stream_ended:
            self.serve(event.stream_id, self.requests.pop(event.stream_id))

    def echo(self, event, request):
        """Bytes as they come; of a flow whole capsules, between which others may go."""
        data, rest = event.data, b""
        if ":protocol" in request["head"]:
            data = request["body"] + data
            whole = length_of_whole(data)
            data, rest = data[:whole], data[whole:]
        request["body"] = rest
        self.http.send_data(event.stream_id, data, end_stream=event.stream_ended)

    def answer(self, stream, status, more, ends):
        lines = [(":status", str(status)), ("server", "aioquic"), *more]
        self.http.send_headers(stream, [(name.encode(), value.encode()) for name, value in lines], end_stream=ends)

    def serve(self, stream, request):
        path = request["head"].get(":path", "")
        if request["head"][":method"] == "CONNECT":
            self.http.send_data(stream, b"", end_stream=True)
        elif path == "/echo":
            self.answer(stream, 200, [], False)
            self.http.send_data(stream, request["body"], end_stream=False)
            self.http.send_headers(stream, [(b"x-trailer", b"back")], end_stream=True)
        elif path.startswith("/bytes/"):
            size = int(path.split("/")[2])
            self.answer(stream, 200, [("content-length", str(size))], size == 0)
            if size > 0:
                self.http.send_data(stream, b"x" * size, end_stream=True)
        else:
            told = {"head": request["head"], "bytes": len(request["body"]), "trailers": request["trailers"]}
            self.answer(stream, 200, [("content-type", "application/json")], False)
            self.http.send_data(stream, json.dumps(told).encode(), end_stream=True)


def length_of_whole(data):
    """How many bytes of a buffer are whole capsules."""
    at = 0
    while True:
        try:
            buf = Buffer(data=data[at:])
            buf.pull_uint_var()
            buf.pull_bytes(buf.pull_uint_var())
        except BufferReadError:
            return at
        at += buf.tell()


def fields(headers):
    return {name.decode(): value.decode() for name, value in headers}


async def main():
    cert, key = sys.argv[1], sys.argv[2]
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["h3"], max_datagram_frame_size=65536)
    configuration.load_cert_chain(cert, key)
    server = await serve("127.0.0.1", 0, configuration=configuration, create_protocol=Origin)
    print(server._transport.get_extra_info("sockname")[1], flush=True)
    await asyncio.Future()


asyncio.run(main())
