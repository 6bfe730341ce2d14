/* Exposed arrays: no rank accesses an array after its owner has it back.

   Models
     src/algorithms/windows/exposure.pyx: begin_access, end_access, revoke_access

   Every rank accesses the other's array twice. The owner may revoke access at any time, and then
   changes its array. A store becomes visible some time later, as in doorbell.pml. An owner's
   patience has no limit here. */

#define REVOKED 0               /* of ranks 0 and 1 */
#define ACCESSING 2             /* of ranks 0 and 1 */

byte memory[4];
chan buffer[2] = [2] of { byte, byte };     /* of the two ranks */
bool returned[2];               /* the caller has its array again */

#define store(i, place, value) buffer[i]!place, value
#define fence(i) empty(buffer[i])

proctype Buffer(byte i)
{
    byte place, value;
end:
    do
    :: atomic { buffer[i]?place, value -> memory[place] = value; place = 0; value = 0 }
    od
}

proctype Rank(byte me)
{
    byte accesses;
    do
    :: accesses == 2 -> break
    :: break                    /* a failure */
    :: accesses < 2 ->
        accesses++;
        store(me, ACCESSING + me, 1);
#ifndef NO_FENCE_BEFORE_ACCESS
        fence(me);
#endif
        if
        :: memory[REVOKED + 1 - me] == 0 ->
            assert(!returned[1 - me])       /* the access */
        :: else
        fi;
        store(me, ACCESSING + me, 0)
    od;
    store(me, REVOKED + me, 1);
#ifndef NO_FENCE_AFTER_REVOKING
    fence(me);
#endif
#ifndef NO_PATIENCE
    memory[ACCESSING + 1 - me] == 0;
#endif
    returned[me] = true
}

init { atomic { run Buffer(0); run Buffer(1); run Rank(0); run Rank(1) } }
