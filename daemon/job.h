/* SPDX-License-Identifier: Apache-2.0 */
/* job.h - what a group does for somebody, one after another, in order of arrival. */
#ifndef DDIPD_JOB_H
#define DDIPD_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "err.h"

struct group;
struct rank;

/* What a group does for somebody: a cell, or a request to ranks. Lives inside its owner. */
struct job {
    TAILQ_ENTRY(job) link;
    bool queued;
    const struct job_kind *kind;
};

struct job_kind {
    void (*start)(struct job *job);
    /* A rank has died; the job may end within this call. */
    void (*rank_lost)(struct job *job, struct rank *rank, const char *why);
    /* The group cannot do the job (any more); the job ends within this call. */
    void (*abandon)(struct job *job, const char *why);
    /* Interrupts the job, started or waiting; returns its cell number. NULL: not possible. */
    uint32_t (*interrupt)(struct job *job);
};

TAILQ_HEAD(job_list, job);

/* Does the group take jobs, and has the queue room for one more? */
int job_check_room(const struct group *g, struct err *err) ERR_MUST_CHECK;
/* Puts the job at the end of the queue. It starts from the loop. */
void job_enqueue(struct group *g, struct job *job);
/* Looks for the next job, from the loop. */
void job_wake(struct group *g);
/* The job is over, whether it was started or not. */
void job_done(struct group *g, struct job *job);
/* How many cells and requests come before it. */
size_t job_ahead(const struct group *g, const struct job *job);
/* The first waiting job that can be interrupted; NULL: none. */
struct job *job_first_cell(const struct group *g);
/* Ends every job, started or not. */
void job_abandon_all(struct group *g, const char *why);
void job_abandon_waiting(struct group *g, const char *why); /* the running one goes on */

#endif
