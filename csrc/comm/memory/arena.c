/* The arena's books.
 *
 * A slot describes a run of bytes, free or taken.  It is linked to its neighbours in
 * address order, so a freed run finds the free runs beside it.  Free runs of about one
 * size are in one bin.  Taken ones are in a ring list, in the order of their taking; a
 * hand moves around this list and finds the returned ones.
 */
#define _GNU_SOURCE
#include "comm/memory/arena.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/lock.h"

#define NONE UINT32_MAX

/* Every offset and size is a multiple. */
#define UNIT 64u

/* A rest smaller than this is not worth a slot. */
#define MIN_REST 1024u

/* Bins: a power of two, cut into 2^STEP_BITS. */
#define STEP_BITS 3
#define STEPS (1u << STEP_BITS)
#define POWERS 48u

/* The hand's looks at taken blocks in each call of take: more than one, so that the
 * hand gains on the takes. */
#define LOOKS 4

/* The number of tried runs of the bin below before giving up. */
#define TRIES 32

/* Pages are made in steps, one ahead of the highest use. */
#define PAGES_STEP ((uint64_t)2 << 20)

typedef enum { RUN_NONE, RUN_FREE, RUN_TAKEN } run_state;

typedef struct {
    uint64_t  offset;
    uint64_t  bytes;
    uint32_t  below; /* neighbours by address */
    uint32_t  above;
    uint32_t  next; /* in the bin, the taken list, or the list of unused slots */
    uint32_t  prev;
    run_state state;
} run;

/* A range perhaps still open to another process's writes. */
typedef struct keep {
    uint64_t     offset;
    uint64_t     bytes;
    smp_user    *users; /* owned, with nusers */
    int          nusers;
    uint64_t     last; /* their last step */
    struct keep *next;
} keep;

struct smp_arena {
    smp_segment     *segment;  /* owned: one reference */
    smp_arena_ground ground;   /* set at create; states lie in the segment */
    _Atomic uint64_t touched;  /* no block has ended above */
    _Atomic uint64_t expected; /* by smp_arena_expect() */
    _Atomic uint64_t made;     /* pages below exist */
    smp_lock         lock;     /* guards all below */
    run             *runs;     /* owned: one per slot */
    uint32_t         unused;   /* list of slots without a run */
    uint32_t         fresh;    /* this slot and those above never described anything */
    uint32_t         hand;     /* the taken slot to look at next */
    uint32_t         ntaken;
    keep            *keeps; /* owned: list */
    uint64_t         in_use;
    uint64_t         high;
    uint64_t         powers;        /* bit p: a bin of power p has runs */
    uint8_t          steps[POWERS]; /* bit s: bins[p][s] has runs */
    uint32_t         bins[POWERS][STEPS];
};

static unsigned
log2_floor(uint64_t x)
{
    return 63u - (unsigned)__builtin_clzll(x);
}

/* The bin of runs of `bytes`. */
static void
bin_of(uint64_t bytes, unsigned *power, unsigned *step)
{
    unsigned p = log2_floor(bytes);

    *power = p;
    *step = (unsigned)(bytes >> (p - STEP_BITS)) & (STEPS - 1);
}

static void
bin_put(smp_arena *arena, uint32_t slot)
{
    unsigned p;
    unsigned s;
    run     *r = &arena->runs[slot];

    bin_of(r->bytes, &p, &s);
    r->state = RUN_FREE;
    r->prev = NONE;
    r->next = arena->bins[p][s];
    if (r->next != NONE) {
        arena->runs[r->next].prev = slot;
    }
    arena->bins[p][s] = slot;
    arena->steps[p] |= (uint8_t)(1u << s);
    arena->powers |= (uint64_t)1 << p;
}

