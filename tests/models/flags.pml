/* Flags of windows: no rank sleeps past the flag that it awaits.

   Models
     src/transports/window_flags.pyx: raise_flag, sleep_until_raised

   One rank raises a flag step by step, and two ranks await each step. Without the exchange, the
   store may become visible after the load that follows it. The look at the flag may come before the
   announcement all the same, as without the fence between them: futex_wait looks again. Sleeps have
   no limit here: a wake-up that is lost is a deadlock. */

#define STEPS 2

byte flag, sleepers;
bool sleeping[2];               /* in futex_wait */

proctype Raiser()
{
    byte value;
    bool anybody;
    do
    :: value == STEPS -> break
    :: else ->
        value++;
#ifdef STORE_WITHOUT_EXCHANGE
        if
        :: flag = value; anybody = sleepers != 0
        :: anybody = sleepers != 0; flag = value
        fi;
#else
        flag = value;
        anybody = sleepers != 0;
#endif
        if
        :: anybody -> d_step { sleeping[0] = false; sleeping[1] = false }   /* futex_wake */
        :: else
        fi
    od
}

proctype Sleeper(byte me)
{
    byte value = 1, seen;
    do
    :: value > STEPS -> break
    :: else ->
        if
        :: flag >= value -> value++
        :: else ->
            if
            :: sleepers++; seen = flag
            :: seen = flag; sleepers++
            fi;
            if
            :: seen < value ->
                /* futex_wait compares and sleeps in one step. */
#ifdef NO_COMPARISON
                sleeping[me] = true;
#else
                d_step {
                    if
                    :: flag == seen -> sleeping[me] = true
                    :: else
                    fi
                };
#endif
                sleeping[me] == false
            :: else
            fi;
            sleepers--
        fi
    od
}

init { atomic { run Raiser(); run Sleeper(0); run Sleeper(1) } }
