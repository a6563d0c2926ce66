/* What libcuda.so.1 and gpud say to each other, one packet each way (gpud.py has the same structs), and the page by
 * which a CUDA process takes orders from others. */
#pragma once
#include <stdint.h>

typedef struct {
	unsigned char bytes[16];
} CUuuid;

typedef struct {
	CUuuid from, to;
} gpu_pair;

enum state { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum action { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK };

#define MAX_GPUS 8
#define MAX_PAIRS 64
#define CONTROL_NAME "cuda-checkpoint" /* of a memfd: CRIU restores it, and /proc/PID/fd leads to it */
#define CONTROL_MAGIC 0x434b5054

struct control {
	uint32_t magic, pid, tid; /* in the process's own PID namespace */
	uint32_t state;
	uint32_t asked, answered; /* sequence numbers, futexes */
	uint32_t action, timeout_ms, pair_count;
	int32_t result;
	gpu_pair pairs[MAX_PAIRS];
};

enum request_kind { HELLO = 1, ALLOC, FAULT, EXPORT, IMPORT };

struct request {
	uint32_t kind, gpu;
	uint64_t size, handle;
	char action[16];
};

struct gpu {
	CUuuid uuid;
	char chip[16];
	uint64_t total;
};

/* What a restore may do to the memory that it gives back: each must be caught by who compares. */
enum damage { INTACT, DEAD_DEVICE, CONTENT_LOST, ONE_LOST, SWAPPED };

struct fault {
	int32_t state; /* to end in; -1: as it should be */
	int32_t hang, delay_ms, damage;
	int32_t idle; /* says that it succeeded and does nothing */
};

struct reply {
	int32_t error, gpu_count;
	uint64_t handle, size;
	uint64_t bandwidth[2]; /* bytes a second, from the device and to it; 0: as fast as memory */
	uint32_t driver, reserved;
	struct fault fault;
	struct gpu gpus[MAX_GPUS];
};
