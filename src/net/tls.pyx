"""TLS 1.3 with a pre-shared key; see tls.pxd.

Nothing of OpenSSL is needed to compile this: the functions are looked up in the libssl that
Python's own module `ssl` is linked to, at the first use. They exist since OpenSSL 1.1.1.
"""
import os

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from cydist._native.linux cimport MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    int RTLD_NOW

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int, void *, size_t, int)
    ssize_t send(int, const void *, size_t, int)

cdef enum:
    TLS1_3_VERSION = 0x0304
    SSL_CTRL_MODE = 33
    SSL_MODE_RELEASE_BUFFERS = 0x10
    SSL_CTRL_SET_READ_AHEAD = 41
    SSL_CTRL_SET_SESS_CACHE_MODE = 44
    SSL_CTRL_SET_MIN_PROTO_VERSION = 123
    SSL_VERIFY_PEER = 1
    SSL_ERROR_WANT_READ = 2
    SSL_KEY_UPDATE_NOT_REQUESTED = 0
    BIO_TYPE_SOURCE_SINK = 0x0400
    BIO_FLAGS_READ_AND_RETRY = 0x01 | 0x08
    BIO_CTRL_FLUSH = 11

    RECORD_BYTES = 16384        # the longest plaintext of a record
    READ_BYTES = 98304          # of ciphertext that one read takes
    SEALED_AT_ONCE = 196608     # of plaintext: as much as stays in the second-level cache
    READS_AT_ONCE = 4

# How many records AES-GCM keys may seal is 2^24.5 (RFC 8446, 5.5).
cdef uint64_t records_per_key = 1 << 23

# These two hash with SHA-256, as a key that is handed in must.
cdef const char *SUITES = b"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"

ctypedef unsigned int (*ClientKey)(void *, const char *, char *, unsigned int, unsigned char *,
                                   unsigned int) noexcept nogil
ctypedef unsigned int (*ServerKey)(void *, const char *, unsigned char *,
                                   unsigned int) noexcept nogil
ctypedef int (*BioRead)(void *, char *, int) noexcept nogil
ctypedef int (*BioWrite)(void *, const char *, int) noexcept nogil
ctypedef long (*BioControl)(void *, int, long, void *) noexcept nogil

cdef struct Libssl:
    void *(*TLS_method)() noexcept nogil
    void *(*SSL_CTX_new)(const void *) noexcept nogil
    long (*SSL_CTX_ctrl)(void *, int, long, void *) noexcept nogil
    int (*SSL_CTX_set_ciphersuites)(void *, const char *) noexcept nogil
    int (*SSL_CTX_set_num_tickets)(void *, size_t) noexcept nogil
    void (*SSL_CTX_set_default_read_buffer_len)(void *, size_t) noexcept nogil
    void *(*SSL_new)(void *) noexcept nogil
    void (*SSL_free)(void *) noexcept nogil
    int (*SSL_set_ex_data)(void *, int, void *) noexcept nogil
    void *(*SSL_get_ex_data)(const void *, int) noexcept nogil
    void (*SSL_set_verify)(void *, int, void *) noexcept nogil
    void (*SSL_set_psk_client_callback)(void *, ClientKey) noexcept nogil
    void (*SSL_set_psk_server_callback)(void *, ServerKey) noexcept nogil
    void (*SSL_set_bio)(void *, void *, void *) noexcept nogil
    void (*SSL_set_connect_state)(void *) noexcept nogil
    void (*SSL_set_accept_state)(void *) noexcept nogil
    int (*SSL_do_handshake)(void *) noexcept nogil
    int (*SSL_session_reused)(const void *) noexcept nogil
    int (*SSL_read)(void *, void *, int) noexcept nogil
    int (*SSL_write)(void *, const void *, int) noexcept nogil
    int (*SSL_key_update)(void *, int) noexcept nogil
    int (*SSL_get_error)(const void *, int) noexcept nogil
    void (*ERR_clear_error)() noexcept nogil
    int (*BIO_get_new_index)() noexcept nogil
    void *(*BIO_meth_new)(int, const char *) noexcept nogil
    int (*BIO_meth_set_read)(void *, BioRead) noexcept nogil
    int (*BIO_meth_set_write)(void *, BioWrite) noexcept nogil
    int (*BIO_meth_set_ctrl)(void *, BioControl) noexcept nogil
    void *(*BIO_new)(const void *) noexcept nogil
    void (*BIO_set_data)(void *, void *) noexcept nogil
    void *(*BIO_get_data)(void *) noexcept nogil
    void (*BIO_set_init)(void *, int) noexcept nogil
    void (*BIO_set_flags)(void *, int) noexcept nogil
    void (*BIO_clear_flags)(void *, int) noexcept nogil

