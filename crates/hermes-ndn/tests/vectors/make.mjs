// Packets of @ndn/packet, as vectors: `node make.mjs > ndnts.json` with @ndn/packet and @ndn/keychain installed.
// Keys are made anew, so that each run differs.
import { Encoder } from "@ndn/tlv";
import { Data, FwHint, Interest, Name } from "@ndn/packet";
import { ECDSA, Ed25519, generateSigningKey } from "@ndn/keychain";
import { Version, Segment } from "@ndn/naming-convention2";

const hex = (bytes) => Buffer.from(bytes).toString("hex");
const vectors = [];
for (const [kind, algo] of [["ecdsa", ECDSA], ["ed25519", Ed25519]]) {
  const [signer, verifier] = await generateSigningKey("/alice/KEY/1", algo);
  const key = hex(verifier.spki);
  const name = new Name("/org/dev").append(Version, 3).append(Segment, 0);
  const data = new Data(name, Data.FreshnessPeriod(10000), new Uint8Array(300));
  data.finalBlockId = new Name().append(Segment, 7).at(0);
  await signer.sign(data);
  vectors.push({ packet: hex(Encoder.encode(data)), type: "data", name: "/org/dev/v=3/seg=0", content: 300, final: "/seg=7", signature: kind, key });
  const interest = new Interest("/alice/cmd", new Uint8Array(10));
  await signer.sign(interest);
  vectors.push({ packet: hex(Encoder.encode(interest)), type: "interest", name: "/alice/cmd", signature: kind, key, parameters: 10 });
}
const plain = new Interest("/a/b", Interest.CanBePrefix, Interest.MustBeFresh, Interest.Lifetime(6000));
plain.nonce = 0x01020304; plain.hopLimit = 5; plain.fwHint = new FwHint(["/h"]);
vectors.push({ packet: hex(Encoder.encode(plain)), type: "interest", name: "/a/b", signature: null, key: null, parameters: null });
console.log(JSON.stringify(vectors, null, 1));
