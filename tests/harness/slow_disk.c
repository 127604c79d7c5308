/* A disk on which every sync takes five seconds; preloaded into a server. */
#include <time.h>

static int dawdle(void)
{
    struct timespec pause = {5, 0};
    nanosleep(&pause, 0);
    return 0;
}

int fsync(int fd)
{
    (void)fd;
    return dawdle();
}

int fdatasync(int fd)
{
    (void)fd;
    return dawdle();
}
