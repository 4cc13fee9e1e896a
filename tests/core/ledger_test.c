/* The order in which gradients are added, compared as the expression that it makes:
 * "((G+(c2+c1))+d1)". */
#define _POSIX_C_SOURCE 200809L
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "server/ledger.h"

#define PARAMETERS 3
#define ENTRIES 3

/* Entry 0 uses a and b, entry 1 b and c, entry 2 none. */
static const int32_t first[] = {0, 2, 4, 4};
static const int32_t uses[] = {0, 1, 1, 2};

/* A parameter server of strings. */
typedef struct {
    char *gradient[PARAMETERS]; /* owned */
    int   completed[PARAMETERS];
    long  live;      /* terms that somebody owns */
    int   calls;     /* of ops */
    int   fail_call; /* the op that fails; -1: none */
} book;

static char *
term_of(book *b, const char *text)
{
    b->live++;
    return strdup(text);
}

static bool
fails(book *b)
{
    return b->calls++ == b->fail_call;
}

/* "(left+right)", in place of left. */
static void
join(char **left, const char *right)
{
    size_t room = strlen(*left) + strlen(right) + 4;
    char  *both = malloc(room);

    snprintf(both, room, "(%s+%s)", *left, right);
    free(*left);
    *left = both;
}

static void
drop(void *ctx, void *term)
{
    ((book *)ctx)->live--;
    free(term);
}

static smp_status
add(void *ctx, void **sum, void *term)
{
    bool failed = fails(ctx);

    if (!failed) {
        char *text = *sum;

        join(&text, term);
        *sum = text;
    }
    drop(ctx, term);
    return failed ? SMP_ERR_SYSTEM : SMP_OK;
}

static smp_status
fold(void *ctx, int32_t parameter, void *sum)
{
    book *b = ctx;
    bool  failed = fails(b);

    if (!failed) {
        join(&b->gradient[parameter], sum);
    }
    drop(b, sum);
    return failed ? SMP_ERR_SYSTEM : SMP_OK;
}

static smp_status
complete(void *ctx, int32_t parameter)
{
    book *b = ctx;

    b->completed[parameter]++;
    return fails(b) ? SMP_ERR_SYSTEM : SMP_OK;
}

static const smp_ledger_ops ops = {add, fold, complete, drop};

static smp_ledger *
open_book(book *b, int32_t microbatches, int32_t backwards)
{
    smp_ledger *ledger;

    *b = (book){.fail_call = -1};
    for (int p = 0; p < PARAMETERS; p++) {
        b->gradient[p] = strdup("G");
    }
    if (smp_ledger_create(PARAMETERS, ENTRIES, first, uses, &ops, b, &ledger) !=
            SMP_OK ||
        smp_ledger_begin(ledger, microbatches, backwards) != SMP_OK) {
        abort();
    }
    return ledger;
}

static void
close_book(book *b, smp_ledger *ledger)
{
    CHECK(smp_ledger_held(ledger) == (size_t)b->live);
    smp_ledger_destroy(ledger);
    for (int p = 0; p < PARAMETERS; p++) {
        free(b->gradient[p]);
    }
    CHECK(b->live == 0);
}

/* A scenario reads as a list of events, and of what must be true in between. */
typedef enum {
    OPENS,
    CLOSES,
    BACKWARDS,
    IS_DONE,
    ADDS,
    SUSPECTS,
    PROMISES,
    BEGINS,
    ENDS,
    ABANDONS,
    IS_GRADIENT,
    IS_COMPLETED,
    IS_HELD,
} event_kind;

typedef struct {
    event_kind  kind;
    int32_t     at[4];
    const char *text;
} event;

#define OPEN(mb, order, entry)                                                         \
    {                                                                                  \
        OPENS, {mb, order, entry}, NULL                                                \
    }
#define CLOSE(mb, order, entry)                                                        \
    {                                                                                  \
        CLOSES, {mb, order, entry}, NULL                                               \
    }
#define BACKWARD(mb, n)                                                                \
    {                                                                                  \
        BACKWARDS, {mb, n}, NULL                                                       \
    }
