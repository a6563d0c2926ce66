/* The devices: nodes that are held open, memory that gpud hands out, a link of limited bandwidth. */
#define _GNU_SOURCE
#include "cudasim.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define STEP ((size_t)4 << 20)
#define CATCH_UP 20000000 /* ns that a transfer may lag behind its turn and still use it */

struct devices devices;
static int held[MAX_GPUS + 1];
static uint64_t bandwidth[2], *turns; /* turns: when each link is free next, shared by all processes */

/* The real library knows it by itself; this one is of whatever version gpud plays. */
API unsigned cudasimDriver(void)
{
	struct request request = {.kind = HELLO};
	struct reply reply;
	if (!devices.driver && !device_call(&request, &reply, NULL))
		devices.driver = reply.driver;
	return devices.driver;
}

static const char *setting(const char *name, const char *otherwise)
{
	const char *value = getenv(name);
	return value ? value : otherwise;
}

void nap(uint64_t ns)
{
	struct timespec left = {ns / 1000000000, ns % 1000000000};
	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

/* A connection for each call: the driver itself holds none, so none is in the way of a dump. */
CUresult device_call(struct request *request, struct reply *reply, int *fd)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char space[CMSG_SPACE(sizeof(int))];
	struct iovec part = {reply, sizeof(*reply)};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space)};
	ssize_t got = -1;
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", setting("CUDASIM_SOCKET", "/run/cudasim/socket"));
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s < 0)
		return OPERATING_SYSTEM;
	if (connect(s, (void *)&address, sizeof(address))) {
		close(s);
		return NO_DEVICE;
	}
	if (send(s, request, sizeof(*request), MSG_NOSIGNAL) == sizeof(*request))
		while ((got = recvmsg(s, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
			;
	close(s);
	if (got != sizeof(*reply))
		return OPERATING_SYSTEM;
	struct cmsghdr *control_message = CMSG_FIRSTHDR(&message);
	int given = control_message ? *(int *)CMSG_DATA(control_message) : -1;
	if (fd)
		*fd = given;
	else if (given >= 0)
		close(given);
	return reply->error;
}

/* What the real driver holds while it runs: /dev/nvidiactl and a node of each device that the process sees. */
CUresult devices_open(void)
{
	struct request request = {.kind = HELLO};
	struct reply reply;
	char path[108];
	const char *folder = setting("CUDASIM_DEV", "/dev");
	int page = -1;
	CUresult result = device_call(&request, &reply, &page);
	if (result)
		return result;
	memcpy(bandwidth, reply.bandwidth, sizeof(bandwidth));
	devices.driver = reply.driver;
	turns = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
	close(page);
	snprintf(path, sizeof(path), "%s/nvidiactl", folder);
	held[MAX_GPUS] = open(path, O_RDWR | O_CLOEXEC);
	devices.count = 0;
	for (int i = 0; i < reply.gpu_count; i++) {
		snprintf(path, sizeof(path), "%s/nvidia%d", folder, i);
		int fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd < 0)
			continue;
		held[devices.count] = fd;
		devices.number[devices.count] = i;
		devices.gpus[devices.count++] = reply.gpus[i];
	}
	if (held[MAX_GPUS] < 0 || !devices.count || turns == MAP_FAILED) {
		devices_close();
		return NO_DEVICE;
	}
	return SUCCESS;
}

void devices_close(void)
{
	for (int i = 0; i <= MAX_GPUS; i++) {
		if (held[i] > 0)
			close(held[i]);
		held[i] = 0;
	}
	if (turns && turns != MAP_FAILED)
		munmap(turns, 4096);
	turns = NULL;
}

CUresult device_map(struct allocation *a, int gpu)
{
	struct request request = {.kind = ALLOC, .gpu = gpu, .size = a->size};
	struct reply reply;
	int fd = -1;
	CUresult result = device_call(&request, &reply, &fd);
	if (result)
		return result;
	void *p = mmap((void *)a->address, a->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
	close(fd);
	if (p == MAP_FAILED)
		return OUT_OF_MEMORY;
	a->handle = reply.handle;
	a->gpu = gpu;
	return SUCCESS;
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t); /* the one clock that no time namespace shifts */
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Copies in steps, each of which waits for its turn on the link. */
void device_copy(void *to, const void *from, size_t size, enum direction direction, int gpu)
{
	for (size_t at = 0; at < size; at += STEP) {
		size_t count = size - at < STEP ? size - at : STEP;
		uint64_t takes = 0, start = 0, free_at;
		if (bandwidth[direction] && turns) {
			uint64_t *turn = &turns[gpu * 2 + direction], t = now();
			takes = count * 1000000000ull / bandwidth[direction];
			do {
				free_at = __atomic_load_n(turn, __ATOMIC_SEQ_CST);
				start = free_at + CATCH_UP > t ? free_at : t;
			} while (!__atomic_compare_exchange_n(turn, &free_at, start + takes, 0, __ATOMIC_SEQ_CST,
							      __ATOMIC_SEQ_CST));
		}
		memcpy((char *)to + at, (const char *)from + at, count);
		uint64_t t = now();
		if (start + takes > t + 50000)
			nap(start + takes - t);
	}
}
