"""A consumer of python-ndn.

In: on standard input a JSON object: port, transport (`tcp` or `udp`), prefix, count. Out: on standard output a JSON
object: how many Interests were answered, how many timed out, and the bytes of content. Without a count, the consumer
fetches the segments of the newest version, and the object has the bytes and the SHA-256 digest of the content.
"""

import asyncio
import hashlib
import json
import sys

from ndn.app import NDNApp
from ndn.app_support.segment_fetcher import segment_fetcher
from ndn.encoding import Component, Name
from ndn.security import KeychainDigest
from ndn.transport.stream_face import TcpFace
from ndn.transport.udp_face import UdpFace
from ndn.types import InterestNack, InterestTimeout

PIPELINE = 10
task = json.load(sys.stdin)
face = {"tcp": TcpFace, "udp": UdpFace}[task["transport"]]("127.0.0.1", task["port"])
app = NDNApp(face=face, keychain=KeychainDigest())
found = {"answered": 0, "late": 0, "returned": 0, "bytes": 0}


async def ask(room, number):
    name = Name.from_str(task["prefix"]) + [Component.from_segment(number)]
    async with room:
        try:
            _, _, content = await app.express_interest(name, lifetime=4000)
            found["answered"] += 1
            found["bytes"] += len(bytes(content))
        except InterestTimeout:
            found["late"] += 1
        except InterestNack:
            found["returned"] += 1


async def fetch():
    content = b"".join([bytes(part) async for part in segment_fetcher(app, Name.from_str(task["prefix"]))])
    found.clear()
    found.update({"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    app.shutdown()


async def main():
    if "count" not in task:
        return await fetch()
    room = asyncio.Semaphore(PIPELINE)
    await asyncio.gather(*[ask(room, number) for number in range(task["count"])])
    app.shutdown()


app.run_forever(after_start=main())
print(json.dumps(found))
