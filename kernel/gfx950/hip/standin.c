/* A stand-in for libamdhip64.so.7 on a machine without a GPU: the calls that FlyDSL's launch runtime makes.
 *
 * Device memory is host memory, there is one device, every operation is done at once and in order, and a kernel
 * launch is handed to a callback. The sim_* functions are for the Python half (device.py). */
#define _GNU_SOURCE
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int hipError_t;
enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidConfiguration = 9,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidImage = 200,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
    hipErrorStreamCaptureUnsupported = 900,
    hipErrorStreamCaptureInvalidated = 901,
    hipErrorStreamCaptureImplicit = 906,
};

static const struct { hipError_t code; const char *name; } error_names[] = {
    {hipSuccess, "hipSuccess"},
    {hipErrorInvalidValue, "hipErrorInvalidValue"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory"},
    {hipErrorInvalidConfiguration, "hipErrorInvalidConfiguration"},
    {100, "hipErrorNoDevice"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice"},
    {hipErrorInvalidImage, "hipErrorInvalidImage"},
    {209, "hipErrorNoBinaryForGpu"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle"},
    {hipErrorNotFound, "hipErrorNotFound"},
    {700, "hipErrorIllegalAddress"},
    {hipErrorLaunchFailure, "hipErrorLaunchFailure"},
    {hipErrorNotSupported, "hipErrorNotSupported"},
    {hipErrorStreamCaptureUnsupported, "hipErrorStreamCaptureUnsupported"},
    {hipErrorStreamCaptureInvalidated, "hipErrorStreamCaptureInvalidated"},
    {hipErrorStreamCaptureImplicit, "hipErrorStreamCaptureImplicit"},
};

enum { EM_AMDGPU_MACHINE = 224, MAX_WORKGROUP_THREADS = 1024, ALLOCATION_ALIGNMENT = 256 };

struct function {
    struct function *next;
    struct module *module;
    char name[];
};
struct module {
    struct module *next;
    struct function *functions;
    size_t size; /* bytes */
    uint8_t image[];
};
enum object_kind { STREAM, EVENT };
struct object {
    struct object *next;
    enum object_kind kind;
};
struct allocation {
    struct allocation *next;
    uint8_t *base;
    size_t size; /* bytes */
};

/* A launch as the callback sees it; device.py has the same layout. */
struct launch {
    const uint8_t *image;
    uint64_t image_size; /* bytes */
    const char *kernel;
    uint32_t grid[3];  /* workgroups */
    uint32_t block[3]; /* threads */
    uint64_t dynamic_lds; /* bytes */
    void *stream;
    void **kernel_params;
};
typedef hipError_t launch_callback(const struct launch *);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static launch_callback *on_launch;
static struct module *modules;
static struct object *objects;
static struct allocation *allocations;
static __thread hipError_t last_error;
static __thread const char *failed_call; /* the first since sim_take_failure */
static __thread hipError_t failed_code;

#define EXPORT __attribute__((visibility("default")))
#define LOCKED(statement)           \
    do {                            \
        pthread_mutex_lock(&mutex); \
        statement;                  \
        pthread_mutex_unlock(&mutex); \
    } while (0)

/* ---- calls: counted, and made to fail on request ---- */

enum { MAX_CALLS = 64, MAX_NAME = 64 };
static struct { const char *name; uint64_t count; } calls[MAX_CALLS];
static char failing_call[MAX_NAME];
static hipError_t failing_code;

static hipError_t enter(const char *name) {
    hipError_t code = hipSuccess;
    LOCKED({
        int i = 0;
        while (i < MAX_CALLS - 1 && calls[i].name && strcmp(calls[i].name, name)) i++;
        calls[i].name = name;
        calls[i].count++;
        if (failing_code && !strcmp(failing_call, name)) code = failing_code;
    });
    return code;
}

static hipError_t leave(const char *name, hipError_t code) {
    if (code) {
        last_error = code;
        if (!failed_call) failed_call = name, failed_code = code;
    }
    return code;
}

#define RETURN(code) return leave(__func__, (code))
#define ENTER                               \
    do {                                    \
        hipError_t injected = enter(__func__); \
        if (injected) RETURN(injected);     \
    } while (0)

/* ---- capture: launches on one stream are recorded by the callback, calls that HIP refuses then are refused ----
 *
 * As HIP's global mode: a refused call of any thread invalidates the capture. The calls and codes are those of
 * hip_memory.cpp, hip_stream.cpp, hip_event.cpp and hip_device_runtime.cpp of ROCm 6.3. HIP does not look at a capture
 * when it loads a module; but that copies code to the device and waits for it, so it is refused here. */

static void *captured; /* the stream */
static int invalidated;

static hipError_t refused(hipError_t code) {
    int refuse;
    LOCKED({
        refuse = captured != NULL;
        invalidated |= refuse;
    });
    return refuse ? code : hipSuccess;
}

#define ENTER_UNCAPTURED(code)                \
    ENTER;                                    \
    do {                                      \
        hipError_t refusal = refused((code)); \
        if (refusal) RETURN(refusal);         \
    } while (0)

/* Whether work on `stream` may go on: recorded on the captured one, refused on the null stream, which waits for it. */
static hipError_t enter_stream(void *stream) {
    hipError_t code = hipSuccess;
    LOCKED({
        if (captured && stream == captured && invalidated) code = hipErrorStreamCaptureInvalidated;
    });
    return code ? code : (uintptr_t)stream <= 1 ? refused(hipErrorStreamCaptureImplicit) : hipSuccess;
}

/* Copies and fills that would be nodes of a graph are not recorded. */
#define ENTER_STREAM(stream)                                  \
    do {                                                      \
        if (!is_stream(stream)) RETURN(hipErrorInvalidHandle); \
        hipError_t refusal = enter_stream(stream);            \
        if (refusal) RETURN(refusal);                         \
        if ((stream) == captured) RETURN(hipErrorNotSupported); \
    } while (0)

EXPORT void sim_begin_capture(void *stream) {
    LOCKED({
        captured = stream;
        invalidated = 0;
    });
}

EXPORT hipError_t sim_end_capture(void) {
    hipError_t code;
    LOCKED({
        code = invalidated ? hipErrorStreamCaptureInvalidated : hipSuccess;
        captured = NULL;
    });
    return code;
}

EXPORT void sim_set_launch(launch_callback *callback) { on_launch = callback; }

/* Every call of `name` returns `code` until it is set to hipSuccess. */
EXPORT int sim_fail(const char *name, hipError_t code) {
    if (strlen(name) >= MAX_NAME) return -1;
    LOCKED({
        strcpy(failing_call, name);
        failing_code = code;
    });
    return 0;
}

/* The i-th call that was ever made and how often; NULL past the last. */
EXPORT const char *sim_call(size_t i, uint64_t *count) {
    const char *name = NULL;
    if (i < MAX_CALLS) LOCKED({
        name = calls[i].name;
        *count = calls[i].count;
    });
    return name;
}

/* This thread's first failed call since the last take, or NULL. */
EXPORT const char *sim_take_failure(hipError_t *code) {
    const char *name = failed_call;
    *code = failed_code;
    failed_call = NULL;
    failed_code = hipSuccess;
    return name;
}

/* Writes up to `capacity` pairs (base, bytes) and returns how many allocations are live. */
EXPORT size_t sim_allocations(uint64_t (*pairs)[2], size_t capacity) {
    size_t count = 0;
    LOCKED({
        for (struct allocation *a = allocations; a; a = a->next, count++)
            if (count < capacity) {
                pairs[count][0] = (uintptr_t)a->base;
                pairs[count][1] = a->size;
            }
    });
    return count;
}

/* ---- errors and the device ---- */

EXPORT const char *hipGetErrorName(hipError_t code) {
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].code == code) return error_names[i].name;
    return "hipErrorUnknown";
}

EXPORT hipError_t hipGetLastError(void) {
    hipError_t code = last_error;
    last_error = hipSuccess;
    return code;
}

EXPORT hipError_t hipGetDeviceCount(int *count) {
    ENTER;
    *count = 1;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipGetDevice(int *device) {
    ENTER;
    *device = 0;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipSetDevice(int device) {
    ENTER;
    RETURN(device == 0 ? hipSuccess : hipErrorInvalidDevice);
}

EXPORT hipError_t hipDeviceSynchronize(void) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    RETURN(hipSuccess);
}

/* ---- memory ---- */

EXPORT hipError_t hipMalloc(void **pointer, size_t size) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    if (!pointer) RETURN(hipErrorInvalidValue);
    *pointer = NULL;
    if (!size) RETURN(hipSuccess);
    struct allocation *a = malloc(sizeof *a);
    if (!a) RETURN(hipErrorOutOfMemory);
    if (posix_memalign((void **)&a->base, ALLOCATION_ALIGNMENT, size)) {
        free(a);
        RETURN(hipErrorOutOfMemory);
    }
    memset(a->base, 0xff, size); /* NaN in every float format: what nobody wrote must not look like a zero */
    a->size = size;
    LOCKED({
        a->next = allocations;
        allocations = a;
    });
    *pointer = a->base;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipFree(void *pointer) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    if (!pointer) RETURN(hipSuccess);
    struct allocation *found = NULL;
    LOCKED({
        struct allocation **link = &allocations;
        while (*link && (*link)->base != pointer) link = &(*link)->next;
        if ((found = *link)) *link = found->next;
    });
    if (!found) RETURN(hipErrorInvalidValue);
    free(found->base);
    free(found);
    RETURN(hipSuccess);
}

static int is_object(void *handle, enum object_kind kind) {
    int found = 0;
    LOCKED({
        for (struct object *o = objects; o && !found; o = o->next) found = o == handle && o->kind == kind;
    });
    return found;
}

/* NULL, hipStreamLegacy (1) and hipStreamPerThread (2) need no creation. */
static int is_stream(void *stream) { return (uintptr_t)stream <= 2 || is_object(stream, STREAM); }

EXPORT hipError_t hipMemcpy(void *to, const void *from, size_t size, int kind) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureImplicit);
    (void)kind;
    memmove(to, from, size);
    RETURN(hipSuccess);
}

