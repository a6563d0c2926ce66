"""Read a checkpoint in a process without privileges: what it holds is another party's bytes."""
