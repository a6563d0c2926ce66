module stasis.dev/cni

go 1.21
