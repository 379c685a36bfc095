// Writes vectors of NDNts: javascript.json, with the keys of keys.json.
//
//     npm install @ndn/{packet,keychain,lp,tlv}@0.0.20240630      (all of one version)
//     NODE_MODULES=DIR node make.mjs
//
// The malformed packets are written by hand; the script records those that NDNts accepts.

import { createHash } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const modules = path.resolve(process.env.NODE_MODULES ?? "node_modules");
const load = async (name) => {
  const root = path.join(modules, name);
  const { main } = JSON.parse(fs.readFileSync(path.join(root, "package.json")));
  return import(pathToFileURL(path.join(root, main)));
};
const { Component, Data, digestSigning, FwHint, Interest, Name, SigInfo, ValidityPeriod } =
  await load("@ndn/packet");
const { Certificate, ECDSA, Ed25519, generateSigningKey, HMAC, RSA } = await load("@ndn/keychain");
const { Fragmenter, LpPacket } = await load("@ndn/lp");
const { Decoder, Encoder } = await load("@ndn/tlv");

const here = import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname);
const bytes = (text) => Uint8Array.from(Buffer.from(text, "hex"));
const hex = (value) => Buffer.from(value).toString("hex");
const encode = (packet) => Encoder.encode(packet);
const keys = JSON.parse(fs.readFileSync(path.join(here, "keys.json")));

const pair = (key) => ({ importPkcs8: [bytes(keys[key].pkcs8), bytes(keys[key].spki)] });
const LOCATOR = "/js/KEY/k1";
const [hmac] = await generateSigningKey(LOCATOR, HMAC, { importRaw: bytes(keys.hmac.secret) });
const [rsa, rsaPublic] = await generateSigningKey(LOCATOR, RSA, pair("rsa"));
const [ecdsa, ecdsaPublic] = await generateSigningKey(LOCATOR, ECDSA, pair("ecdsa"));
const [ed25519, ed25519Public] = await generateSigningKey(LOCATOR, Ed25519, pair("ed25519"));
const signers = { digest: digestSigning, hmac, rsa, ecdsa, ed25519 };
const publics = { rsa: rsaPublic, ecdsa: ecdsaPublic, ed25519: ed25519Public };

async function interests() {
  const result = [];
  const add = async (fields, key, signature = {}) => {
    const interest = new Interest(new Name(fields.name));
    interest.canBePrefix = fields.can_be_prefix ?? false;
    interest.mustBeFresh = fields.must_be_fresh ?? false;
    if (fields.forwarding_hint) interest.fwHint = new FwHint(fields.forwarding_hint.map((uri) => new Name(uri)));
    interest.nonce = fields.nonce;
    if (fields.lifetime) interest.lifetime = fields.lifetime;
    if (fields.hop_limit !== undefined) interest.hopLimit = fields.hop_limit;
    if (fields.parameters !== undefined) interest.appParameters = bytes(fields.parameters);
    if (key) {
      interest.sigInfo = new SigInfo();
      Object.assign(interest.sigInfo, signature);
      await signers[key].sign(interest);
    } else if (fields.parameters !== undefined) {
      await interest.updateParamsDigest();
    }
    const wire = encode(interest);
    result.push({
      wire: hex(wire),
name_wire: hex(encode(interest.name)),
      can_be_prefix: interest.canBePrefix,
      must_be_fresh: interest.mustBeFresh,
      forwarding_hint: fields.forwarding_hint ?? [],
      nonce: fields.nonce.toString(16).padStart(8, "0"),
      lifetime: fields.lifetime ?? null,
      hop_limit: fields.hop_limit ?? null,
      parameters: interest.appParameters ? hex(interest.appParameters) : null,
      key: key ?? null,
      locator: key && key !== "digest" ? LOCATOR : null,
      signature_nonce: signature.nonce ? hex(signature.nonce) : null,
      signature_time: signature.time ?? null,
      signature_sequence: signature.seqNum === undefined ? null : Number(signature.seqNum),
    });
  };
  await add({ name: "/A", nonce: 0x85ac8579 });
  await add({ name: "/A/B", nonce: 1, can_be_prefix: true, must_be_fresh: true, hop_limit: 0, lifetime: 100 });
  await add({ name: "/A", nonce: 2, forwarding_hint: ["/F", "/G/H"], lifetime: 70000, hop_limit: 254 });
  await add({ name: "/A", nonce: 3, parameters: "c0c1c2" });
  for (const key of Object.keys(signers)) {
    await add({ name: "/S", nonce: 4, parameters: "c0" }, key);
    await add({ name: "/S", nonce: 5 }, key, { nonce: bytes("0102030405060708"), time: 1700000000000, seqNum: 9n });
  }
  return result;
}

async function data() {
  const result = [];
  const cases = [
    { name: "/D" },
    { name: "/D/x", freshness: 500, content: "c0c1" },
    { name: "/D", content_type: 3, freshness: 70000, final: "D", content: "11".repeat(7000) },
  ];
  for (const [key, signer] of Object.entries(signers)) {
    for (const fields of cases) {
      const packet = new Data(new Name(fields.name));
      if (fields.content_type) packet.contentType = fields.content_type;
      if (fields.freshness) packet.freshnessPeriod = fields.freshness;
      if (fields.final) packet.finalBlockId = Component.from(fields.final);
      if (fields.content) packet.content = bytes(fields.content);
      await signer.sign(packet);
      const wire = encode(packet);
      result.push({
        wire: hex(wire),
        name: fields.name,
        content_type: fields.content_type ?? 0,
        freshness: fields.freshness ?? null,
        final: fields.final ?? null,
        content: fields.content ?? "",
        key,
        locator: key === "digest" ? null : LOCATOR,
        digest: createHash("sha256").update(wire).digest("hex"),
      });
    }
  }
  return result;
}