#define DONE(mb)                                                                       \
    {                                                                                  \
        IS_DONE, {mb}, NULL                                                            \
    }
#define ADD(mb, n, order, parameter, text)                                             \
    {                                                                                  \
        ADDS, {mb, n, order, parameter}, text                                          \
    }
#define SUSPECT(mb, parameter)                                                         \
    {                                                                                  \
        SUSPECTS, {mb, parameter}, NULL                                                \
    }
#define PROMISE(mb, order, entry)                                                      \
    {                                                                                  \
        PROMISES, {mb, order, entry}, NULL                                             \
    }
#define BEGIN(microbatches, backwards)                                                 \
    {                                                                                  \
        BEGINS, {microbatches, backwards}, NULL                                        \
    }
#define END                                                                            \
    {                                                                                  \
        ENDS, {0}, NULL                                                                \
    }
#define END                                                                            \
    {                                                                                  \
        ENDS, {0}, NULL                                                                \
    }
#define ABANDON                                                                        \
    {                                                                                  \
        ABANDONS, {0}, NULL                                                            \
    }
#define GRADIENT(parameter, want)                                                      \
    {                                                                                  \
        IS_GRADIENT, {parameter}, want                                                 \
    }
#define COMPLETED(parameter, times)                                                    \
    {                                                                                  \
        IS_COMPLETED, {parameter, times}, NULL                                         \
    }
#define HELD(terms)                                                                    \
    {                                                                                  \
        IS_HELD, {terms}, NULL                                                         \
    }

static void
play_one(book *b, smp_ledger *l, const event *e)
{
    uint64_t order = (uint64_t)e->at[e->kind == ADDS ? 2 : 1];

    switch (e->kind) {
    case OPENS:
        CHECK_OK(smp_ledger_open(l, e->at[0], order, e->at[2]));
        break;
    case CLOSES:
        CHECK_OK(smp_ledger_close(l, e->at[0], order, e->at[2]));
        break;
    case BACKWARDS:
        CHECK_OK(smp_ledger_backward(l, e->at[0], e->at[1]));
        break;
    case IS_DONE:
        CHECK_OK(smp_ledger_done(l, e->at[0]));
        break;
    case ADDS:
        CHECK_OK(smp_ledger_add(l, e->at[0], e->at[1], order, e->at[3],
                                term_of(b, e->text)));
        break;
    case PROMISES:
        CHECK_OK(smp_ledger_promise(l, e->at[0], order, e->at[2]));
        break;
    case SUSPECTS:
        CHECK_OK(smp_ledger_suspect(l, e->at[0], e->at[1]));
        break;
    case BEGINS:
        CHECK_OK(smp_ledger_begin(l, e->at[0], e->at[1]));
        break;
    case ENDS:
        CHECK_OK(smp_ledger_end(l));
        break;
    case ABANDONS:
        smp_ledger_abandon(l);
        CHECK(b->live == 0);
        break;
    case IS_GRADIENT:
        CHECK_TEXT(b->gradient[e->at[0]], e->text);
        break;
    case IS_COMPLETED:
        CHECK(b->completed[e->at[0]] == e->at[1]);
        break;
    case IS_HELD:
        CHECK(smp_ledger_held(l) == (size_t)e->at[0]);
        break;
    }
}

static void
play(const event *events, size_t n, int32_t microbatches, int32_t backwards)
{
    book        b;
    smp_ledger *l = open_book(&b, microbatches, backwards);

    for (size_t i = 0; i < n; i++) {
        play_one(&b, l, &events[i]);
    }
    close_book(&b, l);
}

#define SCENARIO(name, microbatches, backwards, ...)                                   \
    TEST(name)                                                                         \
    {                                                                                  \
        static const event events[] = {__VA_ARGS__};                                   \
                                                                                       \
        play(events, COUNT_OF(events), microbatches, backwards);                       \
    }

