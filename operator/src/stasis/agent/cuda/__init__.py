"""GPUs: the state of CUDA processes moved to host memory and back by the driver's own checkpoint operations."""
