/* Included before every file of a wheel for manylinux_2_28: binds functions whose versions in newer
   glibc only say that they moved into libc.so to their first versions, which every glibc has. */
#ifdef __x86_64__
#define FIRST "GLIBC_2.2.5"
#define CLOCK "GLIBC_2.3.3"
#define ROBUST "GLIBC_2.12"
#define STAT_VERSION 1
#else
#define FIRST "GLIBC_2.17"
#define CLOCK FIRST
#define ROBUST FIRST
#define STAT_VERSION 0
#endif

#define BIND(name, version) __asm__(".symver " #name ", " #name "@" version);
BIND(dlopen, FIRST)
BIND(dlsym, FIRST)
BIND(pthread_condattr_setclock, CLOCK)
BIND(pthread_create, FIRST)
BIND(pthread_join, FIRST)
BIND(pthread_mutex_consistent, ROBUST)
BIND(pthread_mutex_trylock, FIRST)
BIND(pthread_mutexattr_destroy, FIRST)
BIND(pthread_mutexattr_init, FIRST)
BIND(pthread_mutexattr_setpshared, FIRST)
BIND(pthread_mutexattr_setrobust, ROBUST)
BIND(pthread_sigmask, FIRST)

/* Since 2.33 fstat is a function. Before, it was this call, made by a macro in a header. */
int cydist_fxstat64(int version, int fd, void *status) __asm__("__fxstat64");
int cydist_fstat64(int fd, void *status) __asm__("fstat64");
__attribute__((weak, visibility("hidden"))) int cydist_fstat64(int fd, void *status)
{
    return cydist_fxstat64(STAT_VERSION, fd, status);
}

#undef FIRST /* src/kernels has one of its own */
#undef CLOCK
#undef ROBUST
#undef STAT_VERSION
#undef BIND
