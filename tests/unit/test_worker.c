/* SPDX-License-Identifier: Apache-2.0 */
/* test_worker.c - hub.c and worker.c with a rank that this test plays: who gets in, the order of
 * frames and pipe text, what a rank leaves when it dies. */
#include "worker.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hub.h"
#include "kin.h"
#include "log.h"
#include "tap.h"
#include "util.h"

static char folder[] = "/tmp/ddipd-test-worker-XXXXXX";
static uv_loop_t loop;
static struct hub *hub;
static struct worker *worker;
static struct buf told; /* what the callbacks said */
static int batches, exits, refusals;
static bool disk_full;
static uint32_t skew;
static uint64_t ends[2]; /* positions after the last text of fd 1 and 2 */

/* The rank's side. */
static struct wire rank;
static int out[2], err_out[2]; /* pipes: read end, write end */
static struct frame_pipes *counters;
static int counters_fd;
static pid_t pid;

/* --- what the worker says, as one text: "[2:payload]" a frame, "<1:text>" output --- */

static bool on_frame(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS], bool may_wait)
{
    (void)ctx;
    (void)fds;
    if (refusals && may_wait) {
        refusals--;
        return false;
    }
    buf_addf(&told, "[%d:%.*s]", f->type, f->type == FRAME_HELLO ? 0 : (int)f->length, f->payload);
    return true;
}

static void on_output(void *ctx, int fd, const char *text, size_t len, uint64_t end)
{
    (void)ctx;
    ends[fd - 1] = end;
    buf_addf(&told, "<%d:", fd);
    buf_add(&told, text, len);
    buf_addc(&told, '>');
}

static void on_lost_text(void *ctx, int fd, uint64_t bytes)
{
    (void)ctx;
    buf_addf(&told, "<%d: %d lost>", fd, (int)bytes);
}

static bool on_batch(void *ctx)
{
    (void)ctx;
    if (disk_full)
        return false;
    batches++;
    return true;
}

static void on_exit_of_worker(void *ctx, int status, const char *last_words)
{
    (void)ctx;
    exits++;
    buf_addf(&told, "{%d %s}", status, last_words);
}

static const struct worker_events events = {.on_frame = on_frame,
                                            .on_output = on_output,
                                            .on_lost_text = on_lost_text,
                                            .on_batch = on_batch,
                                            .on_exit = on_exit_of_worker};

/* --- the loop --- */

static void on_tick(uv_timer_t *timer)
{
    (void)timer;
}

/* Lets the daemon work until nothing has happened for a while. */
static const char *listen_to_daemon(void)
{
    static struct buf text;
    uv_timer_t tick;
    uv_timer_init(&loop, &tick);
    uv_timer_start(&tick, on_tick, 5, 5);
    size_t before;
    do {
        before = told.len;
        for (int i = 0; i < 8; i++)
            uv_run(&loop, UV_RUN_ONCE);
    } while (told.len != before);
    uv_close((uv_handle_t *)&tick, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
    buf_reset(&text);
    buf_add(&text, told.data, told.len);
    buf_reset(&told);
    return buf_cstr(&text);
}

/* --- the rank --- */

static int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void connect_to_hub(void)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", hub_socket_path(hub));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
        abort();
    wire_init(&rank, fd);
}

static void send_frame(enum frame_type type, uint64_t number, uint32_t position,
                       const char *payload)
{
    struct frame f = {.type = (uint8_t)type,
                      .number = number,
                      .length = (uint32_t)strlen(payload),
                      .out = position,
                      .payload = (const uint8_t *)payload};
    (void)wire_send(&rank, &f, NULL);
}

static void send_hello(const char *secret)
{
    char *json = util_printf("{\"secret\":\"%s\"}", secret);
    struct frame f = {.type = FRAME_HELLO,
                      .nfds = 3,
                      .length = (uint32_t)strlen(json),
                      .payload = (const uint8_t *)json};
    int fds[] = {out[0], err_out[0], counters_fd};
    (void)wire_send(&rank, &f, fds);
    free(json);
}

