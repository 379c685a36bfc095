/* Work in place of a proxy's own: a library for LD_PRELOAD. A worker that reads a request with `x-work: burn 500` burns 500 us of CPU
 * time before it goes on, and with `x-work: block 500` it stands still for 500 us. So all proxies do the same work, unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char MARK[] = "x-work: ";

static void burn(long micros) {
    struct timespec begin, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    do {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000000L + (now.tv_nsec - begin.tv_nsec) / 1000 < micros);
}

static void block(long micros) {
    struct timespec left = {micros / 1000000, micros % 1000000 * 1000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static void work(const char *bytes, ssize_t length) {
    int before = errno;
    const char *mark = length > 4 && memcmp(bytes, "GET ", 4) == 0 ? memmem(bytes, length, MARK, sizeof MARK - 1) : NULL;
    if (mark != NULL) {
        /* The line ends within what was read, or the request comes in pieces, which the load never sends. */
        const char *value = mark + sizeof MARK - 1;
        if (strncmp(value, "burn ", 5) == 0) {
            burn(atol(value + 5));
        } else if (strncmp(value, "block ", 6) == 0) {
            block(atol(value + 6));
        }
    }
    errno = before;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) { \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    }

ssize_t read(int fd, void *buffer, size_t size) {
    REAL(read)
    ssize_t length = real(fd, buffer, size);
    work(buffer, length);
    return length;
}

ssize_t recv(int fd, void *buffer, size_t size, int flags) {
    REAL(recv)
    ssize_t length = real(fd, buffer, size, flags);
    if ((flags & MSG_PEEK) == 0) {
        work(buffer, length);
    }
    return length;
}

ssize_t recvfrom(int fd, void *restrict buffer, size_t size, int flags, struct sockaddr *restrict from, socklen_t *restrict room) {
    REAL(recvfrom)
    ssize_t length = real(fd, buffer, size, flags, from, room);
    if ((flags & MSG_PEEK) == 0) {
        work(buffer, length);
    }
    return length;
}

ssize_t readv(int fd, const struct iovec *pieces, int count) {
    REAL(readv)
    ssize_t length = real(fd, pieces, count);
    if (length > 0 && count > 0) {
        work(pieces[0].iov_base, (size_t)length < pieces[0].iov_len ? length : (ssize_t)pieces[0].iov_len);
    }
    return length;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg)
    ssize_t length = real(fd, message, flags);
    if (length > 0 && message->msg_iovlen > 0 && (flags & MSG_PEEK) == 0) {
        const struct iovec *first = message->msg_iov;
        work(first->iov_base, (size_t)length < first->iov_len ? length : (ssize_t)first->iov_len);
    }
    return length;
}
