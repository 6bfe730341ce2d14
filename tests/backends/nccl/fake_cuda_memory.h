/* The part of fake_cuda.c about memory and the device. */
#pragma once

/* Memory: of the device in one region, so that its addresses are known. */

enum { SMALLEST = 9, CLASSES = 40 };    /* blocks of 2^9 bytes and more */
static const size_t REGION_BYTES = (size_t)1 << 36;
static char *region, *region_end;
static void *spare[CLASSES];            /* blocks that were freed, by their first word */

int host_is_device(const void *pointer) {
    return region && (const char *)pointer >= region && (const char *)pointer < region_end;
}

static int class_of(size_t size) {
    int class = SMALLEST;
    while (((size_t)1 << class) < size) class++;
    return class;
}

intptr_t host_malloc(size_t size, int skip) {
    (void)skip;
    int class = class_of(size);
    pthread_mutex_lock(&lock);
    if (region == NULL) {
        region = region_end = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    int status = unsafe();
    char *made = spare[class];
    if (made) spare[class] = *(void **)made;
    else made = region_end, region_end += (size_t)1 << class;
    pthread_mutex_unlock(&lock);
    if (status) { failed(status); return 0; }
    memset(made, POISON, size);
    return (intptr_t)made;
}

/* What a stream that has come so far needs no more; the block is so large. */
void host_release(void *block, size_t size) {
    memset(block, POISON, size);
    pthread_mutex_lock(&lock);
    *(void **)block = spare[class_of(size)];
    spare[class_of(size)] = block;
    pthread_mutex_unlock(&lock);
}

PyObject *host_free(intptr_t pointer, int skip) { (void)pointer; (void)skip; Py_RETURN_NONE; }

static int refused(void) {
    pthread_mutex_lock(&lock);
    int status = unsafe();
    pthread_mutex_unlock(&lock);
    return status;
}

intptr_t host_hostAlloc(size_t size, unsigned flags, int skip) {
    (void)flags; (void)skip;
    void *made = NULL;
    int status = refused();
    if (!status && posix_memalign(&made, 4096, size ? size : 1)) status = 2;
    if (status) { failed(status); return 0; }
    memset(made, POISON, size);
    return (intptr_t)made;
}
PyObject *host_freeHost(intptr_t pointer, int skip) {
    (void)skip;
    int status = refused();
    if (!status) free((void *)pointer);
    return answer(status);
}
PyObject *host_memGetInfo(int skip) {
    (void)skip;
    return Py_BuildValue("(nn)", (Py_ssize_t)1 << 33, (Py_ssize_t)1 << 34);
}
int host_pointerGetMemoryType(intptr_t pointer, int skip) {
    (void)skip;
    return host_is_device((void *)pointer) ? 2 : 0;
}

typedef struct { void *into; const void *source; int value; size_t size; } Move;

static void move(void *given) {
    Move *m = given;
    if (m->source) memmove(m->into, m->source, m->size);
    else memset(m->into, m->value, m->size);
    free(m);
}
static void *move_again(void *given) {
    Move *made = malloc(sizeof *made);
    *made = *(Move *)given;
    return made;
}
static void put_move(intptr_t stream, Move m) { put(stream, move, move_again, move_again(&m)); }

PyObject *host_memcpyAsync(intptr_t into, intptr_t source, size_t size, int kind, intptr_t stream, int skip) {
    (void)skip;
    /* As memcpyHostToDevice and memcpyDeviceToHost say, or memcpyDefault: whatever it is. */
    if (kind != 4 && kind != 2 * host_is_device((void *)source) + host_is_device((void *)into))
        return failed(21);
    if (size) put_move(stream, (Move){(void *)into, (void *)source, 0, size});
    Py_RETURN_NONE;
}
PyObject *host_memcpy(intptr_t into, intptr_t source, size_t size, int kind, int skip) {
    if (host_memcpyAsync(into, source, size, kind, 0, skip) == NULL) return NULL;
    return answer(synchronize(&legacy));
}
PyObject *host_memsetAsync(intptr_t into, int value, size_t size, intptr_t stream, int skip) {
    (void)skip;
    if (size) put_move(stream, (Move){(void *)into, NULL, value, size});
    Py_RETURN_NONE;
}
PyObject *host_memset(intptr_t into, int value, size_t size, int skip) {
    return host_memsetAsync(into, value, size, 0, skip);
}

/* The device. */

int host_getDevice(int skip) { (void)skip; return 0; }
int host_getDeviceCount(int skip) { (void)skip; return 1; }
PyObject *host_setDevice(int device, int skip) {
    (void)skip;
    take_locks();
    return answer(device ? INVALID_DEVICE : OK);
}

static int the_context;                 /* its address is the device's only context */
static _Thread_local void *thread_context;
int cuCtxGetCurrent(void **context) { *context = &the_context; return OK; }
int cuCtxSetCurrent(void *context) { thread_context = context; return OK; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device + 1, 16); return OK; }
int host_deviceGetAttribute(int attribute, int device, int skip) {
    (void)device; (void)skip;
    return attribute == 75 ? 9 : 0;     /* compute capability 9.0, and nothing else */
}
PyObject *host_deviceGetPCIBusId(int device, int skip) {
    (void)device; (void)skip;
    return PyUnicode_FromString("0000:00:00.0");
}
PyObject *host_getDeviceProperties(int device, int skip) {
    (void)skip;
    return Py_BuildValue("{s:y,s:i}", "name", "stand-in", "major", 9 + 0 * device);
}
int host_driverGetVersion(int skip) { (void)skip; return 13000; }
PyObject *host__ensure_context(void) { Py_RETURN_NONE; }
