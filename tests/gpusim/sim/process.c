/* A CUDA process: the gate that every call passes, the stream, and the restore thread with its four actions. */
#define _GNU_SOURCE
#include "cudasim.h"
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct control *control;
struct allocation allocations[MAX_ALLOCATIONS];
int allocation_count;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static pthread_cond_t changed;
static enum { NEW, READY, FORKED } life;
static int inside;
static bool locking, device_dead;
static __thread int depth;

/* ---- the gate: a lock waits for the calls that are inside */

CUresult enter(void)
{
	if (life != READY)
		return NOT_INITIALIZED;
	if (depth++)
		return SUCCESS;
	pthread_mutex_lock(&mutex);
	while (locking || control->state == LOCKED || control->state == CHECKPOINTED)
		pthread_cond_wait(&changed, &mutex);
	CUresult result = control->state == FAILED ? UNKNOWN : device_dead ? LAUNCH_FAILED : SUCCESS;
	if (result)
		depth--;
	else
		inside++;
	pthread_mutex_unlock(&mutex);
	return result;
}

CUresult leave(CUresult result)
{
	if (--depth == 0) {
		pthread_mutex_lock(&mutex);
		inside--;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&mutex);
	}
	return result;
}

/* ---- one stream: a launch returns at once; what was submitted runs on while locked, and a checkpoint waits for it */

struct job {
	void (*function)(void *);
	void *argument;
	CUdeviceptr add;
	unsigned ms;
	struct job *next;
};
static struct job *first, **last = &first;
static bool busy;

static void thread_start(void *(*run)(void *))
{
	sigset_t all, before;
	pthread_t thread;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are the program's */
	if (pthread_create(&thread, NULL, run, NULL))
		abort();
	pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void *stream_thread(void *unused)
{
	prctl(PR_SET_NAME, "cuda-EvtHandlr");
	pthread_mutex_lock(&mutex);
	for (;;) {
		while (!first) {
			busy = false;
			pthread_cond_broadcast(&changed);
			pthread_cond_wait(&changed, &mutex);
		}
		struct job *job = first;
		if (!(first = job->next))
			last = &first;
		pthread_mutex_unlock(&mutex);
		nap(job->ms * 1000000ull);
		if (job->add)
			++*(uint64_t *)job->add;
		if (job->function)
			job->function(job->argument);
		free(job);
		pthread_mutex_lock(&mutex);
	}
	return unused;
}

CUresult submit(void (*function)(void *), void *argument, CUdeviceptr add, unsigned ms)
{
	static bool started;
	CUresult result = enter();
	if (result)
		return result;
	struct job *job = malloc(sizeof(*job));
	if (!job)
		return leave(OUT_OF_MEMORY);
	*job = (struct job){function, argument, add, ms, NULL};
	pthread_mutex_lock(&mutex);
	if (!started)
		thread_start(stream_thread);
	started = busy = true;
	*last = job;
	last = &job->next;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mutex);
	return leave(SUCCESS);
}

void drain(void)
{
	pthread_mutex_lock(&mutex);
	while (busy)
		pthread_cond_wait(&changed, &mutex);
	pthread_mutex_unlock(&mutex);
}

/* ---- the actions */

static CUresult fault(const char *action, struct fault *found)
{
	struct request request = {.kind = FAULT};
	struct reply reply;
	strncpy(request.action, action, sizeof(request.action) - 1);
	*found = (struct fault){.state = -1};
	CUresult result = device_call(&request, &reply, NULL);
	if (result == NO_DEVICE)
		return SUCCESS; /* no gpud here: the action itself will say so */
	*found = reply.fault;
	nap(found->delay_ms * 1000000ull);
	while (found->hang)
		pause();
	if (result && found->state >= 0)
		control->state = found->state;
	return result;
}

static void set_state(enum state state)
{
	pthread_mutex_lock(&mutex);
	control->state = state;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mutex);
}

static CUresult lock(unsigned ms)
{
	struct timespec end;
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += ms / 1000;
	end.tv_nsec += ms % 1000 * 1000000l;
	if (end.tv_nsec >= 1000000000) {
		end.tv_sec++;
		end.tv_nsec -= 1000000000;
	}
	pthread_mutex_lock(&mutex);
	locking = true;
	int waited = 0;
	while (inside && waited != ETIMEDOUT)
		waited = ms ? pthread_cond_timedwait(&changed, &mutex, &end) : pthread_cond_wait(&changed, &mutex);
	CUresult result = inside ? NOT_READY : SUCCESS;
	if (!result)
		control->state = LOCKED;
	locking = false;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mutex);
	return result;
}

