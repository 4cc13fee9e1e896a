/* The order of adding gradients. */
#include "server/ledger.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* A contribution waiting for one of a later request; or the trace of one. */
typedef struct term {
    void        *value; /* owned; NULL: it is in the sum */
    uint64_t     order;
    int32_t      backward; /* the model.backward call */
    struct term *next;     /* lower order, or later arrival */
} term;

/* One parameter in one microbatch. */
typedef struct slot {
    int32_t      microbatch;
    int32_t      backward; /* the model.backward call of call_sum and waiting */
    void        *sum;      /* owned; of the calls before; NULL: nothing yet */
    void        *call_sum; /* owned; NULL: nothing yet */
    term        *waiting;  /* owned */
    term        *given;    /* owned; in no order: those moved out of waiting */
    struct slot *next;     /* later microbatch */
} slot;

/* A forward with its graph kept, or promised. */
typedef struct open_forward {
    uint64_t             order;
    int32_t              entry;
    bool                 promised;
    struct open_forward *next; /* lower order */
} open_forward;

typedef struct {
    open_forward *open; /* owned; highest order first */
    int32_t       backwards;
    bool          done;
    bool         *suspect; /* owned, by parameter; NULL: none is */
} microbatch_state;

/* The number of a request's terms for a parameter.  From NEW once, at the end of a
 * step; to SEVERAL at any time. */
typedef enum { TERMS_NEW, TERMS_ONE, TERMS_SEVERAL } term_count;

typedef struct {
    slot      *slots; /* owned; by microbatch */
    int32_t    next;  /* the first microbatch not finished for this parameter */
    term_count terms;
    bool       had_terms; /* in this step */
} parameter_state;

struct smp_ledger {
    smp_ledger_ops    ops;
    void             *ctx; /* borrowed */
    int32_t           nparameters;
    int32_t           nentries;
    int32_t          *first; /* owned: nentries + 1 */
    int32_t          *uses;  /* owned */
    parameter_state  *parameters;
    microbatch_state *microbatches; /* owned: room for nmicrobatches */
    int32_t           nmicrobatches;
    int32_t           backwards;
    size_t            held;
};

/* -------------------------------------------------------- users of parameters */

static bool
entry_uses(const smp_ledger *ledger, int32_t entry, int32_t parameter)
{
    int32_t low;
    int32_t high;

    if (entry < 0) {
        return true;
    }
    low = ledger->first[entry];
    high = ledger->first[entry + 1];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (ledger->uses[middle] < parameter) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < ledger->first[entry + 1] && ledger->uses[low] == parameter;
}

static bool
is_given(const term *terms, uint64_t order, int32_t backward)
{
    for (; terms != NULL; terms = terms->next) {
        if (terms->order == order && terms->backward == backward) {
            return true;
        }
    }
    return false;
}

/* Whether an open request with this order, or a later one, may still give the parameter
 * a term in this model.backward call.  s: its slot; NULL: it has none. */
static bool
may_come(const smp_ledger *ledger, const microbatch_state *mb, const slot *s,
         int32_t backward, uint64_t order, int32_t parameter)
{
    bool one = ledger->parameters[parameter].terms == TERMS_ONE && s != NULL;

    for (open_forward *o = mb->open; o != NULL && o->order >= order; o = o->next) {
        if (entry_uses(ledger, o->entry, parameter) &&
            !(one && (is_given(s->given, o->order, backward) ||
                      is_given(s->waiting, o->order, backward)))) {
            return true;
        }
    }
    return false;
}

/* s: the parameter's slot in the microbatch; NULL: it has none. */
static bool
is_finished(const smp_ledger *ledger, int32_t microbatch, const slot *s,
            int32_t parameter)
{
    const microbatch_state *mb = &ledger->microbatches[microbatch];

    if (mb->done) {
        return true;
    }
    if (mb->backwards < ledger->backwards) {
        return false;
    }
    if (mb->suspect != NULL && mb->suspect[parameter]) {
        return false;
    }
    return !may_come(ledger, mb, s, mb->backwards - 1, 0, parameter);
}

