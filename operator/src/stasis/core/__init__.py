"""Pure logic: no I/O, no clock, no randomness. Drivers in other layers carry its effects out."""
