/* SPDX-License-Identifier: Apache-2.0 */
/* test_oom.c - the kernel's count of out-of-memory kills, from files like the kernel's. */
#include "oom.h"

#include <stdlib.h>
#include <unistd.h>

#include "tap.h"
#include "util.h"

static char root[] = "/tmp/ddipd-test-oom-XXXXXX";

static void put(const char *folder, const char *name, const char *text)
{
    struct err err = ERR_INIT;
    char *dir = util_printf("%s%s", root, folder), *path = util_printf("%s/%s", dir, name);
    if (util_mkdirs(dir, 0700, &err) < 0 ||
        util_write_file(path, 0600, text, strlen(text), &err) < 0)
        abort();
    free(dir);
    free(path);
}

static int64_t count_by(const char *cgroups)
{
    struct oom o = {.before = -1};
    oom_watch_text(&o, root, cgroups);
    int64_t count = o.before;
    oom_deinit(&o);
    return count;
}

#define EVENTS(n) "low 0\nhigh 1\nmax 7\noom 9\noom_kill " n "\noom_group_kill 0\n"

int main(void)
{
    if (!mkdtemp(root))
        return 1;
    put("/user.slice/a", "memory.events", EVENTS("3"));
    put("/unified/b", "memory.events", EVENTS("4"));
    put("/memory/c", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
    put("/old", "memory.events", "low 0\noom 9\n");
    put("/", "memory.events", EVENTS("8"));
    ok(count_by("0::/user.slice/a\n") == 3, "version 2");
    ok(count_by("9:cpu:/\n0::/b\n") == 4, "version 2 beside version 1");
    ok(count_by("4:cpu,memory:/c\n0::/nowhere\n") == 5, "version 1, among other controllers");
    ok(count_by("0::/\n") == 8, "the root of a container");
    ok(count_by("4:memoryx:/c\n5:xmemory:/c") == -1, "another controller is not memory");
    ok(count_by("0::/old\n") == -1, "a kernel that does not count");
    ok(count_by("0::/../../c\n") == -1, "a cgroup outside of what is shown here");
    ok(count_by("") == -1 && count_by("nonsense") == -1 && count_by(":::") == -1 &&
           count_by("0::") == -1 && count_by("\n\n") == -1,
       "no cgroup");
    struct oom o = {.before = -1};
    oom_watch_text(&o, root, "0::/user.slice/a");
    put("/user.slice/a", "memory.events", EVENTS("12"));
    ok(o.before == 3 && oom_count(&o) == 12, "the count grows");
    char *path = util_printf("%s/user.slice/a/memory.events", root);
    unlink(path);
    ok(oom_count(&o) == -1, "a cgroup that is gone");
    oom_watch(&o, root, getpid());
    ok(o.before == -1 || o.before == 8, "of a living process, this one");
    oom_deinit(&o);
    free(path);
    util_remove_tree(root);
    return tap_done();
}
