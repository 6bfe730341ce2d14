/* Claims of a cooperative copy: each piece is copied once, no message is taken whose memory may
   have changed, and no rank writes into memory that its owner has back.

   Models
     src/transports/stream/stream_coop_copy.pyx: open_coop_copy, pull_pieces, stop_pulling
     src/transports/stream/stream_coop_copy.pyx: join_coop_copy, push_pieces, stop_pushing
     src/transports/stream/stream_coop_copy.pyx: withdraw_coop_copy, coop_copy_waits
     src/transports/stream/stream_recv.pyx: request_data, withdraw_recv, on_withdrawn
     src/transports/stream/stream_send.pyx: on_reply, withdraw_send

   The sender offers two messages at once and may take back either at any time; then it changes the
   message's memory. The receiver opens one message at a time, and may give up. Frames arrive in
   order. A change of `claims` is one step, as compare and swap is. A rank sleeps unless
   coop_copy_waits or a frame has come: a rank that would sleep for ever is a deadlock. Patience
   has no limit here. */

#define PIECES 3
#define MESSAGES 2

mtype = { OFFER, WITHDRAW, DATA, JOIN, SEND, TAKEN };
chan to_receiver = [6] of { mtype, byte };
chan to_sender = [6] of { mtype, byte };

/* Control. A message's name is its number here. */
byte name, front, back;         /* claims */
bool closed;
byte into, pushed, withdrawn;

bool changed[MESSAGES + 1];     /* the sender's caller has its memory again */
bool lent[MESSAGES + 1];        /* the receiver's memory belongs to the transport */
byte copies[(MESSAGES + 1) * PIECES];
bool spoilt[MESSAGES + 1];      /* a piece was copied after the change */

#define piece(message, index) ((message) * PIECES + (index))
#define is_open(message) (name == message && !closed)

inline close_claims(message)
{
    d_step {
        won = is_open(message);
        if
        :: won -> closed = true
        :: else
        fi
    }
}

/* Set `index` to a piece counted from this side's end, or PIECES. */
inline claim(message, own, other)
{
#ifdef CLAIM_WITHOUT_SWAP
    was_own = own; was_other = other;
    if
    :: is_open(message) && was_own + was_other < PIECES ->
        d_step { index = was_own; own = was_own + 1; other = was_other }
    :: else -> index = PIECES
    fi;
    was_own = 0; was_other = 0
#else
    d_step {
        if
        :: is_open(message) && own + other < PIECES -> index = own; own++
        :: else -> index = PIECES
        fi
    }
#endif
}

proctype Sender()
{
    byte over[MESSAGES + 1];    /* the message is sent or taken back */
    bool sending[MESSAGES + 1]; /* it goes through the ring */
    byte m, coop, target, mine, index = PIECES;
    byte was_own, was_other;
    bool rung, won;
    bool unwanted[MESSAGES + 1];
    if
    :: unwanted[1] = true
    :: unwanted[2] = true
    :: unwanted[1] = true; unwanted[2] = true
    :: true
    fi;
    to_receiver!OFFER, 1;
    to_receiver!OFFER, 2;
    do
    :: over[1] && over[2] -> break
    :: to_sender?JOIN, m ->
        if
        :: !over[m] && coop == 0 && is_open(m) ->
            target = into;
            coop = m; mine = 0; rung = false
        :: else
        fi
    :: to_sender?TAKEN, m ->
        if
        :: coop == m -> close_claims(m); coop = 0
        :: else
        fi;
        over[m] = true; changed[m] = true
    :: to_sender?SEND, m ->
        if
        :: coop == m -> close_claims(m); coop = 0
        :: else
        fi;
        sending[m] = !over[m]
    :: coop != 0 && !rung ->                            /* push_pieces */
        claim(coop, back, front);
        if
        :: index == PIECES -> rung = true
        :: else ->
            if
            :: !is_open(coop) -> rung = true            /* the receiver has given up */
            :: else ->
#ifdef PUSHED_BEFORE_WRITTEN
                pushed = mine + 1;
#endif
                assert(lent[target]);
                copies[piece(target, PIECES - 1 - index)]++
            fi;
            mine++;
            pushed = mine
        fi;
        index = PIECES
    :: sending[1] && !over[1] -> to_receiver!DATA, 1; over[1] = true; changed[1] = true
    :: sending[2] && !over[2] -> to_receiver!DATA, 2; over[2] = true; changed[2] = true
    :: (!over[1] && unwanted[1]) || (!over[2] && unwanted[2]) ->    /* withdraw_send */
        if
        :: !over[1] && unwanted[1] -> m = 1
        :: !over[2] && unwanted[2] -> m = 2
        fi;
        if
        :: coop == m -> close_claims(m); coop = 0
        :: else
        fi;
#ifdef NO_FENCE_OF_THE_SENDER
        if
        :: withdrawn++; changed[m] = true
        :: changed[m] = true; withdrawn++
        fi;
#else
#ifndef WITHDRAW_UNCOUNTED
        withdrawn++;
#endif
        changed[m] = true;
#endif
        to_receiver!WITHDRAW, m;
        over[m] = true
    od
}

