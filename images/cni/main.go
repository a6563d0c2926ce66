// stasis-ipam is the IPAM step with which a CNI keeps the addresses of suspended pods. It stands before host-local:
// a network's "ipam" names it in host-local's place, with host-local's own settings, and it runs host-local.
//
// A pod that carries the annotation stasis.dev/pod-ip takes part. Its value, which may be empty, are the addresses it
// wants, at most one a family, separated by commas. It gets each that lies in a subnet of the network and that nobody
// has, else what host-local gives: a wish never keeps a pod from starting. A subnet that all nodes share on one link,
// each with a range of its own (rangeStart, rangeEnd), lets a pod have an address of another node's range.
//
// When such a pod goes, its address is held for its namespace: no other pod gets it unless the range has no other
// left; then the longest held goes first.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	annotation = "stasis.dev/pod-ip"
	capability = "io.kubernetes.cri.pod-annotations" // what a runtime passes a pod's annotations as
	delegate   = "host-local"
	elsewhere  = "-" // in a namespace's place: held since a pod on another node has it
)

// config is a network's configuration: all of it is handed on, so only what is needed of it is typed.
type config map[string]any

func main() {
	input, err := io.ReadAll(os.Stdin)
	if err == nil {
		err = run(os.Getenv("CNI_COMMAND"), input)
	}
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		os.Exit(failed.ExitCode()) // host-local has said why
	} else if err != nil {
		json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": "1.0.0", "code": 100, "msg": "stasis-ipam: " + err.Error()})
		os.Exit(1)
	}
}

func run(command string, input []byte) error {
	if command == "VERSION" {
		return pass(input, os.Stdout)
	}
	conf := config{}
	if err := json.Unmarshal(input, &conf); err != nil {
		return fmt.Errorf("the network configuration: %w", err)
	}
	ipam, ok := conf["ipam"].(map[string]any)
	if !ok {
		return errors.New("the network configuration has no ipam")
	}
	ipam["type"] = delegate
	if _, old := ipam["subnet"]; old { // host-local's older form of a single range
		r := map[string]any{}
		for _, key := range []string{"subnet", "rangeStart", "rangeEnd", "gateway"} {
			if value, set := ipam[key]; set {
				r[key] = value
				delete(ipam, key)
			}
		}
		ranges, _ := ipam["ranges"].([]any)
		ipam["ranges"] = append([]any{[]any{r}}, ranges...)
	}
	wanted, takesPart := conf.wish()
	store := openStore(ipam, conf)
	switch {
	case command == "ADD" && len(wanted) > 0:
		if out, err := conf.addWanted(store, wanted); err == nil {
			_, err = os.Stdout.Write(out)
			return err
		} else {
			fmt.Fprintln(os.Stderr, "stasis-ipam: another address than wanted:", err)
		}
		return conf.add(store)
	case command == "ADD":
		return conf.add(store)
	case command == "DEL" && takesPart:
		if err := store.hold(os.Getenv("CNI_CONTAINERID"), podNamespace(), conf.inRange); err != nil {
			fmt.Fprintln(os.Stderr, "stasis-ipam: the address is not held:", err) // it is freed all the same
		}
	}
	return pass(conf.encode(), os.Stdout)
}

// add lets host-local choose. Where its range has none left, held addresses are given up one by one.
func (c config) add(store *store) error {
	for {
		out := new(bytes.Buffer)
		err := pass(c.encode(), out)
		if err == nil && c.giveBackTaken(store, out.Bytes()) {
			continue
		}
		if err == nil || !store.giveUpOldest(c.inUse) {
			os.Stdout.Write(out.Bytes())
			return err
		}
	}
}

// giveBackTaken undoes a choice that a pod on another node has: it wanted it while nobody here knew of it. The address
// is held from then on, so that it is not chosen again.
func (c config) giveBackTaken(store *store, result []byte) bool {
	var chosen struct {
		IPs []struct{ Address netip.Prefix }
	}
	if json.Unmarshal(result, &chosen) != nil {
		return false
	}
	var taken []netip.Addr
	for _, ip := range chosen.IPs {
		if c.inUse(ip.Address.Addr()) {
			taken = append(taken, ip.Address.Addr())
		}
	}
	if len(taken) == 0 {
		return false
	}
	os.Setenv("CNI_COMMAND", "DEL")
	err := pass(c.encode(), io.Discard)
	os.Setenv("CNI_COMMAND", "ADD")
	for _, address := range taken {
		store.put(address, elsewhere)
	}
	return err == nil
}