EXPORT hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    ENTER;
    (void)kind;
    ENTER_STREAM(stream);
    memmove(to, from, size);
    RETURN(hipSuccess);
}

EXPORT hipError_t hipMemset(void *to, int value, size_t size) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureImplicit);
    memset(to, value, size);
    RETURN(hipSuccess);
}

EXPORT hipError_t hipMemsetD16Async(void *to, unsigned short value, size_t count, void *stream) {
    ENTER;
    ENTER_STREAM(stream);
    for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = value;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipMemsetD32Async(void *to, int value, size_t count, void *stream) {
    ENTER;
    ENTER_STREAM(stream);
    for (size_t i = 0; i < count; i++) ((int32_t *)to)[i] = value;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    (void)pointer, (void)size, (void)flags;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipHostUnregister(void *pointer) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    (void)pointer;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipHostGetDevicePointer(void **device, void *host, unsigned flags) {
    ENTER;
    (void)flags;
    *device = host;
    RETURN(hipSuccess);
}

/* ---- streams and events: everything has already happened ---- */

static hipError_t create_object(void **handle, enum object_kind kind) {
    struct object *o = malloc(sizeof *o);
    if (!o) return hipErrorOutOfMemory;
    o->kind = kind;
    LOCKED({
        o->next = objects;
        objects = o;
    });
    *handle = o;
    return hipSuccess;
}

static hipError_t destroy_object(void *handle, enum object_kind kind) {
    struct object *found = NULL;
    LOCKED({
        struct object **link = &objects;
        while (*link && !(*link == handle && (*link)->kind == kind)) link = &(*link)->next;
        if ((found = *link)) *link = found->next;
    });
    free(found);
    return found ? hipSuccess : hipErrorInvalidHandle;
}

EXPORT hipError_t hipStreamCreate(void **stream) {
    ENTER;
    RETURN(create_object(stream, STREAM));
}

EXPORT hipError_t hipStreamDestroy(void *stream) {
    ENTER;
    RETURN(destroy_object(stream, STREAM));
}

EXPORT hipError_t hipStreamSynchronize(void *stream) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    RETURN(is_stream(stream) ? hipSuccess : hipErrorInvalidHandle);
}

EXPORT hipError_t hipStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER;
    (void)flags;
    RETURN(is_stream(stream) && is_object(event, EVENT) ? hipSuccess : hipErrorInvalidHandle);
}