/* Microbatch 1 gives first, and request 1 before request 2. */
SCENARIO(terms_are_added_by_request_then_microbatch, 2, 1, OPEN(0, 1, 0), OPEN(0, 2, 0),
         OPEN(1, 1, 0), BACKWARD(1, 0), ADD(1, 0, 1, 0, "d1"), CLOSE(1, 1, 0),
         BACKWARD(0, 0), ADD(0, 0, 1, 0, "c1"), GRADIENT(0, "G"), CLOSE(0, 1, 0),
         ADD(0, 0, 2, 0, "c2"), GRADIENT(0, "G"), CLOSE(0, 2, 0),
         GRADIENT(0, "((G+(c2+c1))+d1)"), COMPLETED(0, 1), HELD(0), END,
         GRADIENT(0, "((G+(c2+c1))+d1)"), COMPLETED(0, 1))

/* The requests suspend in between. */
SCENARIO(a_requests_own_terms_are_summed_by_themselves, 1, 1, OPEN(0, 1, 0),
         OPEN(0, 2, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "c1"), ADD(0, 0, 2, 0, "c2"),
         ADD(0, 0, 1, 0, "c1'"), ADD(0, 0, 2, 0, "c2'"), CLOSE(0, 2, 0), CLOSE(0, 1, 0),
         GRADIENT(0, "(G+((c2+c2')+(c1+c1')))"), END)

/* The same events in two steps of one microbatch: a request gives one term.  The first
 * step shows that of parameter 0, and nothing of parameter 1; microbatch 0 comes first
 * all the same. */
SCENARIO(after_the_first_step_a_single_term_does_not_wait_for_its_request, 2, 1,
         OPEN(0, 0, -1), BACKWARD(0, 0), ADD(0, 0, 0, 0, "c"), GRADIENT(0, "G"),
         CLOSE(0, 0, -1), DONE(0), DONE(1), END, BEGIN(2, 1), OPEN(0, 0, -1),
         OPEN(1, 0, -1), BACKWARD(1, 0), ADD(1, 0, 0, 0, "e"), GRADIENT(0, "(G+c)"),
         BACKWARD(0, 0), ADD(0, 0, 0, 0, "d"), GRADIENT(0, "(((G+c)+d)+e)"), HELD(0),
         COMPLETED(0, 2), ADD(0, 0, 0, 1, "f"), GRADIENT(1, "G"), CLOSE(0, 0, -1),
         CLOSE(1, 0, -1), DONE(0), DONE(1), END, GRADIENT(1, "(G+f)"))

#define STEP(one, both)                                                                \
    BEGIN(1, 1), OPEN(0, 1, 0), OPEN(0, 2, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "c1"),  \
        GRADIENT(0, one), ADD(0, 0, 2, 0, "c2"), GRADIENT(0, both), CLOSE(0, 2, 0),    \
        CLOSE(0, 1, 0), DONE(0), END
SCENARIO(a_single_term_waits_for_other_requests, 1, 1, STEP("G", "G"),
         STEP("(G+(c2+c1))", "((G+(c2+c1))+(c2+c1))"),
         GRADIENT(0, "((G+(c2+c1))+(c2+c1))"))
#undef STEP

/* A request of the first call is served late. */
#define STEP(one, both)                                                                \
    BEGIN(1, 2), OPEN(0, 0, -1), BACKWARD(0, 0), ADD(0, 0, 0, 0, "c"), OPEN(0, 0, -1), \
        BACKWARD(0, 1), BACKWARD(0, 0), GRADIENT(0, one), ADD(0, 1, 0, 0, "d"),        \
        GRADIENT(0, both), CLOSE(0, 0, -1), CLOSE(0, 0, -1), DONE(0), END
SCENARIO(a_single_term_waits_for_the_last_backward_call, 1, 2, STEP("G", "G"),
         STEP("(G+(c+d))", "((G+(c+d))+(c+d))"), GRADIENT(0, "((G+(c+d))+(c+d))"))
#undef STEP

/* The second one does not come in the first step; the second step did not expect it and
 * lost nothing. */
#define STEP                                                                           \
    BEGIN(1, 1), OPEN(0, 1, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "c"),                  \
        ADD(0, 0, 1, 0, "d"), CLOSE(0, 1, 0), DONE(0), END
