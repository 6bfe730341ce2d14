/* A stand-in for libnccl.so.2 in host memory: what the binding calls, for ranks that are threads or
 * processes of one host. Tests build it and load it before cupy, which then takes it for NCCL.
 *
 * Ranks share one file in /dev/shm, in which every ordered pair has a ring of bytes. A call is a
 * set of messages with a header each; ranks that disagree wait for ever, as with NCCL, until they
 * are aborted. Calls run where the stream is: standin_use_streams names who queues them; without,
 * they run at once. What kernels, real streams, other transports and NCCL's own rounding do, this
 * cannot show.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl_errors.h"
#include "fake_nccl_reduce.h"

enum { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV };
enum { NO_COLOR = -1 };  /* of a rank that gets no communicator */
enum { RING_BYTES = 16384, MOST_RANKS = 16, MOST_PREMULS = 64, INIT_SECONDS = 60 };
enum { ONE_RANK_MENDED = 22907 };  /* the version whose kernel of one rank leaves nothing out */

static const char *const NAMES[] = {
    "all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "send", "recv",
};

typedef struct { char internal[128]; } UniqueId;

typedef struct {
    _Atomic uint64_t head, tail;
    _Atomic int cut;            /* its sender was aborted, and nothing of it arrives any more */
    char data[RING_BYTES];
} Ring;

/* What a rank says in a split, the number of its split, and of the last one whose colours it read. */
typedef struct { int color, key; _Atomic int said, read; } Said;

typedef struct {
    _Atomic int arrived, connected;
    Said split[MOST_RANKS];
    Ring rings[];               /* of rank s to rank d: s * size + d */
} Segment;

typedef struct {
    Segment *segment;
    char name[240];             /* of the file */
    size_t bytes;
    int rank, size;
    int splits;                 /* how often it was split */
    _Atomic int aborted, async_error;
    _Atomic uint64_t issued, served;
    _Atomic int running;        /* tasks that use this object */
    _Atomic int inside;         /* threads in a call */
    int connected;              /* the first call has made connections */
    struct { int type; char scalar[8]; int used; } premuls[MOST_PREMULS];
} Comm;

typedef struct Op {
    int kind, type, op, root;   /* root: or the peer of a send or receive */
    const char *send;
    char *recv;
    size_t count;
    void *stream;
    Comm *comm;
    char *gathered;             /* everybody's contributions, to be reduced */
    char scalar[8];             /* of its operation, which may go when the call has returned */
} Op;

typedef struct { Comm *comm; uint64_t ticket; int count; Op *ops; } Task;

typedef struct { uint64_t magic, count; int32_t kind, type, op, root; } Header;

/* A message under way. */
typedef struct { char *data; size_t bytes, done; Header header; int peer, sends; } Message;

static _Thread_local int depth, queued_count;
static _Thread_local Op *queued;

static int (*enqueue)(void *stream, void *task);    /* 1: it is kept for a graph */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 20];
static size_t log_bytes;

static int idle;                /* calls do nothing: for those who time what comes before */
void standin_do_nothing(void) { idle = 1; }
void standin_use_streams(int (*callback)(void *stream, void *task)) { enqueue = callback; }

static void note(int rank, const char *text) {
    pthread_mutex_lock(&log_lock);
    int room = (int)(sizeof log_text - log_bytes);
    int wrote = snprintf(log_text + log_bytes, (size_t)room, "%d %s\n", rank, text);
    if (wrote < room) log_bytes += (size_t)wrote;
    pthread_mutex_unlock(&log_lock);
    const char *path = getenv("STANDIN_LOG");   /* of calls that come when the log cannot be read */
    if (path == NULL) return;
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    dprintf(file, "%d %s\n", rank, text);
    close(file);
}

