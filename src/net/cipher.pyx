"""Sealed records; see cipher.pxd."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strlen

from cydist._native.linux cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, explicit_bzero, pthread_atfork, recv, send,
)
from cydist._native.openssl cimport lib, tls_context

cdef enum:
    RECORD_BYTES = 65536        # of plaintext in the longest record
    HEAD_BYTES = 4
    TAG_BYTES = 16
    OVERHEAD_BYTES = HEAD_BYTES + TAG_BYTES
    NONCE_BYTES = 12
    KEY_BYTES = 16
    JOINED_BYTES = 16384        # of data that share a record with their frame's header
    SEALED_AT_ONCE = 262144     # of data: as much as stays in the second-level cache
    # With room for a frame's header, and what each record adds
    OUTBOX_BYTES = SEALED_AT_ONCE + 4096
    READ_BYTES = 262144         # of one read
    INCOMING_BYTES = READ_BYTES + RECORD_BYTES + OVERHEAD_BYTES
    GCM_SET_TAG = 0x11
    GCM_GET_TAG = 0x10

# RFC 8446 (5.5) lets a key of AES-GCM seal 2^24.5 records of 2^10 blocks of 16 bytes.
cdef uint64_t blocks_per_key = <uint64_t>1 << 34

# A forked child has its parent's keys, and would seal other bytes with the same nonces.
cdef int forks = 0


cdef void count_fork() noexcept nogil:
    global forks
    forks += 1


if pthread_atfork(NULL, NULL, count_fork) != 0:
    raise MemoryError("no memory for a handler of forks")


def change_keys_after(blocks):
    """Set how many blocks the keys of later connections seal, for tests; return the number so
    far."""
    global blocks_per_key
    before = blocks_per_key
    blocks_per_key = blocks
    return before


# Keys


cdef bint expand(const unsigned char *secret, const char *label, unsigned char *key,
                 size_t nbytes) noexcept nogil:
    """Make at most 32 bytes: HKDF-Expand-Label of RFC 8446, 7.1, with an empty context."""
    cdef unsigned char info[64]
    cdef unsigned char hashed[32]
    cdef size_t label_bytes = strlen(label)
    info[0] = 0
    info[1] = <unsigned char>nbytes
    info[2] = <unsigned char>(6 + label_bytes)
    memcpy(&info[3], b"tls13 ", 6)
    memcpy(&info[9], label, label_bytes)
    info[9 + label_bytes] = 0
    info[10 + label_bytes] = 1          # of HKDF-Expand: its first and only block
    if lib.HMAC(lib.EVP_sha256(), secret, SECRET_BYTES, info, 11 + label_bytes, hashed,
                NULL) == NULL:
        return False
    memcpy(key, hashed, nbytes)
    explicit_bzero(hashed, sizeof(hashed))
    return True


cdef bint use_secret(Direction *d) noexcept nogil:
    cdef unsigned char key[KEY_BYTES]
    cdef bint used
    d.number = d.blocks = 0
    used = (expand(d.secret, b"key", key, KEY_BYTES) and expand(d.secret, b"iv", d.iv, NONCE_BYTES)
            and lib.EVP_CipherInit_ex(d.context, NULL, NULL, key, NULL, -1) == 1)
    explicit_bzero(key, sizeof(key))
    return used


cdef bint begin_record(Cipher *c, Direction *d, const unsigned char *head,
                       size_t nbytes) noexcept nogil:
    """Give the direction the next record's nonce and head, and a new key when it is time."""
    cdef unsigned char nonce[NONCE_BYTES]
    cdef int i, unused
    if d.failed:        # perhaps between two keys, where a number would have its nonce twice
        return False
    if d.blocks >= c.blocks_per_key:
        if not expand(d.secret, b"traffic upd", d.secret, SECRET_BYTES) or not use_secret(d):
            return False
    memcpy(nonce, d.iv, NONCE_BYTES)
    for i in range(8):
        nonce[NONCE_BYTES - 1 - i] ^= <unsigned char>(d.number >> (8 * i))
    d.number += 1
    d.blocks += (nbytes >> 4) + 3       # the last one, the head's, and that of the lengths
    return (lib.EVP_CipherInit_ex(d.context, NULL, NULL, NULL, nonce, -1) == 1
            and lib.EVP_CipherUpdate(d.context, NULL, &unused, head, HEAD_BYTES) == 1)


