/* The CPU kernels of tensor parallelism, for operations slow in torch or missing for a
 * slice.
 *
 * Tensors are dense and row-major; `rows` and `columns` may be 0.  Values are widened
 * to float32, every operation is one of float32, and a result is rounded once, when
 * written.
 *
 * One set of kernels is in plain C, and one for each kind of vectors.  They differ in
 * the order of the sums inside a row, so by rounding; one set gives a row the same bits
 * wherever it stands.
 *
 * Ownership  Everything is the caller's; an output overlaps no input except where it is
 *            said.  `scratch` need not be initialised.
 * Threads    Any; no state outside the arguments.
 * Errors     None, but where it is said.
 */
#ifndef SMP_TP_KERNELS_TP_KERNELS_H
#define SMP_TP_KERNELS_TP_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/isa.h"

/* The dtype of all tensors of a call, but where said. */
typedef enum { SMP_TP_F32, SMP_TP_F16, SMP_TP_BF16, SMP_TP_DTYPES } smp_tp_dtype;

size_t smp_tp_dtype_bytes(smp_tp_dtype dtype); /* of one element */

/* Floats of a row of scratch: whole vectors, a warp the widest. */
#define SMP_TP_SCRATCH_ROW(columns) (((columns) + 31) / 32 * 32)

/* Dropout: y = keep ? x / (1 - p) : 0.
 *
 * The element with global index i is kept when half i % 8 (the lower one of a word
 * first) of Philox4x32-7(counter = i / 8, key = seed) is at least p * 2^16, rounded to
 * nearest, and to less than 2^16.  So any part of the tensor may be a call, and
 * backward makes the mask again.  Philox, because torch and cuRAND use this generator
 * on GPUs, and a word needs 2 products of 32 bits a round.  7 rounds, because with so
 * many it passes BigCrush. [Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
 * SC 2011]  16 bits an element, because with 32 and 10 rounds the generator is half of
 * a kernel's time; p is met within 2^-17.
 *
 * Row r and column c of the call have the global index
 *
 *     first + (r / run) * jump + (r % run) * width + c
 *
 * so a call may have consecutive rows, some heads of each sample, or some columns. */
typedef struct {
    double   p; /* in [0, 1]; 0: everything is kept, the rest does not count */
    uint64_t seed;
    uint64_t first;
    uint64_t run; /* >= 1 */
    uint64_t jump;
    uint64_t width;
} smp_tp_dropout;

/* out = residual + dropout(x + bias).  Without a bias and a residual it is dropout, and
 * its own backward. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         columns;
    smp_tp_dropout dropout;
    const void    *x;        /* [rows, columns] */
    const void    *bias;     /* [columns] or NULL */
    const void    *residual; /* [rows, columns] or NULL */
    void          *out;      /* [rows, columns]; may be x or residual */
} smp_tp_residual;

/* grad_x = dropout(grad); grad_bias = the sum of its rows.  The residual's gradient is
 * grad. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         columns;
    smp_tp_dropout dropout;
    const void    *grad;      /* [rows, columns] */
    void          *grad_x;    /* [rows, columns]; may be grad */
    void          *grad_bias; /* [columns] or NULL */
    float         *scratch;   /* 2 rows; NULL without grad_bias */
} smp_tp_residual_backward;

/* The keys seen by a row of scores: all, or those at or before its own position, or the
 * last `window` of those.  Row r has query r % queries, at position first_query + r %
 * queries; key k has position k. */
typedef struct {
    bool    causal; /* else the rest does not count */
    int64_t first_query;
    size_t  queries; /* >= 1 */
    size_t  window;  /* 0: all */
} smp_tp_sight;

#define SMP_TP_MASK_DIMS 8

/* The addend of the scores.  The rows of the call form a tensor of `shape`.  The mask
 * of row [i, j, ...] begins at element i * strides[0] + j * strides[1] ...; its keys
 * follow one another. */
typedef struct {
    const void *data; /* NULL: no mask */
    int         dims; /* 0 without a mask */
    size_t      shape[SMP_TP_MASK_DIMS];
    size_t      strides[SMP_TP_MASK_DIMS];
} smp_tp_mask;

/* probabilities = softmax(scores * scale + mask) over the keys seen by a row, 0 for the
 * others, and 0 for all of a row fully masked with -infinity; out =
 * dropout(probabilities). */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         keys;
    float          scale;
    smp_tp_sight   sight;
    smp_tp_dropout dropout;
    const void    *scores; /* [rows, keys] */
    smp_tp_mask    mask;
    void          *probabilities; /* [rows, keys]; may be scores */
    void          *out;           /* [rows, keys] or NULL; may be scores */
    float         *scratch;       /* a row */
} smp_tp_softmax;

/* grad_scores = scale * p * (g - sum of p * g), where g = dropout(grad). */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         keys;
    float          scale;
    smp_tp_sight   sight;
    smp_tp_dropout dropout;
    const void    *probabilities; /* [rows, keys] */
    const void    *grad;          /* [rows, keys] */
    void          *grad_scores;   /* [rows, keys]; may be probabilities or grad */
    float         *scratch;       /* a row */
} smp_tp_softmax_backward;

