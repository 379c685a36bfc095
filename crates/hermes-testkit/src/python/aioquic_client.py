"""A client of other people's making: aioquic asks an HTTP/3 listener.

In: on standard input one JSON object: host, port, name, ca, perhaps cert and key, and `ask`, a list of
[operation, arguments...]. Out: on standard output a JSON list with what became of each, in its order; all are on one
connection, one after the other. Every byte that comes back is compared here.
"""

import asyncio
import json
import ssl
import sys

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.buffer import Buffer, encode_uint_var
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, DatagramReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, StreamReset

SILENCE = 20


class Client(QuicConnectionProtocol):
    """One connection; what comes on a stream is put in the stream's queue."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Without it aioquic offers no datagrams.
        self.http = H3Connection(self._quic, enable_webtransport=True)
        self.streams = {}

    def quic_event_received(self, event):
        if isinstance(event, StreamReset):
            self.queue(event.stream_id).put_nowait(("reset", event.error_code))
        if isinstance(event, ConnectionTerminated):
            for queue in self.streams.values():
                queue.put_nowait(("closed", event.error_code))
        for known in self.http.handle_event(event):
            if isinstance(known, HeadersReceived):
                fields = {name.decode(): value.decode() for name, value in known.headers}
                self.queue(known.stream_id).put_nowait(("headers", fields))
            elif isinstance(known, DataReceived):
                self.queue(known.stream_id).put_nowait(("data", known.data))
            elif isinstance(known, DatagramReceived):
                self.queue(known.stream_id).put_nowait(("datagram", known.data))
                continue
            else:
                continue
            if known.stream_ended:
                self.queue(known.stream_id).put_nowait(("end", None))

    def queue(self, stream):
        return self.streams.setdefault(stream, asyncio.Queue())

    async def next(self, stream):
        return await asyncio.wait_for(self.queue(stream).get(), SILENCE)

    def begin(self, headers, ends):
        stream = self._quic.get_next_available_stream_id()
        self.queue(stream)
        lines = [(name.encode(), value.encode()) for name, value in headers]
        self.http.send_headers(stream, lines, end_stream=ends)
        self.transmit()
        return stream

    def send(self, stream, data, ends):
        self.http.send_data(stream, data, end_stream=ends)
        self.transmit()

    async def whole(self, stream):
        """The whole answer: head, body, trailers."""
        head, body, trailers = None, b"", None
        while True:
            kind, value = await self.next(stream)
            if kind == "headers" and head is None:
                if value[":status"][0] != "1":
                    head = value
            elif kind == "headers":
                trailers = value
            elif kind == "data":
                body += value
            elif kind == "end":
                return head, body, trailers
            else:
                raise RuntimeError(f"{kind} {value!r}")

    async def settings(self):
        while self.http.received_settings is None:
            await asyncio.sleep(0.01)
        return self.http.received_settings


def pattern(size):
    """Bytes that repeat at no boundary of anybody's."""
    once = bytes((7 * i + i // 251) % 256 for i in range(251 * 256))
    return (once * (size // len(once) + 1))[:size]


def head(method, authority, path):
    return [(":method", method), (":scheme", "https"), (":authority", authority), (":path", path)]


async def get(client, authority, path):
    answer, body, trailers = await client.whole(client.begin(head("GET", authority, path), True))
    return {"status": int(answer[":status"]), "body": body.decode(), "headers": answer, "trailers": trailers}


async def post(client, authority, path, size):
    """Posts so many bytes to an echo, with trailers behind."""
    sent = pattern(size)
    stream = client.begin(head("POST", authority, path), False)
    for start in range(0, size, 50_000):
        client.send(stream, sent[start : start + 50_000], False)
    client.http.send_headers(stream, [(b"x-trailer", b"yes")], end_stream=True)
    client.transmit()
    answer, body, trailers = await client.whole(stream)
    return {"status": int(answer[":status"]), "same": body == sent, "bytes": len(body), "trailers": trailers}


async def tunnel(client, authority, size):
    """CONNECT: sends so many bytes to an echo, ends its side, and hears all of it and the end."""
    sent = pattern(size)
    stream = client.begin([(":method", "CONNECT"), (":authority", authority)], False)
    kind, answer = await client.next(stream)
    if answer[":status"] != "200":
        return {"status": int(answer[":status"])}
    client.send(stream, sent, True)
    heard = b""
    while True:
        kind, value = await client.next(stream)
        if kind == "end":
            return {"status": 200, "same": heard == sent, "bytes": len(heard)}
        if kind != "data":
            raise RuntimeError(f"{kind} {value!r}")
        heard += value


def datagram_capsule(payload):
    return encode_uint_var(0) + encode_uint_var(len(payload)) + payload


def capsules(data):
    """The whole capsules of a buffer, and how much of it they were."""
    found, at = [], 0
    while True:
        try:
            buf = Buffer(data=data[at:])
            kind, length = buf.pull_uint_var(), buf.pull_uint_var()
            value = buf.pull_bytes(length)
        except Exception:
            return found, at
        found.append((kind, value))
        at += buf.tell()


async def flow(client, host, port, sizes, by):
    """CONNECT-UDP: sends a payload of each size by QUIC datagrams or by capsules, and takes each back however it
    comes."""
    settings = await client.settings()
    lines = [(":method", "CONNECT"), (":protocol", "connect-udp"), (":scheme", "https"), (":authority", "proxy.test")]
    lines += [(":path", f"/.well-known/masque/udp/{host}/{port}/"), ("capsule-protocol", "?1")]
    stream = client.begin(lines, False)
    kind, answer = await client.next(stream)
    if answer[":status"] != "200":
        return {"status": int(answer[":status"]), "headers": answer}
    came, unread, same = {"datagrams": 0, "capsules": 0}, b"", True
    for number, size in enumerate(sizes):
        payload = bytes([number % 256]) * size
        # Context 0 is UDP payload.
        if by == "datagrams":
            client.http.send_datagram(stream, b"\0" + payload)
            client.transmit()
        else:
            client.send(stream, datagram_capsule(b"\0" + payload), False)
        back = None
        while back is None:
            kind, value = await client.next(stream)
            if kind == "datagram":
                back = value
                came["datagrams"] += 1
            elif kind == "data":
                unread += value
                whole, used = capsules(unread)
                unread = unread[used:]
                for sort, value in whole:
                    if sort == 0:
                        back = value
                        came["capsules"] += 1
            else:
                raise RuntimeError(f"{kind} {value!r}")
        same = same and back == b"\0" + payload
    client.send(stream, b"", True)
    ended = await client.next(stream)
    while ended == ("data", b""):
        ended = await client.next(stream)
    return {"status": 200, "same": same, "came": came, "ended": ended[0], "offered": settings.get(0x33), "head": answer}


OPERATIONS = {"get": get, "post": post, "tunnel": tunnel, "flow": flow}


async def main():
    task = json.load(sys.stdin)
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=["h3"], server_name=task["name"], max_datagram_frame_size=65536
    )
    configuration.verify_mode = ssl.CERT_REQUIRED
    configuration.load_verify_locations(task["ca"])
    if task.get("cert"):
        configuration.load_cert_chain(task["cert"], task["key"])
    results = []
    async with connect(task["host"], task["port"], configuration=configuration, create_protocol=Client) as client:
        for operation, *arguments in task["ask"]:
            try:
                results.append(await OPERATIONS[operation](client, *arguments))
            except Exception as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(results, sys.stdout)


asyncio.run(main())
