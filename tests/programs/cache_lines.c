/* What it costs one core to write memory that it, or the other core, has read last.
 *
 *     gcc -O2 -o cache_lines tests/programs/cache_lines.c && ./cache_lines
 *
 * Two processes on two cores take turns. Each copies a message out of shared memory and then one into
 * it: into memory of its own, or into the memory that it has just read. Prints microseconds per copy.
 * The figures of docs/dev/lab_notes.md are from this program.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TURNS = 3000, MOST = 1 << 17 };

struct Shared {
    _Alignas(128) volatile int turn;
    _Alignas(128) double reading, writing;
    _Alignas(4096) char areas[2][MOST];
};

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void take_turns(struct Shared *shared, int me, size_t nbytes, int same) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(me, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
    char *own = malloc(nbytes);
    memset(own, me, nbytes);
    char *theirs = shared->areas[same ? 0 : 1 - me], *ours = shared->areas[same ? 0 : me];
    for (int i = 0; i < TURNS; i++) {
        while (shared->turn != me)
            ;
        double began = now_us();
        memcpy(own, theirs, nbytes);
        double read = now_us();
        memcpy(ours, own, nbytes);
        if (me == 0 && i > 0) {
            shared->reading += (read - began) / (TURNS - 1);
            shared->writing += (now_us() - read) / (TURNS - 1);
        }
        __atomic_store_n(&shared->turn, 1 - me, __ATOMIC_SEQ_CST);
    }
}

int main(void) {
    printf("%8s %24s %10s %10s\n", "bytes", "writes into", "read us", "write us");
    for (size_t nbytes = 4096; nbytes <= MOST; nbytes *= 2)
        for (int same = 0; same < 2; same++) {
            struct Shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            for (int me = 0; me < 2; me++)
                if (fork() == 0) {
                    take_turns(shared, me, nbytes, same);
                    _exit(0);
                }
            wait(NULL);
            wait(NULL);
            printf("%8zu %24s %10.2f %10.2f\n", nbytes, same ? "what it has just read" : "memory of its own",
                   shared->reading, shared->writing);
        }
}
