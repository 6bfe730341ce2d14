/* Doorbells of threads: no request is complete while its owner sleeps.

   Models
     src/transports/inproc/inproc_mailbox.pyx: complete, wait

   Two ranks complete one request each, of two threads of one rank, which share its doorbell. All
   operations but the status are sequentially consistent, and the status is stored before the
   addition. The mutations are other orders in the program. Sleeps have no limit here: a wake-up
   that is lost is a deadlock. */

bool ok[2];                     /* Request.status */
byte doorbell, sleepers;
bool sleeping[2];               /* in futex_wait */

proctype Completer(byte i)
{
#ifdef DOORBELL_FIRST
    doorbell++;
    ok[i] = true;
#else
    ok[i] = true;
    doorbell++;
#endif
    if
    :: sleepers != 0 -> d_step { sleeping[0] = false; sleeping[1] = false }     /* futex_wake */
    :: else
    fi
}

proctype Waiter(byte i)
{
    byte seen;
    bool done;
    do
    :: done -> break
    :: else ->
        sleepers++;
#ifdef STATUS_BEFORE_DOORBELL
        done = ok[i];
        seen = doorbell;
#else
        seen = doorbell;
        done = ok[i];
#endif
        if
        :: done
        :: else ->
            /* futex_wait compares and sleeps in one step. */
#ifdef NO_COMPARISON
            sleeping[i] = true;
#else
            d_step {
                if
                :: doorbell == seen -> sleeping[i] = true
                :: else
                fi
            };
#endif
            sleeping[i] == false
        fi;
        sleepers--;
        done = ok[i]
    od
}

init { atomic { run Completer(0); run Completer(1); run Waiter(0); run Waiter(1) } }