# In the order of the struct, whose members are function pointers only.
FUNCTIONS = (
    b"TLS_method", b"SSL_CTX_new", b"SSL_CTX_ctrl", b"SSL_CTX_set_ciphersuites",
    b"SSL_CTX_set_num_tickets", b"SSL_CTX_set_default_read_buffer_len", b"SSL_new", b"SSL_free",
    b"SSL_set_ex_data", b"SSL_get_ex_data", b"SSL_set_verify", b"SSL_set_psk_client_callback",
    b"SSL_set_psk_server_callback", b"SSL_set_bio", b"SSL_set_connect_state",
    b"SSL_set_accept_state", b"SSL_do_handshake", b"SSL_session_reused", b"SSL_read", b"SSL_write",
    b"SSL_key_update", b"SSL_get_error", b"ERR_clear_error", b"BIO_get_new_index", b"BIO_meth_new",
    b"BIO_meth_set_read", b"BIO_meth_set_write", b"BIO_meth_set_ctrl", b"BIO_new", b"BIO_set_data",
    b"BIO_get_data", b"BIO_set_init", b"BIO_set_flags", b"BIO_clear_flags",
)

cdef Libssl lib
cdef void *context = NULL       # SSL_CTX, one for the process
cdef void *bio_method = NULL


def load(path):
    """Look the functions up in the libraries that the file `path` is linked to; None: in those of
    the interpreter. Does nothing after the first success.

    Raises OSError with the reason if this process cannot have TLS 1.3 with keys of its own.
    """
    global context, bio_method
    cdef void *handle
    cdef void *function
    cdef bytes name
    cdef int i
    if context != NULL:
        return
    if path is None:
        handle = dlopen(NULL, RTLD_NOW)
    else:
        handle = dlopen(os.fsencode(path), RTLD_NOW)
    if handle == NULL:
        raise OSError(f"{path} cannot be opened")
    if len(FUNCTIONS) * sizeof(void *) != sizeof(Libssl):
        raise SystemError("FUNCTIONS does not name the members of Libssl")
    for i, name in enumerate(FUNCTIONS):
        function = dlsym(handle, name)
        if function == NULL:
            raise OSError(f"the libssl of Python's ssl module has no {name.decode()}: it is not "
                          "OpenSSL 1.1.1 or later, or hides its functions")
        (<void **>&lib)[i] = function
    made = lib.SSL_CTX_new(lib.TLS_method())
    if (made == NULL or not lib.SSL_CTX_set_ciphersuites(made, SUITES)
            or not lib.SSL_CTX_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL)):
        raise OSError("this OpenSSL has no TLS 1.3, or not with AES-GCM or ChaCha20")
    lib.SSL_CTX_set_num_tickets(made, 0)    # a session is never resumed
    lib.SSL_CTX_ctrl(made, SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL)
    lib.SSL_CTX_ctrl(made, SSL_CTRL_SET_READ_AHEAD, 1, NULL)
    # An idle connection holds no buffer: a store has one connection for each rank.
    lib.SSL_CTX_ctrl(made, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS, NULL)
    lib.SSL_CTX_set_default_read_buffer_len(made, READ_BYTES)
    bio_method = lib.BIO_meth_new(lib.BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, b"cydist")
    if bio_method == NULL:
        raise MemoryError
    lib.BIO_meth_set_read(bio_method, bio_read)
    lib.BIO_meth_set_write(bio_method, bio_write)
    lib.BIO_meth_set_ctrl(bio_method, bio_control)
    context = made


def update_keys_every(records):
    """Change the sending key after this number of records, for tests; return the number so far."""
    global records_per_key
    before = records_per_key
    records_per_key = records
    return before


# What libssl calls: where it reads from and writes to, and the key


cdef int bio_read(void *bio, char *into, int room) noexcept nogil:
    cdef Tls *t = <Tls *>lib.BIO_get_data(bio)
    cdef ssize_t got = -1
    cdef size_t part
    lib.BIO_clear_flags(bio, BIO_FLAGS_READ_AND_RETRY)
    if t.fd < 0:
        part = min(<size_t>room, t.arrived_bytes)
        if part != 0:
            memcpy(into, t.arrived, part)
            t.arrived += part
            t.arrived_bytes -= part
            return <int>part
    elif t.reads != 0:
        got = recv(t.fd, into, <size_t>room, MSG_DONTWAIT)
        while got < 0 and errno == EINTR:
            got = recv(t.fd, into, <size_t>room, MSG_DONTWAIT)
        # After a short read the socket is empty, and what comes later is reported again.
        t.reads = t.reads - 1 if got == room else 0
        if got > 0:
            return <int>got
        if got == 0 or errno != EAGAIN:
            t.ended = True
            t.error = errno if got < 0 else 0
            return 0
    lib.BIO_set_flags(bio, BIO_FLAGS_READ_AND_RETRY)
    return -1


