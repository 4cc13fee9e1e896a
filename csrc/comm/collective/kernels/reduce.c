/* The tree, one piece of the tensors at a time, so that terms stay in the first cache.
 *
 * Terms are pushed on a stack and merged as in a binary counter: after term i, as many
 * pairs are merged as i + 1 has trailing zero bits.  The rest is merged at the end,
 * from the right.  The last merge of all writes the result.
 */
#include "comm/collective/kernels/reduce.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

/* Elements of a piece: at most 16 KiB. */
#define PIECE 2048u
#define LEVEL_BYTES (PIECE * sizeof(double))

/* The stack never holds more: SMP_REDUCE_TENSORS is 2^10, and one for the merge. */
#define LEVELS 12

_Static_assert(LEVELS *LEVEL_BYTES == SMP_REDUCE_SCRATCH, "scratch is the stack");

/* The common values of all pieces. */
typedef struct {
    const smp_kernels  *kernels;
    smp_reduction       reduction;
    smp_dtype           dtype; /* of the tensors */
    smp_dtype           term;  /* of the terms: smp_term_dtype() */
    smp_binary_kernel  *merge;
    smp_scaling_kernel *divide;   /* NULL: not AVG */
    smp_scaling_kernel *multiply; /* NULL: not PREMUL_SUM */
    smp_convert_kernel *widen;    /* NULL: term is dtype */
    smp_convert_kernel *narrow;   /* the same */
    const double       *factors;
    int                 n;
    bool                is_part; /* the result is a term of a larger tree */
} reduction_plan;

/* Term i as the tree wants it: the tensor itself or, made in `level`, a copy. */
static const void *
leaf(const reduction_plan *plan, const void *in, double factor, size_t count,
     void *level)
{
    if (plan->widen != NULL) {
        plan->widen(level, in, count);
        in = level;
    }
    if (plan->multiply != NULL) {
        plan->multiply(level, in, factor, count);
        in = level;
    }
    return in;
}

/* The terms still to be merged. */
typedef struct {
    const void *terms[LEVELS];
    int         depth;
} term_stack;

/* Merges the last terms on the stack: one pair for each zero bit at the end of `pairs`,
 * or all: then the last merge goes to `root`, if not NULL. */
static void
merge(const reduction_plan *plan, term_stack *stack, int pairs, bool all, void *root,
      size_t count, uint8_t *scratch)
{
    for (; stack->depth > 1 && (all || (pairs & 1) == 0); pairs >>= 1) {
        const void **pair = &stack->terms[stack->depth - 2];
        void        *to = scratch + (size_t)(stack->depth - 2) * LEVEL_BYTES;

        if (all && stack->depth == 2 && root != NULL) {
            to = root;
        }
        plan->merge(to, pair[0], pair[1], count);
        pair[0] = to;
        stack->depth--;
    }
}

/* Turns the root of the tree, in `root`, into the result. */
static void
finish(const reduction_plan *plan, void *out, const void *root, size_t count,
       void *level)
{
    assert(out != NULL);
    if (plan->divide != NULL) {
        void *to = plan->widen != NULL ? level : out;

        plan->divide(to, root, plan->n, count);
        root = to;
    }
    if (plan->widen != NULL) {
        plan->narrow(out, root, count);
    } else if (root != out) {
        memcpy(out, root, count * smp_dtype_bytes(plan->dtype));
    }
}

static void
reduce_piece(const reduction_plan *plan, uint8_t *out, const void *const *in,
             size_t start, size_t count, uint8_t *scratch)
{
    term_stack stack = {.depth = 0};
    size_t     skip = start * smp_dtype_bytes(plan->dtype);
    uint8_t   *to =
        out + start * smp_dtype_bytes(plan->is_part ? plan->term : plan->dtype);
    void *root = plan->is_part || plan->widen == NULL ? to : NULL;

    for (int i = 0; i < plan->n; i++) {
        stack.terms[stack.depth] =
            leaf(plan, (const uint8_t *)in[i] + skip,
                 plan->factors != NULL ? plan->factors[i] : 1, count,
                 scratch + (size_t)stack.depth * LEVEL_BYTES);
        stack.depth++;
        merge(plan, &stack, i + 1, i + 1 == plan->n, root, count, scratch);
    }
    if (!plan->is_part) {
        finish(plan, to, stack.terms[0], count, scratch);
    }
}

/* The same from terms; each but the last has a power of two of tensors. */
static void
reduce_terms_piece(const reduction_plan *plan, uint8_t *out, const smp_term *terms,
                   int nterms, size_t start, size_t count, uint8_t *scratch)
{
    term_stack stack = {.depth = 0};
    uint8_t   *to = out + start * smp_dtype_bytes(plan->dtype);
    int        end = 0;

    for (int i = 0; i < nterms; i++) {
        const uint8_t *data = terms[i].data;

        if (terms[i].n == 1) {
            data =
                leaf(plan, data + start * smp_dtype_bytes(plan->dtype), terms[i].factor,
                     count, scratch + (size_t)stack.depth * LEVEL_BYTES);
        } else {
            data += start * smp_dtype_bytes(plan->term);
        }
        stack.terms[stack.depth++] = data;
        end += terms[i].n;
        merge(plan, &stack, end / terms[i].n, i + 1 == nterms,
              plan->widen == NULL ? to : NULL, count, scratch);
    }
    finish(plan, to, stack.terms[0], count, scratch);
}

