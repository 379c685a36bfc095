#!/usr/bin/env python3
"""Writes vectors of python-ndn: keys.json (unless it exists) and python.json.

    python3 -m venv VENV && VENV/bin/pip install python-ndn==0.5.2
    VENV/bin/python make.py

The keys are for tests alone. Run make.mjs afterwards, since it uses the same keys.
"""

import datetime
import json
import os
import pathlib

from Cryptodome.PublicKey import ECC, RSA
from ndn.app_support.security_v2 import new_cert
from ndn.encoding import Component, InterestParam, MetaInfo, Name, make_data, make_interest, make_network_nack
from ndn.security.signer import (
    DigestSha256Signer,
    HmacSha256Signer,
    Sha256WithEcdsaSigner,
    Sha256WithRsaSigner,
)
from ndn.security.signer.ed25519_signer import Ed25519Signer
from hashlib import sha256

HERE = pathlib.Path(__file__).resolve().parent
KEYS = HERE / "keys.json"
LOCATOR = "/test/KEY/k1"


def make_keys():
    def pair(key):
        if isinstance(key, RSA.RsaKey):
            return {"pkcs8": key.export_key("DER", pkcs=8).hex(), "spki": key.public_key().export_key("DER").hex()}
        pkcs8 = key.export_key(format="DER", use_pkcs8=True)
        return {"pkcs8": pkcs8.hex(), "spki": key.public_key().export_key(format="DER").hex()}

    KEYS.write_text(json.dumps({
        "hmac": {"secret": os.urandom(32).hex()},
        "rsa": pair(RSA.generate(2048)),
        "ecdsa": pair(ECC.generate(curve="P-256")),
        "ed25519": pair(ECC.generate(curve="Ed25519")),
    }, indent=1) + "\n")


def signers(keys):
    return {
        "digest": DigestSha256Signer(),
        "hmac": HmacSha256Signer(LOCATOR, bytes.fromhex(keys["hmac"]["secret"])),
        "rsa": Sha256WithRsaSigner(LOCATOR, bytes.fromhex(keys["rsa"]["pkcs8"])),
        "ecdsa": Sha256WithEcdsaSigner(LOCATOR, bytes.fromhex(keys["ecdsa"]["pkcs8"])),
        "ed25519": Ed25519Signer(LOCATOR, bytes.fromhex(keys["ed25519"]["pkcs8"])),
    }


def names():
    # Not "/...": python-ndn lacks the rule for components of periods only.
    uris = [
        "/", "/a", "/a/b/c", "/%00%FF/x%2Fy", "/32=metadata", "/65535=z", "/a/seg=0", "/a/seg=255",
        "/a/seg=256/off=65536", "/a/v=4294967296", "/a/t=1700000000000000", "/a/seq=18446744073709551615",
        "/sha256digest=" + "ab" * 32, "/params-sha256=" + "cd" * 32, "/" + "/".join(["x" * 300] * 3),
    ]
    return [{"wire": bytes(Name.to_bytes(uri)).hex(), "uri": uri} for uri in uris]


def interests(signers):
    cases = [
        ("/a", {"lifetime": None}, None, None),
        ("/a/b", {"can_be_prefix": True, "must_be_fresh": True, "nonce": 0x01020304, "hop_limit": 5}, None, None),
        ("/a/seg=3", {"forwarding_hint": ["/isp1", "/isp2/x"], "nonce": 0xfffefdfc, "lifetime": 65536}, None, None),
        ("/p", {"nonce": 7}, b"\x00\x01parameters", None),
        ("/p", {"nonce": 7, "lifetime": None}, b"", None),
        *[("/s/" + key, {"nonce": 9}, b"x" * 300, key) for key in signers],
    ]
    result = []
    for uri, fields, parameters, key in cases:
        param = InterestParam(**fields)
        wire, final = make_interest(uri, param, parameters, signers.get(key), need_final_name=True)
        result.append({
            "wire": bytes(wire).hex(),
            "name": Name.to_str(final),
            "can_be_prefix": param.can_be_prefix,
            "must_be_fresh": param.must_be_fresh,
            "forwarding_hint": param.forwarding_hint,
            "nonce": None if param.nonce is None else param.nonce.to_bytes(4, "big").hex(),
            "lifetime": param.lifetime,
            "hop_limit": param.hop_limit,
            "parameters": None if parameters is None else parameters.hex(),
            "key": key,
            "locator": None if key in (None, "digest") else LOCATOR,
        })
    return result


def data(signers):
    cases = [
        ("/d", None, None, None, b""),
        ("/d/v=1/seg=0", None, 10_000, "seg=255", b"content"),
        ("/d", 3, 0, None, b"\x05" * 8000),
        ("/d/x", 1024, None, None, b"x" * 252),
    ]
    result = []
    for key, signer in signers.items():
        for uri, kind, freshness, final, content in cases:
            final_id = None if final is None else Component.from_str(final)
            # python-ndn writes an empty MetaInfo only if it is given.
            meta = MetaInfo(content_type=kind, freshness_period=freshness, final_block_id=final_id)
            plain = kind is None and freshness is None and final is None
            wire = bytes(make_data(uri, None if plain else meta, content, signer))
            result.append({
                "wire": wire.hex(),
                "name": uri,
                "content_type": kind or 0,
                "freshness": freshness,
                "final": final,
                "content": content.hex(),
                "key": key,
                "locator": None if key == "digest" else LOCATOR,
                "digest": sha256(wire).hexdigest(),
            })
    return result


def certificates(keys, signers):
    start = datetime.datetime(2024, 2, 29, 12, 34, 56)
    end = datetime.datetime(2044, 12, 31, 23, 59, 59)
    seconds = lambda time: int(time.replace(tzinfo=datetime.timezone.utc).timestamp())
    result = []
    for key in ("rsa", "ecdsa", "ed25519"):
        name, wire = new_cert(LOCATOR, Component.from_str("self"), bytes.fromhex(keys[key]["spki"]), signers[key], start, end)
        result.append({
            "wire": bytes(wire).hex(),
            "name": Name.to_str(name),
            "identity": "/test",
            "not_before": seconds(start),
            "not_after": seconds(end),
            "key": key,
            "issuer": key,
            "self_signed": True,
        })
    return result


def frames():
    interest = bytes(make_interest("/nacked", InterestParam(nonce=1)))
    return [{
        "frames": [bytes(make_network_nack(interest, reason)).hex()],
        "packet": interest.hex(),
        "nack": reason,
        "pit_token": None,
        "congestion_mark": None,
    } for reason in (50, 100, 150)]


def main():
    if not KEYS.exists():
        make_keys()
    keys = json.loads(KEYS.read_text())
    all_signers = signers(keys)
    vectors = {
        "source": "python-ndn 0.5.2",
        "names": names(),
        "interests": interests(all_signers),
        "data": data(all_signers),
        "certificates": certificates(keys, all_signers),
        "frames": frames(),
    }
    (HERE / "python.json").write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
