"""The paper's "simple Python echo server", for four kinds of clients.

python3 slow_echo.py BIND PAYLOAD_FILE BACKLOG CERT KEY

Serves, each on a port of its own: HTTP/1.1, the same over TLS, TCP echo, UDP echo. Prints one JSON line with the
ports when all of them are open, and ends when its standard input does. Standard library only, used as its
documentation shows: a thread a connection. It sleeps nowhere: what makes it slow at accepting is Python itself.
"""

import http.server
import json
import socket
import socketserver
import ssl
import sys
import threading

BIND, PAYLOAD_FILE, BACKLOG, CERT, KEY = sys.argv[1:6]
with open(PAYLOAD_FILE, "rb") as file:
    PAYLOAD = file.read()


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # With Nagle's algorithm a body would wait for the acknowledgement of its head: a round trip of nobody's making.
    disable_nagle_algorithm = True

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAYLOAD)))
        self.end_headers()
        self.wfile.write(PAYLOAD)

    def log_message(self, *_):
        pass


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Datagram(socketserver.BaseRequestHandler):
    def handle(self):
        data, sock = self.request
        sock.sendto(data, self.client_address)


class Quiet:
    """A client that has gone away is no news."""

    def handle_error(self, *_):
        pass


class TcpServer(Quiet, socketserver.ThreadingTCPServer):
    request_queue_size = int(BACKLOG)
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False


class TlsServer(TcpServer):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)

    # In the connection's own thread: a handshake in the accepting one would let a single client hold up all others.
    def finish_request(self, request, client_address):
        with self.context.wrap_socket(request, server_side=True) as wrapped:
            self.RequestHandlerClass(wrapped, client_address, self)


class UdpServer(Quiet, socketserver.UDPServer):
    max_packet_size = 65536

    # A thousand datagrams at one instant are more than the default buffer holds; lost ones would be nobody's delay.
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        super().server_bind()


servers = {
    "http": TcpServer((BIND, 0), Web),
    "secure": TlsServer((BIND, 0), Web),
    "tcp": TcpServer((BIND, 0), Echo),
    "udp": UdpServer((BIND, 0), Datagram),
}
for server in servers.values():
    threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps({name: f"{BIND}:{server.server_address[1]}" for name, server in servers.items()}), flush=True)
sys.stdin.buffer.read()