// addWanted has host-local give exactly these addresses, by ranges of one address each.
func (c config) addWanted(store *store, wanted []netip.Addr) ([]byte, error) {
	narrowed := config{}
	if err := json.Unmarshal(c.encode(), &narrowed); err != nil { // a copy
		return nil, err
	}
	var held []netip.Addr
	giveBack := func() {
		for _, address := range held {
			store.put(address, podNamespace())
		}
	}
	for _, address := range wanted {
		if !narrowed.narrow(address) {
			return nil, fmt.Errorf("%s lies in no subnet of this network", address)
		}
		if c.inUse(address) {
			return nil, fmt.Errorf("%s is in use", address)
		}
	}
	for _, address := range wanted {
		taken, err := store.take(address, podNamespace())
		if err != nil {
			giveBack()
			return nil, err
		}
		if taken {
			held = append(held, address)
		}
	}
	out := new(bytes.Buffer)
	if err := pass(narrowed.encode(), out); err != nil {
		giveBack()
		return nil, errors.New(strings.TrimSpace(out.String()))
	}
	return out.Bytes(), nil
}

// wish is what the pod's annotation says, and whether there is one. What is no address is no wish.
func (c config) wish() (wanted []netip.Addr, takesPart bool) {
	runtime, _ := c["runtimeConfig"].(map[string]any)
	annotations, _ := runtime[capability].(map[string]any)
	value, takesPart := annotations[annotation].(string)
	for _, part := range strings.Split(value, ",") {
		if address, err := netip.ParseAddr(strings.TrimSpace(part)); err == nil {
			wanted = append(wanted, address)
		}
	}
	return wanted, takesPart
}

// ranges calls visit for each of host-local's ranges until it returns true.
func (c config) ranges(visit func(r map[string]any) bool) bool {
	sets, _ := c["ipam"].(map[string]any)["ranges"].([]any)
	for _, set := range sets {
		list, _ := set.([]any)
		for _, entry := range list {
			if r, ok := entry.(map[string]any); ok && visit(r) {
				return true
			}
		}
	}
	return false
}

// narrow leaves the range whose subnet has the address that address only, and its set no other range.
func (c config) narrow(address netip.Addr) bool {
	ipam := c["ipam"].(map[string]any)
	sets, _ := ipam["ranges"].([]any)
	for i, set := range sets {
		list, _ := set.([]any)
		for _, entry := range list {
			r, _ := entry.(map[string]any)
			subnet, err := netip.ParsePrefix(text(r["subnet"]))
			if err != nil || !subnet.Contains(address) || text(r["gateway"]) == address.String() {
				continue
			}
			r["rangeStart"], r["rangeEnd"] = address.String(), address.String()
			sets[i] = []any{r}
			return true
		}
	}
	return false
}

// inRange tells whether host-local would give this address to any pod of this node.
func (c config) inRange(address netip.Addr) bool {
	return c.ranges(func(r map[string]any) bool {
		subnet, err := netip.ParsePrefix(text(r["subnet"]))
		if err != nil || !subnet.Contains(address) {
			return false
		}
		first, noFirst := netip.ParseAddr(text(r["rangeStart"]))
		last, noLast := netip.ParseAddr(text(r["rangeEnd"]))
		return (noFirst != nil || first.Compare(address) <= 0) && (noLast != nil || address.Compare(last) <= 0)
	})
}

// inUse asks on the network's bridge, if it has one, who has the address.
func (c config) inUse(address netip.Addr) bool {
	bridge := text(c["bridge"])
	if bridge == "" || !address.Is4() {
		return false
	}
	return answersARP(bridge, address)
}

func (c config) encode() []byte {
	out, err := json.Marshal(c)
	if err != nil {
		panic(err) // it came from JSON
	}
	return out
}

func text(value any) string { s, _ := value.(string); return s }

// podNamespace is the namespace that the runtime names in CNI_ARGS (KEY=VALUE;...).
func podNamespace() string {
	for _, arg := range strings.Split(os.Getenv("CNI_ARGS"), ";") {
		if value, found := strings.CutPrefix(arg, "K8S_POD_NAMESPACE="); found {
			return value
		}
	}
	return ""
}

// pass runs host-local, found as CNI finds plugins, in this program's environment.
func pass(input []byte, output io.Writer) error {
	for _, folder := range filepath.SplitList(os.Getenv("CNI_PATH")) {
		program := filepath.Join(folder, delegate)
		if _, err := os.Stat(program); err == nil {
			cmd := exec.Command(program)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), output, os.Stderr
			return cmd.Run()
		}
	}
	return errors.New(delegate + " is in no folder of CNI_PATH")
}
