/* A libcuda.so.1 without a GPU: what the driver's parts know of each other. */
#pragma once
#include "wire.h"
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	OPERATING_SYSTEM = 304,
	ILLEGAL_STATE = 401,
	NOT_FOUND = 500,
	NOT_READY = 600,
	LAUNCH_FAILED = 719,
	NOT_PERMITTED = 800,
	NOT_SUPPORTED = 801,
	UNKNOWN = 999,
};

enum shared { PRIVATE = 0, IPC = 1, IMPORTED = 2, MULTICAST = 4 };
enum direction { FROM_DEVICE, TO_DEVICE };

struct allocation {
	CUdeviceptr address;
	size_t size, mapped;
	int gpu, shared; /* gpu: index among those of gpud */
	void *host;	 /* while checkpointed */
	uint64_t handle;
};

/* device.c: gpud, and what the driver holds of the devices while it runs */
struct devices {
	int count; /* those that this process sees, in the order of their nodes */
	int number[MAX_GPUS];
	struct gpu gpus[MAX_GPUS];
	uint32_t driver;
};
extern struct devices devices;
unsigned cudasimDriver(void);
CUresult devices_open(void);
void devices_close(void);
CUresult device_call(struct request *request, struct reply *reply, int *fd);
CUresult device_map(struct allocation *a, int gpu);
void device_copy(void *to, const void *from, size_t size, enum direction direction, int gpu);
void nap(uint64_t ns);

/* process.c: the gate, the stream, and the four actions */
extern struct control *control;
extern struct allocation allocations[];
extern int allocation_count;
extern pthread_mutex_t mutex;
CUresult process_init(void);
CUresult enter(void);
CUresult leave(CUresult result);
void drain(void);
CUresult submit(void (*function)(void *), void *argument, CUdeviceptr add, unsigned ms);

/* memory.c */
#define MAX_ALLOCATIONS 4096
#define RESERVED(address, size, flags)                                                                                 \
	mmap((void *)(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (flags), -1, 0)