/* Writes to fd 1 as the rank would; returns how much has been written in all. */
static uint32_t print(const char *text)
{
    static uint32_t total;
    ssize_t n = write(out[1], text, strlen(text));
    total += n > 0 ? (uint32_t)n : 0;
    return total + skew;
}

/* The next frame from the daemon: its number, or -1 when it is of another type. */
static int64_t receive(enum frame_type type)
{
    struct frame f;
    int fds[FRAME_MAX_FDS];
    const char *why;
    if (wire_next(&rank, FRAME_MAX, &f, fds, &why) != WIRE_FRAME &&
        (wire_fill(&rank, 4096) != WIRE_FRAME ||
         wire_next(&rank, FRAME_MAX, &f, fds, &why) != WIRE_FRAME))
        return -1;
    return f.type == type ? (int64_t)f.number : -1;
}

static void start(void)
{
    struct err err = ERR_INIT;
    worker = worker_new(hub, "test", &events, NULL, &err);
    if (!worker || pipe2(out, O_CLOEXEC) < 0 || pipe2(err_out, O_CLOEXEC) < 0)
        abort();
    counters_fd = memfd_create("pipes", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(counters_fd, sizeof(*counters)) < 0 ||
        fcntl(counters_fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        abort();
    counters = mmap(NULL, sizeof(*counters), PROT_READ | PROT_WRITE, MAP_SHARED, counters_fd, 0);
    pid = fork();
    if (pid == 0) {
        setsid();
        alarm(60);
        for (;;)
            pause();
    }
    worker_set_pid(worker, pid);
    connect_to_hub();
    send_hello(worker_secret(worker));
}

/* --- checks --- */

static void check_guests(void)
{
    int pipe_fds[2], before = count_fds();
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return;
    struct frame bad = {.type = FRAME_STREAM, .nfds = 3};
    for (int i = 0; i < 5; i++) {
        connect_to_hub();
        (void)wire_send(&rank, &bad, (int[]){pipe_fds[0], pipe_fds[0], pipe_fds[0]});
        listen_to_daemon();
        ok(wire_fill(&rank, 100) == WIRE_CLOSED, "a guest that says no HELLO is sent away");
        wire_deinit(&rank);
    }
    connect_to_hub();
    (void)!write(rank.fd, "GET / HTTP/1.1\r\n\r\n", 18);
    listen_to_daemon();
    ok(wire_fill(&rank, 100) == WIRE_CLOSED, "and one that speaks HTTP");
    wire_deinit(&rank);
    connect_to_hub();
    out[0] = err_out[0] = counters_fd = pipe_fds[0];
    send_hello("wrong");
    listen_to_daemon();
    ok(receive(FRAME_EXIT) == 0 && wire_fill(&rank, 100) == WIRE_CLOSED,
       "one with a wrong secret is told to leave");
    wire_deinit(&rank);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    ok(count_fds() == before, "their descriptors are closed (%d more)", count_fds() - before);
}

static void check_hello(void)
{
    is_str(listen_to_daemon(), "[1:]", "HELLO is the first frame");
    ok(receive(FRAME_WELCOME) == 0, "WELCOME says that nothing has been seen");
    ok(batches == 1 && worker_connected(worker) && worker_pid(worker) == pid, "a batch is over");
}

static void check_order(void)
{
    uint32_t position = print("one\n");
    send_frame(FRAME_STREAM, 1, position, "two");
    position = print("three\n");
    send_frame(FRAME_STREAM, 2, position, "four");
    send_frame(FRAME_EVENT, 3, position, "five");
    print("six\n");
    is_str(listen_to_daemon(), "<1:one\n>[2:two]<1:three\n>[2:four][3:five]<1:six\n>",
           "frames and what was printed before and after them");
    ok(receive(FRAME_ACK) == 3, "all is acknowledged");
    send_frame(FRAME_STREAM, 3, 0, "again");
    send_frame(FRAME_STREAM, 4, 0, "new");
    is_str(listen_to_daemon(), "[2:new]", "a number that was there is not delivered twice");
    ok(receive(FRAME_ACK) == 4, "the new one is acknowledged");
}

/* More than is read at a time lies in the pipe, and the frame is there, too. */
static void check_much_output(void)
{
    size_t size = 300000;
    char *text = util_malloc(size + 1);
    memset(text, 'x', size);
    text[size] = '\0';
    if (fcntl(out[1], F_SETPIPE_SZ, 1 << 20) < 0) {
        free(text);
        ok(true, "much output # SKIP needs a pipe of 1 MiB");
        return;
    }
    uint32_t position = print(text);
    send_frame(FRAME_STREAM, 5, position, "after");
    const char *got = listen_to_daemon(), *frame = strstr(got, "[2:after]");
    size_t before = 0, all = 0;
    for (const char *p = got; *p; p++) {
        all += *p == 'x';
        before += *p == 'x' && p < frame;
    }
    ok(frame && all == size, "300 kB of output and a frame");
    ok(before == size, "the frame comes after all that was printed before it (%zu)", before);
    ok(counters->taken[0] == position && counters->seq % 2 == 0, "the counters say what was read");
    free(text);
}

static void check_characters(void)
{
    print("a\xc3");
    is_str(listen_to_daemon(), "<1:a>", "half a character waits");
    print("\xa4z");
    is_str(listen_to_daemon(), "<1:\xc3\xa4z>", "for its other half");
}

static void check_lost_connection(void)
{
    (void)!write(rank.fd, "nonsense", 8);
    is_str(listen_to_daemon(), "", "nonsense ends the connection");
    ok(!worker_connected(worker) && wire_fill(&rank, 100) != WIRE_EMPTY, "it is closed");
    wire_deinit(&rank);
    print("meanwhile\n");
    is_str(listen_to_daemon(), "", "the pipes are left to the rank's library");
    connect_to_hub();
    send_hello(worker_secret(worker));
    is_str(listen_to_daemon(), "[1:]<1:meanwhile\n>", "the rank comes back");
    ok(receive(FRAME_WELCOME) == 5, "and hears what was seen");
    struct wire first = rank;
    connect_to_hub();
    send_hello(worker_secret(worker));
    is_str(listen_to_daemon(), "", "a second connection is refused");
    wire_deinit(&rank);
    rank = first;
}

static void check_refusal(void)
{
    refusals = 2;
    send_frame(FRAME_EVENT, 6, 0, "late");
    send_frame(FRAME_EVENT, 7, print("text\n"), "later");
    is_str(listen_to_daemon(), "[3:late]<1:text\n>[3:later]",
           "a frame that cannot be taken is offered again, and nothing comes before it");
    ok(refusals == 0, "as often as needed");
}

static void check_full_disk(void)
{
    disk_full = true;
    send_frame(FRAME_EVENT, 8, 0, "first");
    print("pipe\n");
    is_str(listen_to_daemon(), "[3:first]", "what was read is told");
    send_frame(FRAME_EVENT, 9, 0, "second");
    uint32_t position = print("more\n");
    is_str(listen_to_daemon(), "", "a batch that is not committed is the last");
    int inside = 0;
    ok(ioctl(out[0], FIONREAD, &inside) == 0 && inside == 10 && counters->taken[0] == position - 10,
       "its text stays in the pipe");
    worker_resume(worker);
    is_str(listen_to_daemon(), "", "trying in vain changes nothing");
    disk_full = false;
    worker_resume(worker);
    is_str(listen_to_daemon(), "[3:second]<1:pipe\nmore\n>", "when there is room it goes on");
    ok(counters->taken[0] == position && ends[0] == position, "and the text is taken out");
}

/* The library took text out while nobody was there, and tells it with its position. */
static void check_pipe_frames(void)
{
    uint32_t position = (uint32_t)ends[0];
    struct frame f = {.type = FRAME_STREAM,
                      .flags = FRAME_FLAG_PIPE,
                      .number = 10,
                      .arg = 1,
                      .length = 4,
                      .out = position + 1,
                      .payload = (const uint8_t *)"re\nx"};
    (void)wire_send(&rank, &f, NULL);
    is_str(listen_to_daemon(), "<1:x>", "what is known of it is not told again");
    ok(ends[0] == position + 1, "its position counts");
    worker_skip(worker, (uint64_t[2]){position + 100, 0});
    f.number = 11;
    f.out = position + 104;
    (void)wire_send(&rank, &f, NULL);
    is_str(listen_to_daemon(), "<1:re\nx>", "what the rank says it dropped is not waited for");
    f.number = 12;
    f.out = position + 110;
    (void)wire_send(&rank, &f, NULL);
    is_str(listen_to_daemon(), "<1: 2 lost><1:re\nx>", "what is missing without a word is told");
    skew = 110; /* from now on positions are as if all that had been in the pipe */
    counters->taken[0] += skew;
    wire_deinit(&rank);
    is_str(listen_to_daemon(), "", "the connection ends");
    connect_to_hub();
    send_hello(worker_secret(worker));
    is_str(listen_to_daemon(), "[1:]", "and begins again");
}

static void check_adoption(void)
{
    struct err err = ERR_INIT;
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    struct worker_past past = {.pid = child, .started = kin_start_time(child) + 1};
    past.secret = "0123456789abcdef0123456789abcdef";
    ok(!worker_adopt(hub, "old", &events, NULL, &past, &err) && err.code == ERR_GONE,
       "a process that started at another time is not the one");
    past.started--;
    worker = worker_adopt(hub, "old", &events, NULL, &past, &err);
    ok(worker && worker_pid(worker) == child && worker_started(worker) == past.started,
       "the right one is taken");
    ok(strcmp(worker_secret(worker), past.secret) == 0, "with its secret");
    exits = 0;
    kill(child, SIGKILL);
    while (!exits)
        uv_run(&loop, UV_RUN_ONCE);
    is_str(listen_to_daemon(), "{-1 }", "its end is noticed, its status is nobody's to know");
    worker_close(worker);
    ok(!worker_adopt(hub, "old", &events, NULL, &past, &err), "gone it is not adopted");
}

static void check_exit(void)
{
    uint32_t position = print("last output\n");
    send_frame(FRAME_DONE, 13, position, "done");
    print("very last");
    kill(pid, SIGKILL);
    while (!exits)
        uv_run(&loop, UV_RUN_ONCE);
    is_str(listen_to_daemon(), "<1:last output\n>[4:done]<1:very last>{9 }",
           "all it said comes before its end, though its pipe is still open");
    ok(exits == 1, "which is told once");
    worker_close(worker);
    wire_deinit(&rank);
    int fds[] = {out[0], out[1], err_out[0], err_out[1], counters_fd};
    for (size_t i = 0; i < UTIL_COUNT(fds); i++)
        close(fds[i]);
    munmap(counters, sizeof(*counters));
}

int main(void)
{
    struct err err = ERR_INIT;
    signal(SIGPIPE, SIG_IGN);
    log_set_level(LOG_LEVEL_ERROR);
    uv_loop_init(&loop);
    if (!mkdtemp(folder) || !(hub = hub_new(&loop, folder, &err)))
        return 1;
    int before = count_fds();
    check_guests();
    start();
    check_hello();
    check_order();
    check_much_output();
    check_characters();
    check_lost_connection();
    check_refusal();
    check_full_disk();
    check_pipe_frames();
    check_exit();
    check_adoption();
    uv_run(&loop, UV_RUN_NOWAIT);
    ok(count_fds() == before, "no descriptor is left open");
    hub_close(hub);
    uv_run(&loop, UV_RUN_DEFAULT);
    ok(uv_loop_close(&loop) == 0, "nor a handle of the loop");
    util_remove_tree(folder);
    buf_deinit(&told);
    return tap_done();
}
