/* The driver API that programs call: initialisation, devices, memory, one stream, errors. What begins with `cudasim`
 * stands for what only a GPU could do: a kernel is a section of the caller's own code on mapped device memory. */
#define _GNU_SOURCE
#include "cudasim.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRAIN ((size_t)2 << 20) /* of addresses, as the driver's */
#define FIRST_ADDRESS 0x300000000000ull

static __thread int current; /* stands for the current context */

API CUresult cuInit(unsigned flags)
{
	(void)flags;
	return process_init();
}

API CUresult cuDriverGetVersion(int *version)
{
	*version = devices.driver >= 580 ? 13000 : 12000; /* CUDA's, not the driver's */
	return SUCCESS;
}

static CUresult known(CUdevice device)
{
	return !control ? NOT_INITIALIZED : device < 0 || device >= devices.count ? INVALID_DEVICE : SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
	*count = devices.count;
	return control ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	*device = ordinal;
	return known(ordinal);
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	CUresult result = known(device);
	if (!result)
		*uuid = devices.gpus[device].uuid;
	return result;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	return cuDeviceGetUuid_v2(uuid, device);
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
	CUresult result = known(device);
	if (!result)
		snprintf(name, size, "NVIDIA %s", devices.gpus[device].chip);
	return result;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	CUresult result = known(device);
	if (!result)
		*bytes = devices.gpus[device].total;
	return result;
}

API CUresult cudasimSetDevice(int device)
{
	CUresult result = known(device);
	if (!result)
		current = device;
	return result;
}

/* ---- memory */

static struct allocation *find(CUdeviceptr address)
{
	for (int i = 0; i < allocation_count; i++)
		if (allocations[i].address == address)
			return &allocations[i];
	return NULL;
}

/* fd: of memory that another process exported; -1: fresh memory of the current device. */
static CUresult allocate(CUdeviceptr *address, size_t size, int shared, int fd)
{
	static CUdeviceptr next = FIRST_ADDRESS;
	CUresult result = SUCCESS;
	struct allocation a = {.size = size, .mapped = (size + GRAIN - 1) & ~(GRAIN - 1), .shared = shared};
	if (!size)
		return INVALID_VALUE;
	pthread_mutex_lock(&mutex);
	a.address = next;
	next += a.mapped + GRAIN;
	if (allocation_count == MAX_ALLOCATIONS || RESERVED(a.address, a.mapped, MAP_FIXED_NOREPLACE) == MAP_FAILED)
		result = OUT_OF_MEMORY;
	else if (fd < 0)
		result = device_map(&a, devices.number[current]);
	else if (mmap((void *)a.address, a.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		result = OUT_OF_MEMORY;
	if (result)
		munmap((void *)a.address, a.mapped);
	else
		allocations[allocation_count++] = a;
	pthread_mutex_unlock(&mutex);
	*address = a.address;
	return result;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
	CUresult result = enter();
	return result ? result : leave(allocate(address, size, PRIVATE, -1));
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
	CUresult result = enter();
	if (result)
		return result;
	pthread_mutex_lock(&mutex);
	struct allocation *a = find(address);
	if (a) {
		munmap((void *)a->address, a->mapped);
		*a = allocations[--allocation_count];
	}
	pthread_mutex_unlock(&mutex);
	return leave(a ? SUCCESS : INVALID_VALUE);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
	CUresult result = enter();
	if (result)
		return result;
	device_copy((void *)to, from, size, TO_DEVICE, devices.number[current]);
	return leave(SUCCESS);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
	CUresult result = enter();
	if (result)
		return result;
	drain(); /* copies of the stream come after what was submitted */
	device_copy(to, (void *)from, size, FROM_DEVICE, devices.number[current]);
	return leave(SUCCESS);
}

/* ---- the stream */

API CUresult cuCtxSynchronize(void)
{
	CUresult result = enter();
	if (result)
		return result;
	drain();
	return leave(SUCCESS);
}

API CUresult cuStreamSynchronize(void *stream)
{
	(void)stream;
	return cuCtxSynchronize();
}

API CUresult cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument)
{
	(void)stream;
	return submit(function, argument, 0, 0);
}

/* A kernel that runs for `ms` and adds one to a 64-bit word. */
API CUresult cudasimLaunchAdd(CUdeviceptr word, unsigned ms)
{
	return submit(NULL, NULL, word, ms);
}

API CUresult cudasimKernelBegin(void)
{
	return enter();
}

API CUresult cudasimKernelEnd(void)
{
	return leave(SUCCESS);
}

/* ---- memory shared with other processes: IPC handles, exported allocations, multicast objects */

static CUresult export(CUdeviceptr address, uint64_t *handle, int shared)
{
	struct request request = {.kind = EXPORT};
	struct reply reply;
	CUresult result = enter();
	if (result)
		return result;
	struct allocation *a = find(address);
	if (!a)
		return leave(INVALID_VALUE);
	request.handle = *handle = a->handle;
	a->shared |= shared;
	return leave(device_call(&request, &reply, NULL));
}

static CUresult import(CUdeviceptr *address, uint64_t handle, int shared)
{
	struct request request = {.kind = IMPORT, .handle = handle};
	struct reply reply;
	int fd = -1;
	CUresult result = enter();
	if (result)
		return result;
	if (!(result = device_call(&request, &reply, &fd))) {
		result = allocate(address, reply.size, shared, fd);
		close(fd);
	}
	return leave(result);
}

API CUresult cuIpcGetMemHandle(char handle[64], CUdeviceptr address)
{
	uint64_t number = 0;
	CUresult result = export(address, &number, IPC);
	memset(handle, 0, 64);
	memcpy(handle, &number, sizeof(number));
	return result;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, const char *handle, unsigned flags)
{
	uint64_t number;
	(void)flags;
	memcpy(&number, handle, sizeof(number));
	return import(address, number, IPC);
}

API CUresult cudasimExport(uint64_t *handle, CUdeviceptr address)
{
	return export(address, handle, PRIVATE);
}

API CUresult cudasimImport(CUdeviceptr *address, uint64_t handle)
{
	return import(address, handle, IMPORTED);
}

API CUresult cudasimMulticast(CUdeviceptr address)
{
	struct allocation *a = find(address);
	if (a)
		a->shared |= MULTICAST;
	return a ? SUCCESS : INVALID_VALUE;
}

/* ---- errors, and how other libraries find all of this */

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult code, const char **text, bool name)
{
	*text = NULL;
	for (unsigned i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].code == code)
			*text = name ? errors[i].name : errors[i].text;
	return *text ? SUCCESS : INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
	return describe(code, text, false);
}

API CUresult cuGetErrorName(CUresult code, const char **text)
{
	return describe(code, text, true);
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
	static const char *suffixes[] = {"_v3", "_v2", ""};
	void *self = NULL;
	char name[128];
	Dl_info here;
	(void)version, (void)flags;
	if (dladdr((void *)cuInit, &here))
		self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
	*function = NULL;
	if (!strncmp(symbol, "cuCheckpoint", 12) && cudasimDriver() < 570)
		self = NULL;
	for (unsigned i = 0; self && !*function && i < sizeof(suffixes) / sizeof(*suffixes); i++) {
		snprintf(name, sizeof(name), "%s%s", symbol, suffixes[i]);
		*function = dlsym(self, name);
	}
	if (status)
		*status = !*function;
	return *function ? SUCCESS : NOT_FOUND;
}
