/* A stand-in for CUDA in host memory, below the real cupy: the functions of its runtime that cupy's
 * modules call, by cupy's own C interface, and those of libcuda.so.1 that cydist calls.
 *
 * Streams are threads, so what nobody waits for comes late. Captures follow CUDA's rules: a stream
 * joins one by an event, has to be waited for before its end, and what breaks a rule ends it. There
 * is one device. Kernels are Python's functions
 * (fake_cuda.py). Speed, real kernels and contexts this cannot show.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903,
       CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905,
       CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907 };
enum { CALL, SIGNAL, WAIT };
enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NON_BLOCKING = 1 };
enum { MOST_STREAMS = 16, MOST_ALIVE = 4096, POISON = 0xA5 };
enum { QUEUE = 1024 };                  /* launches that a stream takes before one blocks */

typedef struct { int done; } Point;     /* a place on a stream, which is over or not */

typedef struct Op {
    int kind;
    void (*run)(void *given);           /* once: it frees what it was given */
    void *(*again)(void *given);        /* that, for one more run */
    void *given;
    Point *point;
    struct Op *next;
} Op;

typedef struct Capture {
    uint64_t number;
    int mode, broken, streams;
    pthread_t thread;
    struct Stream *members[MOST_STREAMS];
    uint64_t counts[MOST_STREAMS];      /* ops of each */
    Op *first, **last;                  /* in the order of their calls, in which they may run */
    struct Capture *next;
} Capture;

typedef struct Stream {
    Op *first, **last;
    uint64_t issued, done;
    unsigned flags;
    int place, started;                 /* in its capture */
    Capture *capture;
    uint64_t known[MOST_STREAMS];       /* what of each member comes before its next op */
} Stream;

typedef struct { Point *point; Capture *capture; uint64_t known[MOST_STREAMS]; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static Stream legacy = {.last = &legacy.first};
static Stream *alive[MOST_ALIVE] = {&legacy};
static int alive_count = 1;
static Capture *captures;               /* under way */
static uint64_t capture_numbers;
static int blocked;                     /* threads in a launch behind a call of NCCL that hangs */
static void (*nccl_run)(void *task);
static void *(*nccl_again)(void *task);
static _Thread_local int thread_mode = GLOBAL;
static PyObject *(*check_status)(int status, int skip);

void host_begin(void *check) { *(void **)&check_status = check; }

static PyObject *failed(int status) { check_status(status, 0); return NULL; }
static PyObject *answer(int status) { if (status) return failed(status); Py_RETURN_NONE; }

/* Streams. All of this with the lock held. */

static Stream *stream_of(intptr_t handle) {
    return handle == 0 || handle == 1 ? &legacy : (Stream *)handle;
}

static void wait_for(Stream *stream, uint64_t ticket) {
    while (stream->done < ticket) pthread_cond_wait(&change, &lock);
}

static void *work(void *given) {
    Stream *stream = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&change, &lock);
        Op *op = stream->first;
        if (op->kind == WAIT) {
            while (!op->point->done) pthread_cond_wait(&change, &lock);
        } else if (op->kind == SIGNAL) {
            op->point->done = 1;
        } else {
            pthread_mutex_unlock(&lock);
            op->run(op->given);
            pthread_mutex_lock(&lock);
        }
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        stream->done++;
        free(op);
        pthread_cond_broadcast(&change);
    }
    return NULL;
}

static void append(Stream *stream, Op op) {
    Op *made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    *stream->last = made;
    stream->last = &made->next;
    stream->issued++;
    if (!stream->started) {
        pthread_t thread;
        stream->started = 1;
        pthread_create(&thread, NULL, work, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&change);
}

/* A thread that blocks in a launch holds a lock which these functions of CUDA's need. Some are
 * called with Python's lock: then all threads wait. */
static void take_locks(void) {
    pthread_mutex_lock(&lock);
    while (blocked) pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
}

static int stands_behind_nccl(const Stream *stream) {
    return stream->issued - stream->done >= QUEUE && stream->first && stream->first->kind == CALL
        && stream->first->run == nccl_run;
}

/* Something to do; 1: it became part of a graph. */
static int put(intptr_t handle, void (*run)(void *), void *(*again)(void *), void *given) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    Capture *capture = stream->capture;
    if (!capture && stands_behind_nccl(stream)) {
        blocked++;
        while (stands_behind_nccl(stream)) pthread_cond_wait(&change, &lock);
        blocked--;
        pthread_cond_broadcast(&change);
    }
    if (capture) {
        Op *op = malloc(sizeof *op);
        *op = (Op){CALL, run, again, given, NULL, NULL};
        *capture->last = op;
        capture->last = &op->next;
        stream->known[stream->place] = ++capture->counts[stream->place];
    } else {
        append(stream, (Op){CALL, run, again, given, NULL, NULL});
    }
    pthread_mutex_unlock(&lock);
    return capture != NULL;
}