/* ------------------------------------------------------------------------- sums */

static void
free_terms(const smp_ledger *ledger, term *terms)
{
    while (terms != NULL) {
        term *t = terms;

        terms = t->next;
        if (t->value != NULL) {
            ledger->ops.drop(ledger->ctx, t->value);
        }
        free(t);
    }
}

/* *sum += value; takes value. */
static smp_status
add_to(smp_ledger *ledger, void **sum, void *value)
{
    if (*sum == NULL) {
        *sum = value;
        return SMP_OK;
    }
    ledger->held--;
    return ledger->ops.add(ledger->ctx, sum, value);
}

/* Moves terms into the call's sum: those with no more to wait for, or all. */
static smp_status
settle(smp_ledger *ledger, slot *s, int32_t parameter, bool all)
{
    const microbatch_state *mb = &ledger->microbatches[s->microbatch];

    while (s->waiting != NULL) {
        term      *t = s->waiting;
        void      *value;
        smp_status status;

        if (!all && may_come(ledger, mb, s, s->backward, t->order, parameter)) {
            return SMP_OK;
        }
        value = t->value;
        s->waiting = t->next;
        t->value = NULL;
        t->next = s->given;
        s->given = t;
        status = add_to(ledger, &s->call_sum, value);
        if (status != SMP_OK) {
            return status;
        }
    }
    return SMP_OK;
}

/* The slot's current call is over: its sum joins those before. */
static smp_status
end_call(smp_ledger *ledger, slot *s, int32_t parameter)
{
    smp_status status = settle(ledger, s, parameter, true);
    void      *value = s->call_sum;

    if (status == SMP_OK && value != NULL) {
        s->call_sum = NULL;
        status = add_to(ledger, &s->sum, value);
    }
    return status;
}

/* Folds the sums of finished microbatches, in order. */
static smp_status
advance(smp_ledger *ledger, int32_t parameter)
{
    parameter_state *p = &ledger->parameters[parameter];

    while (p->next < ledger->nmicrobatches) {
        slot      *s = p->slots;
        smp_status status = SMP_OK;
        bool       here = s != NULL && s->microbatch == p->next;

        if (!is_finished(ledger, p->next, here ? s : NULL, parameter)) {
            return SMP_OK;
        }
        p->next++;
        if (here) {
            void *sum;

            status = end_call(ledger, s, parameter);
            if (status != SMP_OK) {
                return status;
            }
            sum = s->sum;

            p->slots = s->next;
            free_terms(ledger, s->given);
            free(s);
            if (sum != NULL) {
                ledger->held--;
                status = ledger->ops.fold(ledger->ctx, parameter, sum);
            }
            if (status != SMP_OK) {
                return status;
            }
        }
    }
    return SMP_OK;
}

/* advance, and complete after the last microbatch. */
static smp_status
move_on(smp_ledger *ledger, int32_t parameter)
{
    bool       was_left = ledger->parameters[parameter].next < ledger->nmicrobatches;
    smp_status status = advance(ledger, parameter);

    if (status == SMP_OK && was_left &&
        ledger->parameters[parameter].next == ledger->nmicrobatches) {
        status = ledger->ops.complete(ledger->ctx, parameter);
    }
    return status;
}

/* For each parameter of the entry: settles its terms in the microbatch, and moves
 * on. */
static smp_status
move_on_all(smp_ledger *ledger, int32_t microbatch, int32_t entry)
{
    int32_t    count = entry < 0 ? ledger->nparameters
                                 : ledger->first[entry + 1] - ledger->first[entry];
    smp_status status;

    for (int32_t i = 0; i < count; i++) {
        int32_t parameter = entry < 0 ? i : ledger->uses[ledger->first[entry] + i];
        slot   *s = ledger->parameters[parameter].slots;

        while (s != NULL && s->microbatch < microbatch) {
            s = s->next;
        }
        status = s != NULL && s->microbatch == microbatch
                     ? settle(ledger, s, parameter, false)
                     : SMP_OK;
        if (status == SMP_OK) {
            status = move_on(ledger, parameter);
        }
        if (status != SMP_OK) {
            return status;
        }
    }
    return SMP_OK;
}

