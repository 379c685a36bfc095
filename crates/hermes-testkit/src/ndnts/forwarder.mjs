// The third-party NDN forwarder of NDNts (@ndn/fw), with its FIB and PIT.
//
// Arguments: the address at which programs connect over TCP and UDP (HOST:PORT; port 0 takes a free one), and the face to
// which all Interests go (tcp://HOST:PORT, udp://HOST:PORT or unix:///PATH). Prints the port, and ends with its standard
// input if that is a pipe.

import { createSocket } from "node:dgram";
import { once } from "node:events";
import { fstatSync } from "node:fs";
import { createServer } from "node:net";
import { Forwarder } from "@ndn/fw";
import { L3Face, StreamTransport, Transport, rxFromPacketIterable } from "@ndn/l3face";
import { TcpTransport, UdpTransport, UnixTransport } from "@ndn/node-transport";
import { Name } from "@ndn/packet";

const UDP_PAYLOAD = 1472;
const MAX_WAITING = 1024;
const MAX_SOURCES = 1024;
const [listenAt, upstream] = process.argv.slice(2);
const forwarder = Forwarder.create();

async function connect(uri) {
  if (uri.startsWith("unix://")) {
    return UnixTransport.connect(uri.slice("unix://".length));
  }
  const [, transport, host, port] = uri.match(/^(tcp|udp):\/\/\[?(.*?)\]?:(\d+)$/);
  return transport === "udp"
    ? UdpTransport.connect({ host, port: Number(port) })
    : TcpTransport.connect(host, Number(port));
}

// The datagrams of one source. NDNts itself has no UDP listener.
class SourceTransport extends Transport {
  constructor(socket, source) {
    super({ describe: `${source.address}:${source.port}` });
    Object.assign(this, { socket, source, waiting: [], wake: () => {} });
    this.rx = rxFromPacketIterable(this.datagrams());
  }

  get mtu() {
    return UDP_PAYLOAD;
  }

  push(datagram) {
    if (this.waiting.length < MAX_WAITING) {
      this.waiting.push(datagram);
    }
    this.wake();
  }

  async *datagrams() {
    for (;;) {
      yield* this.waiting.splice(0);
      if (this.waiting.length === 0) {
        await new Promise((resolve) => (this.wake = resolve));
      }
    }
  }

  async tx(packets) {
    for await (const packet of packets) {
      this.socket.send(packet, this.source.port, this.source.address);
    }
  }
}

forwarder.addFace(new L3Face(await connect(upstream))).addRoute(new Name("/"));

const server = createServer({ noDelay: true }, (socket) => {
  socket.on("error", () => socket.destroy());
  forwarder.addFace(new L3Face(new StreamTransport(socket, { describe: "program" })));
});
const separator = listenAt.lastIndexOf(":");
const host = listenAt.slice(0, separator);
server.listen(Number(listenAt.slice(separator + 1)), host);
await once(server, "listening");
const { port } = server.address();

const datagrams = createSocket("udp4");
const sources = new Map();
datagrams.on("message", (datagram, source) => {
  const key = `${source.address}:${source.port}`;
  if (!sources.has(key)) {
    if (sources.size >= MAX_SOURCES) {
      return;
    }
    const transport = new SourceTransport(datagrams, source);
    sources.set(key, transport);
    forwarder.addFace(new L3Face(transport));
  }
  sources.get(key).push(datagram);
});
datagrams.bind(port, host);
await once(datagrams, "listening");

console.log(port);
if (fstatSync(0).isFIFO()) {
  process.stdin.on("end", () => process.exit(0)).resume();
}