/* Integers are divided, and floats of 8 bits converted, by the plain kernels only. */
static smp_scaling_kernel *
divide_of(const smp_kernels *kernels, smp_dtype term)
{
    return kernels->divide[term] != NULL ? kernels->divide[term]
                                         : smp_kernels_scalar.divide[term];
}

static smp_convert_kernel *
widen_of(const smp_kernels *kernels, smp_dtype dtype)
{
    return kernels->widen[dtype] != NULL ? kernels->widen[dtype]
                                         : smp_kernels_scalar.widen[dtype];
}

static smp_convert_kernel *
narrow_of(const smp_kernels *kernels, smp_dtype dtype)
{
    return kernels->narrow[dtype] != NULL ? kernels->narrow[dtype]
                                          : smp_kernels_scalar.narrow[dtype];
}

const smp_kernels *
smp_kernels_of(smp_isa isa)
{
    static const smp_kernels *const sets[SMP_ISAS] = {
        [SMP_ISA_SCALAR] = &smp_kernels_scalar,
#if defined(__x86_64__)
        [SMP_ISA_AVX2] = &smp_kernels_avx2,
        [SMP_ISA_AVX512] = &smp_kernels_avx512,
#endif
    };

    return smp_isa_runs(isa) ? sets[isa] : NULL;
}

const smp_kernels *
smp_kernels_best(void)
{
    for (smp_isa isa = SMP_ISAS; isa-- > SMP_ISA_SCALAR;) {
        const smp_kernels *kernels = smp_kernels_of(isa);

        if (kernels != NULL) {
            return kernels;
        }
    }
    return &smp_kernels_scalar;
}

smp_dtype
smp_term_dtype(smp_dtype dtype)
{
    return smp_kernels_scalar.widen[dtype] != NULL ? SMP_F32 : dtype;
}

bool
smp_reduction_defined(smp_reduction reduction, smp_dtype dtype)
{
    const smp_kernels *kernels = &smp_kernels_scalar;
    smp_dtype          term = smp_term_dtype(dtype);

    switch (reduction) {
    case SMP_AVG:
        return kernels->divide[term] != NULL;
    case SMP_PREMUL_SUM:
        return kernels->multiply[term] != NULL;
    case SMP_SUM:
    case SMP_PRODUCT:
    case SMP_MIN:
    case SMP_MAX:
    case SMP_BAND:
    case SMP_BOR:
    case SMP_BXOR:
        return kernels->binary[term][reduction] != NULL;
    case SMP_REDUCTIONS:
        break;
    }
    return false;
}

static reduction_plan
make_plan(const smp_kernels *kernels, smp_reduction reduction, smp_dtype dtype,
          const double *factors, int n, bool is_part)
{
    smp_dtype term = smp_term_dtype(dtype);

    assert(smp_reduction_defined(reduction, dtype));
    assert(n >= 1 && n <= SMP_REDUCE_TENSORS);
    return (reduction_plan){
        .kernels = kernels,
        .reduction = reduction,
        .dtype = dtype,
        .term = term,
        .merge = kernels->binary[term][reduction <= SMP_BXOR ? reduction : SMP_SUM],
        .divide = reduction == SMP_AVG ? divide_of(kernels, term) : NULL,
        .multiply = reduction == SMP_PREMUL_SUM ? kernels->multiply[term] : NULL,
        .widen = widen_of(kernels, dtype),
        .narrow = narrow_of(kernels, dtype),
        .factors = factors,
        .n = n,
        .is_part = is_part,
    };
}

static void
reduce(const reduction_plan *plan, void *out, const void *const *in, size_t count,
       void *scratch)
{
    for (size_t start = 0; start < count; start += PIECE) {
        size_t left = count - start;

        reduce_piece(plan, out, in, start, left < PIECE ? left : PIECE, scratch);
    }
}

void
smp_reduce_term(const smp_kernels *kernels, smp_reduction reduction, smp_dtype dtype,
                void *out, const void *const *in, const double *factors, int n,
                size_t count, void *scratch)
{
    reduction_plan plan = make_plan(kernels, reduction, dtype, factors, n, true);

    assert(n >= 2);
    reduce(&plan, out, in, count, scratch);
}

void
smp_reduce_terms(const smp_kernels *kernels, smp_reduction reduction, smp_dtype dtype,
                 void *out, const smp_term *terms, int nterms, size_t count,
                 void *scratch)
{
    reduction_plan plan;
    int            n = 0;

    for (int i = 0; i < nterms; i++) {
        n += terms[i].n;
    }
    plan = make_plan(kernels, reduction, dtype, NULL, n, false);
    for (size_t start = 0; start < count; start += PIECE) {
        size_t left = count - start;

        reduce_terms_piece(&plan, out, terms, nterms, start,
                           left < PIECE ? left : PIECE, scratch);
    }
}

void
smp_reduce(const smp_kernels *kernels, smp_reduction reduction, smp_dtype dtype,
           void *out, const void *const *in, const double *factors, int n, size_t count,
           void *scratch)
{
    reduction_plan plan = make_plan(kernels, reduction, dtype, factors, n, false);

    reduce(&plan, out, in, count, scratch);
}
