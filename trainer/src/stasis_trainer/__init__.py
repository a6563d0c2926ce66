"""Runs inside each trainer: lets an agent bring its collectives to rest, tear them down, and rebuild them elsewhere."""