/* sum = residual + dropout(x + bias); out = (sum - mean) * rstd * weight + shift, where
 * rstd = 1 / sqrt(variance + eps), of each row. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         columns;
    smp_tp_dropout dropout;
    const void    *x;        /* [rows, columns] */
    const void    *bias;     /* [columns] or NULL */
    const void    *residual; /* [rows, columns] or NULL */
    const void    *weight;   /* [columns] or NULL */
    const void    *shift;    /* [columns] or NULL */
    float          eps;
    void          *sum;  /* [rows, columns]; may be x or residual */
    void          *out;  /* [rows, columns] */
    float         *mean; /* [rows] */
    float         *rstd; /* [rows] */
} smp_tp_norm;

/* From the gradients of out and sum those of all inputs. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         rows;
    size_t         columns;
    smp_tp_dropout dropout;
    const void    *grad_out;      /* [rows, columns] */
    const void    *grad_sum;      /* [rows, columns] or NULL: 0 */
    const void    *sum;           /* [rows, columns] */
    const void    *weight;        /* [columns] or NULL */
    const float   *mean;          /* [rows] */
    const float   *rstd;          /* [rows] */
    void          *grad_residual; /* [rows, columns] */
    void          *grad_x;        /* [rows, columns] or NULL */
    void          *grad_bias;     /* [columns] */
    void          *grad_weight;   /* [columns] */
    void          *grad_shift;    /* [columns] */
    float         *scratch;       /* 6 rows */
} smp_tp_norm_backward;

/* Cross-entropy of logits with their columns, the ids of a vocabulary, split over
 * ranks: the statistics of one rank's columns.  All ranks' are the largest of the tops,
 * the sum of sum[r] * exp(top[r] - largest), and the sums of target and all. */
typedef struct {
    smp_tp_dtype   dtype; /* of the logits */
    size_t         rows;
    size_t         columns;
    int64_t        start; /* id of column 0 */
    int64_t        vocabulary;
    int64_t        ignored; /* target of an ignored row */
    const void    *logits;  /* [rows, columns] */
    const int64_t *targets; /* [rows]: ids */
    float         *top;     /* [rows]: the largest logit; -infinity without columns */
    float         *sum;     /* [rows]: of exp(logit - top) */
    float         *target;  /* [rows]: the target's logit, 0 where it is elsewhere */
    float         *all;     /* [rows] or NULL: the sum of the logits */
} smp_tp_cross_entropy;

/* grad = factor * (exp(logit - top) / sum - (1 - smoothing) * is_target - smoothing /
 * vocabulary), from the statistics of all ranks; 0 where the factor is. */
typedef struct {
    smp_tp_dtype   dtype; /* of logits and grad */
    size_t         rows;
    size_t         columns;
    int64_t        start;
    int64_t        vocabulary;
    float          smoothing;
    const void    *logits;  /* [rows, columns] */
    const int64_t *targets; /* [rows] */
    const float   *top;     /* [rows] */
    const float   *sum;     /* [rows] */
    const float   *factors; /* [rows]: gradient of the row's loss */
    void          *grad;    /* [rows, columns]; may be logits */
} smp_tp_cross_entropy_backward;

/* out[i] = the row of table for ids[i], zeros where another rank has it. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         count;
    size_t         rows;
    size_t         columns;
    int64_t        start; /* id of row 0 */
    const void    *table; /* [rows, columns] */
    const int64_t *ids;   /* [count] */
    void          *out;   /* [count, columns] */
} smp_tp_gather;

/* grad_table = the sums of grad's rows by id, in their order. */
typedef struct {
    smp_tp_dtype   dtype;
    size_t         count;
    size_t         rows;
    size_t         columns;
    int64_t        start;
    int64_t        padding;    /* an id without a gradient; -1: none */
    const int64_t *ids;        /* [count] */
    const void    *grad;       /* [count, columns] */
    void          *grad_table; /* [rows, columns] */
    int64_t       *lists;      /* scratch: rows + count */
} smp_tp_scatter;

/* A set of kernels. */
typedef struct {
    void (*softmax)(const smp_tp_softmax *call);
    void (*softmax_backward)(const smp_tp_softmax_backward *call);
    void (*residual)(const smp_tp_residual *call);
    void (*residual_backward)(const smp_tp_residual_backward *call);
    void (*norm)(const smp_tp_norm *call);
    void (*norm_backward)(const smp_tp_norm_backward *call);
    /* The first row with a target neither an id nor ignored, or call->rows. */
    size_t (*cross_entropy)(const smp_tp_cross_entropy *call);
    void (*cross_entropy_backward)(const smp_tp_cross_entropy_backward *call);
    void (*gather)(const smp_tp_gather *call);
    void (*scatter)(const smp_tp_scatter *call);
} smp_tp_kernels;

/* NULL: this processor cannot run them. */
const smp_tp_kernels *smp_tp_kernels_of(smp_isa isa);

/* The fastest set for this processor. */
const smp_tp_kernels *smp_tp_kernels_best(void);

#endif