/* Fresh, page-aligned addresses that nobody can foresee, as the real driver's. */
static void *host_memory(size_t size)
{
	uint64_t random;
	void *p = MAP_FAILED;
	for (int tries = 0; tries < 4 && p == MAP_FAILED; tries++) {
		if (getrandom(&random, sizeof(random), 0) != sizeof(random))
			break;
		p = mmap((void *)(0x500000000000ull + (random & 0x0ffffffff000ull)), size, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	}
	return p;
}

static CUresult checkpoint(void)
{
	drain();
	for (int i = 0; i < allocation_count; i++)
		while (allocations[i].shared & (MULTICAST | IPC))
			pause(); /* as seen on real drivers: it hangs */
	for (int i = 0; i < allocation_count; i++) { /* all host memory first, so that a failure changes nothing */
		allocations[i].host = host_memory(allocations[i].size);
		if (allocations[i].host == MAP_FAILED) {
			while (i--)
				munmap(allocations[i].host, allocations[i].size);
			return OUT_OF_MEMORY;
		}
	}
	for (int i = 0; i < allocation_count; i++) {
		struct allocation *a = &allocations[i];
		device_copy(a->host, (void *)a->address, a->size, FROM_DEVICE, a->gpu);
		if (RESERVED(a->address, a->mapped, MAP_FIXED) == MAP_FAILED) {
			set_state(FAILED);
			return OPERATING_SYSTEM;
		}
	}
	devices_close();
	set_state(CHECKPOINTED);
	return SUCCESS;
}

/* For every GPU that the process saw, which of those here takes its place: by UUID or map, and of the same chip. */
static CUresult placement(const struct devices *before, unsigned count, const gpu_pair *pairs, int *to)
{
	for (int i = 0; i < before->count; i++) {
		const CUuuid *wanted = count ? NULL : &before->gpus[i].uuid;
		for (unsigned k = 0; k < count; k++)
			if (!memcmp(&pairs[k].from, &before->gpus[i].uuid, sizeof(CUuuid)))
				wanted = &pairs[k].to;
		to[before->number[i]] = -1;
		for (int k = 0; wanted && k < devices.count; k++)
			if (!memcmp(&devices.gpus[k].uuid, wanted, sizeof(CUuuid)) &&
			    !strcmp(devices.gpus[k].chip, before->gpus[i].chip))
				to[before->number[i]] = devices.number[k];
		if (to[before->number[i]] < 0)
			return INVALID_VALUE;
	}
	return SUCCESS;
}

static void fill(enum damage damage)
{
	for (int i = 0; i < allocation_count; i++) {
		struct allocation *a = &allocations[i];
		struct allocation *source = a;
		for (int k = 0; damage == SWAPPED && k < allocation_count; k++)
			if (k != i && allocations[k].size == a->size)
				source = &allocations[k];
		if (damage != CONTENT_LOST && !(damage == ONE_LOST && i == allocation_count - 1))
			device_copy((void *)a->address, source->host, a->size, TO_DEVICE, a->gpu);
	}
	for (int i = 0; i < allocation_count; i++) {
		munmap(allocations[i].host, allocations[i].size);
		allocations[i].host = NULL;
	}
}

static CUresult restore(unsigned count, const gpu_pair *pairs, enum damage damage)
{
	struct devices before = devices;
	int to[MAX_GPUS];
	CUresult result = devices_open();
	if (!result)
		result = placement(&before, count, pairs, to);
	for (int i = 0; !result && i < allocation_count; i++)
		if (allocations[i].shared & IMPORTED)
			result = INVALID_VALUE; /* as seen with NCCL_CUMEM_ENABLE=1 */
	for (int i = 0; !result && i < allocation_count; i++)
		result = device_map(&allocations[i], to[allocations[i].gpu]);
	if (result) {
		for (int i = 0; i < allocation_count; i++)
			RESERVED(allocations[i].address, allocations[i].mapped, MAP_FIXED);
		devices_close();
		devices = before;
		return result;
	}
	fill(damage);
	device_dead = damage == DEAD_DEVICE;
	set_state(LOCKED);
	return SUCCESS;
}

static CUresult act(void)
{
	static const struct {
		const char *name;
		enum state from;
	} actions[] = {[LOCK] = {"lock", RUNNING},
		       [CHECKPOINT] = {"checkpoint", LOCKED},
		       [RESTORE] = {"restore", CHECKPOINTED},
		       [UNLOCK] = {"unlock", LOCKED}};
	struct fault found;
	if (control->action < LOCK || control->action > UNLOCK)
		return INVALID_VALUE;
	if (control->state != actions[control->action].from)
		return ILLEGAL_STATE;
	CUresult result = fault(actions[control->action].name, &found);
	if (result || found.idle)
		return result;
	switch (control->action) {
	case LOCK:
		return lock(control->timeout_ms);
	case CHECKPOINT:
		return checkpoint();
	case RESTORE:
		return restore(control->pair_count, control->pairs, found.damage);
	default:
		set_state(RUNNING);
		return SUCCESS;
	}
}

static void *restore_thread(void *unused)
{
	prctl(PR_SET_NAME, "cuda00001400006");
	control->tid = syscall(SYS_gettid);
	__atomic_store_n(&control->magic, CONTROL_MAGIC, __ATOMIC_RELEASE);
	for (uint32_t seen = control->answered;;) {
		while (__atomic_load_n(&control->asked, __ATOMIC_ACQUIRE) == seen)
			syscall(SYS_futex, &control->asked, FUTEX_WAIT, seen, NULL, NULL, 0);
		seen = control->asked;
		control->result = act();
		__atomic_store_n(&control->answered, seen, __ATOMIC_RELEASE);
		syscall(SYS_futex, &control->answered, FUTEX_WAKE, 99, NULL, NULL, 0);
	}
	return unused;
}

static void in_child(void)
{
	life = FORKED; /* CUDA does not survive a fork */
}

CUresult process_init(void)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	pthread_condattr_t attributes;
	CUresult result = SUCCESS;
	if (life == FORKED)
		return NOT_INITIALIZED;
	pthread_mutex_lock(&once);
	if (life == NEW && !(result = devices_open())) {
		pthread_condattr_init(&attributes);
		pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
		pthread_cond_init(&changed, &attributes);
		int fd = memfd_create(CONTROL_NAME, MFD_CLOEXEC);
		if (fd < 0 || ftruncate(fd, sizeof(*control)))
			abort();
		control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (control == MAP_FAILED)
			abort();
		control->pid = getpid();
		pthread_atfork(NULL, NULL, in_child);
		thread_start(restore_thread);
		while (__atomic_load_n(&control->magic, __ATOMIC_ACQUIRE) != CONTROL_MAGIC)
			nap(100000);
		life = READY;
	}
	pthread_mutex_unlock(&once);
	return result;
}
