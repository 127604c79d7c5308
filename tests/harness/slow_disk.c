/* A disk on which every sync takes five seconds; preloaded into a server. With SLOW_DISK_FILE set,
   as many milliseconds as that file says, none if it is missing: a disk that is slow at times. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int dawdle(void)
{
    const char *path = getenv("SLOW_DISK_FILE");
    long ms = 5000;
    if (path) {
        FILE *file = fopen(path, "r");
        if (!file || fscanf(file, "%ld", &ms) != 1)
            ms = 0;
        if (file)
            fclose(file);
    }
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
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
