"""What runs on a node: freezes, captures, lays files and addresses, restores; one rank at a time."""
