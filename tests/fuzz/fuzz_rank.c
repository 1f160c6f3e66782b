/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_rank.c - what processes say, right or wrong: frames, output and exits of a group of two
 * ranks, while a cell runs, another waits and a request is open.
 *
 * An input is records, each ended by 0xff: a byte for what it is and who speaks (see say), a byte
 * for cell and arg, and the payload. The first byte of all: 's' for a group that is just starting.
 */
#include "record.h"
#include "request.h"
#include "world.h"

static int answers;

static void on_answer(void *ctx, struct request *r)
{
    (void)ctx;
    (void)r;
    answers++;
}

static void on_wait(void *ctx, struct group *g, const struct err *err)
{
    (void)g;
    (void)err;
    *(bool *)ctx = true;
}

static void begin_cells(struct group *g)
{
    struct err err = ERR_INIT;
    struct cell_spec spec = {.code = "1+1", .code_len = 3, .store_history = -1};
    bool second_only[2] = {false, true};
    fuzz_check(cell_new(g, &spec, &err));
    spec.ranks = second_only;
    fuzz_check(cell_new(g, &spec, &err));
    answers = 0;
    if (g->state == GROUP_READY)
        fuzz_check(request_new(g, NULL, false, util_strdup("{}"), -1, on_answer, NULL, &err));
    world_turn();
}

/* One record. 'A'..'G': a frame of rank 0 of type 1..7, 'a'..'g': of rank 1; 'H'/'h': of an unknown
 * type; 'O'/'o', 'E'/'e': output on fd 1, 2; 'X'/'x': exit; 'S': the store says where it is, 's':
 * it exits; 'T': the loop turns. */
static void say(uint64_t number, const uint8_t *data, size_t size)
{
    bool lower = data[0] >= 'a';
    int kind = lower ? data[0] - 'a' + 'A' : data[0];
    struct world_worker *w = world_find(kind == 'S' ? "group=g store"
                                        : lower     ? "group=g rank=1"
                                                    : "group=g rank=0");
    struct frame f = {.number = number,
                      .length = (uint32_t)size - 2,
                      .cell = data[1] & 15,
                      .arg = data[1] >> 4,
                      .payload = data + 2};
    if (kind == 'T')
        world_turn();
    if (!w)
        return;
    if (kind >= 'A' && kind <= 'H' && (f.type = kind == 'H' ? 200 : (uint8_t)(kind - 'A' + 1))) {
        world_frame(w, &f);
    } else if (kind == 'O' || kind == 'E') {
        w->events->on_output(w->ctx, kind == 'O' ? 1 : 2, (const char *)data + 2, size - 2, size);
    } else if (kind == 'S' && !lower) {
        f.type = FRAME_STATE;
        world_frame(w, &f);
    } else if (kind == 'X' || kind == 'S') {
        char *words = util_strndup((const char *)data + 2, size - 2);
        w->events->on_exit(w->ctx, data[1] & 0x7f, words);
        free(words);
        return;
    }
    if (number % 3 == 0 && kind != 'S')
        w->events->on_batch(w->ctx);
}

static void check_records(struct group *g)
{
    struct buf b = BUF_INIT;
    struct err err = ERR_INIT;
    struct jw w = JW_INIT(&b);
    const struct cell *c;
    jw_array(&w, NULL);
    record_group(&w, g);
    TAILQ_FOREACH(c, &g->cells, link)
    {
        record_cell(&w, c);
    }
    jw_end_array(&w);
    json *j = json_parse((const char *)b.data, b.len, &err);
    fuzz_check(j);
    json_free(j);
    buf_deinit(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct stream *streams[4];
    bool told = false;
    if (!size)
        return 0;
    world_init();
    struct group *g = world_group(2);
    if (data[0] != 's')
        world_make_ready(g);
    struct group_wait wait = {.for_gone = true, .done = on_wait, .ctx = &told};
    group_wait(g, &wait);
    begin_cells(g);
    for (int i = 0; i < 3; i++)
        streams[i] = stream_new(g->output, i % 2 + 1, 0, i ? STREAM_PLAIN : STREAM_SSE, NULL,
                                world_no_wake, NULL);
    streams[3] = stream_new(g->output, OUTPUT_NO_CELL, 0, STREAM_PLAIN, NULL, world_no_wake, NULL);
    uint64_t number = 0;
    for (size_t at = data[0] == 's'; at < size;) {
        const uint8_t *end = memchr(data + at, 0xff, size - at);
        size_t n = end ? (size_t)(end - data) - at : size - at;
        uint8_t *record = fuzz_copy(data + at, n);
        if (n >= 2)
            say(++number, record, n);
        free(record);
        at += n + 1;
        for (int i = 0; i < 4 && number % 4 == 0; i++)
            world_read(streams[i]);
    }
    world_check_events(g->output);
    check_records(g);
    struct output_sub *rest = output_subscribe(g->output, 1, 0, world_no_wake, NULL);
    world_end();
    fuzz_check(told && answers <= 1);
    for (int i = 0; i < 4; i++) {
        fuzz_check(world_read(streams[i])); /* every reader comes to an end */
        stream_free(streams[i]);
    }
    output_unsubscribe(rest);
    return 0;
}