SCENARIO(terms_that_come_twice_in_a_request_wait_ever_after, 1, 1, OPEN(0, 1, 0),
         BACKWARD(0, 0), ADD(0, 0, 1, 0, "c"), CLOSE(0, 1, 0), DONE(0), END, STEP, STEP,
         STEP, GRADIENT(0, "(((((G+c)+c)+d)+(c+d))+(c+d))"))
#undef STEP

SCENARIO(an_entry_delays_only_what_it_may_use, 2, 1, OPEN(0, 1, 0), OPEN(0, 2, 1),
         OPEN(0, 3, 2), BACKWARD(0, 0), BACKWARD(1, 0), ADD(0, 0, 1, 0, "a"),
         ADD(0, 0, 1, 1, "b"), CLOSE(0, 1, 0), GRADIENT(0, "(G+a)"), COMPLETED(0, 1),
         GRADIENT(1, "G"), ADD(0, 0, 2, 1, "b2"), CLOSE(0, 2, 1),
         GRADIENT(1, "(G+(b2+b))"), COMPLETED(1, 1), COMPLETED(2, 1), END)

SCENARIO(the_step_function_may_use_all, 1, 1, OPEN(0, 0, -1), OPEN(0, 1, 1),
         BACKWARD(0, 0), ADD(0, 0, 0, 2, "root"), ADD(0, 0, 1, 2, "c1"), CLOSE(0, 1, 1),
         GRADIENT(2, "G"), ADD(0, 0, 0, 2, "root'"), CLOSE(0, 0, -1),
         GRADIENT(2, "(G+(c1+(root+root')))"))

/* The outputs of the second one never reached the loss. */
SCENARIO(a_released_request_lets_the_others_through, 2, 1, OPEN(0, 1, 0), OPEN(0, 2, 0),
         OPEN(1, 1, 0), BACKWARD(0, 0), BACKWARD(1, 0), ADD(1, 0, 1, 0, "d1"),
         CLOSE(1, 1, 0), ADD(0, 0, 1, 0, "c1"), CLOSE(0, 1, 0), GRADIENT(0, "G"),
         CLOSE(0, 2, 0), GRADIENT(0, "((G+c1)+d1)"))

/* What is checkpointed runs again, as a request of the backward. */
SCENARIO(a_suspect_waits_until_its_microbatch_is_done, 2, 1, OPEN(0, 1, 0),
         SUSPECT(0, 0), BACKWARD(0, 0), BACKWARD(1, 0), ADD(0, 0, 1, 0, "c1"),
         CLOSE(0, 1, 0), GRADIENT(0, "G"), OPEN(0, 2, 0), ADD(0, 0, 2, 0, "again"),
         CLOSE(0, 2, 0), GRADIENT(0, "G"), COMPLETED(2, 0), DONE(0),
         GRADIENT(0, "(G+(c1+again))"), COMPLETED(0, 1))

/* The second call of a checkpoint has the first one's order; earlier terms wait. */
SCENARIO(a_promised_request_has_its_place, 2, 1, OPEN(0, 1, 0), PROMISE(0, 2, 0),
         PROMISE(0, 3, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "c1"), CLOSE(0, 1, 0),
         OPEN(0, 2, 0), ADD(0, 0, 2, 0, "c2"), CLOSE(0, 2, 0), OPEN(0, 3, 0),
         ADD(0, 0, 3, 0, "c3"), CLOSE(0, 3, 0), GRADIENT(0, "G"), DONE(0),
         GRADIENT(0, "(G+((c3+c2)+c1))"), COMPLETED(0, 0))

/* Without any model.backward; the graph outlives its microbatch. */
SCENARIO(done_closes_what_gets_no_backward, 2, 1, OPEN(0, 1, 0), OPEN(1, 1, 0),
         BACKWARD(1, 0), ADD(1, 0, 1, 0, "d1"), CLOSE(1, 1, 0), GRADIENT(0, "G"),
         DONE(0), GRADIENT(0, "(G+d1)"), CLOSE(0, 1, 0), COMPLETED(0, 1))

