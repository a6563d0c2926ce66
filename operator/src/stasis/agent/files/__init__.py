"""What a container wrote, read after the freeze and laid into a fresh container: upper layer, emptyDirs, /dev/shm."""
