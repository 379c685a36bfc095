// connect-ip-go between a device and HTTP/3: the peer that Hermes is tested against, as client and as proxy.
//
// In: "client" or "proxy", certificates, addresses. Out: a device whose packets go through a tunnel, and a line
// "ready" once they do. It ends with the tunnel, or with its standard input. Needs CAP_NET_ADMIN.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"unsafe"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
	"golang.org/x/sys/unix"
)

const device = "go0"

var (
	cert     = flag.String("cert", "", "PEM file of our certificate")
	key      = flag.String("key", "", "PEM file of its key")
	ca       = flag.String("ca", "", "PEM file of the CA that the peer's certificate is of")
	name     = flag.String("name", "", "client: the name that the proxy's certificate is for")
	template = flag.String("template", "", "URI of the proxy")
	dial     = flag.String("dial", "", "client: address and port of the proxy")
	listen   = flag.String("listen", "", "proxy: address and port to listen on")
	own      = flag.String("address", "", "addresses of the device, with commas between them")
)

func main() {
	log.SetFlags(log.Lmicroseconds)
	mode := os.Args[1]
	os.Args = os.Args[1:]
	flag.Parse()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	var err error
	switch mode {
	case "client":
		err = client()
	case "proxy":
		err = proxy()
	default:
		err = fmt.Errorf("neither client nor proxy: %s", mode)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// client asks the proxy for addresses, whichever it gives, and sends what the proxy has routes for.
func client() error {
	certificates, roots, err := identity()
	if err != nil {
		return err
	}
	wanted, err := prefixes(*own)
	if err != nil {
		return err
	}
	request, err := connectip.NewRequest(context.Background(), uritemplate.MustNew(*template))
	if err != nil {
		return err
	}
	transport := connectip.Transport{
		TLSClientConfig: &tls.Config{
			Certificates: certificates, RootCAs: roots, ServerName: *name, NextProtos: []string{http3.NextProtoH3},
		},
		DialAddr: func(ctx context.Context, _ string, t *tls.Config, q *quic.Config) (*quic.Conn, error) {
			return quic.DialAddr(ctx, *dial, t, q)
		},
	}
	conn, _, err := transport.Dial(request)
	if err != nil {
		return err
	}
	if _, err = conn.RequestAddresses(wanted); err != nil {
		return err
	}
	assigned, err := conn.ReceiveAddressAssignment(context.Background())
	if err != nil {
		return err
	}
	var addresses []netip.Prefix
	for _, one := range assigned {
		if !one.Rejected() {
			addresses = append(addresses, one.IPPrefix)
		}
	}
	routes, err := conn.Routes(context.Background())
	if err != nil {
		return err
	}
	tun, err := open(addresses)
	if err != nil {
		return err
	}
	for _, route := range routes {
		for _, prefix := range route.Prefixes() {
			if err := ip("route", "add", prefix.String(), "dev", device); err != nil {
				return err
			}
		}
	}
	go func() { log.Fatal(send(tun, func([]byte) *connectip.Conn { return conn })) }()
	fmt.Println("ready")
	return receive(conn, tun)
}

// proxy gives every client the addresses that it asks for, and routes to ours.
func proxy() error {
	certificates, roots, err := identity()
	if err != nil {
		return err
	}
	addresses, err := prefixes(*own)
	if err != nil {
		return err
	}
	tun, err := open(addresses)
	if err != nil {
		return err
	}
	uri := uritemplate.MustNew(*template)
	server := http3.Server{
		EnableDatagrams: true,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r, uri, addresses, tun); err != nil {
				log.Print(err)
			}
		}),
	}
	socket, err := net.ListenPacket("udp", *listen)
	if err != nil {
		return err
	}
	listener, err := quic.ListenEarly(socket, http3.ConfigureTLSConfig(&tls.Config{
		Certificates: certificates, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert,
	}), &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350})
	if err != nil {
		return err
	}
	go func() { log.Fatal(send(tun, holder)) }()
	fmt.Println("ready")
	return server.ServeListener(listener)
}