# One record


cdef inline size_t length_in(const unsigned char *head) noexcept nogil:
    return (<size_t>head[0] << 24) | (head[1] << 16) | (head[2] << 8) | head[3]


cdef bint seal(Cipher *c, char *into, const char *first, size_t first_bytes, const char *second,
               size_t second_bytes) noexcept nogil:
    """Write one record: OVERHEAD_BYTES more than it carries. False: OpenSSL failed, or the process
    is a forked child."""
    cdef Direction *d = &c.sending
    cdef unsigned char *head = <unsigned char *>into
    cdef unsigned char *out = head + HEAD_BYTES
    cdef size_t nbytes = first_bytes + second_bytes
    cdef int i, done = 0
    if c.forks != forks:
        return False
    for i in range(HEAD_BYTES):
        head[i] = <unsigned char>(nbytes >> (8 * (HEAD_BYTES - 1 - i)))
    if (begin_record(c, d, head, nbytes)
            and (first_bytes == 0 or lib.EVP_CipherUpdate(
                d.context, out, &done, <const unsigned char *>first, <int>first_bytes) == 1)
            and (second_bytes == 0 or lib.EVP_CipherUpdate(
                d.context, out + first_bytes, &done, <const unsigned char *>second,
                <int>second_bytes) == 1)
            and lib.EVP_CipherFinal_ex(d.context, out + nbytes, &done) == 1
            and lib.EVP_CIPHER_CTX_ctrl(d.context, GCM_GET_TAG, TAG_BYTES, out + nbytes) == 1):
        return True
    d.failed = True
    lib.ERR_clear_error()
    return False


cdef ssize_t record_in(const char *sealed, size_t nbytes) noexcept nogil:
    """Return how many bytes the record at the beginning carries, 0 if it is not complete, or
    CIPHER_CHANGED."""
    cdef size_t carried
    if nbytes < HEAD_BYTES:
        return 0
    carried = length_in(<const unsigned char *>sealed)
    if not 0 < carried <= RECORD_BYTES:
        return CIPHER_CHANGED
    return <ssize_t>carried if nbytes >= carried + OVERHEAD_BYTES else 0


cdef bint unseal(Cipher *c, const char *sealed, size_t nbytes, char *into) noexcept nogil:
    """Open the whole record that carries `nbytes`. False: it is not the next one, and nothing
    of it remains in `into`."""
    cdef Direction *d = &c.receiving
    cdef const unsigned char *head = <const unsigned char *>sealed
    cdef const unsigned char *tag = head + HEAD_BYTES + nbytes
    cdef unsigned char unused[16]
    cdef int done = 0
    if (begin_record(c, d, head, nbytes)
            and lib.EVP_CIPHER_CTX_ctrl(d.context, GCM_SET_TAG, TAG_BYTES, <void *>tag) == 1
            and lib.EVP_CipherUpdate(d.context, <unsigned char *>into, &done, head + HEAD_BYTES,
                                     <int>nbytes) == 1
            and lib.EVP_CipherFinal_ex(d.context, unused, &done) == 1):
        return True
    d.failed = True
    memset(into, 0, nbytes)
    lib.ERR_clear_error()
    return False


# On a link


cdef bint flush(Cipher *c) noexcept nogil:
    """Send from the outbox what the socket takes. False: the connection has ended."""
    cdef ssize_t taken
    while c.sent != c.filled:
        taken = send(c.fd, c.outbox + c.sent, c.filled - c.sent, MSG_NOSIGNAL | MSG_DONTWAIT)
        if taken < 0 and errno == EINTR:
            continue
        if taken < 0:
            return errno == EAGAIN
        c.sent += taken
    if c.outbox != NULL:
        if c.buffers.spare == NULL:
            c.buffers.spare = c.outbox
        else:
            free(c.outbox)
        c.outbox = NULL
    c.sent = c.filled = 0
    return True


cdef bint put(Cipher *c, const char *first, size_t first_bytes, const char *second,
              size_t second_bytes) noexcept nogil:
    """Seal one record into the outbox."""
    if not seal(c, c.outbox + c.filled, first, first_bytes, second, second_bytes):
        return False
    c.filled += first_bytes + second_bytes + OVERHEAD_BYTES
    return True