/* What a capture forbids this thread to do: it ends the capture. */
static int unsafe(void) {
    int status = OK;
    for (Capture *each = captures; each && thread_mode != RELAXED; each = each->next)
        if (each->mode == GLOBAL
            || (each->mode == THREAD_LOCAL && pthread_equal(each->thread, pthread_self())))
            each->broken = status = CAPTURE_UNSUPPORTED;
    return status;
}

/* Wait until a stream (NULL: all) has come so far. Without Python's lock. */
static int synchronize(Stream *stream) {
    int status = OK;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    status = unsafe();
    for (int i = 0; i < alive_count && !status; i++) {
        if (stream != NULL && stream != alive[i]) continue;
        if (alive[i]->capture) { alive[i]->capture->broken = 1; status = CAPTURE_UNSUPPORTED; break; }
        wait_for(alive[i], alive[i]->issued);
    }
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS
    return status;
}

intptr_t host_streamCreateWithPriority(unsigned flags, int priority, int skip) {
    (void)priority; (void)skip;
    Stream *made = calloc(1, sizeof *made);
    made->last = &made->first;
    made->flags = flags;
    pthread_mutex_lock(&lock);
    if (alive_count < MOST_ALIVE) alive[alive_count++] = made;
    pthread_mutex_unlock(&lock);
    return (intptr_t)made;
}

intptr_t host_streamCreateWithFlags(unsigned flags, int skip) {
    return host_streamCreateWithPriority(flags, 0, skip);
}

unsigned host_streamGetFlags(intptr_t stream, int skip) { (void)skip; return stream_of(stream)->flags; }
/* What is on it still runs. */
PyObject *host_streamDestroy(intptr_t stream, int skip) {
    (void)skip;
    return answer(stream == 0 || stream == 1 ? INVALID_HANDLE : OK);
}
PyObject *host_streamSynchronize(intptr_t stream, int skip) {
    (void)skip;
    return answer(synchronize(stream_of(stream)));
}
PyObject *host_deviceSynchronize(int skip) { (void)skip; return answer(synchronize(NULL)); }

PyObject *host_streamQuery(intptr_t handle, int skip) {
    (void)skip;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int status = unsafe();
    if (!status && stream->done < stream->issued) status = NOT_READY;
    pthread_mutex_unlock(&lock);
    return PyLong_FromLong(status);
}

/* Events. */

intptr_t host_eventCreateWithFlags(unsigned flags, int skip) {
    (void)flags; (void)skip;
    return (intptr_t)calloc(1, sizeof(Event));
}
PyObject *host_eventDestroy(intptr_t event, int skip) {
    (void)skip;
    take_locks();
    free((Event *)event);               /* its point stays for those who wait */
    Py_RETURN_NONE;
}

