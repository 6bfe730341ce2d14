"""The handshake of TLS 1.3 with a pre-shared key, by which an encrypted connection gets its keys.

Both sides hold a key that the handshake of cydist/net/auth.py made for this connection, and no
certificates: an external PSK with an ephemeral Diffie-Hellman exchange (RFC 8446, psk_dhe_ke). So
the job's secret, when it is learnt later, does not open what was sent before. TLS carries nothing
after its handshake: its exporter gives both sides the secrets of a cipher (cipher.pxd).
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.string cimport memcpy, strlen

from cydist._native.cipher cimport SECRET_BYTES, CipherHandle
from cydist._native.linux cimport explicit_bzero
from cydist._native.openssl cimport lib, tls_context

cdef enum:
    SSL_VERIFY_PEER = 1
    SSL_ERROR_WANT_READ = 2
    KEY_BYTES = 32

cdef const char *LABEL = b"EXPORTER-cydist-records"


cdef unsigned int client_key(void *ssl, const char *hint, char *identity, unsigned int most,
                             unsigned char *key, unsigned int most_key) noexcept nogil:
    memcpy(identity, b"cydist", 7)
    return server_key(ssl, identity, key, most_key)


cdef unsigned int server_key(void *ssl, const char *identity, unsigned char *key,
                             unsigned int most_key) noexcept nogil:
    memcpy(key, lib.SSL_get_ex_data(ssl, 0), KEY_BYTES)
    return KEY_BYTES


cdef class TlsHandshake:
    """TLS's handshake on one connection whose bytes the caller carries.

    Args:
        key: 32 bytes that only this connection's two sides know.
        server: Whether this is the side that accepted the connection.

    `cipher` is the connection's once the handshake is complete, and None before. Raises OSError if
    `load` has not succeeded.
    """
    cdef void *ssl
    cdef void *arriving             # BIOs, which `ssl` owns
    cdef void *leaving
    cdef unsigned char key[KEY_BYTES]
    cdef bint server
    cdef readonly CipherHandle cipher

    def __cinit__(self, bytes key not None, bint server):
        if tls_context == NULL or len(key) != KEY_BYTES:
            raise OSError(f"TLS needs `load` first, and a key of {KEY_BYTES} bytes")
        self.server = server
        memcpy(self.key, <const char *>key, KEY_BYTES)
        self.ssl = lib.SSL_new(tls_context)
        self.arriving, self.leaving = lib.BIO_new(lib.BIO_s_mem()), lib.BIO_new(lib.BIO_s_mem())
        if (self.ssl == NULL or self.arriving == NULL or self.leaving == NULL
                or not lib.SSL_set_ex_data(self.ssl, 0, self.key)):
            raise MemoryError
        lib.SSL_set_bio(self.ssl, self.arriving, self.leaving)
        if server:
            lib.SSL_set_psk_server_callback(self.ssl, server_key)
            lib.SSL_set_accept_state(self.ssl)
        else:
            lib.SSL_set_psk_client_callback(self.ssl, client_key)
            lib.SSL_set_verify(self.ssl, SSL_VERIFY_PEER, NULL)     # no server without the key
            lib.SSL_set_connect_state(self.ssl)

    def __dealloc__(self):
        self.end()

    def receive(self, bytes data not None):
        """Take bytes of the peer's, and return those to send; `cipher` says whether all is done.

        Raises ValueError if the peer does not hold the key, or its bytes were changed.
        """
        cdef int result
        if self.ssl == NULL:
            raise ValueError("this handshake has ended")
        lib.ERR_clear_error()
        if len(data) != 0 and lib.BIO_write(self.arriving, <const char *>data, len(data)) < 0:
            raise MemoryError
        with nogil:
            result = lib.SSL_do_handshake(self.ssl)
        if result != 1 and lib.SSL_get_error(self.ssl, result) == SSL_ERROR_WANT_READ:
            return self.take_leaving()
        # OpenSSL says "reused" of a session whose key is ours.
        if result != 1 or not lib.SSL_session_reused(self.ssl):
            lib.ERR_clear_error()
            raise ValueError("the peer does not hold this connection's key")
        answer = self.take_leaving()
        self.cipher = self.new_cipher()
        self.end()
        return answer

    cdef bytes take_leaving(self):
        cdef char part[4096]
        cdef list parts = []
        cdef int got = lib.BIO_read(self.leaving, part, sizeof(part))
        while got > 0:
            parts.append(PyBytes_FromStringAndSize(part, got))
            got = lib.BIO_read(self.leaving, part, sizeof(part))
        return b"".join(parts)

    cdef CipherHandle new_cipher(self):
        """Return a cipher with the exporter's secrets, the client's first."""
        cdef unsigned char secrets[2 * SECRET_BYTES]
        cdef CipherHandle made = CipherHandle.__new__(CipherHandle)
        if lib.SSL_export_keying_material(self.ssl, secrets, sizeof(secrets), LABEL, strlen(LABEL),
                                          NULL, 0, 0) != 1:
            lib.ERR_clear_error()
            raise MemoryError
        try:
            if self.server:
                made.begin(secrets + SECRET_BYTES, secrets)
            else:
                made.begin(secrets, secrets + SECRET_BYTES)
        finally:
            explicit_bzero(secrets, sizeof(secrets))
        return made

    cdef void end(self) noexcept:
        if self.ssl != NULL:
            lib.SSL_free(self.ssl)
        self.ssl = NULL
        explicit_bzero(self.key, KEY_BYTES)
