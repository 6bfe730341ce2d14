"""The functions of OpenSSL that cydist calls, in the libraries that Python's `ssl` is linked to.

Nothing of OpenSSL is needed to compile this: `load` looks the functions up at the first use. They
exist since OpenSSL 1.1.1.
"""
from libc.stddef cimport size_t

ctypedef unsigned int (*ClientKey)(void *, const char *, char *, unsigned int, unsigned char *,
                                   unsigned int) noexcept nogil
ctypedef unsigned int (*ServerKey)(void *, const char *, unsigned char *,
                                   unsigned int) noexcept nogil


ctypedef struct OpenSSL:        # in the order of NAMES in openssl.pyx
    # TLS, by libssl
    void *(*TLS_method)() noexcept nogil
    void *(*SSL_CTX_new)(const void *) noexcept nogil
    long (*SSL_CTX_ctrl)(void *, int, long, void *) noexcept nogil
    int (*SSL_CTX_set_ciphersuites)(void *, const char *) noexcept nogil
    int (*SSL_CTX_set_num_tickets)(void *, size_t) noexcept nogil
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
    int (*SSL_get_error)(const void *, int) noexcept nogil
    int (*SSL_export_keying_material)(void *, unsigned char *, size_t, const char *, size_t,
                                      const unsigned char *, size_t, int) noexcept nogil
    # Memory that TLS reads and writes, ciphers and hashes, by libcrypto
    void *(*BIO_s_mem)() noexcept nogil
    void *(*BIO_new)(const void *) noexcept nogil
    int (*BIO_read)(void *, void *, int) noexcept nogil
    int (*BIO_write)(void *, const void *, int) noexcept nogil
    void (*ERR_clear_error)() noexcept nogil
    const void *(*EVP_aes_128_gcm)() noexcept nogil
    void *(*EVP_CIPHER_CTX_new)() noexcept nogil
    void (*EVP_CIPHER_CTX_free)(void *) noexcept nogil
    int (*EVP_CIPHER_CTX_ctrl)(void *, int, int, void *) noexcept nogil
    int (*EVP_CipherInit_ex)(void *, const void *, void *, const unsigned char *,
                             const unsigned char *, int) noexcept nogil
    int (*EVP_CipherUpdate)(void *, unsigned char *, int *, const unsigned char *,
                            int) noexcept nogil
    int (*EVP_CipherFinal_ex)(void *, unsigned char *, int *) noexcept nogil
    const void *(*EVP_sha256)() noexcept nogil
    unsigned char *(*HMAC)(const void *, const void *, int, const unsigned char *, size_t,
                           unsigned char *, unsigned int *) noexcept nogil


cdef OpenSSL lib
cdef void *tls_context          # SSL_CTX, one for the process; NULL before `load`
