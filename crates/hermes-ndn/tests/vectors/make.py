"""Packets of python-ndn 0.5.2, as vectors: `python3 make.py > python-ndn.json` with the package installed.

Each vector has a packet in hexadecimal and what it contains. Keys are made anew, so that each run differs.
"""
import json

from Cryptodome.PublicKey import ECC, RSA
from ndn.encoding import InterestParam, MetaInfo, Component, Name, make_data, make_interest
from ndn.security import DigestSha256Signer, HmacSha256Signer, Sha256WithEcdsaSigner, Sha256WithRsaSigner
from ndn.security.signer import Ed25519Signer

ecdsa, rsa, ed = ECC.generate(curve="P-256"), RSA.generate(2048), ECC.generate(curve="Ed25519")
secret = b"a shared secret"
spki = lambda key: key.public_key().export_key(format="DER").hex()
signers = {
    "digest": (DigestSha256Signer(), None),
    "hmac": (HmacSha256Signer("/alice/KEY/1", secret), secret.hex()),
    "ecdsa": (Sha256WithEcdsaSigner("/alice/KEY/1", ecdsa.export_key(format="DER", use_pkcs8=True)), spki(ecdsa)),
    "rsa": (Sha256WithRsaSigner("/alice/KEY/1", rsa.export_key(format="DER", pkcs=8)), spki(rsa)),
    "ed25519": (Ed25519Signer("/alice/KEY/1", ed.export_key(format="DER")), spki(ed)),
}
vectors = []
for size in (0, 1, 300, 8000):  # the longest by digest alone
    for kind, (signer, key) in signers.items():
        if size == 8000 and kind != "digest":
            continue
        meta = MetaInfo(freshness_period=10000, final_block_id=Component.from_segment(7)) if size else MetaInfo()
        name = Name.from_str("/org/dev/%00%FF") + [Component.from_version(3), Component.from_segment(size)]
        packet = make_data(name, meta, content=bytes(range(256)) * 32 if size == 8000 else b"x" * size, signer=signer)
        vectors.append(dict(packet=bytes(packet).hex(), type="data", name=Name.to_str(name), content=size if size < 8000 else 8192,
                            final="/seg=7" if size else None, signature=kind, key=key))
for kind, (signer, key) in signers.items():
    packet = make_interest("/alice/cmd", InterestParam(nonce=1, lifetime=4000), b"parameters", signer=signer)
    vectors.append(dict(packet=bytes(packet).hex(), type="interest", name="/alice/cmd", signature=kind, key=key, parameters=10))
plain = make_interest("/a/b", InterestParam(can_be_prefix=True, must_be_fresh=True, nonce=0x01020304, lifetime=6000, hop_limit=5,
                                            forwarding_hint=["/h"]))
vectors.append(dict(packet=bytes(plain).hex(), type="interest", name="/a/b", signature=None, key=None, parameters=None))
print(json.dumps(vectors, indent=1))
