/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.h - a question to some ranks of a group, and their answers: namespace, completion.
 *
 * Payloads are memory files: the request's travels to every rank, an answer's comes back.
 */
#ifndef DDIPD_REQUEST_H
#define DDIPD_REQUEST_H

#include "group.h"

struct request {
    TAILQ_ENTRY(request) link; /* while sent */
    struct job job;
    struct group *group;
    uint32_t id;
    bool sent;
    bool *asked, *pending; /* per rank: takes part; and has not answered */
    char *body;            /* JSON for the ranks */
    int fd;                /* payload, or -1 */
    struct err err;        /* of the first rank that failed */
    json *reply;           /* last good answer */
    json *failure;         /* last bad one, has "error"; NULL: none */
    int reply_fd;          /* its payload, or -1 */
    bool aside;            /* a FRAME_QUESTION, which has a deadline */
    uv_timer_t timer;      /* the deadline; 0 ms: calls done */
    /* Called once, from the loop; the request is freed after. */
    void (*done)(void *ctx, struct request *r);
    void *ctx;
};

/* What is asked aside has failed when no answer has come by then: someone waits at a keyboard. */
#define REQUEST_ASIDE_MS 400

/* When ranks hear of it. A degraded group takes what only reads, at once, for living ranks. */
enum request_turn {
    REQUEST_WRITES, /* after the cells before it */
    REQUEST_READS,  /* the same */
    REQUEST_ASIDE,  /* reads at once, whatever the group is at: beside the cell that runs */
};

/*
 * body and fd are taken. ranks: mask. done is not called before request_new has returned. NULL:
 * *err, body and fd are disposed of.
 */
struct request *request_new(struct group *g, const bool *ranks, enum request_turn turn, char *body,
                            int fd, void (*done)(void *ctx, struct request *r), void *ctx,
                            struct err *err) ERR_MUST_CHECK;
/* The asker has gone; done will not be called. The ranks still do what was sent. */
void request_abandon(struct request *r);

/* A rank's FRAME_REPLY. fd is taken. */
void request_on_reply(struct group *g, struct rank *rank, uint32_t id, json *content, int fd);

#endif