cdef int bio_write(void *bio, const char *data, int nbytes) noexcept nogil:
    cdef Tls *t = <Tls *>lib.BIO_get_data(bio)
    cdef size_t room = t.room
    cdef char *larger
    while room - t.filled < <size_t>nbytes:
        room = 2 * room if room != 0 else 1024
    if room != t.room:
        larger = <char *>realloc(t.outbox, room)
        if larger == NULL:
            return -1
        t.outbox = larger
        t.room = room
    memcpy(t.outbox + t.filled, data, <size_t>nbytes)
    t.filled += <size_t>nbytes
    return nbytes


cdef long bio_control(void *bio, int command, long number, void *pointer) noexcept nogil:
    return command == BIO_CTRL_FLUSH


cdef unsigned int client_key(void *ssl, const char *hint, char *identity, unsigned int most,
                             unsigned char *key, unsigned int most_key) noexcept nogil:
    memcpy(identity, b"cydist", 7)
    return server_key(ssl, identity, key, most_key)


cdef unsigned int server_key(void *ssl, const char *identity, unsigned char *key,
                             unsigned int most_key) noexcept nogil:
    cdef Tls *t = <Tls *>lib.SSL_get_ex_data(ssl, 0)
    memcpy(key, t.key, sizeof(t.key))
    return sizeof(t.key)


# Sealing and opening


cdef bint seal(Tls *t, const char *data, size_t nbytes) noexcept nogil:
    """Put records into the outbox. False: there was no memory, or libssl failed."""
    cdef int part
    while nbytes != 0:
        if t.records >= records_per_key:
            if not lib.SSL_key_update(t.ssl, SSL_KEY_UPDATE_NOT_REQUESTED):
                return False
            t.records = 0
        part = <int>min(nbytes, <size_t>RECORD_BYTES)
        lib.ERR_clear_error()
        if lib.SSL_write(t.ssl, data, part) != part:
            return False
        t.records += 1
        data += part
        nbytes -= part
    return True


cdef bint flush(Tls *t) noexcept nogil:
    """Send from the outbox what the socket takes. False: the connection has ended."""
    cdef ssize_t taken
    while t.sent != t.filled:
        taken = send(t.fd, t.outbox + t.sent, t.filled - t.sent, MSG_NOSIGNAL | MSG_DONTWAIT)
        if taken < 0 and errno == EINTR:
            continue
        if taken < 0:
            return errno == EAGAIN
        t.sent += taken
    t.sent = t.filled = 0
    return True


cdef ssize_t tls_write(Tls *t, const char *first, size_t first_bytes, const char *second,
                       size_t second_bytes) noexcept nogil:
    cdef char start[RECORD_BYTES]
    cdef size_t taken, of_second
    if not flush(t):
        return TLS_ENDED
    if t.filled != 0:
        return 0
    if t.withheld:
        t.withheld = False
        return 1
    if first_bytes + second_bytes == 0:
        return 0
    # A frame's header and its first bytes share a record; the rest is sealed where it lies.
    of_second = min(second_bytes, RECORD_BYTES - first_bytes)
    memcpy(start, first, first_bytes)
    if of_second != 0:          # else `second` may be NULL
        memcpy(start + first_bytes, second, of_second)
    taken = first_bytes + of_second
    if not seal(t, start, taken):
        return TLS_ENDED
    if of_second != second_bytes:
        second += of_second
        of_second = min(second_bytes - of_second, <size_t>SEALED_AT_ONCE)
        if not seal(t, second, of_second):
            return TLS_ENDED
        taken += of_second
    if not flush(t):
        return TLS_ENDED
    t.withheld = t.filled != 0
    return <ssize_t>taken - t.withheld


cdef void tls_readable(Tls *t) noexcept nogil:
    t.reads = READS_AT_ONCE


cdef ssize_t tls_read(Tls *t, char *into, size_t room) noexcept nogil:
    cdef int got
    lib.ERR_clear_error()
    got = lib.SSL_read(t.ssl, into, <int>min(room, <size_t>(1 << 30)))
    if got > 0:
        return got
    if t.ended:
        return TLS_ENDED
    # A close_notify too: no cydist sends one.
    return 0 if lib.SSL_get_error(t.ssl, got) == SSL_ERROR_WANT_READ else TLS_CHANGED


