/* The layout of a message between the envelope and its end.
 *
 *     envelope | sizes | tensor metas | values | bytes of small tensors
 *
 * and one block for the bytes of each large tensor.  A value is one tag byte and the
 * tag's content; containers nest.  Tensors are numbered by first occurrence, and so are
 * the objects open to changes in place by a callee.  A second occurrence is a
 * reference, so one object arrives as one.  Nothing here is executable: no pickle, but
 * for TAG_PICKLE, for types without another tag.
 */
#ifndef SMP_PYTHON_VALUES_WIRE_H
#define SMP_PYTHON_VALUES_WIRE_H

#include <stdint.h>

typedef enum {
    TAG_NONE = 1,
    TAG_TRUE,
    TAG_FALSE,
    TAG_INT,       /* int64 */
    TAG_BIG_INT,   /* hexadecimal text */
    TAG_FLOAT,     /* double */
    TAG_COMPLEX,   /* two doubles */
    TAG_STR,       /* size, UTF-8 with surrogates passed */
    TAG_BYTES,     /* size, bytes */
    TAG_ELLIPSIS,  /* */
    TAG_SLICE,     /* start, stop, step */
    TAG_TUPLE,     /* size, values */
    TAG_SIZE,      /* torch.Size: size, int64s */
    TAG_FROZENSET, /* size, values */
    TAG_NAMED,     /* named tuple or struct sequence: class, size, values */
    TAG_DTYPE,     /* name: "float32" */
    TAG_DEVICE,    /* text: "cuda:0" */
    TAG_CLASS,     /* a class: module, qualified name */
    TAG_TENSOR,    /* number */
    TAG_MODULE,    /* number of the module on every rank */
    TAG_PARAMETER, /* number of the parameter or buffer, of another rank than the sender
                    */
    /* Objects open to changes in place by a callee; numbered in this order. */
    TAG_PICKLE,    /* bytes, list of the tensors inside; a change cannot travel back */
    TAG_LIST,      /* size, values */
    TAG_DICT,      /* size, pairs */
    TAG_SET,       /* size, values */
    TAG_MAPPED,    /* a subclass of dict: class, size, pairs, __dict__ or none */
    TAG_LISTED,    /* a subclass of list: class, size, values, __dict__ or none */
    TAG_OBJECT,    /* any class with a __dict__: class, __dict__ */
    TAG_DEFAULTED, /* collections.defaultdict or a subclass: class, default_factory,
                      then as TAG_MAPPED */
    TAG_SEEN,      /* number of an earlier object of this message */
    /* In a response: the caller's own argument. */
    TAG_ARGUMENT_TENSOR, /* number of the tensor in the request */
    TAG_ARGUMENT_OBJECT, /* number of the object in the request */
    TAG_LAST = TAG_ARGUMENT_OBJECT,
} smp_tag;

typedef struct {
    uint32_t tensors;
    uint32_t meta_bytes;
    uint32_t value_bytes;
    uint32_t reserved;
    uint64_t data_bytes;
} smp_wire_sizes;

/* Tensors up to this many bytes travel inside the message: a block costs more. */
#define SMP_VALUE_INLINE 2048

/* Deepest nesting of values. */
#define SMP_MAX_DEPTH 200

#endif
