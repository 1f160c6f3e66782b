/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c - a fuzz target without a fuzzer: runs it on every file of the given folders, and says
 * which one it died of. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

#define REPLAY_MAX (1 << 20)

static const char *replay_now;

/* There when a sanitizer is. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void replay_died(void)
{
    dprintf(STDERR_FILENO, "died of %s\n", replay_now);
}

static void replay_on_signal(int signum)
{
    replay_died();
    signal(signum, SIG_DFL);
    raise(signum);
}

static void replay_watch(void)
{
    signal(SIGABRT, replay_on_signal);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(replay_died);
    else
        signal(SIGSEGV, replay_on_signal);
}

static int replay_file(const char *path)
{
    static uint8_t data[REPLAY_MAX];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, data, sizeof(data));
    if (fd >= 0)
        close(fd);
    if (n < 0) {
        perror(path);
        return -1;
    }
    replay_now = path;
    LLVMFuzzerTestOneInput(data, (size_t)n);
    return 0;
}

/* Returns how many files there were, or -1. */
static int replay_folder(const char *folder)
{
    struct dirent **list;
    int n = scandir(folder, &list, NULL, alphasort), count = 0;
    if (n < 0) {
        perror(folder);
        return -1;
    }
    for (int i = 0; i < n; i++) {
        char path[4096];
        if (*list[i]->d_name != '.' && count >= 0) {
            snprintf(path, sizeof(path), "%s/%s", folder, list[i]->d_name);
            count = replay_file(path) < 0 ? -1 : count + 1;
        }
        free(list[i]);
    }
    free(list);
    return count;
}

int main(int argc, char **argv)
{
    int total = 0;
    replay_watch();
    for (int i = 1; i < argc; i++) {
        struct stat st;
        bool plain = stat(argv[i], &st) == 0 && S_ISREG(st.st_mode);
        int n = plain ? replay_file(argv[i]) + 1 : replay_folder(argv[i]);
        if (n <= 0) {
            fprintf(stderr, "%s: no input\n", argv[i]);
            return 1;
        }
        total += n;
    }
    replay_now = "its own end"; /* a leak */
    printf("%d inputs\n", total);
    return total ? 0 : 1;
}