#ifdef NO_FENCE_OF_THE_RECEIVER
#define may_pull() (front + back < PIECES || pushed == back)
#else
#define may_pull() (front + back < PIECES || (pushed == back && withdrawn == withdrawals))
#endif

inline stop_pulling()
{
    close_claims(open);
#ifndef NO_WAIT_FOR_THE_SENDER
    pushed == back;
#endif
    open = 0
}

proctype Receiver()
{
    byte over[MESSAGES + 1];    /* received, given up or withdrawn */
    byte m, open, index = PIECES, withdrawals;
    byte was_own, was_other, early;
    bool won, unwanted;
    if
    :: unwanted = true
    :: true
    fi;
    do
    :: over[1] && over[2] -> break
    :: to_receiver?OFFER, m ->                          /* request_data */
        lent[m] = true;
        if
        :: open == 0 ->
            into = m;
            pushed = 0;
            d_step { name = m; front = 0; back = 0; closed = false };
            open = m;
            to_sender!JOIN, m
        :: else -> to_sender!SEND, m
        fi
    :: to_receiver?WITHDRAW, m ->
#ifndef WITHDRAW_UNCOUNTED
        withdrawals++;
#endif
        if
        :: open == m -> stop_pulling()
        :: else
        fi;
        lent[m] = false; over[m] = true
    :: to_receiver?DATA, m -> lent[m] = false; over[m] = true
    :: open != 0 && is_open(open) && may_pull() ->      /* pull_pieces, and coop_copy_waits */
        claim(open, front, back);
        if
        :: index != PIECES ->
            early = withdrawn;
            spoilt[open] = spoilt[open] || changed[open];
            copies[piece(open, index)]++
        :: else ->
            if
            :: !is_open(open) || pushed != back
            :: else ->
#ifndef NO_FENCE_OF_THE_RECEIVER
                early = withdrawn;
#endif
                won = false;
                if
                :: early == withdrawals -> close_claims(open)
                :: else
                fi;
                if
                :: won ->
                    assert(!spoilt[open]);
                    assert(copies[piece(open, 0)] == 1);
                    assert(copies[piece(open, 1)] == 1);
                    assert(copies[piece(open, 2)] == 1);
                    lent[open] = false; over[open] = true;
                    to_sender!TAKEN, open;
                    open = 0
                :: else
                fi
            fi
        fi;
        index = PIECES; won = false
    :: open != 0 && unwanted ->                         /* withdraw_recv */
        m = open;
        stop_pulling();
        lent[m] = false; over[m] = true;
        to_sender!SEND, m
    od
}

init { atomic { run Sender(); run Receiver() } }
