"""A producer of python-ndn: one file of the given size under /org/file, in version 7, with RDR metadata.

In: the size as an argument. Out: its UDP port on standard output; then Data for each Interest. Byte N of the file is
N * 31 % 251. A digest protects the packets.
"""

import asyncio
import socket
import sys

from ndn.encoding import Component, MetaInfo, Name, make_data, parse_interest
from ndn.encoding.ndnlp_v2 import parse_lp_packet
from ndn.security import DigestSha256Signer

SEGMENT = 8000
size = int(sys.argv[1])
pattern = bytes(n * 31 % 251 for n in range(251))
content = (pattern * (size // 251 + 1))[:size]
last = Component.from_segment(max(0, (size - 1) // SEGMENT))
signer = DigestSha256Signer()


def answer(packet):
    if packet[0] == 0x64:
        packet = bytes(parse_lp_packet(packet, with_tl=True)[1])
    name, _, _, _ = parse_interest(packet)
    if Component.get_type(name[-1]) == Component.TYPE_SEGMENT:
        number = Component.to_number(name[-1])
        part = content[number * SEGMENT:(number + 1) * SEGMENT]
        return make_data(name, MetaInfo(freshness_period=10000, final_block_id=last), content=part, signer=signer)
    if "32=metadata" in Name.to_str(name):
        versioned = Name.from_str("/org/file") + [Component.from_version(7)]
        full = name + [Component.from_version(1), Component.from_segment(0)]
        return make_data(full, MetaInfo(freshness_period=10), content=Name.encode(versioned), signer=signer)
    return None


class Producer(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        packet = answer(data)
        if packet:
            self.transport.sendto(bytes(packet), address)


async def main():
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Producer, local_addr=("127.0.0.1", 0))
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    print(transport.get_extra_info("sockname")[1], flush=True)
    await asyncio.sleep(3600)


asyncio.run(main())
