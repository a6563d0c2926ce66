"""The connections between the members of a gang: drained, locked, mended, released, translated."""