EXPORT hipError_t hipEventCreateWithFlags(void **event, unsigned flags) {
    ENTER;
    (void)flags;
    RETURN(create_object(event, EVENT));
}

EXPORT hipError_t hipEventDestroy(void *event) {
    ENTER;
    RETURN(destroy_object(event, EVENT));
}

EXPORT hipError_t hipEventRecord(void *event, void *stream) {
    ENTER;
    RETURN(is_object(event, EVENT) && is_stream(stream) ? hipSuccess : hipErrorInvalidHandle);
}

EXPORT hipError_t hipEventSynchronize(void *event) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    RETURN(is_object(event, EVENT) ? hipSuccess : hipErrorInvalidHandle);
}

/* ---- modules ---- */

/* hipModuleLoadData is given no size: an ELF file ends after its last section or section header. 0: not a code object. */
static size_t code_object_size(const uint8_t *image) {
    const Elf64_Ehdr *header = (const void *)image;
    if (memcmp(image, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 ||
        header->e_machine != EM_AMDGPU_MACHINE)
        return 0;
    size_t end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    const Elf64_Shdr *section = (const void *)(image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        size_t section_end = section[i].sh_offset + section[i].sh_size;
        if (section[i].sh_type != SHT_NOBITS && section_end > end) end = section_end;
    }
    return end;
}

/* A kernel `name` is a symbol `name.kd`. */
static int has_kernel(const struct module *module, const char *name) {
    const uint8_t *image = module->image;
    const Elf64_Ehdr *header = (const void *)image;
    const Elf64_Shdr *section = (const void *)(image + header->e_shoff);
    size_t length = strlen(name);
    for (int i = 0; i < header->e_shnum; i++) {
        if (section[i].sh_type != SHT_DYNSYM) continue;
        const char *strings = (const char *)image + section[section[i].sh_link].sh_offset;
        const Elf64_Sym *symbol = (const void *)(image + section[i].sh_offset);
        for (size_t k = 0; k < section[i].sh_size / sizeof *symbol; k++) {
            const char *candidate = strings + symbol[k].st_name;
            if (!strncmp(candidate, name, length) && !strcmp(candidate + length, ".kd")) return 1;
        }
    }
    return 0;
}

EXPORT hipError_t hipModuleLoadData(void **handle, const void *image) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    if (!handle || !image) RETURN(hipErrorInvalidValue);
    size_t size = code_object_size(image);
    if (!size) RETURN(hipErrorInvalidImage);
    struct module *module = malloc(sizeof *module + size);
    if (!module) RETURN(hipErrorOutOfMemory);
    module->functions = NULL;
    module->size = size;
    memcpy(module->image, image, size);
    LOCKED({
        module->next = modules;
        modules = module;
    });
    *handle = module;
    RETURN(hipSuccess);
}