/* In the end microbatch 1 has a second backward to come. */
SCENARIO(backward_calls_of_a_microbatch_are_added_in_order, 2, 2, OPEN(0, 1, 0),
         OPEN(0, 2, 0), OPEN(0, 3, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "c1"),
         CLOSE(0, 1, 0), ADD(0, 0, 3, 0, "c3"), CLOSE(0, 3, 0), BACKWARD(0, 1),
         ADD(0, 1, 2, 0, "e2"), GRADIENT(0, "G"), CLOSE(0, 2, 0),
         GRADIENT(0, "(G+((c3+c1)+e2))"), BACKWARD(1, 0), COMPLETED(0, 0), END,
         COMPLETED(0, 1))

SCENARIO(a_late_term_is_still_added, 2, 1, DONE(0), ADD(0, 0, 1, 0, "late"),
         GRADIENT(0, "(G+late)"), DONE(1), ADD(1, 0, 1, 0, "later"),
         GRADIENT(0, "((G+late)+later)"))

SCENARIO(the_end_of_a_step_folds_what_is_left_in_order, 3, 1, OPEN(0, 1, 0),
         OPEN(2, 1, 0), ADD(2, 0, 1, 0, "e1"), ADD(0, 0, 1, 0, "c1"), HELD(2), END,
         GRADIENT(0, "((G+c1)+e1)"), COMPLETED(0, 1), COMPLETED(1, 1), COMPLETED(2, 1),
         HELD(0))

/* And the next one works. */
SCENARIO(a_step_that_failed_leaves_nothing, 2, 1, OPEN(0, 1, 0), ADD(0, 0, 1, 0, "c1"),
         ADD(1, 0, 1, 1, "d1"), ABANDON, HELD(0), GRADIENT(0, "G"), BEGIN(1, 1),
         OPEN(0, 1, 0), BACKWARD(0, 0), ADD(0, 0, 1, 0, "n"), CLOSE(0, 1, 0),
         GRADIENT(0, "(G+n)"), COMPLETED(0, 1))

TEST(entries_share_the_parameters_that_both_use)
{
    book        b;
    smp_ledger *l = open_book(&b, 1, 1);

    CHECK(smp_ledger_share(l, 0, (int32_t[]){2, 1}, 2));
    CHECK(!smp_ledger_share(l, 0, (int32_t[]){2}, 1));
    CHECK(!smp_ledger_share(l, 2, (int32_t[]){0, 1}, 2));
    CHECK(!smp_ledger_share(l, 0, NULL, 0));
    close_book(&b, l);
}

TEST(numbers_that_name_nothing_are_invalid_and_their_terms_dropped)
{
    book        b;
    smp_ledger *l = open_book(&b, 2, 1);

    CHECK_STATUS(smp_ledger_open(l, 2, 1, 0), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_open(l, -1, 1, 0), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_open(l, 0, 1, ENTRIES), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_close(l, 0, 1, 0), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_suspect(l, 0, -1), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_backward(l, 2, 0), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_done(l, 2), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_add(l, 2, 0, 1, 0, term_of(&b, "x")), SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_add(l, 0, 0, 1, PARAMETERS, term_of(&b, "x")),
                 SMP_ERR_INVALID);
    CHECK_STATUS(smp_ledger_add(l, 0, 0, 1, -1, term_of(&b, "x")), SMP_ERR_INVALID);
    CHECK(b.live == 0);
    close_book(&b, l);
}

/* ------------------------------------------------------- any order, the same sum */

#define MICROBATCHES 3
#define REQUESTS 5
#define TERMS 2

static uint64_t
next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int
below(uint64_t *state, int limit)
{
    return (int)((next_random(state) >> 11) % (unsigned)limit);
}

/* What a request will do; order 1 + its index.  The step function is request 0. */
typedef struct {
    int32_t entry;
    int     backward; /* the model.backward call that reaches it; -1: released */
    int     nterms;
    int32_t parameter[TERMS];
    /* How far it is. */
    bool opened;
    bool closed;
    int  added;
} request;

typedef struct {
    request requests[MICROBATCHES][REQUESTS];
    int     backwards;
    int     begun[MICROBATCHES]; /* model.backward calls */
    bool    done[MICROBATCHES];
} program;

