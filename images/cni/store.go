package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// store is the folder in which host-local keeps one file an address that somebody has, named after the address. Its
// first line is the owner: a container's ID, or holdMark and a namespace for an address that is held.
type store struct{ folder string }

const (
	holdMark = "stasis-hold "
	newline  = "\r\n" // host-local's
)

func openStore(ipam map[string]any, conf config) *store {
	folder := text(ipam["dataDir"])
	if folder == "" {
		folder = "/var/lib/cni/networks"
	}
	return &store{filepath.Join(folder, text(conf["name"]))}
}

// locked runs do under host-local's own lock of the folder.
func (s *store) locked(do func() error) error {
	if err := os.MkdirAll(s.folder, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(s.folder, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	return do()
}

func (s *store) path(address netip.Addr) string { return filepath.Join(s.folder, address.String()) }

// hold turns the container's reservations into holds for the namespace; those that keep is false for are left.
func (s *store) hold(container, namespace string, keep func(netip.Addr) bool) error {
	return s.locked(func() error {
		return s.each(func(address netip.Addr, owner string) error {
			if owner != container || !keep(address) {
				return nil
			}
			return s.write(address, namespace)
		})
	})
}

// put holds an address that nobody has.
func (s *store) put(address netip.Addr, namespace string) {
	s.locked(func() error {
		if _, err := os.Stat(s.path(address)); err == nil {
			return nil
		}
		return s.write(address, namespace)
	})
}

// take ends the namespace's hold of an address, if there is one; an address that another has or holds is an error.
func (s *store) take(address netip.Addr, namespace string) (taken bool, err error) {
	err = s.locked(func() error {
		owner, err := s.owner(s.path(address))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case owner == holdMark+namespace:
			taken = true
			return os.Remove(s.path(address))
		case strings.HasPrefix(owner, holdMark):
			return fmt.Errorf("%s is held for another namespace", address)
		}
		return fmt.Errorf("%s is another pod's", address)
	})
	return taken, err
}

// giveUpOldest ends the longest hold whose address nobody uses on the link; false where there is none.
func (s *store) giveUpOldest(inUse func(netip.Addr) bool) (found bool) {
	tried := map[netip.Addr]bool{}
	for !found {
		var oldest netip.Addr
		var since time.Time
		s.each(func(address netip.Addr, owner string) error {
			info, err := os.Stat(s.path(address))
			if err == nil && strings.HasPrefix(owner, holdMark) && !tried[address] && (!oldest.IsValid() || info.ModTime().Before(since)) {
				oldest, since = address, info.ModTime()
			}
			return nil
		})
		if !oldest.IsValid() {
			return false
		}
		tried[oldest] = true
		if inUse(oldest) { // by a pod that took it along to another node
			continue
		}
		s.locked(func() error {
			owner, err := s.owner(s.path(oldest))
			if err == nil && strings.HasPrefix(owner, holdMark) {
				found = os.Remove(s.path(oldest)) == nil
			}
			return nil
		})
	}
	return found
}

func (s *store) each(visit func(address netip.Addr, owner string) error) error {
	entries, err := os.ReadDir(s.folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, entry := range entries {
		address, err := netip.ParseAddr(entry.Name())
		if err != nil {
			continue // its lock and bookmarks
		}
		owner, err := s.owner(s.path(address))
		if err != nil {
			continue // gone meanwhile
		}
		if err := visit(address, owner); err != nil {
			return err
		}
	}
	return nil
}

func (s *store) owner(path string) (string, error) {
	content, err := os.ReadFile(path)
	first, _, _ := strings.Cut(strings.TrimSpace(string(content)), newline)
	return first, err
}

// write makes the file whole or not at all: host-local would read a half one as nobody's.
func (s *store) write(address netip.Addr, namespace string) error {
	temporary := filepath.Join(s.folder, ".stasis-hold")
	if err := os.WriteFile(temporary, []byte(holdMark+namespace+newline), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, s.path(address))
}
