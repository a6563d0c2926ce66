"""The agent's process on a node of a cluster."""