static void
bin_take(smp_arena *arena, uint32_t slot)
{
    unsigned p;
    unsigned s;
    run     *r = &arena->runs[slot];

    bin_of(r->bytes, &p, &s);
    if (r->next != NONE) {
        arena->runs[r->next].prev = r->prev;
    }
    if (r->prev != NONE) {
        arena->runs[r->prev].next = r->next;
        return;
    }
    arena->bins[p][s] = r->next;
    if (r->next == NONE) {
        arena->steps[p] &= (uint8_t) ~(1u << s);
        if (arena->steps[p] == 0) {
            arena->powers &= ~((uint64_t)1 << p);
        }
    }
}

static void
taken_put(smp_arena *arena, uint32_t slot)
{
    run *r = &arena->runs[slot];

    r->state = RUN_TAKEN;
    if (arena->ntaken == 0) {
        r->next = slot;
        r->prev = slot;
        arena->hand = slot;
    } else { /* behind the hand: looked at last */
        run *h = &arena->runs[arena->hand];

        r->next = arena->hand;
        r->prev = h->prev;
        arena->runs[h->prev].next = slot;
        h->prev = slot;
    }
    arena->ntaken++;
}

static void
taken_remove(smp_arena *arena, uint32_t slot)
{
    run *r = &arena->runs[slot];

    arena->runs[r->prev].next = r->next;
    arena->runs[r->next].prev = r->prev;
    if (arena->hand == slot) {
        arena->hand = r->next;
    }
    arena->ntaken--;
}

static void
slot_drop(smp_arena *arena, uint32_t slot)
{
    arena->runs[slot].state = RUN_NONE;
    arena->runs[slot].next = arena->unused;
    arena->unused = slot;
}

/* Adds the run above `slot` to it, if free. */
static void
join_above(smp_arena *arena, uint32_t slot)
{
    run     *r = &arena->runs[slot];
    uint32_t above = r->above;

    if (above == NONE || arena->runs[above].state != RUN_FREE) {
        return;
    }
    bin_take(arena, above);
    r->bytes += arena->runs[above].bytes;
    r->above = arena->runs[above].above;
    if (r->above != NONE) {
        arena->runs[r->above].below = slot;
    }
    slot_drop(arena, above);
}

/* A taken run becomes free. */
static void
give_back(smp_arena *arena, uint32_t slot)
{
    uint32_t below = arena->runs[slot].below;

    taken_remove(arena, slot);
    arena->in_use -= arena->runs[slot].bytes;
    join_above(arena, slot);
    bin_put(arena, slot);
    if (below != NONE && arena->runs[below].state == RUN_FREE) {
        bin_take(arena, below);
        join_above(arena, below);
        bin_put(arena, below);
    }
}

static void
drop_keep(keep *k)
{
    smp_user_forget(k->users, k->nusers);
    free(k);
}

/* Drops the ranges without a writer. */
static void
drop_keeps(smp_arena *arena)
{
    keep **link = &arena->keeps;

    while (*link != NULL) {
        keep *k = *link;
        bool  wanted = false;

        for (int i = 0; i < k->nusers && !wanted; i++) {
            wanted = smp_user_operates(&k->users[i], k->last);
        }
        if (wanted) {
            link = &k->next;
        } else {
            *link = k->next;
            drop_keep(k);
        }
    }
}

static bool
is_kept(const smp_arena *arena, uint32_t slot)
{
    const run *r = &arena->runs[slot];

    for (const keep *k = arena->keeps; k != NULL; k = k->next) {
        if (k->offset < r->offset + r->bytes && r->offset < k->offset + k->bytes) {
            return true;
        }
    }
    return false;
}

/* Moves the hand over up to `looks` blocks, taking back the free ones. */
static void
collect(smp_arena *arena, uint32_t looks)
{
    drop_keeps(arena);
    for (uint32_t i = 0; i < looks && arena->ntaken != 0; i++) {
        uint32_t slot = arena->hand;

        arena->hand = arena->runs[slot].next;
        /* acquire: the reader's last loads come before our next stores */
        if (atomic_load_explicit(&arena->ground.states[slot], memory_order_acquire) ==
                SMP_SLOT_FREE &&
            !is_kept(arena, slot)) {
            give_back(arena, slot);
        }
    }
}

