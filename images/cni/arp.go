package main

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"time"
)

const (
	probes = 3
	wait   = 100 * time.Millisecond // a link's round trip, generously
)

// answersARP sends RFC 5227's probes: does anyone on this interface's link have the address? An interface that is not
// there has no one behind it.
func answersARP(name string, address netip.Addr) bool {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return false
	}
	arp := binary.BigEndian.Uint16([]byte{0x08, 0x06})
	protocol := arp<<8 | arp>>8
	socket, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return false
	}
	defer syscall.Close(socket)
	if syscall.Bind(socket, &syscall.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index}) != nil {
		return false
	}
	target := address.As4()
	request := bytes.Join([][]byte{
		{0, 1, 0x08, 0, 6, 4, 0, 1}, // Ethernet, IPv4, request
		link.HardwareAddr, {0, 0, 0, 0}, make([]byte, 6), target[:],
	}, nil)
	everyone := &syscall.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index, Halen: 6, Addr: [8]byte{255, 255, 255, 255, 255, 255}}
	for i := 0; i < probes; i++ {
		if syscall.Sendto(socket, request, 0, everyone) != nil {
			return false
		}
		for end := time.Now().Add(wait); time.Now().Before(end); {
			left := syscall.NsecToTimeval(max(int64(time.Until(end)), int64(time.Millisecond)))
			syscall.SetsockoptTimeval(socket, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &left)
			packet := make([]byte, 64)
			n, _, err := syscall.Recvfrom(socket, packet, 0)
			if err == nil && n >= 28 && packet[7] == 2 && bytes.Equal(packet[14:18], target[:]) {
				return true
			}
		}
	}
	return false
}