/* The calls since the last time, a line each: rank (-1: of no communicator) and call. */
size_t standin_log(char *into, size_t room) {
    pthread_mutex_lock(&log_lock);
    size_t bytes = log_bytes < room ? log_bytes : room;
    memcpy(into, log_text, bytes);
    log_bytes = 0;
    pthread_mutex_unlock(&log_lock);
    return bytes;
}

/* From now on ncclCommGetAsyncError says so. */
void standin_fail(void *comm, int code) { ((Comm *)comm)->async_error = code; }

static void nap(void) {
    struct timespec time = {0, 50000};
    nanosleep(&time, NULL);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Library-wide functions. */

static int setting(const char *name, int otherwise) {
    const char *wanted = getenv(name);
    return wanted ? atoi(wanted) : otherwise;
}

static int loaded_version(void) { return setting("STANDIN_VERSION", 22809); }

int ncclGetVersion(int *version) { *version = loaded_version(); return SUCCESS; }

static _Thread_local char last_error[200];

const char *ncclGetLastError(void *comm) { (void)comm; return last_error; }

static int refuse(const char *why) {
    snprintf(last_error, sizeof last_error, "stand-in: %s", why);
    return INVALID_ARGUMENT;
}

int ncclGetUniqueId(UniqueId *id) {
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    char *end = stpcpy(id->internal, "/cydist-standin-");
    for (size_t i = 0; i < sizeof random; i++) end += sprintf(end, "%02x", random[i]);
    return SUCCESS;
}

/* Communicators. */

static int is_aborted(const Comm *comm) { return comm != NULL && comm->aborted; }

static int open_segment(Comm *comm, const char *name, int rank, const Comm *parent) {
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->bytes = sizeof(Segment) + (size_t)(comm->size * comm->size) * sizeof(Ring);
    int fd = shm_open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return SYSTEM_ERROR;
    if (ftruncate(fd, (off_t)comm->bytes) != 0) { close(fd); return SYSTEM_ERROR; }
    comm->segment = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (comm->segment == MAP_FAILED) return SYSTEM_ERROR;
    comm->segment->arrived++;
    double end = now() + INIT_SECONDS;
    while (comm->segment->arrived < comm->size) {
        if (now() > end || is_aborted(parent)) { shm_unlink(name); return SYSTEM_ERROR; }
        nap();
    }
    if (rank == 0) shm_unlink(name);
    return SUCCESS;
}

int ncclCommInitRank(Comm **out, int size, UniqueId id, int rank) {
    if (depth) return refuse("init inside a group");
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) return refuse("ranks");
    const char *trap = getenv("STANDIN_INIT_FAILS");
    if (trap && atoi(trap) == rank) { depth++; return SYSTEM_ERROR; }   /* leaks, as NCCL does */
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank, comm->size = size;
    int code = open_segment(comm, id.internal, rank, NULL);
    if (code) { free(comm); return code; }
    note(rank, "init");
    *out = comm;
    return SUCCESS;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, void *config) {
    (void)config;
    return ncclCommInitRank(out, size, id, rank);
}

int ncclCommInitAll(Comm **out, int count, const int *devices) {
    (void)out; (void)count; (void)devices;
    return refuse("one process for many devices");
}