async function certificates() {
  const result = [];
  const [notBefore, notAfter] = [1700000000, 1900000000];
  const validity = new ValidityPeriod(new Date(notBefore * 1000), new Date(notAfter * 1000));
  const add = (certificate, key, issuer, selfSigned) => result.push({
    wire: hex(encode(certificate.data)),
    name_wire: hex(encode(certificate.name)),
    identity: "/js",
    not_before: notBefore,
    not_after: notAfter,
    key,
    issuer,
    self_signed: selfSigned,
  });
  for (const key of Object.keys(publics)) {
    const certificate = await Certificate.selfSign({ validity, privateKey: signers[key], publicKey: publics[key] });
    add(certificate, key, key, true);
  }
  const issuerId = Component.from("issuer");
  const issuerPrivateKey = ecdsa.withKeyLocator(new Name("/other/KEY/i/self/v1"));
  add(await Certificate.issue({ validity, issuerId, issuerPrivateKey, publicKey: ed25519Public }), "ed25519", "ecdsa", false);
  return result;
}

async function frames() {
  const packet = new Data(new Name("/L"), bytes("22".repeat(6000)));
  await digestSigning.sign(packet);
  const payload = encode(packet);
  const result = [];
  const add = (fields, mtu) => {
    const full = new LpPacket();
    Object.assign(full, fields, { payload });
    const list = mtu ? new Fragmenter().fragment(full, mtu) : [full];
    result.push({
      frames: list.map((frame) => hex(encode(frame))),
      packet: hex(payload),
      nack: null,
      pit_token: fields.pitToken ? hex(fields.pitToken) : null,
      congestion_mark: fields.congestionMark ?? null,
    });
  };
  add({ pitToken: bytes("d0d1d2d3") });
  add({ congestionMark: 1 });
  add({}, 1400);
  add({ pitToken: bytes("d0".repeat(32)), congestionMark: 1 }, 500);
  return result;
}

/** Packets that a decoder must reject, each with its fault, and whether NDNts is more lenient. */
async function malformed() {
  const list = [
    ["0500", "interest without a name"],
    ["05020700", "interest with an empty name"],
    ["0506070308014121", "truncated element"],
    ["05050703080141ff", "bytes after the packet"],
    ["0507070308014121", "length beyond the end"],
    ["05080703080141210100", "can-be-prefix with a value"],
    ["050a07030801410a03000000", "nonce of three bytes"],
    ["050a07030801410c03000000", "lifetime of three bytes"],
    ["05080703080141220200", "hop limit of two bytes, truncated"],
    ["0509070308014122020000", "hop limit of two bytes"],
    ["0507070308014109 00".replace(" ", ""), "unknown critical element"],
    ["05070703080141f100", "unknown critical element of an odd type"],
    ["050907030801411200 2100".replace(" ", ""), "critical element out of order"],
    ["0507 0703080141 2400".replaceAll(" ", ""), "parameters without a digest"],
    ["0528 0723 080141 0220".replaceAll(" ", "") + "00".repeat(32) + "2100", "digest without parameters"],
    ["0527 0722 0220".replaceAll(" ", "") + "00".repeat(32) + "2400", "wrong parameters digest"],
    ["0600", "data without a name"],
    ["06050703080141", "data without a signature"],
    ["060c0703080141 16031b0100".replace(" ", "") + "1700ff", "data with bytes after the signature"],
    ["0607 0703080141 1c00".replaceAll(" ", ""), "unknown critical element in data"],
    ["06fd0005 0703080141".replace(" ", ""), "length not in its shortest form"],
    ["0605 0703 000141".replaceAll(" ", ""), "component of type 0"],
  ];
  const result = [];
  for (const [text, fault] of list) {
    let accepted = false;
    try {
      const decoder = new Decoder(bytes(text));
      const packet = decoder.decode(text.startsWith("05") ? Interest : Data);
      decoder.throwUnlessEof();
      if (packet instanceof Interest) await packet.validateParamsDigest();
      accepted = true;
    } catch {}
    result.push({ wire: text, fault, ndnts_accepts: accepted });
  }
  return result;
}

const vectors = {
  source: "NDNts 0.0.20240630",
  names: ["/", "/A", "/A/B%00/%FF", "/...", "/....", "/x/......", "/32=...", "/32=keyword", "/600=x"].map((uri) => {
    const name = new Name(uri);
    return { wire: hex(encode(name)), uri: name.toString().replaceAll("8=", "") };
  }),
  interests: await interests(),
  data: await data(),
  certificates: await certificates(),
  frames: await frames(),
  malformed: await malformed(),
};
fs.writeFileSync(path.join(here, "javascript.json"), `${JSON.stringify(vectors, undefined, 1)}\n`);
