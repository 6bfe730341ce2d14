"""The functions of OpenSSL that cydist calls; see openssl.pxd."""
import os

from cydist._native.linux cimport RTLD_NOW, dlopen, dlsym

cdef enum:
    TLS1_3_VERSION = 0x0304
    SSL_CTRL_SET_SESS_CACHE_MODE = 44
    SSL_CTRL_SET_MIN_PROTO_VERSION = 123

# It hashes with SHA-256, as a key that is handed in must.
cdef const char *SUITE = b"TLS_AES_128_GCM_SHA256"

# In the order of the struct, whose members are function pointers only.
NAMES = (
    b"TLS_method", b"SSL_CTX_new", b"SSL_CTX_ctrl", b"SSL_CTX_set_ciphersuites",
    b"SSL_CTX_set_num_tickets", b"SSL_new", b"SSL_free", b"SSL_set_ex_data", b"SSL_get_ex_data",
    b"SSL_set_verify", b"SSL_set_psk_client_callback", b"SSL_set_psk_server_callback",
    b"SSL_set_bio", b"SSL_set_connect_state", b"SSL_set_accept_state", b"SSL_do_handshake",
    b"SSL_session_reused", b"SSL_get_error", b"SSL_export_keying_material", b"BIO_s_mem",
    b"BIO_new", b"BIO_read", b"BIO_write", b"ERR_clear_error", b"EVP_aes_128_gcm",
    b"EVP_CIPHER_CTX_new", b"EVP_CIPHER_CTX_free", b"EVP_CIPHER_CTX_ctrl", b"EVP_CipherInit_ex",
    b"EVP_CipherUpdate", b"EVP_CipherFinal_ex", b"EVP_sha256", b"HMAC",
)


def load(path):
    """Look the functions up in the libraries that the file `path` is linked to; None: in those of
    the interpreter. Does nothing after the first success.

    Raises OSError with the reason if this process cannot have TLS 1.3 with keys of its own.
    """
    global tls_context
    cdef void *handle
    cdef void *function
    cdef bytes name
    cdef int i
    if tls_context != NULL:
        return
    if path is None:
        handle = dlopen(NULL, RTLD_NOW)
    else:
        handle = dlopen(os.fsencode(path), RTLD_NOW)
    if handle == NULL:
        raise OSError(f"{path} cannot be opened")
    if len(NAMES) * sizeof(void *) != sizeof(OpenSSL):
        raise SystemError("NAMES does not name the members of OpenSSL")
    for i, name in enumerate(NAMES):
        function = dlsym(handle, name)
        if function == NULL:
            raise OSError(f"the libssl of Python's ssl module has no {name.decode()}: it is not "
                          "OpenSSL 1.1.1 or later, or hides its functions")
        (<void **>&lib)[i] = function
    made = lib.SSL_CTX_new(lib.TLS_method())
    if (made == NULL or not lib.SSL_CTX_set_ciphersuites(made, SUITE)
            or not lib.SSL_CTX_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL)):
        raise OSError("this OpenSSL has no TLS 1.3, or not with AES-GCM")
    lib.SSL_CTX_set_num_tickets(made, 0)    # a session is never resumed
    lib.SSL_CTX_ctrl(made, SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL)
    tls_context = made