int ncclCommCount(const Comm *comm, int *count) { *count = comm->size; return SUCCESS; }
int ncclCommUserRank(const Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommCuDevice(const Comm *comm, int *device) { (void)comm; *device = 0; return SUCCESS; }

int ncclCommGetAsyncError(Comm *comm, int *code) { *code = comm->async_error; return SUCCESS; }

static void release(Comm *comm) {
    while (comm->running) nap();
    munmap(comm->segment, comm->bytes);
    comm->segment = NULL;       /* the object itself stays: its late users find it aborted */
}

int ncclCommFinalize(Comm *comm) { note(comm->rank, "finalize"); return SUCCESS; }

int ncclCommDestroy(Comm *comm) {
    note(comm->rank, "destroy");
    while (comm->served < comm->issued && !comm->aborted) nap();
    comm->aborted = 1;
    release(comm);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
    note(comm->rank, comm->inside ? "abort beside a call, which would use freed memory" : "abort");
    comm->aborted = 1;
    /* The kernel has passed a call whose last bytes a thread of NCCL's still sends over a network. */
    if (setting("STANDIN_ABORT_CUTS", 0))
        for (int to = 0; to < comm->size; to++) {
            Ring *ring = &comm->segment->rings[comm->rank * comm->size + to];
            if (ring->head > ring->tail) ring->cut = 1;
        }
    release(comm);
    return SUCCESS;
}

/* From 2.28 on: it ends calls, also those that block in the host, and frees nothing. */
int ncclCommRevoke(Comm *comm, int flags) {
    if (loaded_version() < 22800 || flags) return refuse("revoke");
    note(comm->rank, "revoke");
    comm->aborted = 1;
    while (comm->inside) nap();
    return SUCCESS;
}

/* Every rank of the communicator says its colour and key, and reads all others': this blocks until
 * all have come, or the communicator is aborted. Ranks of one colour are ordered by key, then rank. */
static int read_colors(Comm *comm, int color, int key, int *rank, int *size) {
    Said *all = comm->segment->split, *own = &all[comm->rank];
    int number = ++comm->splits;
    for (int i = 0; i < comm->size; i++)
        while (all[i].read < number - 1) { if (comm->aborted) return INVALID_USAGE; nap(); }
    own->color = color, own->key = key;
    own->said = number;
    *rank = *size = 0;
    for (int i = 0; i < comm->size; i++) {
        while (all[i].said < number) { if (comm->aborted) return INVALID_USAGE; nap(); }
        if (all[i].color != color) continue;
        ++*size;
        if (all[i].key < key || (all[i].key == key && i < comm->rank)) ++*rank;
    }
    own->read = number;
    return SUCCESS;
}

static int split(Comm *comm, int color, int key, Comm **out) {
    char text[80];
    snprintf(text, sizeof text, "split color=%d key=%d%s", color, key,
             comm->served < comm->issued ? " beside calls, which may deadlock" : "");
    note(comm->rank, text);
    while (comm->served < comm->issued && !comm->aborted) nap();
    int rank, size, code = read_colors(comm, color, key, &rank, &size);
    if (code || color == NO_COLOR) return code;
    Comm *made = calloc(1, sizeof *made);
    made->rank = rank, made->size = size;
    char name[240];
    snprintf(name, sizeof name, "%.200s-%d.%d", comm->name, comm->splits, color);
    code = open_segment(made, name, rank, comm);
    if (code) { free(made); return code; }
    *out = made;
    return SUCCESS;
}

int ncclCommSplit(Comm *comm, int color, int key, Comm **out, void *config) {
    if (config) return refuse("a configuration");
    if (depth) return refuse("split inside a group");
    if (color < NO_COLOR) return refuse("color");
    *out = NULL;
    if (comm == NULL || comm->aborted) return refuse("it was aborted");
    comm->inside++;
    int code = split(comm, color, key, out);
    comm->inside--;
    return code;
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *comm) {
    if (residence != 1) return refuse("a scalar on the device");
    if (type < 0 || type >= TYPES) return refuse("type");
    for (int i = 0; i < MOST_PREMULS; i++) {
        if (comm->premuls[i].used) continue;
        comm->premuls[i].used = 1;
        comm->premuls[i].type = type;
        memcpy(comm->premuls[i].scalar, scalar, TYPE_BYTES[type]);
        *op = PREMUL + i;
        note(comm->rank, "premul_create");
        return SUCCESS;
    }
    return refuse("too many operations");
}

int ncclRedOpDestroy(int op, Comm *comm) {
    if (op < PREMUL || op >= PREMUL + MOST_PREMULS) return refuse("operation");
    if (depth) return refuse("an operation that ends inside a group");
    comm->premuls[op - PREMUL].used = 0;
    note(comm->rank, "premul_destroy");
    return SUCCESS;
}

/* How a call runs. */

static size_t padded(size_t bytes);

/* Does a message fit the call that takes it? NCCL completes a receive by a shorter message, and
 * leaves the end of the memory as it is; a longer one is an error of the receiver's. */
static int fits(Comm *comm, const Header *theirs, Message *message) {
    Header alike = message->header;
    alike.count = theirs->count;
    if (memcmp(theirs, &alike, sizeof alike)) return 0;
    if (theirs->count == message->header.count) return 1;
    if (alike.kind != SEND) return 0;
    if (theirs->count > message->header.count) {
        comm->async_error = INVALID_USAGE;
        snprintf(last_error, sizeof last_error, "stand-in: message truncated");
        return 0;
    }
    message->header.count = theirs->count;
    message->bytes = padded(theirs->count * TYPE_BYTES[theirs->type]);
    return 1;
}

static int step(Comm *comm, Message *message) {
    int from = message->sends ? comm->rank : message->peer;
    int to = message->sends ? message->peer : comm->rank;
    Ring *ring = &comm->segment->rings[from * comm->size + to];
    size_t total = sizeof(Header) + message->bytes;
    Header theirs;
    int moved = 0;
    while (message->done < total) {
        uint64_t head = ring->head, tail = ring->tail;
        if (!message->sends && ring->cut) { comm->async_error = REMOTE; return -1; }
        size_t room = message->sends ? RING_BYTES - (head - tail) : head - tail;
        int in_header = message->done < sizeof(Header);
        if (in_header && room < sizeof(Header)) return moved;
        size_t at = message->done - sizeof(Header);
        size_t bytes = in_header ? sizeof(Header) : message->bytes - at;
        uint64_t place = (message->sends ? head : tail) % RING_BYTES;
        if (bytes > room) bytes = room;
        if (bytes > RING_BYTES - place) bytes = RING_BYTES - place;
        if (bytes == 0) return moved;
        if (in_header && bytes < sizeof(Header)) return -1;     /* rings hold whole headers */
        char *own = in_header ? (message->sends ? (char *)&message->header : (char *)&theirs)
                              : message->data + at;
        if (message->sends) {
            memcpy(ring->data + place, own, bytes);
            ring->head = head + bytes;
        } else {
            memcpy(own, ring->data + place, bytes);
            if (in_header && !fits(comm, &theirs, message)) return -1;
            ring->tail = tail + bytes;
        }
        message->done += bytes;
        moved = 1;
    }
    return 1;
}

/* Payloads are padded, so that a header never wraps around the end of a ring. */
static size_t padded(size_t bytes) { return (bytes + sizeof(Header) - 1) / sizeof(Header) * sizeof(Header); }

static Message message(const Op *op, int peer, int sends, const void *data, size_t bytes) {
    Message made = {.bytes = padded(bytes), .peer = peer, .sends = sends};
    made.header = (Header){0xC0111DE, op->count, op->kind == RECV ? SEND : op->kind, op->type, op->op,
                           op->kind >= SEND ? -1 : op->root};
    if (op->op >= PREMUL) made.header.op = PREMUL;      /* factors are each rank's own */
    made.data = calloc(1, made.bytes + 1);
    if (sends && bytes) memcpy(made.data, data, bytes);
    return made;
}

/* The messages of an op; what is received lands in their own memory, see finish. */
static int messages(const Op *op, Message *out) {
    const Comm *comm = op->comm;
    size_t bytes = op->count * TYPE_BYTES[op->type];
    int count = 0;
    for (int peer = 0; peer < comm->size; peer++) {
        int here = op->kind >= SEND ? peer == op->root : peer != comm->rank;
        if (!here) continue;
        int rooted = op->kind == REDUCE || op->kind == BROADCAST;
        int root_sends = op->kind == BROADCAST;
        int sends = op->kind == SEND ||
            (op->kind != RECV && (!rooted || (root_sends ? comm->rank : peer) == op->root));
        int receives = op->kind == RECV ||
            (op->kind != SEND && (!rooted || (root_sends ? peer : comm->rank) == op->root));
        const char *from = op->send + (op->kind == REDUCE_SCATTER ? (size_t)peer * bytes : 0);
        if (sends) out[count++] = message(op, peer, 1, from, bytes);
        if (receives) out[count++] = message(op, peer, 0, NULL, bytes);
    }
    return count;
}

/* How many elements of the result are written. The kernel that multiplies for a communicator of one
 * rank shares them out among blocks, and before 2.29.7 it leaves out what the division leaves. */
static size_t written(const Op *op) {
    if (op->comm->size > 1 || !multiplies(op->type, op->op)) return op->count;
    size_t pack = 16 / TYPE_BYTES[op->type], segment = 16 << 10;
    size_t blocks = (op->count * TYPE_BYTES[op->type] + segment - 1) / segment;
    if (blocks > 32) blocks = 32;
    if (blocks == 0 || loaded_version() >= ONE_RANK_MENDED) return op->count;
    size_t covered = blocks * ((op->count / blocks + pack - 1) / pack * pack);
    return covered < op->count ? covered : op->count;
}

static void finish(const Op *op, Message *made, int count) {
    const Comm *comm = op->comm;
    size_t bytes = op->count * TYPE_BYTES[op->type];
    const char *all[MOST_RANKS] = {NULL};
    if (op->kind < SEND)
        all[comm->rank] = op->send + (op->kind == REDUCE_SCATTER ? (size_t)comm->rank * bytes : 0);
    for (int i = 0; i < count; i++)
        if (!made[i].sends) all[made[i].peer] = made[i].data;
    int reduces = op->kind == ALL_REDUCE || op->kind == REDUCE_SCATTER ||
                  (op->kind == REDUCE && comm->rank == op->root);
    if (reduces) {
        char *result = malloc(bytes + 1);
        standin_reduce(result, all, comm->size, op->count, op->type, op->op);
        memcpy(op->recv, result, written(op) * TYPE_BYTES[op->type]);
        free(result);
    } else if (op->kind == ALL_GATHER) {
        for (int peer = 0; peer < comm->size; peer++)
            memmove(op->recv + (size_t)peer * bytes, all[peer], bytes);
    } else if (op->kind == BROADCAST) {
        memmove(op->recv, all[op->root], bytes);
    } else if (op->kind == RECV) {
        memcpy(op->recv, all[op->root], made[0].header.count * TYPE_BYTES[op->type]);
    }
}

static void premultiply(Op *op) {
    if (op->op < PREMUL) return;
    size_t count = op->count * (op->kind == REDUCE_SCATTER ? (size_t)op->comm->size : 1);
    char *scaled = malloc(count * TYPE_BYTES[op->type] + 1);
    standin_scale(scaled, op->send, count, op->type, op->scalar);
    op->send = op->gathered = scaled;
}

static int progress(Comm *comm, Message *all, int count) {
    for (;;) {
        int left = 0, moved = 0;
        /* In each direction of each pair the first that is not over, then the next. */
        char blocked[2][MOST_RANKS] = {{0}};
        for (int i = 0; i < count; i++) {
            Message *each = &all[i];
            if (each->done == sizeof(Header) + each->bytes) continue;
            left = 1;
            if (blocked[each->sends][each->peer]) continue;
            int did = step(comm, each);
            if (did > 0) moved = 1;
            if (each->done < sizeof(Header) + each->bytes || did < 0)
                blocked[each->sends][each->peer] = 1;
        }
        if (!left) return 1;
        if (comm->aborted) return 0;
        if (!moved) nap();
    }
}

/* Runs what was given to the callback of standin_use_streams, when its turn on the stream comes. */
void standin_run(void *given) {
    Task *task = given;
    Comm *comm = task->comm;
    comm->running++;
    while (comm->served != task->ticket && !comm->aborted) nap();
    if (!comm->aborted) {
        Message *all = calloc((size_t)task->count * 2 * MOST_RANKS, sizeof *all);
        int *ends = calloc((size_t)task->count + 1, sizeof *ends), count = 0;
        for (int i = 0; i < task->count; i++) {
            premultiply(&task->ops[i]);
            ends[i] = count += messages(&task->ops[i], all + count);
        }
        if (progress(comm, all, count))
            for (int i = 0; i < task->count; i++) {
                int start = i ? ends[i - 1] : 0;
                finish(&task->ops[i], all + start, ends[i] - start);
            }
        for (int i = 0; i < count; i++) free(all[i].data);
        for (int i = 0; i < task->count; i++) free(task->ops[i].gathered);
        free(all);
        free(ends);
    }
    comm->served = task->ticket + 1;
    comm->running--;
    free(task->ops);
    free(task);
}

/* A captured task, for one launch of its graph. */
void *standin_again(void *given) {
    const Task *kept = given;
    Task *task = malloc(sizeof *task);
    *task = *kept;
    task->ticket = kept->comm->issued++;
    task->ops = malloc(sizeof *task->ops * (size_t)kept->count);
    memcpy(task->ops, kept->ops, sizeof *task->ops * (size_t)kept->count);
    return task;
}

/* The first call of a communicator connects its ranks, and the host waits for it. */
static void connect_ranks(Comm *comm) {
    if (comm->connected || comm->size == 1 || !setting("STANDIN_FIRST_CALL_BLOCKS", 0)) return;
    comm->connected = 1;
    comm->segment->connected++;
    while (comm->segment->connected < comm->size && !comm->aborted) nap();
}

static int launch(void) {
    int aborted = 0;
    for (int i = 0; i < queued_count; i++) {
        queued[i].comm->inside++;
        connect_ranks(queued[i].comm);
        queued[i].comm->inside--;
    }
    for (int i = 0; i < queued_count; i++) {
        Comm *comm = queued[i].comm;
        if (comm == NULL) continue;
        Task *task = calloc(1, sizeof *task);
        task->comm = comm;
        task->ops = calloc((size_t)queued_count, sizeof *task->ops);
        for (int j = i; j < queued_count; j++)
            if (queued[j].comm == comm) {
                task->ops[task->count++] = queued[j];
                if (j > i) queued[j].comm = NULL;
            }
        if (comm->aborted) { aborted = 1; free(task->ops); free(task); continue; }
        task->ticket = comm->issued;
        if (!enqueue) standin_run(task);
        if (!enqueue || !enqueue(queued[i].stream, task)) comm->issued++;
        if (!enqueue && comm->aborted) aborted = 1;
    }
    free(queued);
    queued = NULL, queued_count = 0;
    return aborted ? INVALID_USAGE : SUCCESS;
}

/* Why NCCL refuses a reduction of floats of 8 bits; NULL: it does not. */
static const char *fp8_refusal(const Comm *comm, int kind, int type, int op) {
    int reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    if (!reduces || (type != F8E4M3 && type != F8E5M2)) return NULL;
    if (setting("STANDIN_CAPABILITY", 90) < 90) return "FP8 reduction begins with sm90";
    /* One rank's kernels for them are left out of the library, in all versions up to 2.32.3. */
    return comm->size == 1 && multiplies(type, op) ? "no kernel of one rank for FP8" : NULL;
}

static int add(int kind, const void *send, void *recv, size_t count, int type, int op, int root,
               Comm *comm, void *stream) {
    if (comm == NULL || idle) return idle ? SUCCESS : refuse("it was aborted");
    if (type < 0 || type >= TYPES) return refuse("type");
    if (op < 0 || op >= PREMUL + MOST_PREMULS) return refuse("operation");
    if (op >= PREMUL && (!comm->premuls[op - PREMUL].used || comm->premuls[op - PREMUL].type != type))
        return refuse("an operation of another type");
    if (root < 0 || root >= comm->size) return refuse("root or peer");
    const char *why = count ? fp8_refusal(comm, kind, type, op) : NULL;
    if (why) return refuse(why);
    char text[120];
    snprintf(text, sizeof text, "%s count=%zu type=%d op=%d root=%d", NAMES[kind], count, type, op, root);
    note(comm->rank, text);
    queued = realloc(queued, sizeof *queued * (size_t)(queued_count + 1));
    Op *made = &queued[queued_count++];
    *made = (Op){kind, type, op, root, send, recv, count, stream, comm, NULL, {0}};
    if (op >= PREMUL) memcpy(made->scalar, comm->premuls[op - PREMUL].scalar, sizeof made->scalar);
    return depth ? SUCCESS : launch();
}

int ncclAlltoAll(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
    if (loaded_version() < 22800) return refuse("ncclAlltoAll");
    if (type < 0 || type >= TYPES) return refuse("type");
    if (comm && !idle) note(comm->rank, "all_to_all");
    size_t bytes = count * TYPE_BYTES[type];
    depth++;
    for (int peer = 0; comm && peer < comm->size; peer++) {
        add(SEND, (const char *)send + (size_t)peer * bytes, NULL, count, type, 0, peer, comm, stream);
        add(RECV, NULL, (char *)recv + (size_t)peer * bytes, count, type, 0, peer, comm, stream);
    }
    return --depth || idle ? SUCCESS : launch();
}

int ncclGroupStart(void) { if (depth++ == 0) note(-1, "group_start"); return SUCCESS; }

int ncclGroupEnd(void) {
    if (depth == 0) return INVALID_USAGE;
    if (--depth || idle) return SUCCESS;
    note(-1, "group_end");
    return launch();
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, Comm *comm, void *stream) {
    return add(ALL_REDUCE, send, recv, count, type, op, 0, comm, stream);
}

int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm,
               void *stream) {
    return add(REDUCE, send, recv, count, type, op, root, comm, stream);
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, Comm *comm,
                  void *stream) {
    return add(BROADCAST, send, recv, count, type, 0, root, comm, stream);
}