PyObject *host_eventRecord(intptr_t handle, intptr_t given, int skip) {
    (void)skip;
    Event *event = (Event *)handle;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(given);
    event->capture = stream->capture;
    event->point = NULL;
    if (stream->capture) {
        memcpy(event->known, stream->known, sizeof event->known);
    } else {
        event->point = calloc(1, sizeof *event->point);
        append(stream, (Op){SIGNAL, NULL, NULL, NULL, event->point, NULL});
    }
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static int under_way(const Capture *capture) {
    for (Capture *each = captures; each; each = each->next)
        if (each == capture) return 1;
    return 0;
}

static int wait_event(Stream *stream, Event *event) {
    Capture *capture = event->capture;
    if (capture) {
        if (!under_way(capture)) return CAPTURED_EVENT;
        if (stream == &legacy) { capture->broken = 1; return CAPTURE_ISOLATION; }
        if (stream->capture == NULL) {
            if (capture->streams == MOST_STREAMS) return INVALID_VALUE;
            stream->capture = capture;
            stream->place = capture->streams++;
            memset(stream->known, 0, sizeof stream->known);
            capture->members[stream->place] = stream;
            stream->known[stream->place] = capture->counts[stream->place] = 1;
        } else if (stream->capture != capture) {
            stream->capture->broken = capture->broken = 1;
            return CAPTURE_ISOLATION;
        }
        for (int i = 0; i < MOST_STREAMS; i++)
            if (stream->known[i] < event->known[i]) stream->known[i] = event->known[i];
    } else if (event->point) {
        if (stream->capture) { stream->capture->broken = 1; return CAPTURE_ISOLATION; }
        append(stream, (Op){WAIT, NULL, NULL, NULL, event->point, NULL});
    }
    return OK;
}

PyObject *host_streamWaitEvent(intptr_t stream, intptr_t event, int skip, void *more) {
    (void)skip; (void)more;
    pthread_mutex_lock(&lock);
    int status = wait_event(stream_of(stream), (Event *)event);
    pthread_mutex_unlock(&lock);
    return answer(status);
}

static int query(const Event *event) {
    int status = unsafe();
    if (status) return status;
    if (event->capture) return CAPTURED_EVENT;
    return event->point == NULL || event->point->done ? OK : NOT_READY;
}

int cuEventQuery(void *event) {
    take_locks();
    pthread_mutex_lock(&lock);
    int status = query(event);
    pthread_mutex_unlock(&lock);
    return status;
}

PyObject *host_eventQuery(intptr_t event, int skip) {
    (void)skip;
    int status = cuEventQuery((void *)event);
    if (status && status != NOT_READY) return failed(status);
    return PyLong_FromLong(status);
}

PyObject *host_eventSynchronize(intptr_t handle, int skip) {
    (void)skip;
    Event *event = (Event *)handle;
    int status;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    while ((status = query(event)) == NOT_READY) pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS
    return answer(status);
}

/* Captures and graphs. */

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

int cuStreamGetCaptureInfo_v2(void *handle, int *active, uint64_t *number, void *graph, void *needs,
                              void *count) {
    (void)graph; (void)needs; (void)count;
    int status = OK;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of((intptr_t)handle);
    for (Capture *each = captures; each && stream == &legacy; each = each->next)
        if (!(each->members[0]->flags & NON_BLOCKING)) status = CAPTURE_IMPLICIT;
    Capture *capture = stream->capture;
    *active = capture == NULL ? 0 : capture->broken ? 2 : 1;
    if (capture) *number = capture->number;
    pthread_mutex_unlock(&lock);
    return status;
}

int host_streamIsCapturing(intptr_t handle, int skip) {
    int active = 0;
    uint64_t number;
    (void)skip;
    int status = cuStreamGetCaptureInfo_v2((void *)handle, &active, &number, NULL, NULL, NULL);
    if (status) { failed(status); return 0; }
    if (active == 2) {
        PyErr_SetString(PyExc_RuntimeError, "the stream was capturing, but an error has invalidated "
                                            "the capture sequence");
        return 0;
    }
    return active;
}

PyObject *host_streamBeginCapture(intptr_t handle, int skip, int *more) {
    (void)skip;
    Stream *stream = stream_of(handle);
    int status = OK;
    pthread_mutex_lock(&lock);
    if (stream == &legacy) status = CAPTURE_UNSUPPORTED;
    else if (stream->capture) status = CAPTURE_UNMATCHED;
    else {
        Capture *made = calloc(1, sizeof *made);
        *made = (Capture){.number = ++capture_numbers, .mode = more && more[0] > 0 ? more[1] : RELAXED,
                          .thread = pthread_self(), .streams = 1, .next = captures};
        made->members[0] = stream;
        made->last = &made->first;
        captures = stream->capture = made;
        stream->place = 0;
        memset(stream->known, 0, sizeof stream->known);
    }
    pthread_mutex_unlock(&lock);
    return answer(status);
}

intptr_t host_streamEndCapture(intptr_t handle, int skip) {
    (void)skip;
    Stream *stream = stream_of(handle);
    int status = OK;
    pthread_mutex_lock(&lock);
    Capture *capture = stream->capture;
    if (capture == NULL || capture->members[0] != stream) {
        status = CAPTURE_UNMATCHED;
    } else {
        for (int i = 1; i < capture->streams; i++)
            if (stream->known[i] < capture->counts[i]) status = CAPTURE_UNJOINED;
        if (capture->broken) status = CAPTURE_INVALIDATED;
        for (int i = 0; i < capture->streams; i++) capture->members[i]->capture = NULL;
        Capture **each = &captures;
        while (*each != capture) each = &(*each)->next;
        *each = capture->next;
    }
    pthread_mutex_unlock(&lock);
    if (status) { failed(status); return 0; }
    return (intptr_t)capture;
}

intptr_t host_graphInstantiate(intptr_t graph, int skip) { (void)skip; return graph; }
PyObject *host_graphDestroy(intptr_t graph, int skip) { (void)graph; (void)skip; Py_RETURN_NONE; }
PyObject *host_graphExecDestroy(intptr_t graph, int skip) { (void)graph; (void)skip; Py_RETURN_NONE; }
PyObject *host_graphUpload(intptr_t graph, intptr_t stream, int skip) {
    (void)graph; (void)stream; (void)skip;
    Py_RETURN_NONE;
}
PyObject *host_graphLaunch(intptr_t graph, intptr_t stream, int skip) {
    (void)skip;
    for (Op *op = ((Capture *)graph)->first; op; op = op->next)
        put(stream, op->run, op->again, op->again(op->given));
    Py_RETURN_NONE;
}

#include "fake_cuda_memory.h"

/* Python's functions in place of kernels. */

static void call(void *given) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallNoArgs(given);
    if (done == NULL) PyErr_WriteUnraisable(given);
    Py_XDECREF(done);
    Py_DECREF((PyObject *)given);
    PyGILState_Release(state);
}
static void *call_again(void *given) { Py_INCREF((PyObject *)given); return given; }

void host_launch(intptr_t stream, PyObject *function) {
    void *given = call_again(function);
    Py_BEGIN_ALLOW_THREADS
    put(stream, call, call_again, given);
    Py_END_ALLOW_THREADS
}

/* NCCL's stand-in, whose calls are its own to run and to copy. */

void host_use_nccl(void *run, void *again) {
    *(void **)&nccl_run = run;
    *(void **)&nccl_again = again;
}
int host_nccl(void *stream, void *task) { return put((intptr_t)stream, nccl_run, nccl_again, task); }