static void
make_program(program *p, uint64_t seed)
{
    *p = (program){.backwards = 1 + below(&seed, 2)};
    for (int m = 0; m < MICROBATCHES; m++) {
        for (int r = 0; r < REQUESTS; r++) {
            request *q = &p->requests[m][r];

            q->entry = r == 0 ? -1 : below(&seed, ENTRIES);
            q->backward =
                r > 0 && below(&seed, 5) == 0 ? -1 : below(&seed, p->backwards);
            if (r == 0) {
                q->backward = p->backwards - 1;
            }
            for (int i = 0; i < TERMS && q->backward >= 0; i++) {
                int32_t from = q->entry < 0 ? 0 : first[q->entry];
                int32_t count = q->entry < 0 ? PARAMETERS : first[q->entry + 1] - from;

                if (count > 0 && below(&seed, 3) > 0) {
                    int32_t which = below(&seed, count);

                    q->parameter[q->nterms++] =
                        q->entry < 0 ? which : uses[from + which];
                }
            }
        }
    }
}

static void
name_term(char *name, int m, int r, int i)
{
    sprintf(name, "m%dr%dt%d", m, r, i);
}

/* Adds text to a sum that may be empty; takes neither. */
static void
accumulate(char **sum, const char *text)
{
    if (text == NULL) {
        return;
    }
    if (*sum == NULL) {
        *sum = strdup(text);
    } else {
        join(sum, text);
    }
}

/* Rules 1 to 4, written down once more, as one loop. */
static char *
expected(const program *p, int32_t parameter)
{
    char *gradient = strdup("G");

    for (int m = 0; m < MICROBATCHES; m++) {
        char *of_microbatch = NULL;

        for (int n = 0; n < p->backwards; n++) {
            char *of_call = NULL;

            for (int r = REQUESTS; r-- > 0;) {
                const request *q = &p->requests[m][r];
                char          *of_request = NULL;
                char           name[32];

                for (int i = 0; i < q->nterms; i++) {
                    if (q->backward == n && q->parameter[i] == parameter) {
                        name_term(name, m, r, i);
                        accumulate(&of_request, name);
                    }
                }
                accumulate(&of_call, of_request);
                free(of_request);
            }
            accumulate(&of_microbatch, of_call);
            free(of_call);
        }
        accumulate(&gradient, of_microbatch);
        free(of_microbatch);
    }
    return gradient;
}

/* Nothing of the calls before `n` is left to do in microbatch m. */
static bool
calls_before_are_over(const program *p, int m, int n)
{
    for (int r = 0; r < REQUESTS; r++) {
        const request *q = &p->requests[m][r];

        if (q->backward >= 0 && q->backward < n && !q->closed) {
            return false;
        }
    }
    return p->begun[m] == n;
}

static bool
all_are_open(const program *p, int m)
{
    for (int r = 0; r < REQUESTS; r++) {
        if (!p->requests[m][r].opened) {
            return false;
        }
    }
    return true;
}

static bool
all_are_closed(const program *p, int m)
{
    for (int r = 0; r < REQUESTS; r++) {
        if (!p->requests[m][r].closed && p->requests[m][r].backward >= 0) {
            return false;
        }
    }
    return true;
}

/* One event of microbatch m that may happen now, chosen by `choice`; *happened. */
static smp_status
one_event(program *p, book *b, smp_ledger *l, int m, uint64_t *random, bool *happened)
{
    request *q = &p->requests[m][below(random, REQUESTS)];
    int      r = (int)(q - p->requests[m]);
    char     name[32];

    *happened = true;
    if (!q->opened) {
        q->opened = true;
        return smp_ledger_open(l, m, (uint64_t)r, q->entry);
    }
    if (p->begun[m] < p->backwards && all_are_open(p, m) &&
        calls_before_are_over(p, m, p->begun[m]) && below(random, 2) == 0) {
        return smp_ledger_backward(l, m, p->begun[m]++);
    }
    if (!q->closed && q->backward < 0) { /* released at any time */
        q->closed = true;
        return smp_ledger_close(l, m, (uint64_t)r, q->entry);
    }
    if (!q->closed && p->begun[m] > q->backward) {
        if (q->added < q->nterms) {
            int i = q->added++;

            name_term(name, m, r, i);
            return smp_ledger_add(l, m, q->backward, (uint64_t)r, q->parameter[i],
                                  term_of(b, name));
        }
        q->closed = true;
        return smp_ledger_close(l, m, (uint64_t)r, q->entry);
    }
    if (!p->done[m] && p->begun[m] == p->backwards && all_are_closed(p, m) &&
        below(random, 3) == 0) {
        p->done[m] = true;
        for (int i = 0; i < REQUESTS; i++) {
            p->requests[m][i].closed = true;
        }
        return smp_ledger_done(l, m);
    }
    *happened = false;
    return SMP_OK;
}