/* ---------------------------------------------------------------------- lifetime */

static int32_t *
copy_of(const int32_t *numbers, size_t count)
{
    int32_t *copy = malloc((count + 1) * sizeof(*copy));

    if (copy != NULL && count > 0) {
        memcpy(copy, numbers, count * sizeof(*copy));
    }
    return copy;
}

smp_status
smp_ledger_create(int32_t nparameters, int32_t nentries, const int32_t *first,
                  const int32_t *uses, const smp_ledger_ops *ops, void *ctx,
                  smp_ledger **out)
{
    smp_ledger *ledger = calloc(1, sizeof(*ledger));

    if (ledger == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    ledger->ops = *ops;
    ledger->ctx = ctx;
    ledger->nparameters = nparameters;
    ledger->nentries = nentries;
    ledger->first = copy_of(first, (size_t)nentries + 1);
    ledger->uses = copy_of(uses, (size_t)first[nentries]);
    ledger->parameters = calloc((size_t)nparameters + 1, sizeof(*ledger->parameters));
    if (ledger->first == NULL || ledger->uses == NULL || ledger->parameters == NULL) {
        smp_ledger_destroy(ledger);
        return SMP_ERR_NO_MEMORY;
    }
    *out = ledger;
    return SMP_OK;
}

void
smp_ledger_abandon(smp_ledger *ledger)
{
    for (int32_t p = 0; p < ledger->nparameters; p++) {
        while (ledger->parameters[p].slots != NULL) {
            slot *s = ledger->parameters[p].slots;

            free_terms(ledger, s->waiting);
            free_terms(ledger, s->given);
            if (s->sum != NULL) {
                ledger->ops.drop(ledger->ctx, s->sum);
            }
            if (s->call_sum != NULL) {
                ledger->ops.drop(ledger->ctx, s->call_sum);
            }
            ledger->parameters[p].slots = s->next;
            free(s);
        }
        ledger->parameters[p].next = 0;
        ledger->parameters[p].had_terms = false;
    }
    for (int32_t m = 0; m < ledger->nmicrobatches; m++) {
        while (ledger->microbatches[m].open != NULL) {
            open_forward *o = ledger->microbatches[m].open;
            ledger->microbatches[m].open = o->next;
            free(o);
        }
        free(ledger->microbatches[m].suspect);
    }
    free(ledger->microbatches);
    ledger->microbatches = NULL;
    ledger->nmicrobatches = 0;
    ledger->held = 0;
}

void
smp_ledger_destroy(smp_ledger *ledger)
{
    if (ledger == NULL) {
        return;
    }
    if (ledger->parameters != NULL) {
        smp_ledger_abandon(ledger);
    }
    free(ledger->parameters);
    free(ledger->first);
    free(ledger->uses);
    free(ledger);
}

smp_status
smp_ledger_begin(smp_ledger *ledger, int32_t microbatches, int32_t backwards)
{
    smp_ledger_abandon(ledger);
    ledger->microbatches = calloc((size_t)microbatches, sizeof(*ledger->microbatches));
    if (ledger->microbatches == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    ledger->nmicrobatches = microbatches;
    ledger->backwards = backwards;
    return SMP_OK;
}

/* ------------------------------------------------------------------------ events */

static bool
in_range(const smp_ledger *ledger, int32_t microbatch, int32_t entry)
{
    return microbatch >= 0 && microbatch < ledger->nmicrobatches && entry >= -1 &&
           entry < ledger->nentries;
}

bool
smp_ledger_share(const smp_ledger *ledger, int32_t entry, const int32_t *others,
                 size_t nothers)
{
    for (int32_t i = ledger->first[entry]; i < ledger->first[entry + 1]; i++) {
        for (size_t j = 0; j < nothers; j++) {
            if (entry_uses(ledger, others[j], ledger->uses[i])) {
                return true;
            }
        }
    }
    return false;
}

/* Opens a forward, or makes a promised one of the same order so. */
static smp_status
put_open(microbatch_state *mb, uint64_t order, int32_t entry, bool promised)
{
    open_forward **at = &mb->open;
    open_forward  *opened;

    while (*at != NULL && (*at)->order > order) {
        at = &(*at)->next;
    }
    for (opened = *at; opened != NULL && opened->order == order;
         opened = opened->next) {
        if (opened->promised && opened->entry == entry) {
            opened->promised = promised;
            return SMP_OK;
        }
    }
    opened = malloc(sizeof(*opened));
    if (opened == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    *opened = (open_forward){
        .order = order, .entry = entry, .promised = promised, .next = *at};
    *at = opened;
    return SMP_OK;
}

smp_status
smp_ledger_open(smp_ledger *ledger, int32_t microbatch, uint64_t order, int32_t entry)
{
    return in_range(ledger, microbatch, entry)
               ? put_open(&ledger->microbatches[microbatch], order, entry, false)
               : SMP_ERR_INVALID;
}

smp_status
smp_ledger_promise(smp_ledger *ledger, int32_t microbatch, uint64_t order,
                   int32_t entry)
{
    const smp_status status = smp_ledger_suspect(ledger, microbatch, entry);

    return status == SMP_OK
               ? put_open(&ledger->microbatches[microbatch], order, entry, true)
               : status;
}

smp_status
smp_ledger_close(smp_ledger *ledger, int32_t microbatch, uint64_t order, int32_t entry)
{
    open_forward **at;

    if (!in_range(ledger, microbatch, entry)) {
        return SMP_ERR_INVALID;
    }
    at = &ledger->microbatches[microbatch].open;
    while (*at != NULL && ((*at)->order != order || (*at)->entry != entry)) {
        at = &(*at)->next;
    }
    if (*at == NULL) { /* a graph from a finished microbatch */
        return ledger->microbatches[microbatch].done ? SMP_OK : SMP_ERR_INVALID;
    }
    {
        open_forward *closed = *at;

        *at = closed->next;
        free(closed);
    }
    return move_on_all(ledger, microbatch, entry);
}

smp_status
smp_ledger_suspect(smp_ledger *ledger, int32_t microbatch, int32_t entry)
{
    microbatch_state *mb;

    if (!in_range(ledger, microbatch, entry) || entry < 0) {
        return SMP_ERR_INVALID;
    }
    mb = &ledger->microbatches[microbatch];
    if (mb->suspect == NULL) {
        mb->suspect = calloc((size_t)ledger->nparameters + 1, sizeof(*mb->suspect));
        if (mb->suspect == NULL) {
            return SMP_ERR_NO_MEMORY;
        }
    }
    for (int32_t i = ledger->first[entry]; i < ledger->first[entry + 1]; i++) {
        mb->suspect[ledger->uses[i]] = true;
    }
    return SMP_OK;
}

smp_status
smp_ledger_backward(smp_ledger *ledger, int32_t microbatch, int32_t backward)
{
    if (!in_range(ledger, microbatch, -1)) {
        return SMP_ERR_INVALID;
    }
    if (ledger->microbatches[microbatch].backwards <= backward) {
        ledger->microbatches[microbatch].backwards = backward + 1;
    }
    return SMP_OK;
}

smp_status
smp_ledger_add(smp_ledger *ledger, int32_t microbatch, int32_t backward, uint64_t order,
               int32_t parameter, void *value)
{
    parameter_state *p;
    slot           **at;
    term           **behind;
    term            *added;

    if (!in_range(ledger, microbatch, -1) || parameter < 0 ||
        parameter >= ledger->nparameters) {
        ledger->ops.drop(ledger->ctx, value);
        return SMP_ERR_INVALID;
    }
    p = &ledger->parameters[parameter];
    p->had_terms = true;
    if (microbatch < p->next) { /* finished, as far as known by then: still right
                                   within rounding */
        p->terms = TERMS_SEVERAL;
        return ledger->ops.fold(ledger->ctx, parameter, value);
    }
    at = &p->slots;
    while (*at != NULL && (*at)->microbatch < microbatch) {
        at = &(*at)->next;
    }
    if (*at == NULL || (*at)->microbatch != microbatch) {
        slot *fresh = calloc(1, sizeof(*fresh));

        if (fresh == NULL) {
            ledger->ops.drop(ledger->ctx, value);
            return SMP_ERR_NO_MEMORY;
        }
        fresh->microbatch = microbatch;
        fresh->backward = backward;
        fresh->next = *at;
        *at = fresh;
    }
    if ((*at)->backward < backward) {
        smp_status status = end_call(ledger, *at, parameter);

        if (status != SMP_OK) {
            ledger->ops.drop(ledger->ctx, value);
            return status;
        }
        (*at)->backward = backward;
    }
    if (is_given((*at)->given, order, backward) ||
        is_given((*at)->waiting, order, backward)) {
        p->terms = TERMS_SEVERAL;
    }
    behind = &(*at)->waiting;
    while (*behind != NULL && (*behind)->order > order) {
        behind = &(*behind)->next;
    }
    if (*behind != NULL &&
        (*behind)->order == order) { /* the same request's: one term */
        return ledger->ops.add(ledger->ctx, &(*behind)->value, value);
    }
    added = malloc(sizeof(*added));
    if (added == NULL) {
        ledger->ops.drop(ledger->ctx, value);
        return SMP_ERR_NO_MEMORY;
    }
    *added =
        (term){.value = value, .order = order, .backward = backward, .next = *behind};
    *behind = added;
    ledger->held++;
    {
        smp_status status = settle(ledger, *at, parameter, false);

        return status == SMP_OK && p->terms == TERMS_ONE ? move_on(ledger, parameter)
                                                         : status;
    }
}

/* No term is to come: open forwards get no backward. */
static void
finish_microbatch(microbatch_state *mb)
{
    mb->done = true;
    while (mb->open != NULL) {
        open_forward *o = mb->open;

        mb->open = o->next;
        free(o);
    }
}

smp_status
smp_ledger_done(smp_ledger *ledger, int32_t microbatch)
{
    if (!in_range(ledger, microbatch, -1)) {
        return SMP_ERR_INVALID;
    }
    finish_microbatch(&ledger->microbatches[microbatch]);
    return move_on_all(ledger, microbatch, -1);
}

smp_status
smp_ledger_end(smp_ledger *ledger)
{
    for (int32_t i = 0; i < ledger->nparameters; i++) {
        parameter_state *p = &ledger->parameters[i];

        if (p->terms == TERMS_NEW && p->had_terms) {
            p->terms = TERMS_ONE;
        }
    }
    for (int32_t m = 0; m < ledger->nmicrobatches; m++) {
        finish_microbatch(&ledger->microbatches[m]);
    }
    return ledger->nmicrobatches == 0
               ? SMP_OK
               : move_on_all(ledger, ledger->nmicrobatches - 1, -1);
}

size_t
smp_ledger_held(const smp_ledger *ledger)
{
    return ledger->held;
}

static smp_status
visit_slot(const slot *s, smp_status (*visit)(void *ctx, void *term), void *ctx)
{
    smp_status status = s->sum == NULL ? SMP_OK : visit(ctx, s->sum);

    if (status == SMP_OK && s->call_sum != NULL) {
        status = visit(ctx, s->call_sum);
    }
    for (const term *t = s->waiting; status == SMP_OK && t != NULL; t = t->next) {
        status = visit(ctx, t->value);
    }
    return status;
}

smp_status
smp_ledger_visit(const smp_ledger *ledger, smp_status (*visit)(void *ctx, void *term),
                 void             *ctx)
{
    smp_status status = SMP_OK;

    for (int32_t p = 0; status == SMP_OK && p < ledger->nparameters; p++) {
        const slot *s = ledger->parameters[p].slots;

        for (; status == SMP_OK && s != NULL; s = s->next) {
            status = visit_slot(s, visit, ctx);
        }
    }
    return status;
}
