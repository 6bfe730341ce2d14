/* Windows: no rank reads a place before it is written, or after it is written again, and no rank
   waits for ever.

   Models
     src/algorithms/windows/window_protocol.pyx: acquire_slot, publish, wait_for_peer, consume
     src/algorithms/windows/window_protocol.pyx: mark_consumed, release_slots, note_released
     src/algorithms/windows/flat.pyx: move_blocks

   The calls are any sequence: a step has short data (after its head) or long data (in a slot), and
   all ranks give and read, or rank 0 gives and reads nothing, as a broadcast's root. A place holds
   the number of the step that wrote it, plus one. What a rank does between two looks at what others
   may change meanwhile is one step. A flag is raised after what was written before it is visible,
   which RELAXED_PUBLISH breaks. Ranks sleep as in flags.pml. */

#define RANKS 2
#define STEPS 5
#define HEADS 4
#define SLOTS 2

/* What all ranks do in a step. The first rank that comes there chooses. */
bool chosen[STEPS], is_long[STEPS], rooted[STEPS];
byte passed[STEPS];
byte some_slots = 2;            /* how many steps the flags may lag behind */

byte posted[RANKS * HEADS];     /* Head.posted */
byte behind[RANKS * HEADS];     /* Head.behind */
byte short_data[RANKS * HEADS];
byte long_data[RANKS * SLOTS];
byte consumed_flag[RANKS];      /* Flags.consumed */

#define head(rank, step) ((rank) * HEADS + (step) % HEADS)
/* With every turn of the slots the two ranks write into each other's windows: see slot_of. */
#define window(rank, step) (rooted[step] -> (rank) : ((rank) + (step) / SLOTS) % RANKS)
#define slot(rank, step) (window(rank, step) * SLOTS + (step) % SLOTS)

inline choose()
{
    atomic {
        if
        :: chosen[step]
        :: !chosen[step] ->
            chosen[step] = true;
            if
            :: is_long[step] = true
            :: true
            fi;
            if
            :: rooted[step] = true
            :: true
            fi
        fi
    }
}

/* These heads are not written again before this rank raises its flag. */
inline release_slots(steps)
{
    consumed = steps;
    least = steps;
    peer = 0;
    do
    :: peer == RANKS -> break
    :: else ->
        assert(posted[head(peer, steps - 1)] == steps);
        there = steps - 1 - behind[head(peer, steps - 1)];
        if
        :: peer != me && there < least -> least = there
        :: else
        fi;
        peer++
    od;
    if
    :: least > released -> released = least
    :: else
    fi;
    if
    :: steps - consumed_flag[me] >= some_slots -> consumed_flag[me] = steps
    :: else
    fi;
    least = 0; there = 0; peer = 0
}

/* Compare the fingerprints of all steps before `steps`: none may be of a later step yet. */
inline consume_patiently(steps)
{
    at = consumed;
    do
    :: at == steps -> break
    :: else ->
        do
        :: peer == RANKS -> break
        :: peer == me -> peer++
        :: peer < RANKS && peer != me ->
            atomic {
                posted[head(peer, at)] > at;
                assert(posted[head(peer, at)] == at + 1)
            };
            peer++
        od;
        peer = 0;
        at++
    od;
    atomic { release_slots(at); at = 0 }
}

/* The same, but only as far as all ranks have come. */
inline consume_posted(steps)
{
    atomic {
        at = consumed;
        do
        :: at == steps -> break
        :: else ->
            all = true;
            do
            :: peer == RANKS -> break
            :: peer < RANKS && posted[head(peer, at)] > at ->
                assert(posted[head(peer, at)] == at + 1);
                peer++
            :: peer < RANKS && posted[head(peer, at)] <= at -> all = false; break
            od;
            peer = 0;
            if
            :: all -> at++; all = false
            :: else -> break
            fi
        od;
        if
        :: at > consumed -> release_slots(at)
        :: else
        fi;
        at = 0
    }
}

inline acquire_slot()
{
    if
    :: step - consumed >= some_slots -> consume_posted(step)
    :: else
    fi;
    ahead = (is_long[step] -> SLOTS : HEADS);
    if
    :: step < ahead
    :: else ->
#ifdef ONE_STEP_TOO_FEW
        needed = step - ahead;
#else
        needed = step + 1 - ahead;
#endif
        if
        :: consumed < needed -> consume_patiently(needed)
        :: else
        fi;
#ifndef NO_FLAG_BEFORE_WAITING
        if
        :: consumed_flag[me] < needed -> consumed_flag[me] = consumed
        :: else
        fi;
#endif
        if
        :: released >= needed
        :: else ->
            do
            :: peer == RANKS -> break
            :: peer == me -> peer++
            :: peer < RANKS && peer != me -> consumed_flag[peer] >= needed; peer++
            od;
            atomic {            /* note_released */
                least = consumed;
                peer = 0;
                do
                :: peer == RANKS -> break
                :: else ->
                    if
                    :: peer != me && consumed_flag[peer] < least -> least = consumed_flag[peer]
                    :: else
                    fi;
                    peer++
                od;
                released = least;
                least = 0; peer = 0
            }
        fi;
        needed = 0
    fi;
    ahead = 0
}

inline write()
{
    if
    :: rooted[step] && me != 0
    :: else ->
        if
        :: is_long[step] -> long_data[slot(me, step)] = step + 1
        :: else -> short_data[head(me, step)] = step + 1
        fi
    fi;
    behind[head(me, step)] = step - consumed
}

inline read(from)
{
    atomic { posted[head(from, step)] > step; assert(posted[head(from, step)] == step + 1) };
#ifdef CONSUMED_BEFORE_READ
    if
    :: !rooted[step] -> consumed_flag[me] = step + 1
    :: else
    fi;
#endif
    if
    :: is_long[step] -> assert(long_data[slot(from, step)] == step + 1)
    :: else -> assert(short_data[head(from, step)] == step + 1)
    fi
}

proctype Rank(byte me)
{
    byte step;
    byte consumed, released;    /* of Windows */
    byte at, ahead, needed, least, there, peer;
    bool all;
    do
    :: step == STEPS -> break
    :: else ->
        choose();
        acquire_slot();
#ifdef RELAXED_PUBLISH
        posted[head(me, step)] = step + 1;
        write();
#else
        atomic { write(); posted[head(me, step)] = step + 1 };
#endif
        if
        :: rooted[step] && me != 0 -> read(0)
        :: rooted[step] && me == 0
        :: !rooted[step] ->
            do
            :: peer == RANKS -> break
            :: peer == me -> peer++
            :: peer < RANKS && peer != me -> read(peer); peer++
            od;
            peer = 0;
            if
            :: consumed < step -> consume_patiently(step + 1)
            :: else -> atomic { release_slots(step + 1) }
            fi
        fi;
        atomic {
            passed[step]++;
            if                  /* nobody looks at it again */
            :: passed[step] == RANKS ->
                is_long[step] = false; rooted[step] = false
            :: else
            fi;
            step++
        }
    od
}

init
{
    byte i;
    atomic {
        if
        :: some_slots = 1
        :: true
        fi;
        do
        :: i == RANKS -> break
        :: else -> run Rank(i); i++
        od
    }
}
