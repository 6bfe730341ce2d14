/* Doorbells: no message waits for a rank that sleeps.

   Models
     src/transports/shm/shm_peers.pyx: ring_doorbell, announce_sleep, end_sleep
     src/transports/shm/shm_ring.pyx: write_ring
     src/transports/stream/stream_progress.pyx: handle_events, progress, sleep_and_handle, nothing_to_do

   A rank has two threads that may sleep. The first ends when all of writer 0 is read, the second
   when all of both writers is read.

   A store becomes visible some time later, in the order of the stores (store buffering): this is
   what x86 does with plain stores, and what C allows for a release store before an acquire load. A
   fence waits until the thread's stores are visible; so do a system call that writes and the
   release of a lock. Sleeps have no limit here: a wake-up that is lost is a deadlock. */

#define MESSAGES 2              /* of each writer */
#define ASLEEP 2                /* after both tails */

byte memory[3];                 /* tail of writer 0, tail of writer 1, Member.asleep */
chan buffer[4] = [2] of { byte, byte };     /* of writers 0 and 1, of threads 2 and 3 */
bool bell;                      /* the pipe holds bytes */
bool other_event = true;        /* a socket wakes one thread once */
bool locked;                    /* Net.lock guards what follows */
byte asleep;                    /* LocalPeers.asleep */
byte seen[2];                   /* how far the rank has read each ring */

#define store(i, place, value) buffer[i]!place, value
#define fence(i) empty(buffer[i])
#define ALL_READ (seen[0] == MESSAGES && seen[1] == MESSAGES)

proctype Buffer(byte i)
{
    byte place, value;
end:
    do
    :: atomic { buffer[i]?place, value -> memory[place] = value; place = 0; value = 0 }
    od
}

proctype Writer(byte i)
{
    byte written;
    do
    :: written == MESSAGES -> break
    :: else ->
        written++;
        store(i, i, written);
#ifndef NO_FENCE_BEFORE_RINGING
        fence(i);
#endif
        if
        :: memory[ASLEEP] == 0
        :: else ->
            store(i, ASLEEP, 0);
            fence(i) -> bell = true     /* write() */
        fi
    od
}

/* handle_events() and poll_local(): the last thread to wake takes the bytes of the bell. */
inline look_around()
{
#ifdef TAKE_BELL_FROM_SLEEPER
    if
    :: rung -> bell = false
    :: else
    fi;
#else
    if
    :: rung && asleep == 0 -> bell = false
    :: else
    fi;
#endif
    seen[0] = memory[0];
    seen[1] = memory[1];
    rung = false
}

proctype Thread(byte i)
{
    bool rung, doze;
    atomic { locked == false -> locked = true };
    do
    :: seen[0] == MESSAGES && (i == 2 || seen[1] == MESSAGES) -> break
    :: seen[0] != MESSAGES || (i == 3 && seen[1] != MESSAGES) ->        /* progress() */
        rung = bell;
        look_around()
    :: seen[0] != MESSAGES || (i == 3 && seen[1] != MESSAGES) ->        /* sleep_and_handle() */
        asleep++;
        store(i, ASLEEP, 1);
#ifndef NO_FENCE_BEFORE_LOOK
        fence(i);
#endif
        doze = true;
#ifndef NO_LOOK
        if
        :: memory[0] != seen[0] -> doze = false
        :: else
        fi;
        if
        :: memory[1] != seen[1] -> doze = false
        :: else
        fi;
#endif
        fence(i) -> locked = false;
        if
        :: doze ->
            if
            :: bell
            :: atomic { other_event -> other_event = false }
            :: ALL_READ             /* the thread that read the rest woke this one */
            fi
        :: else
        fi;
        rung = bell;
        atomic { locked == false -> locked = true };
        asleep--;
#ifdef FORGET_OTHER_SLEEPER
        store(i, ASLEEP, 0);
#else
        store(i, ASLEEP, asleep != 0);
#endif
        fence(i);
        look_around()
    od;
    fence(i) -> locked = false
}

init
{
    atomic {
        run Buffer(0); run Buffer(1); run Buffer(2); run Buffer(3);
        run Writer(0); run Writer(1);
        run Thread(2); run Thread(3)
    }
}