cdef void tls_free(Tls *t) noexcept nogil:
    if t == NULL:
        return
    if t.ssl != NULL:
        lib.SSL_free(t.ssl)
    memset(t.key, 0, sizeof(t.key))
    free(t.outbox)
    free(t)


cdef class TlsSession:
    """TLS on one connection whose bytes the caller carries: the handshake, then records.

    key     32 bytes that only this connection's two sides know
    server  whether this is the side that accepted the connection

    `done` says whether the handshake is complete. Raises OSError if `load` has not succeeded.
    """

    def __cinit__(self, bytes key not None, bint server):
        cdef void *bio
        cdef Tls *t
        if context == NULL or len(key) != sizeof(t.key):
            raise OSError("TLS needs `load` first, and a key of 32 bytes")
        t = self.tls = <Tls *>calloc(1, sizeof(Tls))
        if t == NULL:
            raise MemoryError
        t.fd = -1
        t.ssl = lib.SSL_new(context)
        bio = lib.BIO_new(bio_method)
        if t.ssl == NULL or bio == NULL or not lib.SSL_set_ex_data(t.ssl, 0, t):
            raise MemoryError
        memcpy(t.key, <const char *>key, sizeof(t.key))
        lib.BIO_set_data(bio, t)
        lib.BIO_set_init(bio, 1)
        lib.SSL_set_bio(t.ssl, bio, bio)
        if server:
            lib.SSL_set_psk_server_callback(t.ssl, server_key)
            lib.SSL_set_accept_state(t.ssl)
        else:
            lib.SSL_set_psk_client_callback(t.ssl, client_key)
            lib.SSL_set_verify(t.ssl, SSL_VERIFY_PEER, NULL)    # no server without the key
            lib.SSL_set_connect_state(t.ssl)

    def __dealloc__(self):
        tls_free(self.tls)

    def handshake(self, bytes data not None):
        """Take bytes of the peer's, and return those to send; `done` says whether it has ended.

        Raises ValueError if the peer does not hold the key, or its bytes were changed.
        """
        cdef Tls *t = self.owned()
        cdef int result
        t.arrived, t.arrived_bytes = data, len(data)
        lib.ERR_clear_error()
        with nogil:
            result = lib.SSL_do_handshake(t.ssl)
        if result == 1 and lib.SSL_session_reused(t.ssl):   # so it calls a session with our key
            memset(t.key, 0, sizeof(t.key))
            self.done = True
        elif result == 1 or lib.SSL_get_error(t.ssl, result) != SSL_ERROR_WANT_READ:
            raise ValueError("the peer does not hold this connection's key")
        return self.take_outbox()

    def seal(self, bytes data not None):
        """Return the records that carry `data`."""
        cdef Tls *t = self.owned()
        cdef const char *start = data
        cdef size_t nbytes = len(data)
        cdef bint sealed
        with nogil:
            sealed = seal(t, start, nbytes)
        if not sealed:
            raise MemoryError
        return self.take_outbox()

    def open(self, bytes data not None):
        """Take received bytes, any part of the stream; return what they carry, maybe nothing.

        Raises ValueError if they are not what the peer sent next.
        """
        cdef Tls *t = self.owned()
        cdef list parts = []
        cdef bytearray part = bytearray(RECORD_BYTES)
        cdef char *into = part
        cdef ssize_t got = 1
        t.arrived, t.arrived_bytes = data, len(data)
        while got > 0:
            with nogil:
                got = tls_read(t, into, RECORD_BYTES)
            if got > 0:
                parts.append(PyBytes_FromStringAndSize(into, got))
        if got < 0:
            raise ValueError("a record is not the next one that the peer sent")
        return b"".join(parts)

    cdef Tls *owned(self) except NULL:
        if self.tls == NULL:
            raise ValueError("a link has this session")
        return self.tls

    cdef bytes take_outbox(self):
        cdef Tls *t = self.tls
        data = PyBytes_FromStringAndSize(t.outbox, t.filled) if t.filled != 0 else b""
        free(t.outbox)
        t.outbox = NULL
        t.filled = t.room = 0
        return data

    cdef Tls *detach(self, int fd) noexcept:
        """Hand the session to a link, which reads and writes the socket by itself."""
        cdef Tls *t = self.tls
        self.tls = NULL
        if t != NULL:
            t.fd = fd
        return t