/* A free run of at least `bytes`, or NONE. */
static uint32_t
find(const smp_arena *arena, uint64_t bytes)
{
    unsigned p;
    unsigned s;
    unsigned bits;
    uint64_t up;
    uint32_t slot;

    /* Every run of the next bin up fits; the smallest such bin with a run. */
    up = bytes + ((uint64_t)1 << (log2_floor(bytes) - STEP_BITS)) - 1;
    bin_of(up, &p, &s);
    bits = (unsigned)arena->steps[p] & ~((1u << s) - 1);
    if (bits == 0) {
        uint64_t above = arena->powers & ~(((uint64_t)2 << p) - 1);

        if (above != 0) {
            p = (unsigned)__builtin_ctzll(above);
            bits = arena->steps[p];
        }
    }
    if (bits != 0) {
        return arena->bins[p][__builtin_ctz(bits)];
    }
    /* The bin of `bytes` itself may hold a large enough one. */
    bin_of(bytes, &p, &s);
    slot = arena->bins[p][s];
    for (int i = 0; i < TRIES && slot != NONE; i++) {
        if (arena->runs[slot].bytes >= bytes) {
            return slot;
        }
        slot = arena->runs[slot].next;
    }
    return NONE;
}

/* Cuts the excess over `bytes` off the run `slot`.  The run is in no list. */
static void
cut(smp_arena *arena, uint32_t slot, uint64_t bytes)
{
    run     *r = &arena->runs[slot];
    uint32_t rest = arena->unused;

    if (r->bytes - bytes < MIN_REST) {
        return;
    }
    if (rest != NONE) {
        arena->unused = arena->runs[rest].next;
    } else if (arena->fresh < arena->ground.nslots) {
        rest = arena->fresh++;
    } else {
        return;
    }
    arena->runs[rest] = (run){.offset = r->offset + bytes,
                              .bytes = r->bytes - bytes,
                              .below = slot,
                              .above = r->above};
    if (r->above != NONE) {
        arena->runs[r->above].below = rest;
    }
    r->above = rest;
    r->bytes = bytes;
    bin_put(arena, rest);
}

smp_status
smp_arena_create(smp_segment *segment, smp_arena **out)
{
    const smp_arena_ground ground = {
        .states = segment->states,
        .nslots = segment->arena_slots,
        .bytes = segment->arena_bytes,
        .memory = segment->arena,
    };

    return smp_arena_create_over(segment, &ground, out);
}