static smp_status
count_one(void *ctx, void *term)
{
    *(size_t *)ctx += term != NULL;
    return SMP_OK;
}

/* Whether a visit comes to all terms that are held. */
static bool
all_are_visited(const smp_ledger *l)
{
    size_t visited = 0;

    return smp_ledger_visit(l, count_one, &visited) == SMP_OK &&
           visited == smp_ledger_held(l);
}

static smp_status
run_program(program *p, book *b, smp_ledger *l, uint64_t order)
{
    int idle = 0;

    while (idle < 2000) {
        bool       happened;
        smp_status status =
            one_event(p, b, l, below(&order, MICROBATCHES), &order, &happened);

        if (status != SMP_OK) {
            return status;
        }
        if (!all_are_visited(l)) {
            return SMP_ERR_INVALID;
        }
        idle = happened ? 0 : idle + 1;
    }
    return smp_ledger_end(l);
}

/* Runs the program in one order of events and compares the gradients. */
static void
check_program(uint64_t seed, uint64_t order, book *b, smp_ledger *l)
{
    program p;

    make_program(&p, seed * 7919);
    CHECK_OK(smp_ledger_begin(l, MICROBATCHES, p.backwards));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        free(b->gradient[i]);
        b->gradient[i] = strdup("G");
        b->completed[i] = 0;
    }
    CHECK_OK(run_program(&p, b, l, order * 104729 + seed));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        char *want = expected(&p, i);
        bool  same = strcmp(want, b->gradient[i]) == 0;

        if (!same) {
            fprintf(stderr, "program %d, order %d, parameter %d\nwant %s\ngot  %s\n",
                    (int)seed, (int)order, i, want, b->gradient[i]);
        }
        free(want);
        CHECK(same && b->completed[i] == 1);
    }
    CHECK(smp_ledger_held(l) == 0 && b->live == 0);
}

/* In the second and third step the ledger knows how many terms to expect. */
TEST(the_sum_never_depends_on_the_order_of_events)
{
    for (uint64_t seed = 1; seed <= 150; seed++) {
        for (uint64_t order = 1; order <= 10; order++) {
            book        b;
            smp_ledger *l = open_book(&b, MICROBATCHES, 1);

            for (uint64_t step = 0; step < 3; step++) {
                check_program(seed, order + 10 * step, &b, l);
            }
            close_book(&b, l);
        }
    }
}

TEST(an_op_that_fails_leaks_nothing_and_the_next_step_works)
{
    int failures = 0;

    for (int fail_call = 0;; fail_call++) {
        program     p;
        book        b;
        smp_ledger *l;
        smp_status  status;

        make_program(&p, 4242);
        l = open_book(&b, MICROBATCHES, p.backwards);
        b.fail_call = fail_call;
        status = run_program(&p, &b, l, 99);
        smp_ledger_abandon(l);
        CHECK(b.live == 0);
        if (status == SMP_OK) {
            close_book(&b, l);
            break;
        }
        CHECK_STATUS(status, SMP_ERR_SYSTEM);
        failures++;
        make_program(&p, 4242);
        CHECK_OK(smp_ledger_begin(l, MICROBATCHES, p.backwards));
        CHECK_OK(run_program(&p, &b, l, 7));
        close_book(&b, l);
    }
    CHECK(failures > 10);
}

RUN_TESTS