EXPORT hipError_t hipModuleUnload(void *handle) {
    ENTER_UNCAPTURED(hipErrorStreamCaptureUnsupported);
    struct module *found = NULL;
    LOCKED({
        struct module **link = &modules;
        while (*link && *link != handle) link = &(*link)->next;
        if ((found = *link)) *link = found->next;
    });
    if (!found) RETURN(hipErrorInvalidHandle);
    for (struct function *f = found->functions, *next; f; f = next) {
        next = f->next;
        free(f);
    }
    free(found);
    RETURN(hipSuccess);
}

EXPORT hipError_t hipModuleGetFunction(void **handle, void *module_handle, const char *name) {
    ENTER;
    hipError_t code = hipSuccess;
    pthread_mutex_lock(&mutex);
    struct module *module = modules;
    while (module && module != module_handle) module = module->next;
    struct function *function = module ? module->functions : NULL;
    while (function && strcmp(function->name, name)) function = function->next;
    if (!module) {
        code = hipErrorInvalidHandle;
    } else if (!function && !has_kernel(module, name)) {
        code = hipErrorNotFound;
    } else if (!function) {
        function = malloc(sizeof *function + strlen(name) + 1);
        if (function) {
            strcpy(function->name, name);
            function->module = module;
            function->next = module->functions;
            module->functions = function;
        } else {
            code = hipErrorOutOfMemory;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (!code) *handle = function;
    RETURN(code);
}

EXPORT hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                                     size_t dynamic_lds) {
    ENTER;
    (void)blocks, (void)function, (void)threads, (void)dynamic_lds;
    RETURN(hipErrorNotSupported);
}

EXPORT hipError_t hipModuleLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                        unsigned block_y, unsigned block_z, unsigned dynamic_lds, void *stream,
                                        void **kernel_params, void **extra) {
    ENTER;
    struct function *function = NULL;
    LOCKED({
        for (struct module *m = modules; m && !function; m = m->next)
            for (struct function *f = m->functions; f && !function; f = f->next)
                if (f == handle) function = f;
    });
    if (!function || !is_stream(stream)) RETURN(hipErrorInvalidHandle);
    hipError_t refusal = enter_stream(stream);
    if (refusal) RETURN(refusal);
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z ||
        (uint64_t)block_x * block_y * block_z > MAX_WORKGROUP_THREADS)
        RETURN(hipErrorInvalidConfiguration);
    if (!kernel_params || extra) RETURN(hipErrorInvalidValue); /* FlyDSL passes kernel_params, always */
    if (!on_launch) RETURN(hipErrorNotSupported);
    struct launch launch = {
        .image = function->module->image,
        .image_size = function->module->size,
        .kernel = function->name,
        .grid = {grid_x, grid_y, grid_z},
        .block = {block_x, block_y, block_z},
        .dynamic_lds = dynamic_lds,
        .stream = stream,
        .kernel_params = kernel_params,
    };
    RETURN(on_launch(&launch)); /* no lock is held: the callback takes Python's */
}
