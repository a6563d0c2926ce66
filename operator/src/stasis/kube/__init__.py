"""Access to the Kubernetes API: clients, records, a work queue, a lease, a watch."""
