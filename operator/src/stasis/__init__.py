"""Stasis: suspend a training gang at any instant, keep its exact state, resume it elsewhere."""

__version__ = "0.1.0"
API_GROUP = "stasis.dev"