cdef ssize_t cipher_write(Cipher *c, const char *first, size_t first_bytes, const char *second,
                          size_t second_bytes) noexcept nogil:
    cdef size_t taken, part
    cdef bint together = second_bytes <= JOINED_BYTES
    if not flush(c):
        return CIPHER_ENDED
    if c.filled != 0:
        return 0
    if c.withheld:
        c.withheld = False
        return 1
    if first_bytes + second_bytes == 0:
        return 0
    c.outbox = c.buffers.spare
    c.buffers.spare = NULL
    if c.outbox == NULL:
        c.outbox = <char *>malloc(OUTBOX_BYTES)
        if c.outbox == NULL:
            return CIPHER_NO_MEMORY
    taken = first_bytes + (second_bytes if together else 0)
    if taken != 0 and not put(c, first, first_bytes, second, taken - first_bytes):
        return CIPHER_ENDED
    if not together:
        second_bytes = min(second_bytes, <size_t>SEALED_AT_ONCE)
        while second_bytes != 0:
            part = min(second_bytes, <size_t>RECORD_BYTES)
            if not put(c, NULL, 0, second, part):
                return CIPHER_ENDED
            second += part
            second_bytes -= part
            taken += part
    if not flush(c):
        return CIPHER_ENDED
    c.withheld = c.filled != 0
    return <ssize_t>taken - c.withheld


cdef int cipher_read(Cipher *c) noexcept nogil:
    cdef char *incoming = c.buffers.incoming
    cdef size_t before = c.arrived_bytes
    cdef ssize_t got
    if incoming == NULL:
        incoming = c.buffers.incoming = <char *>malloc(INCOMING_BYTES)
        if incoming == NULL:
            return CIPHER_NO_MEMORY
    if c.rest != NULL:
        memcpy(incoming, c.rest, before)
        free(c.rest)
        c.rest = NULL
    c.arrived = incoming
    while True:
        got = recv(c.fd, incoming + before, READ_BYTES, MSG_DONTWAIT)
        if got >= 0 or errno != EINTR:
            break
    if got > 0:
        c.arrived_bytes += <size_t>got
        return got == READ_BYTES        # after less the socket is empty
    if got < 0 and errno == EAGAIN:
        return False
    c.error = errno if got < 0 else 0
    return CIPHER_ENDED


cdef ssize_t cipher_open(Cipher *c, char *into, size_t room, const char **plain) noexcept nogil:
    cdef const char *sealed = c.arrived
    cdef ssize_t carried = record_in(sealed, c.arrived_bytes)
    if carried < 0:
        return carried
    if carried == 0:
        if c.arrived_bytes != 0:        # other connections read to the same place
            c.rest = <char *>malloc(c.arrived_bytes)
            if c.rest == NULL:
                return CIPHER_NO_MEMORY
            memcpy(c.rest, sealed, c.arrived_bytes)
        return 0
    if <size_t>carried > room:
        into = <char *>sealed + HEAD_BYTES
    if not unseal(c, sealed, <size_t>carried, into):
        return CIPHER_CHANGED
    c.arrived += carried + OVERHEAD_BYTES
    c.arrived_bytes -= <size_t>carried + OVERHEAD_BYTES
    plain[0] = into
    return carried


cdef void free_buffers(CipherBuffers *buffers) noexcept nogil:
    free(buffers.incoming)
    free(buffers.spare)
    buffers.incoming = buffers.spare = NULL


cdef void cipher_free(Cipher *c) noexcept nogil:
    if c == NULL:
        return
    if c.sending.context != NULL:
        lib.EVP_CIPHER_CTX_free(c.sending.context)
    if c.receiving.context != NULL:
        lib.EVP_CIPHER_CTX_free(c.receiving.context)
    free(c.rest)
    free(c.outbox)
    explicit_bzero(c, sizeof(Cipher))
    free(c)


# In Python