smp_status
smp_arena_create_over(smp_segment *segment, const smp_arena_ground *ground,
                      smp_arena **out)
{
    smp_arena *arena = calloc(1, sizeof(*arena));

    if (arena == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    arena->runs = calloc(ground->nslots, sizeof(*arena->runs));
    if (arena->runs == NULL) {
        free(arena);
        return SMP_ERR_NO_MEMORY;
    }
    smp_segment_ref(segment);
    arena->segment = segment;
    arena->ground = *ground;
    smp_lock_init(&arena->lock, SMP_LOCK_ARENA);
    for (unsigned p = 0; p < POWERS; p++) {
        for (unsigned s = 0; s < STEPS; s++) {
            arena->bins[p][s] = NONE;
        }
    }
    arena->unused = NONE;
    arena->fresh = 1;
    if (ground->bytes != 0) {
        arena->runs[0] = (run){.bytes = ground->bytes, .below = NONE, .above = NONE};
        bin_put(arena, 0);
    }
    *out = arena;
    return SMP_OK;
}

void
smp_arena_destroy(smp_arena *arena)
{
    if (arena == NULL) {
        return;
    }
    while (arena->keeps != NULL) {
        keep *k = arena->keeps;

        arena->keeps = k->next;
        drop_keep(k);
    }
    smp_lock_fini(&arena->lock);
    smp_segment_unref(arena->segment);
    free(arena->runs);
    free(arena);
}

bool
smp_arena_take(smp_arena *arena, size_t bytes, uint32_t *slot, uint64_t *offset)
{
    uint64_t rounded;
    uint64_t end;
    uint32_t found;

    if (bytes > arena->ground.bytes) {
        return false;
    }
    rounded = bytes < UNIT ? UNIT : (bytes + UNIT - 1) / UNIT * UNIT;
    smp_lock_acquire(&arena->lock);
    collect(arena, LOOKS);
    found = find(arena, rounded);
    if (found == NONE) {
        collect(arena, arena->ntaken);
        found = find(arena, rounded);
    }
    if (found == NONE) {
        smp_lock_release(&arena->lock);
        return false;
    }
    bin_take(arena, found);
    cut(arena, found, rounded);
    taken_put(arena, found);
    arena->in_use += arena->runs[found].bytes;
    if (arena->in_use > arena->high) {
        arena->high = arena->in_use;
    }
    *slot = found;
    *offset = arena->runs[found].offset;
    end = *offset + arena->runs[found].bytes;
    if (end > atomic_load_explicit(&arena->touched, memory_order_relaxed)) {
        atomic_store_explicit(&arena->touched, end, memory_order_relaxed);
    }
    atomic_store_explicit(&arena->ground.states[found], SMP_SLOT_TAKEN,
                          memory_order_relaxed);
    smp_lock_release(&arena->lock);
    return true;
}

void
smp_arena_keep(smp_arena *arena, uint64_t offset, uint64_t bytes, smp_user *users,
               int n, uint64_t last)
{
    keep *k = malloc(sizeof(*k));

    if (k == NULL) { /* the blocks are used again at once */
        smp_user_forget(users, n);
        return;
    }
    *k = (keep){offset, bytes, users, n, last, NULL};
    smp_lock_acquire(&arena->lock);
    k->next = arena->keeps;
    arena->keeps = k;
    drop_keeps(arena);
    smp_lock_release(&arena->lock);
}

void
smp_arena_measure(smp_arena *arena, smp_arena_use *use)
{
    uint64_t made;
    uint64_t touched;

    smp_lock_acquire(&arena->lock);
    collect(arena, arena->ntaken);
    made = atomic_load_explicit(&arena->made, memory_order_relaxed);
    touched = atomic_load_explicit(&arena->touched, memory_order_relaxed);
    *use = (smp_arena_use){
        .in_use = arena->in_use,
        .high = arena->high,
        .made = made > touched ? made : touched,
        .size = arena->ground.bytes,
    };
    smp_lock_release(&arena->lock);
}

void
smp_arena_expect(smp_arena *arena, uint64_t bytes)
{
    atomic_store_explicit(&arena->expected, bytes, memory_order_relaxed);
}

bool
smp_arena_wants_pages(const smp_arena *arena)
{
    uint64_t made = atomic_load_explicit(&arena->made, memory_order_relaxed);
    uint64_t touched = atomic_load_explicit(&arena->touched, memory_order_relaxed);
    uint64_t expected = atomic_load_explicit(&arena->expected, memory_order_relaxed);

    return arena->ground.memory != NULL && made < arena->ground.bytes &&
           (made < touched + PAGES_STEP || made < expected);
}

void
smp_arena_make_pages(smp_arena *arena)
{
    uint64_t made = atomic_load_explicit(&arena->made, memory_order_relaxed);
    uint64_t touched = atomic_load_explicit(&arena->touched, memory_order_relaxed);
    uint64_t left;

    if (made < touched) {
        made = touched / PAGES_STEP * PAGES_STEP; /* made by their users meanwhile */
    }
    left = arena->ground.bytes - made;
    if (left > PAGES_STEP) {
        left = PAGES_STEP;
    }
    smp_segment_make_pages(arena->ground.memory + made, left);
    atomic_store_explicit(&arena->made, made + left, memory_order_relaxed);
}