func serve(w http.ResponseWriter, r *http.Request, uri *uritemplate.Template, own []netip.Prefix, tun *os.File) error {
	request, err := connectip.ParseProxyRequest(r, uri)
	if err != nil {
		status := http.StatusBadRequest
		if parse, ok := errors.AsType[*connectip.ProxyRequestParseError](err); ok {
			status = parse.HTTPStatus
		}
		w.WriteHeader(status)
		return err
	}
	conn, err := (&connectip.Proxy{}).Proxy(w, request)
	if err != nil {
		return err
	}
	var routes []connectip.IPRoute
	for _, prefix := range own {
		routes = append(routes, connectip.IPRoute{StartIP: prefix.Addr(), EndIP: prefix.Addr()})
	}
	if err := conn.AdvertiseRoute(routes); err != nil {
		return err
	}
	wanted, err := conn.ReceiveAddressRequest(r.Context())
	if err != nil {
		return err
	}
	for _, prefix := range wanted.Prefixes {
		if err := ip("route", "replace", prefix.String(), "dev", device); err != nil {
			return err
		}
		holders.Store(prefix.Addr(), conn)
	}
	if err := wanted.Respond(wanted.Prefixes, nil); err != nil {
		return err
	}
	return receive(conn, tun)
}

// holders has the tunnel of each address that the proxy has given.
var holders sync.Map

// holder is the tunnel that a packet of the proxy's device goes to.
func holder(packet []byte) *connectip.Conn {
	var to netip.Addr
	switch {
	case len(packet) >= 20 && packet[0]>>4 == 4:
		to, _ = netip.AddrFromSlice(packet[16:20])
	case len(packet) >= 40 && packet[0]>>4 == 6:
		to, _ = netip.AddrFromSlice(packet[24:40])
	}
	if conn, ok := holders.Load(to); ok {
		return conn.(*connectip.Conn)
	}
	return nil
}

// send moves packets of the device into the tunnels that they are for, until the device fails.
func send(tun *os.File, find func([]byte) *connectip.Conn) error {
	packet := make([]byte, 65535)
	for {
		n, err := tun.Read(packet)
		if err != nil {
			return fmt.Errorf("reading the device: %w", err)
		}
		conn := find(packet[:n])
		if conn == nil {
			continue
		}
		icmp, err := conn.WritePacket(packet[:n])
		if err != nil {
			log.Printf("a packet of %d bytes is not sent: %v", n, err)
		}
		if icmp != nil {
			_, _ = tun.Write(icmp)
		}
	}
}

// receive moves packets of a tunnel to the device, until the tunnel ends.
func receive(conn *connectip.Conn, tun *os.File) error {
	packet := make([]byte, 65535)
	for {
		n, err := conn.ReadPacket(packet)
		if err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
		if _, err := tun.Write(packet[:n]); err != nil {
			log.Printf("the device refuses a packet of %d bytes: %v", n, err)
		}
	}
}

// open makes the device.
func open(addresses []netip.Prefix) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var request struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], device)
	request.flags = unix.IFF_TUN | unix.IFF_NO_PI
	_, _, failed := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&request)))
	if failed != 0 {
		return nil, failed
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	for _, address := range addresses {
		if err := ip("addr", "add", address.String(), "dev", device); err != nil {
			return nil, err
		}
	}
	// What goes into its datagrams at the start of a connection: the library tells no other MTU than 1280.
	return os.NewFile(uintptr(fd), device), ip("link", "set", device, "mtu", "1280", "up")
}

func ip(args ...string) error {
	said, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, said)
	}
	return nil
}

func prefixes(text string) ([]netip.Prefix, error) {
	var all []netip.Prefix
	for one := range strings.SplitSeq(text, ",") {
		address, err := netip.ParseAddr(one)
		if err != nil {
			return nil, err
		}
		all = append(all, netip.PrefixFrom(address, address.BitLen()))
	}
	return all, nil
}

func identity() ([]tls.Certificate, *x509.CertPool, error) {
	pair, err := tls.LoadX509KeyPair(*cert, *key)
	if err != nil {
		return nil, nil, err
	}
	pem, err := os.ReadFile(*ca)
	if err != nil {
		return nil, nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, nil, fmt.Errorf("no certificate in %s", *ca)
	}
	return []tls.Certificate{pair}, roots, nil
}
