"""A producer of python-ndn: one file of the given size under /org/file, in version 7, with RDR metadata.

In: the size as an argument; optionally an algorithm, a file, and the seconds until a certificate expires. Out: its UDP
port on standard output; then Data for each Interest. Byte N of the file is N * 31 % 251. A digest protects the packets.
With an algorithm, a key of the identity /org/file signs them, which an anchor /org has certified. The public key of the
anchor goes to the file.
"""

import asyncio
import datetime
import socket
import sys

from Cryptodome.PublicKey import ECC, RSA
from ndn.app_support.security_v2 import derive_cert
from ndn.encoding import Component, MetaInfo, Name, make_data, parse_interest
from ndn.encoding.ndnlp_v2 import parse_lp_packet
from ndn.security import DigestSha256Signer, Ed25519Signer, Sha256WithEcdsaSigner, Sha256WithRsaSigner

SEGMENT = 8000
size = int(sys.argv[1])
pattern = bytes(n * 31 % 251 for n in range(251))
content = (pattern * (size // 251 + 1))[:size]
last = Component.from_segment(max(0, (size - 1) // SEGMENT))
signer = DigestSha256Signer()
certificate = None


def key_pair(algorithm, name):
    """The signer and the public key (DER) of a new key."""
    if algorithm == "rsa":
        key = RSA.generate(2048)
        return Sha256WithRsaSigner(name, key.export_key(format="DER")), key.public_key().export_key(format="DER")
    if algorithm == "ed25519":
        key = ECC.generate(curve="ed25519")
        return Ed25519Signer(name, key.export_key(format="DER")), key.public_key().export_key(format="DER")
    key = ECC.generate(curve="P-256")
    private = key.export_key(format="DER", use_pkcs8=False)
    return Sha256WithEcdsaSigner(name, private), key.public_key().export_key(format="DER")


if len(sys.argv) > 2:
    _, _, algorithm, anchor_file, seconds = sys.argv
    anchor, anchor_key = key_pair(algorithm, "/org/KEY/1")
    with open(anchor_file, "w") as file:
        key = RSA.import_key(anchor_key) if algorithm == "rsa" else ECC.import_key(anchor_key)
        pem = key.export_key(format="PEM")
        file.write(pem if isinstance(pem, str) else pem.decode())
    signer, public = key_pair(algorithm, "/org/file/KEY/1")
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=3600)
    _, certificate = derive_cert("/org/file/KEY/1", "anchor", public, anchor, begin, 3600 + int(seconds))


def answer(packet):
    if packet[0] == 0x64:
        packet = bytes(parse_lp_packet(packet, with_tl=True)[1])
    name, _, _, _ = parse_interest(packet)
    if "/KEY/" in Name.to_str(name):
        return certificate
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