int ncclBcast(void *data, size_t count, int type, int root, Comm *comm, void *stream) {
    return add(BROADCAST, data, data, count, type, 0, root, comm, stream);
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, Comm *comm,
                      void *stream) {
    return add(REDUCE_SCATTER, send, recv, count, type, op, 0, comm, stream);
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
    return add(ALL_GATHER, send, recv, count, type, 0, 0, comm, stream);
}

int ncclSend(const void *send, size_t count, int type, int peer, Comm *comm, void *stream) {
    return add(SEND, send, NULL, count, type, 0, peer, comm, stream);
}

int ncclRecv(void *recv, size_t count, int type, int peer, Comm *comm, void *stream) {
    return add(RECV, NULL, recv, count, type, 0, peer, comm, stream);
}

// torch's library for CUDA names these, and does not load without them. No test calls them.
#define UNCALLED(name) int name(void) { return refuse(#name); }
UNCALLED(ncclCommDeregister)
UNCALLED(ncclCommInitRankScalable)
UNCALLED(ncclCommMemStats)
UNCALLED(ncclCommRegister)
UNCALLED(ncclCommResume)
UNCALLED(ncclCommShrink)
UNCALLED(ncclCommSuspend)
UNCALLED(ncclCommWindowDeregister)
UNCALLED(ncclCommWindowRegister)
UNCALLED(ncclDevCommCreate)
UNCALLED(ncclDevCommDestroy)
UNCALLED(ncclGetLsaMultimemDevicePointer)
UNCALLED(ncclGetPeerDevicePointer)
UNCALLED(ncclGroupSimulateEnd)
UNCALLED(ncclMemAlloc)
UNCALLED(ncclMemFree)
UNCALLED(ncclPutSignal)
UNCALLED(ncclSignal)
UNCALLED(ncclWaitSignal)