cdef class CipherHandle:
    """The cipher of one connection: seals bytes for the caller to send, and opens what it has
    received, until a link takes it.

    Args:
        sending, receiving: Secrets of 32 bytes; the peer has them swapped.

    Raises OSError if `load` has not succeeded.
    """

    def __init__(self, bytes sending not None, bytes receiving not None):
        if len(sending) != SECRET_BYTES or len(receiving) != SECRET_BYTES:
            raise ValueError(f"a cipher has secrets of {SECRET_BYTES} bytes")
        self.begin(sending, receiving)

    def __dealloc__(self):
        cipher_free(self.cipher)

    cdef begin(self, const unsigned char *sending, const unsigned char *receiving):
        cdef Cipher *c
        cdef const void *cipher
        if tls_context == NULL:
            raise OSError("a cipher needs `load` first")
        cipher_free(self.cipher)
        self.rest = b""
        c = self.cipher = <Cipher *>calloc(1, sizeof(Cipher))
        if c == NULL:
            raise MemoryError
        memcpy(c.sending.secret, sending, SECRET_BYTES)
        memcpy(c.receiving.secret, receiving, SECRET_BYTES)
        c.blocks_per_key = blocks_per_key
        c.forks = forks
        c.sending.context = lib.EVP_CIPHER_CTX_new()
        c.receiving.context = lib.EVP_CIPHER_CTX_new()
        if c.sending.context == NULL or c.receiving.context == NULL:
            raise MemoryError
        cipher = lib.EVP_aes_128_gcm()
        if not (lib.EVP_CipherInit_ex(c.sending.context, cipher, NULL, NULL, NULL, 1) == 1
                and lib.EVP_CipherInit_ex(c.receiving.context, cipher, NULL, NULL, NULL, 0) == 1
                and use_secret(&c.sending) and use_secret(&c.receiving)):
            lib.ERR_clear_error()
            raise OSError("OpenSSL has no AES-GCM")

    def seal(self, bytes data not None):
        """Return the records that carry `data`.

        Raises OSError in a process that was forked since the cipher was made.
        """
        cdef Cipher *c = self.owned()
        cdef const char *start = data
        cdef size_t left = len(data), part
        cdef size_t records = (left + RECORD_BYTES - 1) // RECORD_BYTES
        cdef bytes sealed = PyBytes_FromStringAndSize(NULL, left + records * OVERHEAD_BYTES)
        cdef char *into = PyBytes_AS_STRING(sealed)
        cdef bint done = True
        while left != 0 and done:       # with the GIL: two threads would take one nonce
            part = min(left, <size_t>RECORD_BYTES)
            done = seal(c, into, start, part, NULL, 0)
            into += part + OVERHEAD_BYTES
            start += part
            left -= part
        if not done:
            raise OSError("OpenSSL cannot encrypt" if c.forks == forks else
                          "a forked process cannot send on its parent's encrypted connection")
        return sealed

    def open(self, bytes data not None):
        """Take received bytes, any part of the stream; return what they carry, maybe nothing.

        Raises ValueError if they are not what the peer sent next.
        """
        cdef Cipher *c = self.owned()
        cdef bytes opened, arrived = self.rest + data
        cdef const char *sealed = arrived
        cdef size_t left = len(arrived)
        cdef char *into
        cdef ssize_t carried
        cdef bint done
        cdef list parts = []
        while True:
            carried = record_in(sealed, left)
            if carried == 0:
                break
            done = carried > 0
            if done:
                opened = PyBytes_FromStringAndSize(NULL, carried)
                into = PyBytes_AS_STRING(opened)
                done = unseal(c, sealed, <size_t>carried, into)
            if not done:
                c.receiving.failed = True       # a length that no record has, too
                raise ValueError("a record is not the next one that the peer sent")
            parts.append(opened)
            sealed += carried + OVERHEAD_BYTES
            left -= <size_t>carried + OVERHEAD_BYTES
        self.rest = PyBytes_FromStringAndSize(sealed, left)
        return b"".join(parts)

    cdef Cipher *owned(self) except NULL:
        if self.cipher == NULL:
            raise ValueError("a link has this cipher")
        return self.cipher

    cdef Cipher *detach(self, int fd, CipherBuffers *buffers) noexcept:
        cdef Cipher *c = self.cipher
        self.cipher = NULL
        if c != NULL:
            c.fd = fd
            c.buffers = buffers
        return c
