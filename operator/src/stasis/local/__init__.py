"""One machine without Kubernetes: containers with networks of their own, and the coordinator that drives a gang."""
